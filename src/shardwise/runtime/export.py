"""A run's weights as a directory that transformers loads: config, safetensors, tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.data import tokens
from shardwise.data.formats import Conversation
from shardwise.data.micro_batch import MicroBatch
from shardwise.data.whole import becoming
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.torch_private import placed_as
from shardwise.errors import DataError, Problem, ShardwiseError, TrainingError
from shardwise.methods.loss import logits
from shardwise.models import float8, hf, peft
from shardwise.models.blocks import named, spec_of
from shardwise.models.config import ModelSpec
from shardwise.models.families import FAMILIES
from shardwise.models.hf_model import Model
from shardwise.models.roles import is_adapter
from shardwise.models.stored import KeptLayers
from shardwise.models.tensorfile import DTYPES, NAMES
from shardwise.runtime import objects, passes
from shardwise.runtime.build import begins_trained, build_parts, fill
from shardwise.runtime.checkpoint.save import read
from shardwise.runtime.generate import ask_turns, chat_of
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.spec.recipe import Recipe
from shardwise.techniques import lora
from shardwise.techniques.dtypes import torch_dtype

FileDtype = Literal["fp32", "bf16", "fp16", "float8"]
_OF_ALL_IDS = re.compile(r"(embed_tokens|head)\.weight$")
"""Tensors with a row for each id."""


def export(
    parameters: Mapping[str, Tensor],
    spec: ModelSpec,
    tokenizer: tokens.Tokenizer,
    target: Path,
    dtype: torch.dtype,
    kept: KeptLayers = hf.NOTHING,
) -> None:
    """Write ``target`` from the (sharded) parameters of all ranks: gathered one tensor at a time, written by rank 0,
    which adds what is ``kept`` of the model that training began with (:func:`kept_of`). Every rank calls this alike.
    What stood there before is replaced when the new one is whole."""
    holders = holders_of(parameters)
    if dist.is_initialized() and dist.get_rank() != 0:
        for name in hf.order_of_writing(spec):
            fetched(name, parameters, holders)
        return
    spec = replace(spec, eos_token_id=ends_of(spec, tokenizer))
    with becoming(target, synced=False) as draft:
        hf.write_weights(draft, spec, lambda name: fetched(name, parameters, holders), dtype, kept=kept)
        tokenizer.copy_to(draft)


def kept_of(recipe: Recipe, spec: ModelSpec) -> tuple[KeptLayers, str]:
    """Return the layers that predict further tokens of the model that training begins with, and what is to be said
    where they are left out. Nothing is downloaded for them."""
    source = recipe.model.path
    if source is None or spec.hf_model or not begins_trained(recipe) or not FAMILIES[spec.family].predictors:
        return KeptLayers(), ""
    if spec.predictors:  # they were trained, and are the model's own
        return KeptLayers(), ""
    try:
        kept = hf.kept_beside(hf.weights_directory(source, recipe.model.revision, here=True), spec)
    except ShardwiseError as error:
        return KeptLayers(), f"layers of {source} that predict further tokens are left out: {error.problems[0].what}"
    rows = {each.entry.shape[0] for name, each in kept.tensors.items() if _OF_ALL_IDS.search(name)}
    if rows - {spec.vocab_size}:
        why = f"they know {max(rows):,} tokens, and the model {spec.vocab_size:,}"
        return KeptLayers(), f"layers of {source} that predict further tokens are left out: {why}"
    return kept, ""


def ends_of(spec: ModelSpec, tokenizer: tokens.Tokenizer) -> int | tuple[int, ...]:
    """The ids at which whoever generates is to stop: the model's, or else the end-of-text token, and the one with which
    the chat template ends an answer. A base model that has learnt a template would not stop there otherwise."""
    own = tokenizer.eot_id if spec.eos_token_id is None else spec.eos_token_id
    ends = own if isinstance(own, tuple) else (own,)
    with suppress(DataError):  # there is no template, or it takes no question alone
        asked = Conversation([{"role": "user", "content": "?"}], None)
        end = ask_turns(chat_of(tokenizer.directory), asked, str(tokenizer.directory)).end
        return own if end is None or end in ends else (*ends, end)
    return own


def export_adapter(
    parameters: Mapping[str, Tensor], settings: Lora, spec: ModelSpec, model: str | None, target: Path
) -> None:
    """Write only the adapters, and what was trained whole beside them, in PEFT's format, as :func:`export` writes a
    model. ``model``: the name of their base model."""
    own = {name: value for name, value in parameters.items() if is_adapter(name) or settings.saves(name)}
    holders = dict(sorted(holders_of(own).items(), key=lambda held: not is_adapter(held[0])))
    if dist.is_initialized() and dist.get_rank() != 0:
        for name in holders:
            fetched(name, own, holders)
        return
    with becoming(target, synced=False) as draft:
        likes = {name: held.like for name, held in holders.items()}
        peft.write_adapter(draft, settings, spec, model, likes, lambda name: fetched(name, own, holders))


class Held(NamedTuple):
    """The first rank that holds a parameter, or a part of it; and the parameter without values, on the meta device."""

    rank: int
    like: Tensor


Holders = Mapping[str, Held]
"""Of each parameter by name, in one order on all ranks."""


def holders_of(parameters: Mapping[str, Tensor]) -> Holders:
    """Return the holder of each parameter, by name. Every rank calls this alike: of a pipeline, each has some of the
    parameters."""
    own = [(name, list(value.shape), NAMES[value.dtype]) for name, value in parameters.items()]
    found: dict[str, Held] = {}
    for rank, held in enumerate(objects.all_gather(own) if dist.is_initialized() else [own]):
        for name, shape, dtype in held:
            if name not in found:
                found[name] = Held(rank, torch.empty(shape, dtype=DTYPES[dtype], device="meta"))
    return found


def whole(parameter: Tensor) -> Tensor:
    """The full value on the host. All ranks of a DTensor's mesh call this alike. Of a dim that is cut twice torch warns
    that it gathers twice."""
    value = parameter.detach()
    if isinstance(value, DTensor):
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        here = value.to_local().to(value.device_mesh.device_type)  # of a weight on the host, a copy
        value = placed_as(value, here).full_tensor()  # type: ignore[attr-defined]
    return value.cpu()


def fetched(name: str, parameters: Mapping[str, Tensor], holders: Holders) -> Tensor:
    """Return on rank 0 the full value, on the host. All ranks call this alike; what others return does not count."""
    holder = holders[name].rank
    value = whole(parameters[name]) if name in parameters else torch.empty(0)
    if holder == 0 or not dist.is_initialized():
        return value
    if dist.get_rank() == holder:
        objects.send(value, 0)
    return objects.receive(holder) if dist.get_rank() == 0 else value


def load_model(recipe: Recipe, spec: ModelSpec) -> Model:
    """The model that the recipe names, with the adapter of ``lora.path`` where it names one, whole, in this process, in
    fp32."""
    plan = Plan(precision=Precision("fp32", "fp32"), lora=lora.settings(recipe.lora, Precision("fp32", "fp32")))
    [model] = build_parts(spec, plan, Meshes(), torch.device("cpu"))
    assert isinstance(model, Model)
    fill([model], spec, recipe, plan)
    return model


def load_run(path: Path, recipe: Recipe, spec: ModelSpec, *, quantised: bool = True) -> Model:
    """The model of a run's newest checkpoint (or of the one named), whole, in this process. Adapters are attached to
    the weights that they were trained on, or unless ``quantised`` to the model's own in ``precision.weights``."""
    weights = recipe.precision.weights
    precision = Precision("fp64" if weights == "fp64" else "fp32", weights)
    adapters = lora.settings(recipe.lora, precision)
    if adapters is not None and not quantised:
        adapters = replace(adapters, nf4=False, float8=False, frozen=precision.weights)
    plan = Plan(precision=precision, lora=adapters)
    [model] = build_parts(spec, plan, Meshes(), torch.device("cpu"))
    assert isinstance(model, Model)
    if adapters is not None:  # their own values are the checkpoint's, not those that they began with
        fill([model], spec, recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"path": None})}), plan)
    trained = {name: one.detach() for name, one in model.named_parameters() if adapters is None or one.requires_grad}
    read(path, {f"model.{name}": value for name, value in trained.items()})
    return model


