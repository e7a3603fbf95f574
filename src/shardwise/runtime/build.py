"""The making of a model that can be trained, as a plan says: built on the meta device, changed by the techniques, then
filled; each rank fills only the slices that it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local_slice, put
from shardwise.models import attention, hf, init, peft
from shardwise.models.added_rows import adds_tokens
from shardwise.models.blocks import named, tie
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.decoder import Decoder
from shardwise.models.float8 import InBlocks
from shardwise.models.hf_model import HFDecoder, model_of
from shardwise.models.init import Draw
from shardwise.models.roles import is_adapter
from shardwise.runtime.state import LossScale, TrainState
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection, Recipe
from shardwise.techniques import lora, offload, optim, pp
from shardwise.techniques.offload.host_copies import HostWeights
from shardwise.techniques.offload.narrow import keep_gradients
from shardwise.techniques.tally import tables


def build(
    recipe: Recipe, spec: ModelSpec, plan: Plan, meshes: Meshes, device: torch.device, draw: Draw | None = None
) -> TrainState:
    """The state of a run before its first step: weights drawn (or read, see :func:`fill`), moments zero."""
    directory = Path(recipe.offload.directory).expanduser() if recipe.offload.directory else None
    parts = build_parts(spec, plan, meshes, device, directory)
    host = offload.host_weights(parts, plan, directory)
    fill(parts, spec, recipe, plan, draw)
    scale = LossScale.dynamic() if plan.precision.loss_scaling else LossScale()
    if directory:
        offload.scratch_in(parts, directory)
    names = [*techniques.float8.layers(spec, plan.precision)]
    optimizer, tally = optimizer_of(parts, recipe.optim, plan, host, recipe.run.seed), tables(parts, names, device)
    state = TrainState(parts, optimizer, scale=scale, host=host, tally=tally)
    state.weights_filled()
    return state


def optimizer_of(
    parts: Sequence[nn.Module], settings: OptimSection, plan: Plan, host: HostWeights | None, seed: int = 0
) -> Optimizer:
    """The optimizer of parts that have been filled, or of their weights on the host."""
    updated = host.of if host else optim.itself
    if host and host.scratch:
        betas = (settings.beta1, settings.beta2)
        defaults = {"lr": settings.learning_rate, "betas": betas, "eps": settings.eps}
        return host.streamed(optim.grouped(parts, settings, updated), defaults)
    return optim.build(parts, settings, plan, seed, updated)


def build_parts(
    spec: ModelSpec, plan: Plan, meshes: Meshes, device: torch.device, directory: Path | None = None
) -> list[nn.Module]:
    """The model's parts with every technique applied; parameters are allocated on ``device`` but hold nothing yet. What
    waits on NVMe is in ``directory``."""
    with torch.device("meta"):
        model = model_of(spec)
    model.kernel = plan.attention
    attention.prepare(device, plan.attention)
    parts: list[nn.Module] = [model]
    return techniques.apply(parts, plan, meshes, lambda parts: allocate(parts, spec, device, plan, directory))


def allocate(
    parts: Sequence[nn.Module],
    spec: ModelSpec,
    device: torch.device,
    plan: Plan | None = None,
    directory: Path | None = None,
) -> None:
    """Allocate meta parameters, tie weights again that ``to_empty`` separated, and fill buffers that follow from the
    config. Where weights of blocks wait on the host, no more than those of a block are on the device at a time."""
    for part in parts:
        if plan is None or plan.offload.weights == "none":
            part.to_empty(device=device)
        else:
            offload.allocate_waiting(part, plan, device, directory)
            for module in part.modules():
                if any(tensor.is_meta for tensor in (*module.parameters(False), *module.buffers(False))):
                    module.to_empty(device=device, recurse=False)
        if isinstance(part, HFDecoder):
            part.restore_buffers()
    if spec.tie_word_embeddings and pp.line_of(parts) is None:  # of stages, each end has a weight of its own
        tie(parts)
    if plan is not None and plan.offload.optimizer != "none":
        for part in parts:
            keep_gradients(part, plan)


def fill(parts: Sequence[nn.Module], spec: ModelSpec, recipe: Recipe, plan: Plan, draw: Draw | None = None) -> None:
    """Draw the initial weights, with ``draw`` or as usual (``model.init`` random, or no path), or read them from a
    directory of safetensors, one tensor at a time. Only the slices that this rank owns are made, unless a technique
    says that it takes more of a weight to fill its parameters."""
    parameters = named(parts)
    directory = weights_directory(recipe)
    wanted = techniques.wanted(parameters, spec, plan)
    shapes = {**parameter_shapes(spec), **{name: tuple(parameter.shape) for name, parameter in parameters.items()}}
    anew = frozenset[str]() if directory is None else hf.begun_anew(directory, spec)
    stored = {name for name in wanted if directory is not None and not is_adapter(name) and name not in anew}
    for name in wanted.keys() - stored:
        drawn = (draw or init.fill)(name, shapes[name], wanted[name], recipe.run.seed, spec)
        _put(parameters, name, wanted[name], drawn, plan)
    if directory is not None:
        found = hf.stored_weights(directory, spec, grown=adds_tokens(recipe.data))
        for name, part in ((name, part) for name, part in wanted.items() if name in stored):
            _put(parameters, name, part, found[name].read_finite(part), plan, found[name].block_scales(part[0]))
    if recipe.lora.path is not None and plan.lora is not None:
        own = {name: local_slice(one) for name, one in parameters.items() if is_adapter(name) or plan.lora.saves(name)}
        names = lora.trained(spec, plan.lora)
        for name, values in peft.read_adapter(Path(recipe.lora.path), own, plan.lora, spec, names):
            put(parameters[name], values)


def predictor_is_drawn(recipe: Recipe, spec: ModelSpec) -> bool:
    """Return whether a run that begins with trained weights draws those of a layer that predicts a further token."""
    directory = weights_directory(recipe) if spec.predictors else None
    return directory is not None and bool(hf.begun_anew(directory, spec))


def load_weights(decoder: Decoder, source: str | Path, revision: str | None = None) -> None:
    """Fill Shardwise's decoder with the trained weights of ``source``: a directory or file of safetensors, or a Hub id.
    Before ``parallelize`` or after it, when each process reads no more than its own slices. Raises MissingInputError
    CKPT001 where there are no weights, DataError CKPT002 to CKPT004 for those of another model."""
    parameters = dict(decoder.named_parameters())
    wanted = {name: local_slice(parameter) for name, parameter in parameters.items()}
    for name, values in hf.read_weights(hf.weights_directory(str(source), revision), wanted, decoder.spec):
        put(parameters[name], values)


def _put(
    parameters: Mapping[str, Tensor],
    name: str,
    part: tuple[slice, ...],
    values: Tensor,
    plan: Plan,
    scales: Tensor | None = None,
) -> None:
    """Fill what follows from the weight ``name``, of which ``values`` are a ``part``, with the ``scales`` of their
    blocks where the files have it so: the parameter of this name, where there is one, and those of techniques."""
    if name in parameters:
        own = local_slice(parameters[name])
        mine = (slice(held.start - given.start, held.stop - given.start) for held, given in zip(own, part, strict=True))
        put(parameters[name], values if own == part else values[tuple(mine)])
        values = values.to(parameters[name].dtype)
    techniques.store(parameters, name, part, values if scales is None else InBlocks(values, scales), plan)


def begins_trained(recipe: Recipe) -> bool:
    """Return whether training starts from trained weights, not from random ones."""
    return recipe.model.path is not None and recipe.model.init != "random"


def weights_directory(recipe: Recipe) -> Path | None:
    """Return the directory that trained weights are to be read from; None for a model that starts from random ones."""
    if recipe.model.path is None or not begins_trained(recipe):
        return None
    return hf.weights_directory(recipe.model.path, recipe.model.revision)
