"""What a unit of the model makes, frees, computes and sends in each of its passes, as events.

The same for every block of a kind, for every micro-batch and for every way to shard: keys are relative to the unit
(planner/events.py, ``Tape.play``), and where the weights have a say there stands a ``WeightsCall``.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.methods.head import backward_tensors, forward_tensors, gathers, products
from shardwise.planner.events import Compute, Event, Free, Key, Make, Send, WeightsCall
from shardwise.planner.overhead import attention_bytes
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Op, Sheet, Unit
from shardwise.techniques.tp_units import SEND

OUTPUT, GRADIENT = "output", "gradient of output"


class Passes:
    """The passes of the units of a sheet under a plan; with the workspaces of kernels where ``kind`` is cuda."""

    def __init__(self, sheet: Sheet, plan: Plan, kind: Kind) -> None:
        self.sheet, self.plan, self.kind = sheet, plan, kind
        self.b, self.s = plan.batch.micro_batch_size, plan.batch.seq_len
        self.recomputes = any(sheet.blocks[kind].recompute for kind in set(sheet.order))
        self.locals: dict[int, _Local] = {}

    def local(self, unit: Unit) -> _Local:
        if id(unit) not in self.locals:
            self.locals[id(unit)] = _Local(self, unit)
        return self.locals[id(unit)]

    def forward(self, unit: Unit) -> Iterator[Event | WeightsCall]:
        """A unit under recompute keeps what its ``saved_ops`` made, any other what it saved."""
        local = self.local(unit)
        keep = {tensor for i in unit.saved_ops for tensor in unit.forward[i].allocates} | {unit.input}
        yield WeightsCall("cast")
        for op in unit.forward_plain if unit.recompute else unit.forward:
            yield from local.runs(op)
            yield from (local.free(tensor) for tensor in op.frees if tensor not in keep)
        if unit.recompute:
            yield WeightsCall("uncast")
        if unit is self.sheet.tail:
            yield from self._loss_forward(local)
        # The loop over the blocks lets go of a block's input once it has run.
        if unit is not self.sheet.stem and unit.input not in unit.saved and not unit.recompute:
            yield local.free(unit.input)

    def tables(self, stem: Unit) -> Iterator[Event]:
        """Forward's own hold on the rotation tables ends; a recomputed block keeps what it was given."""
        local = self.local(stem)
        yield from (local.free(tensor) for tensor in unfreed(stem) - stem.saved if not self.recomputes)

    def recompute(self, unit: Unit) -> Iterator[Event | WeightsCall]:
        """Forward again, until all that backward reads is there."""
        local = self.local(unit)
        made: set[int] = set()
        yield WeightsCall("cast")
        for i, op in enumerate(recomputed(unit)):
            if i not in unit.saved_ops:
                yield from local.runs(op)
            made.update(op.allocates)
            for tensor in op.frees:
                if tensor != unit.input:
                    yield local.free(tensor)
                    made.discard(tensor)
        yield from (local.free(tensor) for tensor in made - unit.saved)

    def backward(self, unit: Unit) -> Iterator[Event | WeightsCall]:
        """Recomputation first, where there is any."""
        local, first = self.local(unit), unit is self.sheet.stem
        by_name = {weight.name: weight for weight in unit.weights}
        gradients = {tensor: by_name[weight] for weight, tensor in unit.weight_gradients}
        if unit.recompute:
            yield from self.recompute(unit)
        for op in unit.backward:
            yield from local.runs(op)
            for tensor in op.allocates:
                if tensor in gradients:
                    if first and self.sheet.tied and gradients[tensor] is unit.weights[0]:
                        yield WeightsCall("add_tied", gradients[tensor])
                    yield local.free(tensor)
                    yield WeightsCall("gradient", gradients[tensor])
            if op.kind == "attention" and self.kind == "cuda":
                workspace = "attention workspace", attention_bytes(unit, op, self.plan)
                yield from (Make((0, workspace[0]), *workspace), Free((0, workspace[0]), *workspace))
            yield from (local.free(tensor) for tensor in op.frees if tensor not in gradients)
        yield WeightsCall("uncast")
        yield from self._end_of_graph(local)

    def _end_of_graph(self, local: _Local) -> Iterator[Event]:
        """What no operation of backward frees is held by the unit's graph to its end: what a node saves that does not
        run, and the tables, which the blocks have used for the last time."""
        unit, first = local.unit, local.unit is self.sheet.stem
        held = unfreed(unit)
        yield from (local.free(tensor) for tensor in (held if self.recomputes and first else held & unit.saved))
        used = any(unit.input in op.frees for op in unit.backward)
        if not first and not used and (unit.recompute or unit.input in unit.saved):
            yield local.free(unit.input)

    def _loss(self) -> tuple[list[Event], dict[str, int]]:
        """The forward pass of the loss, and the bytes of what it leaves."""
        events: list[Event] = []
        left: dict[str, int] = {}
        for name, size, frees in forward_tensors(self.sheet, self.plan, self.kind):
            events += [Free((0, other), "logits", left.pop(other)) for other in frees]
            if size:
                left[name] = size
                events.append(Make((0, name), "logits", size))
        return events, left

    def _loss_forward(self, local: _Local) -> Iterator[Event]:
        tail = self.sheet.tail
        yield from self._loss()[0]
        vocabulary, hidden = (int(dim) for dim in self.sheet.stem.weights[0].shape)
        yield Compute(2 * products(self.sheet, self.plan) * vocabulary * hidden * self.b * self.s)
        yield from (Send("all_gather", "tp", "activations", size) for size in gathers(self.plan))
        yield from (local.free(tensor) for tensor in {tail.output} | (unfreed(tail) - tail.saved))

    def loss_backward(self, tail: Unit) -> Iterator[Event | WeightsCall]:
        """What the loss has made in its forward pass becomes the gradients of the output layer and of what it reads."""
        left = self._loss()[1]
        for name, size, frees in backward_tensors(self.sheet, self.plan):
            if size:
                left[name] = size
                yield Make((0, name), "logits", size)
            yield from (Free((0, other), "logits", left.pop(other)) for other in frees)
        for name in left.keys() & {"typed", "grad_weight"}:
            yield from (Free((0, name), "logits", left[name]), WeightsCall("head_gradient"))
        if "grad_hidden" in left:  # from here on it is the tail's to free
            yield Free((0, "grad_hidden"), "logits", left["grad_hidden"])
            yield Make((0, GRADIENT), "logits", tail.tensors[tail.output].bytes(self.b, self.s))


