"""Traces units: runs the embedding, a block or the head of a model on fake tensors, after a plan's techniques were
applied to it, in a fake world.

What is traced is what is applied: adapters, dtypes, 4 bits, frozen weights and collectives are operations that were
seen. Every number that only sizes something is a prime, so that each size can be read as a product of symbols
(planner/symbols.py). A fake world stands on the process's default group, so a unit is traced in a process of its own
(planner/tracer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from shardwise import techniques
from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local
from shardwise.models.attention import MaskSpec
from shardwise.models.config import layer_kinds
from shardwise.models.decoder import Decoder
from shardwise.models.delta_sizes import passed, products
from shardwise.models.hf_model import HFDecoder, Model
from shardwise.models.moe import counting
from shardwise.planner.hf_units import Call, Start, hf_models
from shardwise.planner.recorder import RecordedOp, Recorder, Stored
from shardwise.planner.symbols import Symbols
from shardwise.spec.layout import Layout
from shardwise.spec.rows import pieces_of
from shardwise.spec.sheet import ARRIVED, EXPERT_ROWS, GROUPED, GROUPED_OUTER, SCALED, SEND, Dim, Op, Tensor, Unit
from shardwise.techniques.dtypes import compute_dtype, torch_dtype
from shardwise.techniques.variant import Variant, parameters

Tell = Callable[[torch.Tensor], None]
OVER_RANKS = "over_ranks"
"""In the names of operations whose keys, or states, are on several ranks."""
CONVOLUTION = "shardwise.conv_silu_over_ranks"
"""The short convolution of gated delta nets, which reads the last tokens of the rank before as well."""
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
class _Pass:
    """One recorded run of a unit: what its tensors and parameters are called by index of storage."""

    recorder: Recorder
    weights: dict[int, str]
    marks: dict[str, int]
    forward_events: int = 0
    weight_gradients: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class _Runnable:
    """A pass that is to be run: the unit's ``parameters`` by their names in it, ``call``, the ``leaf`` that enters, and
    what is there before. ``unsaved``: of what the embedding makes for the blocks, what none of them saves for backward.
    ``following``: what a predictor reads of the next token, of the unit ``embedding`` an output once it has run; in
    backward their gradient takes their storage."""

    parameters: Mapping[str, nn.Parameter]
    call: Call
    leaf: torch.Tensor
    shared: list[torch.Tensor]
    unsaved: Callable[[], list[torch.Tensor]] = list
    following: list[torch.Tensor] = field(default_factory=list)


def trace(variant: Variant) -> Unit:
    """The unit of all models and plans with this variant, in symbols. Raises RuntimeError in a process that has a
    default group."""
    with ExitStack() as stack:
        plan = variant.plan
        world = fake_world(plan.layout) if plan.layout.world > 1 else nullcontext(Meshes())
        meshes = stack.enter_context(world)
        stack.enter_context(FakeTensorMode())
        model = _applied(variant, meshes)
        named = dict(model.named_parameters())
        reading = Symbols.of(variant, {symbol: local(named[name].detach()).shape[0] for symbol, name in variant.sums})
        axes = meshes.called() if plan.layout.world > 1 else {}
        return _Recording(variant.what, _subject(variant, model), _Naming(reading, axes, plan.layout)).made()


trace_once = cache(trace)
"""As :func:`trace`, each variant once in this process."""


def traced_here(variants: Iterable[Variant]) -> dict[Variant, Unit]:
    """The units of variants, traced in this process."""
    return {variant: trace_once(variant) for variant in variants}


def _applied(variant: Variant, meshes: Meshes) -> Model:
    """The model with the plan's techniques applied, its weights in the dtypes in which a pass sees them."""
    model = Decoder(variant.model) if variant.model.hf_model is None else HFDecoder(variant.model)
    techniques.apply_inside([model], variant.plan, meshes)
    for name, module in model.named_modules() if variant.gathered else ():
        dtype = torch_dtype(compute_dtype(variant.plan.precision, name))
        for word, parameter in list(module.named_parameters(recurse=False)):
            cast = local(parameter.detach()).to(dtype)
            if isinstance(parameter, DTensor):  # whose ``data`` keeps its dtype
                size: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
                cast = DTensor.from_local(cast, parameter.device_mesh, parameter.placements, run_check=False, **size)
            module.register_parameter(word, nn.Parameter(cast, parameter.requires_grad))
    return model


