"""Makes a sheet: runs the stem, a block of each sort and the tail of a model on fake tensors, once, with no technique
applied.

The micro-batch and the sequence are two large primes, so that every dim that grows with them can be recognised in the
shapes seen; of the decoder's units all sizes are primes (planner/features.py). Two variants are traced: ``narrow``
(compute type smaller than the type of statistics: bf16, fp16) and ``wide`` (the same: fp32, fp64), since converting
costs a tensor in the one and nothing in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.models.attention import MaskSpec
from shardwise.models.blocks import blocks
from shardwise.models.config import LayerKind, ModelSpec, layer_kinds
from shardwise.models.decoder import Decoder
from shardwise.models.hf_model import HFDecoder
from shardwise.planner.features import What, assembled, joined
from shardwise.planner.record import RecordedOp, Recorder, Stored, plain_tensors
from shardwise.planner.symbols import renumbered, symbolic
from shardwise.spec.plan import Lora
from shardwise.spec.sheet import Dim, Op, Sheet, Tensor, Unit
from shardwise.techniques import cells
from shardwise.techniques.adapter import attach
from shardwise.techniques.dora import LayerShare

MICRO_BATCH, SEQ_LEN = 10_007, 10_009
GROWING: dict[int, Dim] = {MICRO_BATCH: "b", SEQ_LEN: "s", MICRO_BATCH * SEQ_LEN: "b*s"}
ENDS: tuple[What, What] = ("stem", "tail")

Tell = Callable[[torch.Tensor], None]
Start = Callable[[], torch.Tensor]
"""Begins the recording of a unit, and returns the unit's input."""


