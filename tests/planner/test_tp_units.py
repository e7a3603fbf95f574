"""A block on paper under tensor parallelism, operation by operation beside a block that ran so on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.distributed.fake_world import fake_world
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.models.decoder import Decoder
from shardwise.planner import record, trace
from shardwise.planner.sheets import sheet_of
from shardwise.runtime.watch.measure import collective, payload_bytes
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.sheet import Op, Unit
from shardwise.techniques import freeze, lora, precision, tp
from shardwise.techniques.tp_units import SEND
from tests.covering import pairwise

SPEC = ModelSpec("oracle", 601, 48, 104, 1, 8, 4, 8)
B, S = trace.MICRO_BATCH, trace.SEQ_LEN
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "norms before and after": {"norm_placement": "both", "qk_norm": "head"},
    "norms after": {"norm_placement": "after", "qk_norm": "head"},
    "norms over whole projections": {"norm_placement": "after", "qk_norm": "projection", "num_key_value_heads": 8},
}


class LocalRecorder(record.Recorder):
    """Sees of a DTensor what is local, and what collectives send."""

    def __init__(self) -> None:
        super().__init__()
        storages, add = self.storages, self.storages.add
        storages.add = lambda t: add(t._local_tensor if isinstance(t, DTensor) else t)  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if kind := collective(func):
            event = self.events[-1]
            self.events[-1] = SentOp(**{**vars(event), "op": kind}, payload=payload_bytes(args))
        return out


@dataclass
class SentOp(record.RecordedOp):
    """A collective; ``op`` is its kind."""

    payload: int = 0


_arithmetic = trace._arithmetic


def arithmetic(event: record.RecordedOp) -> tuple[str, int, str]:
    """As the tracer has it; of a collective the bytes that it sends."""
    return (SEND, event.payload, "") if isinstance(event, SentOp) else _arithmetic(event)


@contextmanager
def parallel(spec: ModelSpec, plan: Plan, dtype: torch.dtype) -> Iterator[Decoder]:
    """A decoder to which adapters and tensor parallelism were applied in a fake world."""
    with fake_world(plan.layout) as groups:
        parts: list[nn.Module] = [(model := Decoder(spec)).to(dtype)]
        for technique in (lora, freeze, tp):
            technique.apply(parts, plan, groups)
        yield model


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def traced(spec: ModelSpec, plan: Plan, which: str, monkeypatch: pytest.MonkeyPatch) -> Unit:
    """The block as it ran, with sizes as numbers."""
    monkeypatch.setattr(trace, "Recorder", LocalRecorder)
    monkeypatch.setattr(trace, "_dim", lambda size: size)
    monkeypatch.setattr(trace, "_arithmetic", arithmetic)
    dtype = torch.bfloat16 if which == "narrow" else torch.float32
    with parallel(spec, plan, dtype) as model:
        weights = {module: dict(module.named_parameters(recurse=False)) for module in model.modules()}
        shapes = {p: _local(p).shape for own in weights.values() for p in own.values()}
        with trace._tracing(which):
            for module, own in weights.items():
                for name, p in own.items():
                    whole = torch.empty(shapes[p], dtype=dtype)
                    if isinstance(p, DTensor):
                        whole = DTensor.from_local(
                            whole, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                        )
                    module.register_parameter(name, nn.Parameter(whole, p.requires_grad))
            (kind,), ids = layer_kinds(spec)[0], torch.zeros((B, S), dtype=torch.int64)
            stream = (-(-B * S // plan.layout.tp),) if plan.sequence_parallel else (B, S)
            hidden = torch.empty((*stream, spec.hidden_size), dtype=dtype, requires_grad=True)
            (rotary,) = model.tables((kind,), ids, dtype, MaskSpec())
            model.embed(ids)  # from which the blocks know the number of rows
            block = model.layers[0]
            call = partial(trace._call, block, (rotary, MaskSpec()), {})
            return trace._unit("block", trace._named("", block), call, hidden, [*(rotary or ())])


@dataclass(frozen=True)
class Told:
    """An operation: the layer of whose weight, what it multiplies by or sends in bytes, and of tensors what it makes
    (bytes and type), reads and frees, by the place of the operation that made them."""

    kind: str
    name: str
    layer: str
    size: int
    makes: tuple[tuple[int, str], ...]
    reads: tuple[str, ...]
    frees: tuple[str, ...]


def told(unit: Unit, which: str) -> dict[str, list[Any]]:
    """All operations of each pass in order, collectives among them, with the smallest tensors; what is saved for
    backward; and every gradient with the place where it is made. Equal but for names and frees of a layer's rounds of
    DoRA's norms, and the seed (8 bytes) with which cut layers draw what drops out, which no paper has."""
    given = {unit.input: "input", unit.gradient_in: "gradient of output"}
    names = dict(given)
    found: dict[str, list[Any]] = {
        "forward": _told(unit, unit.forward, which, names),
        "saved": sorted((names[tensor], _bytes(unit, tensor, which)) for tensor in unit.saved),
        "forward_plain": _told(unit, unit.forward_plain, which, dict(given)),
        "backward": _told(unit, unit.backward, which, names),
    }
    found["gradients"] = sorted((name, names[t], _bytes(unit, t, which)) for name, t in unit.weight_gradients)
    found["ends"] = [names[unit.output], names[unit.gradient_out]]
    return found


