"""The passes of a unit of the model: what it makes, frees, computes and sends in each, as events.

They are the same for every block of a kind, for every micro-batch and for every way to shard. The key (0, tensor) is a
tensor of the unit itself and (-1, tensor) one of the unit before it; where weights add events of their own there stands
a ``WeightsCall``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from shardwise import techniques
from shardwise.methods.loss_memory import backward_tensors, forward_tensors, gathers, products, sums
from shardwise.models.roles import is_expert, role
from shardwise.planner.held import recomputed, unfreed
from shardwise.planner.overhead import workspace_bytes
from shardwise.planner.seconds.kernels import NOTHING, Duration, durations, loss_durations, seen, under_way
from shardwise.planner.seconds.rates import Rates
from shardwise.spec.cluster import Kind
from shardwise.spec.hash_once import hash_once
from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.sheet import KEPT_UNITS, SEND, At, Cut, Op, Sheet, Unit
from shardwise.techniques.events import (
    GRADIENT,
    OUTPUT,
    AddTiedGradients,
    Compute,
    Event,
    ExpertsRun,
    Free,
    GradientReady,
    HeadGradientReady,
    Key,
    Make,
    Send,
    WeightsCall,
)

Piece = Event | WeightsCall
"""Of a pass: an event, or a point at which the weights add theirs."""


@hash_once
@dataclass(frozen=True)
class Passes:
    """The passes of a model's units, and all that they depend on besides the unit: plans with equal passes share what
    a pass of a unit comes to. ``b`` sequences of ``s`` tokens are computed in the dtype ``compute`` on devices of
    ``kind``, with the workspaces of its kernels; rows are ``cut`` among ranks. ``recomputes``: some block does.
    ``trains``: a backward follows, as it does not in a stage that has nothing to train, nor any before it. ``rates``:
    how fast the device is, where seconds are asked for. ``loss``: what the loss does in its forward and in its
    backward. ``apart``: experts are gathered and reduced apart from the rest of their block."""

    embedding: Unit
    head: Unit
    tied: bool
    recomputes: bool
    trains: bool
    b: int
    s: int
    kind: Kind
    compute: Dtype
    deterministic: bool
    rates: Rates | None
    cut: Cut
    loss: tuple[tuple[Piece, ...], tuple[Piece, ...]] = field(hash=False)  # many, of a long sequence
    apart: bool = False

    @classmethod
    def of(cls, sheet: Sheet, plan: Plan, kind: Kind, rates: Rates | None = None) -> Passes:
        units = [sheet.embedding, *(sheet.blocks[block] for block in sorted(set(sheet.order)))]
        made = cls(
            embedding=sheet.embedding,
            head=sheet.head,
            tied=sheet.tied,
            recomputes=any(unit.recompute for unit in units),
            trains=sheet.rank_kind.head or any(unit.backward for unit in units),
            b=plan.batch.micro_batch_size,
            s=plan.row_tokens,
            kind=kind,
            compute=plan.precision.compute,
            deterministic=plan.deterministic,
            rates=rates,
            cut=Cut(plan.batch.seq_len, plan.layout.ring, sheet.rank_kind.coordinate("ring"), plan.cp_kind == "gather"),
            loss=_loss(sheet, plan, kind, rates) if sheet.rank_kind.head else ((), ()),
            apart=plan.sharded and plan.layout.ep > 1,
        )
        return _same(made)

    def forward(self, unit: Unit) -> Iterator[Piece]:
        """A unit under recompute keeps what its ``saved_ops`` made, any other what it saved."""
        local = _Local(self, unit)
        keep = {tensor for i in unit.saved_ops for tensor in unit.forward[i].allocates} | {unit.input}
        begin, end = self._experts(unit, unit.forward)
        beside = meanwhile(unit.forward, local.forward)
        for i, op in enumerate(unit.forward_plain if unit.recompute else unit.forward):
            yield from _calls(i, {begin: ExpertsRun("forward", begins=True), end: ExpertsRun("forward", begins=False)})
            yield from local.runs(op, local.forward[i], beside.get(i, 0))
            yield from (local.free(tensor) for tensor in op.frees if tensor not in keep)
        yield from _calls(len(unit.forward), {end: ExpertsRun("forward", begins=False)})
        # The loop over the blocks lets go of a block's input once it has run, and nobody holds the head's in the loss.
        if unit is not self.embedding and unit.input not in unit.saved and not unit.recompute:
            yield local.free(unit.input)
        if unit is self.head:
            yield from self.loss[0]
            yield from (local.free(tensor) for tensor in {unit.output} | (unfreed(unit) - unit.saved))

    def tables(self, embedding: Unit) -> Iterator[Piece]:
        """Forward's own hold on the rotation tables ends; a recomputed block keeps what it was given. Without a
        backward nothing else holds them."""
        local, saved = _Local(self, embedding), embedding.saved if self.trains else frozenset()
        yield from (local.free(tensor) for tensor in unfreed(embedding) - saved if not self.recomputes)

    def recompute(self, unit: Unit) -> Iterator[Piece]:
        """Forward again, until all that backward reads is there."""
        local = _Local(self, unit)
        made: set[int] = set()
        beside = meanwhile(unit.forward, local.forward, unit.saved_ops)
        for i, op in enumerate(recomputed(unit)):
            if i not in unit.saved_ops:
                yield from local.runs(op, local.forward[i], beside.get(i, 0))
            made.update(op.allocates)
            for tensor in op.frees:
                if tensor != unit.input:
                    yield local.free(tensor)
                    made.discard(tensor)
        yield from (local.free(tensor) for tensor in made - unit.saved)

    def backward(self, unit: Unit) -> Iterator[Piece]:
        """Recomputation first, where there is any; of the head, what the loss has made in its forward pass becomes the
        gradients of the output layer and of what that reads."""
        return self._gradients(unit, frozenset())

    def input_gradients(self, unit: Unit) -> Iterator[Piece]:
        """The first half of a backward that comes in two: all but the products that give the gradients of weights, and
        what only these lead to."""
        return self._gradients(unit, put_off(unit))

    def weight_gradients(self, unit: Unit) -> Iterator[Piece]:
        """The second half."""
        local, later = _Local(self, unit), put_off(unit)
        weights = {weight.name: weight for weight in unit.weights}
        gradients = {tensor: weights[name] for name, tensor in unit.weight_gradients}
        for i in sorted(later):
            op = unit.backward[i]
            yield from local.runs(op, local.backward[i])
            for tensor in op.allocates:
                if tensor in gradients:
                    yield local.free(tensor)
                    yield GradientReady(gradients[tensor])
        held = _held(unit, later)
        freed = {tensor for op in unit.backward for tensor in op.frees} & held
        yield from (local.free(tensor) for tensor in sorted(freed - gradients.keys()))

    def _gradients(self, unit: Unit, later: frozenset[int]) -> Iterator[Piece]:
        """A backward without some of its operations, and with what these need left alive."""
        if unit is self.head:
            yield from self.loss[1]
            if not unit.backward:
                return
        local = _Local(self, unit)
        first = unit is self.embedding
        held = _held(unit, later)
        by_name = {weight.name: weight for weight in unit.weights}
        gradients = {tensor: by_name[weight] for weight, tensor in unit.weight_gradients}
        begin, end = self._experts(unit, unit.backward)
        begins, ends = (ExpertsRun("backward", begins=first) for first in (True, False))
        calls: dict[int, WeightsCall] = {begin: begins, end: ends} if end >= 0 else {}
        if unit.recompute:  # it begins where backward first reads what was not saved: in the experts
            yield from _calls(begin, calls)
            yield from self.recompute(unit)
            calls.pop(begin, None)
        beside = meanwhile(unit.backward, local.backward, later)
        for i, op in enumerate(unit.backward):
            yield from _calls(i, calls)
            if i in later:
                yield from (local.free(tensor) for tensor in op.frees if tensor not in gradients and tensor not in held)
                continue
            yield from local.runs(op, local.backward[i], beside.get(i, 0))
            for tensor in op.allocates:
                if tensor in gradients:
                    if first and self.tied and gradients[tensor] is unit.weights[0]:
                        yield AddTiedGradients()
                    yield local.free(tensor)
                    yield GradientReady(gradients[tensor])
            if op.kind in ("attention", "rule") and self.kind == "cuda":
                size = workspace_bytes(op, (self.b, self.s), self.compute, deterministic=self.deterministic)
                workspace = "attention workspace", size
                yield from (Make((0, workspace[0]), *workspace), Free((0, workspace[0]), *workspace))
            yield from (local.free(tensor) for tensor in op.frees if tensor not in gradients and tensor not in held)
        yield from _calls(len(unit.backward), calls)
        yield from self._end_of_graph(local)

    def _experts(self, unit: Unit, ops: tuple[Op, ...]) -> tuple[int, int]:
        """Between which of these operations the experts of a block run, where their weights come and go by themselves;
        -1 where not."""
        return experts_among(unit, ops) if self.apart and unit.name == "block" else (-1, -1)

    def _end_of_graph(self, local: _Local) -> Iterator[Piece]:
        """Yield the frees of what no operation of backward frees, and the unit's graph holds to its end: what a node
        saves that does not run, and the tables, which the blocks have used for the last time."""
        unit, first = local.unit, local.unit is self.embedding
        held = unfreed(unit)
        yield from (local.free(tensor) for tensor in (held if self.recomputes and first else held & unit.saved))
        if unit.recompute:  # what was saved to be taken by a recomputation, which has not come to it
            reached = len(recomputed(unit))
            left = {t for i in unit.saved_ops if i >= reached for t in unit.forward[i].allocates}
            yield from (local.free(tensor) for tensor in sorted(left - (held & unit.saved) - {unit.output}))
        used = any(unit.input in op.frees for op in unit.backward)
        if not first and not used and (unit.recompute or unit.input in unit.saved):
            yield local.free(unit.input)


@lru_cache(maxsize=32 * KEPT_UNITS)
def _same(passes: Passes) -> Passes:
    """Return those that were made first of all that are equal."""
    return passes


def _loss(sheet: Sheet, plan: Plan, kind: Kind, rates: Rates | None) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Return what the loss of a micro-batch does forward and backward."""
    left: dict[str, int] = {}  # the bytes of what forward leaves

    def make(name: str, size: int) -> Iterator[Piece]:
        if size:
            left[name] = size
            yield Make((0, name), "logits", size)

    def free(names: tuple[str, ...]) -> Iterator[Piece]:
        yield from (Free((0, name), "logits", left.pop(name)) for name in names)

    def forward() -> Iterator[Piece]:
        for name, size, frees in forward_tensors(sheet, plan, kind):
            yield from (*free(frees), *make(name, size))
        vocabulary, hidden = map(int, sheet.output.shape)
        tokens = plan.batch.micro_batch_size * plan.row_tokens * sheet.per_token
        times = products(sheet, plan)
        multiplied, rest = loss_durations(sheet, plan, rates, times) if rates else (NOTHING, NOTHING)
        yield Compute(2 * times * vocabulary * hidden * tokens, multiplied.device_ns, multiplied.host_ns)
        if rest.device_ns:
            yield Compute(0, rest.device_ns, rest.host_ns, rest.kind)
        yield from (Send("all_gather", "tp", "activations", size) for size in gathers(plan, sheet.per_token))
        yield from (Send("all_reduce", "cp", "control", size) for size in sums(plan))

    def backward() -> Iterator[Piece]:
        for name, size, frees in backward_tensors(sheet, plan):
            yield from (*make(name, size), *free(frees))
        for name in left.keys() & {"typed", "grad_weight"}:
            yield from (Free((0, name), "logits", left[name]), HeadGradientReady())
        if "grad_hidden" in left:  # from here on it is the head's to free
            yield Free((0, "grad_hidden"), "logits", left["grad_hidden"])
            output = sheet.head.tensors[sheet.head.output]
            yield Make((0, GRADIENT), "logits", output.bytes(plan.batch.micro_batch_size, plan.row_tokens))

    return tuple(forward()), tuple(backward())