class _UnitInput(torch.autograd.Function):
    """Hands out a tensor that nothing but the graph holds; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tell_input: Tell, tell_gradient: Tell) -> torch.Tensor:
        ctx.tell = tell_gradient
        handed = torch.empty_like(leaf)
        tell_input(handed)
        return handed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.tell(grad)
        return None, None, None


class _Seed(torch.autograd.Function):
    """Ends a graph; its backward makes the gradient that the next unit would send."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, tell: Tell) -> torch.Tensor:
        ctx.like, ctx.tell = (out.shape, out.dtype), tell
        return torch.zeros((), dtype=out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = torch.empty(ctx.like[0], dtype=ctx.like[1])
        ctx.tell(gradient)
        return gradient, None


@dataclass
class _RecordedPass:
    """One recorded pass through a unit: what its tensors and parameters are called by index of storage."""

    recorder: Recorder
    weights: dict[int, str]
    marks: dict[str, int]
    forward_events: int
    weight_gradients: tuple[tuple[str, int], ...] = ()


def trace(spec: ModelSpec, variant: str, ranks: int = 1) -> Sheet:
    """The sheet of a model, or of each of ``ranks`` tensor-parallel ranks; ``variant`` is ``narrow`` or ``wide``. Takes
    a second or two, and no memory to speak of."""
    if spec.hf_model is not None:
        with _tracing(variant) as dtype:
            sheet = _hf_sheet(spec, dtype)
    else:
        sheet = assembled(spec, partial(trace_template, variant), ranks)
    return replace(sheet, types=variant, cells={name: trace_cell(variant, name) for name in cells.NAMES})


@cache
def trace_template(variant: str, what: What, template: ModelSpec) -> Unit:
    """The unit of all models with this template, in symbols."""
    with _tracing(variant) as dtype:
        return symbolic(_decoders(what, template, layer_kinds(template)[0][0], dtype))


@cache
def trace_cell(variant: str, name: str) -> Unit:
    """A layer with an adapter, in symbols. DoRA's norms are one operation, since in how many rounds they are made, of
    how many rows at a time, depends on the sizes."""
    words, size = name.split(), cells.PRIMES
    lora = Lora(size["r"], 1.0, dropout=0.5 if "dropout" in words else 0.0, dora="dora" in words)

    def norms(module: nn.Module, factor: float, share: LayerShare) -> torch.Tensor:
        return torch.empty(size["out"], dtype=torch.float32)

    with _tracing(variant) as dtype:
        layer = nn.Linear(size["in"], size["out"], bias="biased" in words)
        layer.requires_grad_(False)
        attach(layer, lora, 0.5, norms)
        if "apart" in words:
            layer.lora_m = nn.Parameter(torch.empty(size["out"], dtype=torch.float32))
        hidden = torch.empty((MICRO_BATCH, SEQ_LEN, size["in"]), dtype=dtype, requires_grad=True)
        unit = renumbered(_unit("cell", _named("", layer), partial(_call, layer, (), {}), hidden, []), size)
    wide = Tensor(f"t{len(unit.tensors)}", ("w", "in"), "statistics", symbols=("w", "in"))
    return replace(
        unit,
        tensors=(*unit.tensors, wide),
        forward=tuple(_norms_made(op, len(unit.tensors)) for op in unit.forward),
        forward_plain=tuple(_norms_made(op, len(unit.tensors)) for op in unit.forward_plain),
    )


def _norms_made(op: Op, wide: int) -> Op:
    if not op.name.startswith("aten.empty"):
        return op
    return replace(op, name="dora", allocates=(*op.allocates, wide), frees=(*op.frees, wide), weight="lora_m")


def trace_as_it_is(spec: ModelSpec, variant: str) -> Sheet:
    """The sheet of a model of the decoder's families, traced with its own numbers: what symbols must come to."""
    kinds, _ = layer_kinds(spec)
    with _tracing(variant) as dtype:
        stem, tail = (_decoders(what, spec, kinds[0], dtype) for what in ENDS)
        return joined(spec, stem, [_decoders("block", spec, kind, dtype) for kind in kinds], tail)


@contextmanager
def _tracing(variant: str) -> Iterator[torch.dtype]:
    """Tensors are fake, and of the type that is computed in where none is asked for."""
    dtype = torch.bfloat16 if variant == "narrow" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            yield dtype
    finally:
        torch.set_default_dtype(before)


def _hf_sheet(spec: ModelSpec, dtype: torch.dtype) -> Sheet:
    """The stem is what runs where blocks only pass on what they are given, the tail what follows the last one."""
    assert spec.hf_model is not None
    torch.set_default_dtype(torch.float32)  # that of its buffers, whatever is computed in
    model = HFDecoder(spec)
    torch.set_default_dtype(dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    layers = blocks(model)
    kinds, order = layer_kinds(spec)
    ids, positions = (torch.zeros((MICRO_BATCH, SEQ_LEN), dtype=torch.int64) for _ in range(2))
    hidden = torch.empty((MICRO_BATCH, SEQ_LEN, spec.hidden_size), dtype=dtype, requires_grad=True)
    given: list[tuple[Any, Any]] = []

    def run(block: Callable[..., torch.Tensor]) -> torch.Tensor:
        for index, layer in enumerate(layers):
            layer.forward = partial(block, index)
        try:
            return model.normed(ids, positions, MaskSpec())
        finally:
            for layer in layers:
                del layer.forward

    def collect(index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append((args, kwargs))  # what blocks share, made in the stem and held to the end
        if index + 1 == len(order):
            raise _Reached(hidden)
        return hidden

    def stem(start: Start) -> torch.Tensor:
        start()
        try:
            return run(collect)
        except _Reached as reached:
            return reached.hidden

    def tail(start: Start) -> torch.Tensor:
        return run(lambda index, hidden, *_, **__: start() if index + 1 == len(order) else hidden)

    def named(places: list[str]) -> dict[str, nn.Parameter]:
        return {key: p for name in places for key, p in _named(f"{name}.", model.get_submodule(name)).items()}

    places = [name for name, _ in spec.hf_model.places]
    middle = places.index("layers")
    begin = _unit("stem", named(places[:middle]), stem, hidden, [ids, positions])
    traced = []
    for layer in (order.index(kind) for kind in range(len(kinds))):
        args, kwargs = given[layer]
        call = partial(_call, layers[layer], args, kwargs)
        traced.append(_unit("block", _named("", layers[layer]), call, hidden, plain_tensors((args, kwargs))))
    end = _unit("tail", named(places[middle + 1 : -1]), tail, hidden, [])
    return joined(spec, begin, traced, end)


class _Reached(Exception):
    """The last block was called."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _call(block: nn.Module, args: Any, kwargs: Any, start: Start) -> torch.Tensor:
    out: torch.Tensor = block(start(), *args, **kwargs)
    return out


def _decoders(what: What, spec: ModelSpec, kind: LayerKind, dtype: torch.dtype) -> Unit:
    """A unit of the decoder, of a kind of block where it is one."""
    model = Decoder(replace(spec, num_hidden_layers=1))
    kinds, _ = layer_kinds(spec)
    ids = torch.zeros((MICRO_BATCH, SEQ_LEN), dtype=torch.int64)
    hidden = torch.empty((MICRO_BATCH, SEQ_LEN, spec.hidden_size), dtype=dtype, requires_grad=True)
    held: list[Any] = []

    def stem(start: Start) -> torch.Tensor:
        start()
        out: torch.Tensor = model.embedded(ids)
        held.append(model.tables(kinds, ids, out.dtype, MaskSpec()))
        return out

    if what == "stem":
        return _unit("stem", _named("embed.", model.embed), stem, hidden, [ids])
    if what == "tail":
        return _unit("tail", _named("norm.", model.norm), lambda start: model.normed(start()), hidden, [])
    (rotary,) = model.tables((kind,), ids, dtype, MaskSpec())
    call = partial(_call, model.layers[0], (rotary, MaskSpec()), {})
    return _unit("block", _named("", model.layers[0]), call, hidden, [*(rotary or ())])


def _named(prefix: str, module: nn.Module) -> dict[str, nn.Parameter]:
    return {prefix + name: parameter for name, parameter in module.named_parameters()}


def _unit(
    name: str,
    parameters: dict[str, nn.Parameter],
    call: Callable[[Start], torch.Tensor],
    leaf: torch.Tensor,
    shared: list[torch.Tensor],
) -> Unit:
    run = _record(parameters, call, leaf, shared)
    # As under recomputation, which saves nothing either and leaves the grad mode on: a program may ask for that.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        plain = _record(parameters, call, leaf, shared, backward=False)
    local = {index: position for position, index in enumerate(run.recorder.made)}
    renamed = dict(zip(plain.recorder.made, local.values(), strict=False))
    events = run.recorder.events
    forward = _ops(events[: run.forward_events], local, run)
    backward = _ops(events[run.forward_events :], local, run)
    marks = {key: local[index] for key, index in run.marks.items()}
    freed = {index for op in forward for index in op.frees}
    made = {index for op in forward for index in op.allocates}
    tensors = tuple(_tensor(stored, leaf.dtype, i) for i, stored in enumerate(run.recorder.made.values()))
    return Unit(
        name=name,
        weights=tuple(Tensor(key, tuple(p.shape), "weights", "weights") for key, p in parameters.items()),
        tensors=tensors,
        forward=forward,
        forward_plain=_ops(plain.recorder.events[: plain.forward_events], renamed, plain),
        backward=backward,
        input=marks["input"],
        output=marks["output"],
        gradient_in=marks["gradient_in"],
        gradient_out=marks.get("gradient_out", -1),
        weight_gradients=tuple((key, local[index]) for key, index in run.weight_gradients),
        saved=frozenset(made - freed - {marks["output"]})
        | ({marks["input"]} if marks["input"] not in freed else set()),
    )


def _record(
    parameters: dict[str, nn.Parameter],
    call: Callable[[Start], torch.Tensor],
    leaf: torch.Tensor,
    shared: list[torch.Tensor],
    backward: bool = True,
) -> _RecordedPass:
    recorder = Recorder()
    for tensor in shared:
        recorder.outside(tensor)
    one = torch.ones((), dtype=leaf.dtype)
    weights = {recorder.outside(parameter): name for name, parameter in parameters.items()}
    run = _RecordedPass(recorder, weights, {}, 0)

    def mark(key: str, tensor: torch.Tensor) -> None:
        run.marks[key] = recorder.storages.add(tensor)[0].index

    def start() -> torch.Tensor:
        recorder.events.clear()
        recorder.made.clear()
        taken: torch.Tensor = _UnitInput.apply(
            leaf, lambda tensor: mark("input", tensor), lambda tensor: mark("gradient_out", tensor)
        )
        return taken

    with recorder:
        out = call(start)
        mark("output", out)
        run.forward_events = len(recorder.events)
        if backward:
            loss = _Seed.apply(out, lambda tensor: mark("gradient_in", tensor))
            mark("seed", loss)
            del out
            recorder.watch(loss.grad_fn)
            torch.autograd.backward(loss, one)
    run.weight_gradients = tuple(
        (name, recorder.storages.add(parameter.grad)[0].index)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    )
    for parameter in parameters.values():
        parameter.grad = None
    return run


def _ops(events: list[RecordedOp], local: dict[int, int], run: _RecordedPass) -> tuple[Op, ...]:
    """The operations that make, free or compute something; what a view frees counts to the operation before it."""
    ops: list[Op] = []
    others = {run.marks.get(key) for key in ("input", "gradient_in", "seed")}
    kept = {run.marks.get(key) for key in ("output", "gradient_out", "seed")}
    kept.update(index for _, index in run.weight_gradients)
    nodes = {-1: -1}
    for event in events:
        makes = tuple(local[index] for index in event.makes if index not in others)
        frees = tuple(local[index] for index in event.frees if index in local and index not in kept)
        kind, flops, per = _arithmetic(event)
        weight = next((run.weights[index] for index in event.reads if index in run.weights), "")
        if not makes and kind == "elementwise":
            if ops:
                # In place, as a norm multiplies by its weight: the operation before made what is changed.
                changed = weight if event.op is torch.ops.aten.mul_.Tensor else ""
                ops[-1] = replace(ops[-1], frees=ops[-1].frees + frees, weight=ops[-1].weight or changed)
            continue
        reads = tuple(local[index] for index in event.reads if index in local)
        name = str(event.op).removesuffix(".default")
        node = nodes.setdefault(event.node, len(nodes) - 1)
        ops.append(Op(kind, name, makes, frees, reads, weight, flops, per, node))
    return tuple(ops)


def _arithmetic(event: RecordedOp) -> tuple[str, int, str]:
    """Kind of operation, and its floating-point operations per token, or per b*s*s for attention (causal: half)."""
    name = str(event.op)
    if name in ("aten.mm.default", "aten.addmm.default"):
        left, right = event.shapes[-2:]
        return "matmul", 2 * left[0] * left[1] * right[1] // (MICRO_BATCH * SEQ_LEN), "b*s"
    if name.startswith("shardwise.attention"):
        _, heads, _, head_dim = event.shapes[0]
        backward = name.startswith("shardwise.attention_backward")
        return "attention", (5 if backward else 2) * heads * head_dim, "b*s*s"
    return "elementwise", 0, "b*s"


def _tensor(stored: Stored, compute: torch.dtype, index: int) -> Tensor:
    shape = tuple(_dim(size) for size in stored.shape)
    if stored.dtype == compute:
        dtype = "compute"
    else:
        dtype = "statistics" if stored.dtype.is_floating_point else str(stored.dtype).removeprefix("torch.")
    return Tensor(f"t{index}", shape, dtype)


def _dim(size: int) -> Dim:
    if size in GROWING:
        return GROWING[size]
    if size and (size % MICRO_BATCH == 0 or size % SEQ_LEN == 0):
        raise ValueError(f"a dim of {size} grows with the batch in a way that a sheet cannot say")
    return size