class _Local:
    """The events of one unit's tensors and operations."""

    def __init__(self, passes: Passes, unit: Unit) -> None:
        self.unit, self.passes = unit, passes
        self.sizes = [tensor.bytes(passes.b, passes.s) for tensor in unit.tensors]
        self.keys: dict[int, Key] = {unit.output: (0, OUTPUT), unit.gradient_in: (0, GRADIENT)}
        if unit is not passes.sheet.stem:
            self.keys |= {unit.input: (-1, OUTPUT), unit.gradient_out: (-1, GRADIENT)}
        self.arrives = "activations"
        if unit is passes.sheet.tail:  # the loss makes it, as large as what it reads
            self.arrives, self.sizes[unit.gradient_in] = "logits", self.sizes[unit.output]

    def free(self, tensor: int) -> Free:
        category = self.arrives if tensor == self.unit.gradient_in else "activations"
        return Free(self.keys.get(tensor) or (0, tensor), category, self.sizes[tensor])

    def runs(self, op: Op) -> Iterator[Event]:
        """What an operation makes, and what it computes or sends."""
        for tensor in op.allocates:
            yield Make(self.keys.get(tensor) or (0, tensor), "activations", self.sizes[tensor])
        if op.kind == SEND:
            yield Send(op.name, "tp", "activations", max(self.sizes[t] for t in (*op.reads, *op.allocates)))
        elif op.flops:
            b, s = self.passes.b, self.passes.s
            yield Compute(op.flops * b * (s if op.per == "b*s" else seen(s, self.unit.window)))


def seen(s: int, window: int | None) -> int:
    """Twice the pairs of query and key in a causal sequence of ``s``, roughly: s * s, or less with a window."""
    return s * s if window is None or window >= s else window * (2 * s - window)


def recomputed(unit: Unit) -> tuple[Op, ...]:
    """The operations that recomputation goes through: to the last that makes some of what backward reads, or short of
    the last that keeps its weight for backward."""
    read = {op.weight for op in unit.backward if op.kind == "matmul"} - {""}
    stops = [i + 1 for i, op in enumerate(unit.forward) if any(t in unit.saved for t in op.allocates)]
    stops += [i for i, op in enumerate(unit.forward) if op.kind == "matmul" and op.weight in read]
    return unit.forward[: max(stops, default=0)]


def unfreed(unit: Unit) -> set[int]:
    """What the forward pass of a unit makes and none of its operations frees, short of its output."""
    freed = {tensor for op in (*unit.forward, *unit.backward) for tensor in op.frees}
    return {tensor for op in unit.forward for tensor in op.allocates} - freed - {unit.output}