Pass = Callable[[Passes, Unit], Iterator[Piece]]
"""One of the methods of ``Passes``."""


class _Local:
    """The events of one unit's tensors and operations."""

    def __init__(self, passes: Passes, unit: Unit) -> None:
        self.unit, (b, s), length = unit, (passes.b, passes.s), passes.cut.length
        self.times = {"": 1, "b": b, "b*s": b * s, "b*s*s": b * s * s * seen(length, unit.window)}
        self.parts = {"": 1, "b": 1, "b*s": 1, "b*s*s": length * length}
        self.where = At(b, s, BYTES[passes.compute], unit.window, passes.cut)
        self.keys: dict[int, Key] = {unit.output: (0, OUTPUT), unit.gradient_in: (0, GRADIENT)}
        if unit is not passes.embedding:
            self.keys |= {unit.input: (-1, OUTPUT), unit.gradient_out: (-1, GRADIENT)}
        rates = passes.rates
        self.forward = durations(unit, "forward", rates, b, s) if rates else [NOTHING] * len(unit.forward)
        self.backward = durations(unit, "backward", rates, b, s) if rates else [NOTHING] * len(unit.backward)
        self.of_loss = (
            unit.gradient_in if unit is passes.head else -1
        )  # which the loss makes, as large as what it reads

    @cached_property
    def kinds(self) -> list[str]:
        return ["logits" if i == self.of_loss else tensor.category for i, tensor in enumerate(self.unit.tensors)]

    @cached_property
    def sizes(self) -> Sequence[int]:
        found = _tensor_bytes(self.unit, self.where.b, self.where.s)
        if self.of_loss < 0:
            return found
        return [*found[: self.of_loss], found[self.unit.output], *found[self.of_loss + 1 :]]

    def free(self, tensor: int) -> Free:
        return Free(self.keys.get(tensor) or (0, tensor), self.kinds[tensor], self.sizes[tensor])

    def runs(self, op: Op, takes: Duration, beside_ns: int = 0) -> Iterator[Piece]:
        """Yield what an operation makes and computes, or sends while for ``beside_ns`` something else is computed."""
        for tensor in op.allocates:
            yield Make(self.keys.get(tensor) or (0, tensor), self.kinds[tensor], self.sizes[tensor])
        does = techniques.within(op, self.where)
        if does and does.workspace:
            yield Make((0, "workspace"), "activations", does.workspace)
            yield Free((0, "workspace"), "activations", does.workspace)
        size = op.flops * self.times[op.per] // self.parts[op.per]
        if op.kind == SEND:
            yield Send(op.name, op.axis, "activations", size, beside_ns=beside_ns)
        elif size or takes.device_ns:
            yield Compute(size, takes.device_ns, takes.host_ns, takes.kind)
        for kind, sent, beside in does.sent if does else ():
            yield Send(kind, op.axis, "activations", sent, beside_ns=round(beside * takes.device_ns))