def _told(unit: Unit, ops: Iterable[Op], which: str, names: dict[int, str]) -> list[Told]:
    found: list[Told] = []
    before = len(names)
    for op in _alike(ops):
        names |= {t: f"{before + len(found)}.{place}" for place, t in enumerate(op.allocates)}
        reads, frees = (tuple(sorted({names.get(t, "nothing") for t in tensors})) for tensors in (op.reads, op.frees))
        if not op.allocates and op.kind == "elementwise":  # of what is done in place only frees are told
            found[-1] = replace(found[-1], frees=tuple(sorted(found[-1].frees + frees)))
            continue
        size = op.flops
        if op.kind == SEND and not size:  # of paper, whose payload is the larger of what is read and made
            size = max(_bytes(unit, t, which)[0] for t in (*op.reads, *op.allocates))
        layer = "" if op.name == "dora" else op.weight.rpartition(".")[0]
        made = tuple(_bytes(unit, t, which) for t in op.allocates)
        found.append(Told(op.kind, op.name, layer, size, made, reads, frees))
    return found


def _alike(ops: Iterable[Op]) -> list[Op]:
    """As paper says it: the tensor into which a collective sends is made by the collective, DoRA's norms are one
    operation, and so is dropout with its seed."""
    alike: list[Op] = []
    for op in ops:
        before = alike[-1] if alike else Op("", "")
        made = set(before.allocates)
        if before.name == "dora":
            op = replace(op, frees=tuple(t for t in op.frees if t not in before.frees))
        if op.kind == SEND and before.name in ("aten.new_empty", "aten.clone") and made.intersection(op.reads):
            source = before.reads if before.name == "aten.clone" else ()
            reads, frees = tuple({*op.reads, *source} - made), (*before.frees, *op.frees)
            alike[-1] = replace(op, allocates=before.allocates, reads=reads, frees=frees)
        elif before.name == "aten.empty.memory_format":
            if op.name == "aten.bmm":
                alike[-1] = replace(before, allocates=(*before.allocates, *op.allocates))
            elif op.name == "aten.linalg_vector_norm":
                alike[-1] = Op("elementwise", "dora", before.allocates, before.allocates[1:])
        elif op.name == "shardwise.dropout" and before.name == "aten.randint":
            reads, frees = (tuple(t for t in tensors if t not in made) for tensors in (op.reads, op.frees))
            alike[-1] = replace(op, name="aten.native_dropout", reads=reads, frees=frees)
        else:
            alike.append(op)
    return alike


def _bytes(unit: Unit, index: int, which: str) -> tuple[int, str]:
    """Of a tensor, and its type."""
    tensor = unit.tensors[index]
    compute = "bf16" if which == "narrow" else "fp32"
    dtype = {"compute": compute, "statistics": "fp32"}.get(tensor.dtype, tensor.dtype)
    return tensor.numel(B, S) * {"bf16": 2, "fp32": 4, "bool": 1, "int64": 8}[dtype], dtype


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model", "ranks", "sequence", "which"), pairwise(MODELS, (2, 8), (False, True), ("narrow", "wide"))
)
def test_a_block_on_paper_is_the_block_that_ran(
    model: str, ranks: int, sequence: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, **MODELS[model])
    types = Precision("bf16", "bf16", "bf16") if which == "narrow" else Precision()
    plan = Plan(Layout(tp=ranks), Batch(B, 1, S), Shard(), types, sequence_parallel=sequence)
    sheet = sheet_of(spec, which, ranks=ranks)
    for technique in (precision, tp):
        sheet = technique.cost(sheet, plan)
    (paper,) = sheet.blocks
    ran = traced(spec, plan, which, monkeypatch)
    wanted, seen = told(ran, which), told(paper, which)
    for what, each in wanted.items():
        assert seen[what] == each, what
