"""The functions for a user's own training loop: any ``nn.Module``, one plan, and these around a plain loop.

    plan = shardwise.make_plan("zero3", compute="bf16")      # the strategy is one word
    with shardwise.world(plan) as mesh:
        shardwise.parallelize(model, plan, mesh)              # in place
        optimizer = shardwise.optimizer(model, learning_rate=3e-4)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
        checkpoints = shardwise.Checkpoints("runs/mine", model, optimizer, scheduler=scheduler)
        first = (checkpoints.resume() or {"step": 0})["step"]
        for step, batch in enumerate(loader(first), first + 1):    # each rank its own rows
            loss = model(**batch).loss
            shardwise.backward(model, loss)
            shardwise.clip_grad_norm(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 100 == 0 or checkpoints.stopping:            # Ctrl-C, SIGTERM
                checkpoints.save(step)
            if checkpoints.stopping:
                break
        checkpoints.close()
        shardwise.save_pretrained(model, "runs/mine/hf")

A rank's loss is a mean over its own rows; gradients are means over the ranks, as DistributedDataParallel's are, so
ranks with equally many rows train as one process with all of them. Started by ``torchrun``, or alone as one process.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.torch_private import complete_accumulated
from shardwise.errors import ConfigError, DataError, Problem
from shardwise.methods.loss import mask
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.runtime import reduce
from shardwise.runtime import world as processes
from shardwise.runtime.checkpoint import save as checkpoint
from shardwise.runtime.checkpoint.inflight import SaveResult
from shardwise.runtime.checkpoint.stateful import Objects
from shardwise.runtime.faults.guard import stop_requests
from shardwise.runtime.own_model import describe
from shardwise.runtime.own_model import save_pretrained as save_pretrained
from shardwise.runtime.own_optim import optimizer as optimizer
from shardwise.runtime.own_optim import watch
from shardwise.runtime.own_plan import NO_STAGES
from shardwise.runtime.own_plan import make_plan as make_plan
from shardwise.runtime.usage import Usage
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Checkpoint
from shardwise.spec.rows import parts_of
from shardwise.techniques import compile as compilation
from shardwise.techniques import cp as cp_technique
from shardwise.techniques import remat, shard
from shardwise.techniques import tp as tp_technique
from shardwise.techniques.dtypes import torch_dtype

_PLANS: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()
_STATES = "$states"
"""The key under which a checkpoint's facts hold the states of other objects. No keyword argument of ``save`` can have
this name."""
_USAGES: WeakKeyDictionary[nn.Module, Usage] = WeakKeyDictionary()


def world(plan: Plan, timeout_s: float = 60.0) -> AbstractContextManager[Meshes]:
    """The process group of ``plan`` for the length of the block, on GPUs where there are any; yields its groups."""
    return processes.world(plan.layout, "cuda" if torch.cuda.is_available() else "cpu", timeout_s)


def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: Meshes | None,
    whole: Collection[str] = (),
    units: Collection[str] = (),
) -> nn.Module:
    """Apply ``plan`` to ``module``, in place, on this rank's device, and return it. All ranks begin with rank 0's
    weights and buffers.

    Blocks (the members of the module's lists of like modules) are recomputed, compiled and gathered one by one. No
    parameter is renamed. Under ddp, ``compute`` is torch's autocast; under the others FSDP2 casts what it gathers; of
    fp64 the weights are too. ``whole`` names submodules whose blocks are gathered with the rest of the model: those
    that do not run on all ranks alike. ``units`` names what else is gathered by itself, and kept until its backward is
    over: large embeddings and output layers, that run on all ranks in every step. Raises ConfigError CFG005 for a name
    that cannot be either, PLAN022 or PLAN026 for a module that tensor or context parallelism cannot cut, PLAN023 for a
    pipeline.
    """
    if plan.layout.pp > 1:
        raise ConfigError(NO_STAGES)
    _check_cut(module, plan)
    routed = {id(block) for name in whole for block in _submodule(module, name, "whole").modules()}
    apart = [_unit(module, name) for name in units]
    meshes = mesh or Meshes()
    wide = torch.float64 if plan.precision.compute == "fp64" else None
    module.to(processes.device_of("cuda" if torch.cuda.is_available() else "cpu"), wide)
    for tensor in [*module.parameters(), *module.buffers()]:
        meshes.broadcast(tensor.detach(), "world")
    for technique in techniques.acting(plan, "apply", (tp_technique, cp_technique, remat, compilation)):
        technique.apply([module], plan, meshes)
    shard.apply([module], plan, meshes, routed, apart)
    if not plan.sharded and plan.layout.tp == 1 and plan.precision.compute in ("bf16", "fp16"):
        _autocast(module, torch_dtype(plan.precision.compute))
    _USAGES[module] = Usage(module, meshes, zeros_sent=shard.reduce_unused(module))
    _PLANS[module] = plan
    watch(module)
    return module


def _check_cut(module: nn.Module, plan: Plan) -> None:
    """ConfigError PLAN022 or PLAN026 for a module, or a plan, that tensor or context parallelism does not support."""
    layout = plan.layout
    if layout.tp == layout.cp == 1:
        return
    if not isinstance(module, Decoder):
        code, kind = ("PLAN022", "tensor") if layout.tp > 1 else ("PLAN026", "context")
        what = f"{kind} parallelism cuts the layers of shardwise.models.decoder.Decoder"
        what += f", and this module is a {type(module).__name__}"
        fix = "tp=1 and cp=1 with strategy zero3, or `shardwise train` for a model on the Hub"
        raise ConfigError(Problem(code, what, "parallelize", fix))
    any_length = replace(plan, batch=replace(plan.batch, seq_len=parts_of(layout.ring, layout.ulysses)))
    if problems := tp_technique.check(module.spec, plan) + cp_technique.check(module.spec, any_length):
        raise ConfigError(*problems)


def cut_rows(
    mesh: Meshes | None, ids: Tensor, labels: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, MaskSpec]:
    """The tokens of each row that this process trains on, as (ids, labels, positions, mask): what the decoder is called
    with, and what its logits are compared with. ids and labels int64 [b,s] -> [b,s/cp]. ``documents``: int32 [n+1],
    where those of packed rows end, over the b * s tokens laid row after row, 0 and every row's end included. Raises
    ConfigError PLAN026 for rows that ``cp`` processes cannot cut."""
    (b, s), meshes = ids.shape, mesh or Meshes()
    multiple = parts_of(meshes.layout.ring, meshes.layout.ulysses)
    if s % multiple:
        what = f"rows of {s:,} tokens cannot be cut over {meshes.layout.cp} processes"
        raise ConfigError(Problem("PLAN026", what, "cut_rows", f"a multiple of {multiple} tokens"))
    ends = torch.arange(0, b * s + 1, s, dtype=torch.int32) if documents is None else documents.cpu()
    lengths = ends.diff()
    starts = torch.repeat_interleave(ends[:-1].long(), lengths)
    positions = (torch.arange(b * s) - starts).view(b, s).to(ids.device)
    batch = MicroBatch(ids, labels, positions, documents, int(lengths.max())).cut(meshes.row_share)
    return batch.ids, batch.labels, batch.positions, mask(batch)


def _submodule(module: nn.Module, name: str, argument: str) -> nn.Module:
    named: dict[str, nn.Module] = dict(module.named_modules())
    if name not in named:
        near = get_close_matches(name, named, 1)
        fix = f"did you mean `{near[0]}`?" if near else "a name from model.named_modules()"
        raise ConfigError(Problem("CFG005", f"the model has no module `{name}`", argument, fix))
    return named[name]


def _unit(module: nn.Module, name: str) -> nn.Module:
    """The submodule of this name. ConfigError if it cannot be a unit: it is never called itself, or shares a weight
    with another module."""
    unit = _submodule(module, name, "units")
    if isinstance(unit, nn.ModuleList | nn.ModuleDict):
        what = f"`{name}` is a list of modules, which is never called itself"
        raise ConfigError(Problem("CFG005", what, "units", f"its members, such as `{name}.0`"))
    inside, own = set(unit.modules()), set(unit.parameters())
    for other, member in module.named_modules():
        if member not in inside and not own.isdisjoint(member.parameters(recurse=False)):
            what = f"`{name}` shares a weight with `{other}`, and the two must be gathered together"
            raise ConfigError(Problem("CFG005", what, "units", f"leave out `{name}`: the rest of the model holds both"))
    return unit


def _autocast(module: nn.Module, dtype: torch.dtype) -> None:
    plain, device = module.forward, next(module.parameters()).device.type

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return plain(*args, **kwargs)

    module.forward = forward


def backward(module: nn.Module, loss: Tensor, *, last: bool = True, micro_batches: int = 1) -> None:
    """Run backward from ``loss``, a mean over this rank's rows, or over its tokens of them. With several
    ``micro_batches`` per step, say which is the ``last``: after it, gradients are the mean over all of them and over
    all ranks."""
    plan, usage = _PLANS[module], _USAGES[module]
    usage.begin()
    if last and micro_batches > 1 and plan.sharded and plan.shard.accumulates:
        complete_accumulated(module)
    techniques.before_micro_batch([module], plan, last=last)
    (loss / (plan.layout.size("loss") * micro_batches)).backward()
    if last:
        techniques.after_backward([module], plan, usage.meshes)
        usage.end_step()


def clip_grad_norm(module: nn.Module, max_norm: float | None) -> float:
    """Scale the gradients down to ``max_norm`` (None: not at all); the true norm over all ranks before that. Infinite
    or NaN gradients are left as they are: look at what is returned."""
    meshes = _USAGES[module].meshes
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    norm = reduce.local_squares(parameters, meshes.size("stage"))
    meshes.sum(norm, "world")
    norm.sqrt_()
    reduce.scale_gradients(parameters, torch.where(norm.isfinite(), reduce.clip_factor(norm, max_norm), 1.0))
    return float(norm)


class Checkpoints:
    """The checkpoints of a module and its optimizer in ``directory``: saved while training goes on, committed whole or
    not at all, and loaded under any other strategy and number of ranks. Every rank constructs it, at the same point.

    ``keep``: what else has a state, as ``scheduler=scheduler, sampler=sampler``: anything with ``state_dict()`` and
    ``load_state_dict()`` of JSON values and tensors. The first rank's state is saved; for names in ``per_rank`` every
    rank's own, which can be loaded by the same number of ranks only. A ``tokenizer`` of transformers is written beside
    them, for ``shardwise export``."""

    def __init__(
        self,
        directory: str | Path,
        module: nn.Module,
        optimizer: Optimizer,
        settings: Checkpoint | None = None,
        *,
        per_rank: Collection[str] = (),
        **keep: Any,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        describe(module, Path(directory), keep.pop("tokenizer", None))
        self._objects = Objects(keep, per_rank, optimizer)
        self._kept = checkpoint.RunCheckpoints(directory, settings or Checkpoint(), "own loop")
        self._kept.guard(optimizer)
        self._events: list[SaveResult] = []
        self._signals = ExitStack()
        self._stopped = False

    @property
    def stopping(self) -> bool:
        """Return whether the loop should save and leave: true on all ranks from the same step on, after Ctrl-C, SIGTERM
        or SIGUSR1 on any. From when it is first read until ``close`` these signals only ask; a second Ctrl-C ends at
        once. All ranks learn of it in ``backward``."""
        usage = _USAGES[self.module]
        if self._stopped:  # since before ``close``: the module may be in another loop by now
            return True
        if usage.request is None:
            usage.request = self._signals.enter_context(stop_requests())
            self._signals.callback(usage.forget)
        return usage.stop

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved: parameters and buffers by name, and the optimizer's state of each parameter."""
        named = dict(self.module.named_parameters())
        found: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        found |= {f"model.{name}": buffer for name, buffer in self.module.named_buffers()}
        for name, parameter in named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    what = f"the optimizer keeps {key} as {type(value).__name__}, not as a tensor"
                    raise DataError(Problem("CKPT020", what, name, "an optimizer whose state is tensors"))
                found[f"optim.{key}.{name}"] = value
        return found

    def save(self, step: int, **facts: Any) -> None:
        """Start to save as ``step``, with ``facts``: JSON values and tensors of one element; values that are not finite
        become null. The next ``optimizer.step()`` waits until the tensors are copied; they are written in the
        background. If an earlier save failed, this call warns of it. Raises DataError CKPT020 for other facts."""
        plain: dict[str, Any] = {}
        for key, value in facts.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            plain[key] = None if isinstance(number, float) and not math.isfinite(number) else number
        try:
            json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(Problem("CKPT020", f"facts must be JSON: {error}", "save", "numbers, strings")) from error
        for event in self._kept.wait() if self._objects.per_rank else self._kept.poll():
            self._events.append(event)
            if event.kind not in ("committed", "removed"):
                warnings.warn(f"checkpoint of step {event.step} {event.kind}: {event.what}", stacklevel=2)
        changing = {f"model.{name}": buffer.clone() for name, buffer in self.module.named_buffers()}
        for buffer in changing.values():  # or some would be saved as one rank has them, some as another
            _USAGES[self.module].meshes.broadcast(buffer, "world")
        states = {_STATES: self._objects.collect(self._kept.group)} if self._objects.objects else {}
        self._kept.save(self.tensors() | changing, {"step": step, **plain, **states}, step)

    def resume(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint, in place; returns its facts, ``step`` among them, or None if there is no
        checkpoint. Raises DataError OWN002 if it was saved with other objects, or with per-rank states of another
        number of ranks."""
        made = not self.optimizer.state
        if made:
            _make_state(self.optimizer)
        facts = self._kept.resume(self._as_saved if made else self.tensors())
        if facts is not None:
            self._objects.restore(facts.pop(_STATES, None), self._kept.group)
        elif made:
            self.optimizer.state.clear()
        return facts

    def _as_saved(self, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors to load. A parameter that had no gradient before the save has no optimizer state in the
        checkpoint, so none is loaded."""
        had = {name.split(".", 2)[2] for name in names if name.startswith("optim.")}
        for name, parameter in self.module.named_parameters():
            if had and name not in had:
                self.optimizer.state.pop(parameter, None)
        return self.tensors()

    def close(self) -> list[SaveResult]:
        """Wait for the save in flight; returns the outcomes of the saves since the last call. Signal handlers are as
        before ``stopping`` was first read."""
        events, self._events = self._events + self._kept.wait(), []
        if self.module in _USAGES:
            self._stopped |= _USAGES[self.module].stop
        self._signals.close()
        return events


def _make_state(optimizer: Optimizer) -> None:
    """Have an optimizer that creates its state at its first step create it now, by a step of size zero, which changes
    nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