@lru_cache(maxsize=32 * KEPT_UNITS)
def _tensor_bytes(unit: Unit, b: int, s: int) -> tuple[int, ...]:
    """Return the bytes of each tensor of a unit."""
    return tuple(tensor.bytes(b, s) for tensor in unit.tensors)


def meanwhile(ops: tuple[Op, ...], takes: Sequence[Duration], left_out: Set[int] = frozenset()) -> dict[int, int]:
    """Return, for each collective that is waited for later, how many nanoseconds the device computes until then."""
    return {i: sum(takes[k].device_ns for k in during if k not in left_out) for i, during in under_way(ops).items()}


@lru_cache(maxsize=8 * KEPT_UNITS)
def put_off(unit: Unit) -> frozenset[int]:
    """The operations of a block's backward that its second half runs where it comes in two: the products that give the
    gradients of linear layers' weights, and what casts them. Those of experts and routers are not put off."""
    if unit.name != "block":
        return frozenset()
    found = set[int]()
    maker = {tensor: i for i, op in enumerate(unit.backward) for tensor in op.allocates}
    for name, gradient in unit.weight_gradients:
        if is_expert(name) or role(name) == "router":
            continue
        ways = [maker.get(gradient, -1)]
        while ways[-1] >= 0 and unit.backward[ways[-1]].name == "aten._to_copy":
            ways.append(maker.get(unit.backward[ways[-1]].reads[0], -1))
        if ways[-1] >= 0 and unit.backward[ways[-1]].kind == "matmul":
            found.update(ways)
    return frozenset(found)