def export_run(
    run: Path,
    recipe: Recipe,
    spec: ModelSpec,
    tokenizer: tokens.Tokenizer,
    target: Path,
    dtype: FileDtype | None = None,
) -> str:
    """``shardwise export``: the newest checkpoint of ``run`` as one model in ``target``, adapters merged, in one
    process, in ``dtype`` or else that of its weights; returns what is to be said of it. Raises TrainingError
    (LORA001) if the merged model is another one."""
    model, said = load_run(run, recipe, spec, quantised=False), ""
    adapters = lora.settings(recipe.lora, Precision(weights=recipe.precision.weights))
    kept, left_out = kept_of(recipe, spec)
    if adapters is not None:
        said = merge([model], adapters)
        said += ", into the weights as they were before quantisation" if adapters.nf4 else ""
        said += ", into the weights as their files have them" if adapters.float8 else ""
    out = float8.WRITTEN if dtype == "float8" else torch_dtype(dtype or recipe.precision.weights)
    export(dict(model.named_parameters()), spec, tokenizer, target, out, kept)
    return "; ".join(filter(None, (said, left_out)))


def export_adapter_of(run: Path, recipe: Recipe, spec: ModelSpec, tokenizer: tokens.Tokenizer, target: Path) -> None:
    """``shardwise export --adapter``: the adapter alone of the checkpoint ``run``, as :func:`export_adapter` writes it,
    and the tokenizer. The model's own weights are not read."""
    precision = Precision(weights=recipe.precision.weights)
    settings = lora.settings(recipe.lora, precision)
    assert settings is not None
    parts = build_parts(spec, Plan(precision=precision, lora=settings), Meshes(), torch.device("meta"))
    trained = {name: one for part in parts for name, one in part.named_parameters() if one.requires_grad}
    values = {name: torch.empty_like(one, device="cpu") for name, one in trained.items()}
    read(run, {f"model.{name}": value for name, value in values.items()})
    export_adapter(values, settings, spec, recipe.model.path, target)
    tokenizer.copy_to(target)


@torch.no_grad()
def merge(parts: Sequence[nn.Module], adapters: Lora) -> str:
    """Add every adapter into its layer and take it away; the words to report. The model must then say the same as
    before, and no layer may be what it was unless its adapter is zero: what a narrow type rounds away is an error."""
    ids = torch.arange(32).remainder(spec_of(parts).vocab_size).view(1, -1)
    batch = MicroBatch(ids, ids, torch.arange(32).view(1, -1), None, 0)
    before = passes.forward(parts, batch, logits)
    count, lost = lora.merge(parts, adapters)
    after = passes.forward(parts, batch, logits)
    error = float((after - before).norm() / before.norm())
    allowed = 50 * torch.finfo(named(parts)["embed.weight"].dtype).eps
    if lost or not error <= allowed:
        what = f"{len(lost)} of {count} adapters were rounded away" if lost else f"logits differ by {error:.1e}"
        raise TrainingError(Problem("LORA001", f"merging changed the model: {what}", "lora", "precision.weights: fp32"))
    return f"{count} adapters merged; logits differ by {error:.0e} of their norm"