def _subject(variant: Variant, model: Model) -> _Runnable:
    """The unit of the model that is to be run."""
    plan, spec = variant.plan, variant.model
    b, s = plan.batch.micro_batch_size, plan.row_tokens
    tokens = (-(-b * s // variant.spread),) if variant.spread > 1 else (b, s)
    dtype = torch_dtype(plan.precision.compute)
    width = spec.hidden_size * (1 + spec.predictors * (variant.what == "head"))
    leaf = torch.empty((*tokens, width), dtype=dtype, requires_grad=variant.input_trained)
    prefix = f"layers.{variant.block}."
    own = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    if variant.what != "block":
        prefix, own = "", [*parameters(spec, variant.what)]
    named = {name.removeprefix(prefix): model.get_parameter(name) for name in own}
    ids = torch.zeros((b, s), dtype=torch.int64)
    if isinstance(model, Decoder):
        following = [torch.empty_like(leaf, requires_grad=True)] if spec.predictors and variant.what == "block" else []
        call, shared = _decoders(variant, model, ids, following)
        return _Runnable(named, call, leaf, shared, following=following)
    call, shared, unsaved = hf_models(variant, model, ids)
    return _Runnable(named, call, leaf, shared, unsaved)


def _decoders(
    variant: Variant, model: Decoder, ids: torch.Tensor, following: list[torch.Tensor]
) -> tuple[Call, list[torch.Tensor]]:
    """A unit of the decoder. What the caller holds on to lives as long as it does there. ``following``: what a
    predictor reads besides its input; the unit ``embedding`` adds what it makes."""
    kinds, held = layer_kinds(variant.model)[0], list[Any]()

    def embedding(start: Start) -> torch.Tensor:
        start()
        if variant.model.predictors:
            out, beside = model.embedded_twice(ids, ids)
            following[:] = [beside]
        else:
            out = model.embedded(ids)
        held.append(model.tables(kinds, ids, out.dtype, MaskSpec()))
        return out

    def head(start: Start) -> torch.Tensor:
        held.append(model.normed(start()))
        out: torch.Tensor = model.head(held[-1], lambda hidden, weight: hidden)
        return out

    if variant.what == "embedding":
        return embedding, [ids]
    model.embedded(ids)  # from which cut layers know the number of rows
    if variant.what == "head":
        return head, []
    mask = MaskSpec(row_length=variant.plan.batch.seq_len if variant.plan.layout.cp > 1 else None)
    (rotary,) = model.tables(kinds[:1], ids, torch_dtype(variant.plan.precision.compute), MaskSpec())
    block = model.layers[variant.block]
    shared = [*(rotary or ()), *counting(block), *following]
    return lambda start: block(start(), rotary, mask, *following), shared


@contextmanager
def _nothing_saved() -> Iterator[None]:
    """As under recomputation, which saves nothing either and leaves the grad mode on: a program may ask for that."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield


class _Recording:
    """A subject, run with a backward and without one, and the unit that was seen."""

    def __init__(self, name: str, subject: _Runnable, naming: _Naming) -> None:
        self.name = name
        self.subject = subject
        self.naming = naming
        trained = any(p.requires_grad for p in subject.parameters.values())
        self.has_backward = trained or (subject.leaf.requires_grad and name != "embedding")

    def made(self) -> Unit:
        run = self.record(backward=self.has_backward)
        with _nothing_saved():
            plain = self.record(backward=False)
        naming, events = self.naming, run.recorder.events
        local = {index: position for position, index in enumerate(run.recorder.made)}
        renamed = dict(zip(plain.recorder.made, local.values(), strict=False))
        forward = naming.ops(events[: run.forward_events], local, run)
        backward = naming.ops(events[run.forward_events :], local, run)
        marks = {key: local[index] for key, index in run.marks.items()}
        freed = {index for op in forward for index in op.frees}
        made = {index for op in forward for index in op.allocates} - {marks["output"]}
        saved = frozenset(made - freed) | ({marks["input"]} if marks["input"] not in freed else set())
        left = (run.recorder.storages.find(tensor) for tensor in self.subject.unsaved())
        saved -= {local[one.index] for one in left if one and one.index in local}
        if self.name == "head":  # what only the caller holds is not saved for backward
            saved = frozenset(t for t in saved if any(t in op.reads for op in backward))
        copies = {t for op in forward if op.name == "aten._to_copy" and op.weight for t in op.allocates}
        stored = enumerate(run.recorder.made.values())
        return Unit(
            name=self.name,
            weights=tuple(naming.weight(name, p) for name, p in self.subject.parameters.items()),
            tensors=tuple(naming.tensor(one, i, "gathered" if i in copies else "activations") for i, one in stored),
            forward=forward,
            forward_plain=naming.ops(plain.recorder.events[: plain.forward_events], renamed, plain),
            backward=backward,
            input=marks["input"],
            output=marks["output"],
            gradient_in=marks.get("gradient_in", -1),
            gradient_out=marks.get("gradient_out", -1),
            weight_gradients=tuple((key, local[index]) for key, index in run.weight_gradients),
            saved=saved,
            again=frozenset(local[i] for event in events[: run.forward_events] if event.again for i in event.makes),
        )

    def record(self, *, backward: bool) -> _Pass:
        subject, recorder = self.subject, Recorder()
        for tensor in subject.shared:
            recorder.outside(tensor)
        one = torch.ones((), dtype=subject.leaf.dtype)
        weights = {recorder.outside(parameter): name for name, parameter in subject.parameters.items()}
        run = _Pass(recorder, weights, {})

        def mark(key: str, tensor: torch.Tensor) -> None:
            run.marks[key] = recorder.storages.add(tensor)[0].index

        def start() -> torch.Tensor:
            recorder.events.clear()
            recorder.made.clear()
            tell = partial(mark, "input"), partial(mark, "gradient_out")
            taken: torch.Tensor = _UnitInput.apply(subject.leaf, *tell)
            return taken

        with recorder:
            out = subject.call(start)
            mark("output", out)
            run.forward_events = len(recorder.events)
            if backward and out.requires_grad:  # not of a frozen norm before an output layer that is trained
                loss = _Seed.apply(out, partial(mark, "gradient_in"))
                mark("seed", loss)
                del out
                made = [each for each in subject.following if each.grad_fn is not None]
                torch.autograd.backward([loss, *made], [one, *(each.detach() for each in made)])
        gradients = {name: p.grad for name, p in subject.parameters.items() if p.grad is not None}
        run.weight_gradients = tuple((name, recorder.outside(grad)) for name, grad in gradients.items())
        for each in (tensor for tensor in subject.following if tensor.is_leaf):
            each.grad = None  # it takes the place of what it is of, and that is free
        for parameter in subject.parameters.values():
            parameter.grad = None
        return run


@dataclass(frozen=True)
class _Naming:
    """The terms in which a record is told: sizes as products, process groups as axes; ranks have a ``layout``."""

    reading: Symbols
    axes: Mapping[str, str]
    layout: Layout

    def weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        held = local(parameter.detach())
        shape, dtype = tuple(map(self.reading, held.shape)), _dtype(held.dtype)
        return Tensor(name, shape, dtype, "weights", used_as=dtype, trained=parameter.requires_grad, symbols=shape)

    def tensor(self, stored: Stored, index: int, category: str) -> Tensor:
        shape = self.reading.shape(stored.shape)
        arrived = category == "activations" and any(ARRIVED in str(dim).split("*") for dim in shape)
        category = EXPERT_ROWS if arrived else category
        return Tensor(f"t{index}", shape, _dtype(stored.dtype), category, symbols=shape)

    def ops(self, events: list[RecordedOp], local: dict[int, int], run: _Pass) -> tuple[Op, ...]:
        """The operations that make, change, send or compute something; what a view frees counts to the operation before
        it."""
        ops: list[Op] = []
        others = {run.marks.get(key) for key in ("input", "gradient_in", "seed")}
        kept = {run.marks.get(key) for key in ("output", "gradient_out", "seed")}
        kept.update(index for _, index in run.weight_gradients)
        for event in events:
            frees = tuple(local[index] for index in event.frees if index in local and index not in kept)
            makes = tuple(local[index] for index in event.makes if index not in others)
            if not (makes or event.writes or event.kind):
                if ops and frees:
                    ops[-1] = ops[-1].freeing(ops[-1].frees + frees)
                continue
            reads, writes = (
                tuple(local[index] for index in indices if index in local) for indices in (event.reads, event.writes)
            )
            weight = next((run.weights[index] for index in event.reads if index in run.weights), "")
            ops.append(replace(self.op(event), allocates=makes, frees=frees, reads=reads, writes=writes, weight=weight))
        return tuple(ops)

    def op(self, event: RecordedOp) -> Op:
        """Kind and sizes: of a product floating-point operations and what it multiplies (of causal attention half of
        the square), of a collective the larger of what goes in and what comes out."""
        name, size = str(event.op).removesuffix(".default"), self.reading
        if event.kind:
            larger, smaller = max(event.payload), min(event.payload)
            if larger % smaller and event.kind != "all_to_all":  # of which what comes is more, where it is unlike
                raise ValueError(f"which side of {name} is larger depends on sizes: {event.payload}")
            return Op(SEND, event.kind, symbols=size(larger), axis=self.axes.get(event.group, "world"))
        if name in ("aten.mm", "aten.addmm"):
            (m, k), (_, n) = event.shapes[-2:]
            dims = tuple(map(size, (1, m, n, k)))
            return Op("matmul", name, symbols=size(2 * m * n * k), dims=dims)
        if name.startswith(SCALED):
            (m, k), weight = event.shapes[:2]
            n, groups = weight[-1 - name.startswith(SCALED[0])], weight[0] if len(weight) == 3 else 1
            dims, axis = tuple(map(size, (groups, m, n, k))), "tp" * (OVER_RANKS in name)
            return Op("matmul", name, symbols=size(2 * m * n * k), dims=dims, axis=axis)
        if name in (GROUPED, GROUPED_OUTER):
            left, right, counts = event.shapes
            sizes = (left[0], right[-1], left[1]) if name == GROUPED else (left[1], right[1], left[0])
            return Op("matmul", name, symbols=size(2 * prod(sizes)), dims=tuple(map(size, (counts[0], *sizes))))
        if name.startswith("shardwise.attention"):
            backward, ring = name.endswith("_backward"), self.layout.ring if OVER_RANKS in name else 1
            (_, key_heads, *_, e), (b, heads, s, v) = event.shapes[2 if backward else 1], event.shapes[0]
            v = event.shapes[3 if backward else 2][-1]
            pairs = b * heads * s * s * ring
            dims = tuple(map(size, (b * heads, s, s * ring, e, b * key_heads, v)))
            axis = "ring" if ring > 1 else ""
            return Op(
                "attention", name, symbols=size(pairs * (3 * e + 2 * v if backward else e + v)), dims=dims, axis=axis
            )
        read, written = (tuple(map(size, each)) for each in (event.read, event.written))
        if name.startswith("shardwise.gated_delta"):
            return replace(self.rule(name, event), read=read, written=written)
        dims = _dims(name, event, size)
        if name.startswith(CONVOLUTION):
            (*_, channels), (*_, taps) = event.shapes[name.endswith("_backward") :][:2]
            dims = size(channels), size(taps - 1), size(self.layout.cp)
        return Op("elementwise", name, dims=dims, axis="cp" * name.startswith(CONVOLUTION), read=read, written=written)

    def rule(self, name: str, event: RecordedOp) -> Op:
        """The rule of gated delta nets: its products, and of its dims tokens of all heads, key and value; where states
        pass between pieces the ranks too, and how many pieces each has."""
        backward = name.endswith("_backward")
        over = OVER_RANKS in name
        size = self.reading
        (*tokens, heads, key), (*_, value_heads, value) = event.shapes[1 + backward : 3 + backward]
        sizes = key, value, value_heads // heads
        each = products(*sizes, backward=backward) + over * passed(*sizes, backward=backward)
        dims = prod(tokens) * value_heads, key, value, *[self.layout.cp, pieces_of(self.layout.ring)] * over
        symbols = size(2 * prod(tokens) * heads * each)
        return Op("rule", name, symbols=symbols, dims=tuple(map(size, dims)), axis="cp" * over)


def _dims(name: str, event: RecordedOp, size: Callable[[int], Dim]) -> tuple[Dim, ...]:
    """Return the rows and columns of the matrix of an operation that takes memory meanwhile, and what else it is sized
    by; nothing of any other."""
    if name in ("shardwise.dequantise", "shardwise.from_float8"):
        rows, bytes_each = event.shapes[0]
        return size(rows), size(bytes_each if name.endswith("8") else 2 * bytes_each)
    if name == "shardwise.row_norms":
        (rank, columns), read = event.shapes[1], event.read[1]
        return *map(size, event.shapes[0]), size(rank if read < 4 * rank * columns else 0)
    return ()


def _dtype(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))