@lru_cache(maxsize=2 * KEPT_UNITS)
def experts_among(unit: Unit, ops: tuple[Op, ...]) -> tuple[int, int]:
    """Return the range of operations with all that experts do: from after the last with another weight before those
    with weights of experts, to before the next. What runs while rows are on their way to experts does not bound it.
    (-1, -1) where there are none."""
    named = {tensor: name for name, tensor in unit.weight_gradients}
    weights = [[op.weight] * bool(op.weight) + [named[t] for t in op.allocates if t in named] for op in ops]
    own = [i for i, names in enumerate(weights) if any(map(is_expert, names))]
    if not own:
        return -1, -1
    beside = {i for during in under_way(ops).values() for i in during}
    others = [i for i, names in enumerate(weights) if names and i not in beside and not any(map(is_expert, names))]
    before = max((i + 1 for i in others if i < own[0]), default=0)
    return before, min((i for i in others if i > own[-1]), default=len(ops))


def _calls(position: int, at: dict[int, WeightsCall]) -> Iterator[WeightsCall]:
    """The call before this operation, if there is one."""
    if position in at:
        yield at[position]


def _held(unit: Unit, later: frozenset[int]) -> set[int]:
    """Return what must live from the first half of a backward to the second."""
    return {tensor for i in later for tensor in (*unit.backward[i].reads, *unit.backward[i].allocates)}
