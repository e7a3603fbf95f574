"""Spells out one optimizer step of a sheet as a list of events, in the order in which the runtime does things.

Nothing here is a formula for a peak: units run forward, then backward, gather and reduce when FSDP2 does, and what is
alive at each moment is for planner/replay.py to find. Two micro-batches stand for any larger number: from the third on
nothing new happens.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.methods.head import backward_tensors, forward_tensors
from shardwise.planner.overhead import attention_bytes
from shardwise.planner.replay import Event
from shardwise.planner.tape import Tape
from shardwise.planner.weights import Replicated, Sharded, Weights
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Op, Sheet, Unit
from shardwise.techniques import optim


def schedule(sheet: Sheet, plan: Plan, rank: int = 0, kind: Kind = "cpu") -> list[Event]:
    """The events of one step on ``rank``, the state of the model included, from before the first forward; with the
    workspaces of kernels where ``kind`` is cuda."""
    step = _Step(sheet, plan, rank, kind)
    step.state()
    batches = min(plan.batch.accumulation, 3)
    for index in range(batches):
        step.weights.begin(last=index == batches - 1)
        step.micro_batch(index)
    step.tape.mark("end of backward")
    return step.tape.events


class _Step:
    def __init__(self, sheet: Sheet, plan: Plan, rank: int, kind: Kind) -> None:
        self.sheet, self.plan, self.rank, self.kind = sheet, plan, rank, kind
        self.tape = Tape()
        self.b, self.s = plan.batch.micro_batch_size, plan.batch.seq_len
        self.blocks = [sheet.blocks[kind] for kind in sheet.order]
        self.sizes = {id(unit): [tensor.bytes(self.b, self.s) for tensor in unit.tensors] for unit in sheet.units}
        self.idle = {i for i, block in enumerate(self.blocks) if not block.backward}
        self.weights: Weights = (Sharded if plan.sharded else Replicated)(self.tape, sheet, plan)

    def state(self) -> None:
        for category, size in optim.state_bytes(self.sheet, self.plan, self.rank).items():
            self.tape.make(("state", category), category, size)
        # Token ids, labels and positions of the whole step, 8 bytes each; of pairs, the answer that each token is of.
        each = 8 * (4 if self.plan.loss == "dpo" else 3)
        self.tape.make("batch", "buffers", each * self.b * self.s * self.plan.batch.accumulation)

    def micro_batch(self, index: int) -> None:
        tape, last = self.tape, len(self.blocks) - 1
        tape.mark("start of forward")
        self.weights.before_forward("stem")
        self.forward(self.sheet.stem, "stem")
        self.weights.after_forward("stem")
        for i, block in enumerate(self.blocks):
            self.weights.before_forward(i)
            self.forward(block, i)
            self.release_input(block, self.name(i - 1))
            self.weights.after_forward(i)
        self.weights.before_forward("tail")
        self.forward(self.sheet.tail, "tail")
        self.loss_forward()
        self.release_input(self.sheet.tail, self.name(last))
        self.weights.after_forward("tail")
        self.release_tables()
        tape.mark("end of forward")
        self.weights.before_backward("tail")
        self.loss_backward()
        if self.sheet.tail.backward:
            self.backward(self.sheet.tail, "tail", self.name(last))
        running = [i for i in range(last, -1, -1) if i not in self.idle]
        # FSDP2 hears of the end of a backward from the gradient of the input; where there is none, when all is over.
        late: list[Hashable] = [i for i in running if self.blocks[i].gradient_out < 0]
        if self.sheet.tail.gradient_out < 0:
            late.append("tail")
        else:
            self.weights.after_backward("tail")
        for i in running:
            self.weights.before_backward(i)
            self.backward(self.blocks[i], i, self.name(i - 1))
            if i not in late:
                self.weights.after_backward(i)
        self.backward(self.sheet.stem, "stem", None)
        for unit in ("stem", *sorted(self.idle), *late):
            self.weights.after_backward(unit)
        self.weights.end()

    def name(self, block: int) -> Hashable:
        return "stem" if block < 0 else block

    def forward(self, unit: Unit, name: Hashable) -> None:
        """A unit under recompute keeps what its ``saved_ops`` made, any other what it saved."""
        sizes = self.sizes[id(unit)]
        keep = {tensor for i in unit.saved_ops for tensor in unit.forward[i].allocates}
        self.weights.cast(unit, name)
        for op in unit.forward_plain if unit.recompute else unit.forward:
            for tensor in op.allocates:
                self.tape.make((name, tensor), "activations", sizes[tensor])
            for tensor in op.frees:
                if tensor not in keep and tensor != unit.input:
                    self.tape.free((name, tensor))
        if unit.recompute:
            self.weights.uncast(unit, name)

    def release_input(self, unit: Unit, before: Hashable) -> None:
        """The loop over the blocks lets go of a block's input once it has run."""
        if unit.input not in unit.saved and not unit.recompute:
            self.tape.free((before, self._output(before)))

    def release_tables(self) -> None:
        """Forward's own hold on the rotation tables ends; a recomputed block keeps what it was given."""
        if not any(block.recompute for block in self.blocks):
            for tensor in unfreed(self.sheet.stem) - self.sheet.stem.saved:
                self.tape.free(("stem", tensor))

    def _output(self, name: Hashable) -> int:
        return self.sheet.stem.output if name == "stem" else self.blocks[int(str(name))].output

    def recompute(self, unit: Unit, name: Hashable) -> None:
        """Forward again, until all that backward reads is there."""
        sizes = self.sizes[id(unit)]
        made: set[int] = set()
        self.weights.cast(unit, name)
        for i, op in enumerate(recomputed(unit)):
            if i not in unit.saved_ops:
                for tensor in op.allocates:
                    self.tape.make((name, tensor), "activations", sizes[tensor])
            made.update(op.allocates)
            for tensor in op.frees:
                if tensor != unit.input:
                    self.tape.free((name, tensor))
                    made.discard(tensor)
        for tensor in made - unit.saved:
            self.tape.free((name, tensor))

    def backward(self, unit: Unit, name: Hashable, before: Hashable | None) -> None:
        sizes = self.sizes[id(unit)]
        by_name = {weight.name: weight for weight in unit.weights}
        gradients = {tensor: by_name[weight] for weight, tensor in unit.weight_gradients}
        if unit.recompute:
            self.recompute(unit, name)
        for op in unit.backward:
            for tensor in op.allocates:
                if tensor == unit.gradient_out:
                    self.tape.make(("gradient", before), "activations", sizes[tensor])
                else:
                    self.tape.make((name, tensor), "activations", sizes[tensor])
                if tensor in gradients:
                    self.weights.gradient(gradients[tensor], name, (name, tensor))
            if op.kind == "attention" and self.kind == "cuda":
                self.tape.make((name, "workspace"), "attention workspace", attention_bytes(unit, op, self.plan))
                self.tape.free((name, "workspace"))
            for tensor in op.frees:
                if tensor == unit.gradient_in:
                    self.tape.free(("gradient", name))
                elif tensor == unit.input and before is not None:
                    self.tape.free((before, self._output(before)))
                elif tensor not in gradients:
                    self.tape.free((name, tensor))
        self.weights.uncast(unit, name)
        self.end_of_graph(unit, name, before)

    def end_of_graph(self, unit: Unit, name: Hashable, before: Hashable | None) -> None:
        """What no operation of backward frees is held by the unit's graph to its end: what a node saves that does not
        run, and the tables, which the blocks have used for the last time."""
        kept = any(block.recompute for block in self.blocks)
        held = unfreed(unit)
        for tensor in held if kept and unit is self.sheet.stem else held & unit.saved:
            self.tape.free((name, tensor))
        used = any(unit.input in op.frees for op in unit.backward)
        if before is not None and not used and (unit.recompute or unit.input in unit.saved):
            self.tape.free((before, self._output(before)))

    def loss_forward(self) -> None:
        for key, size, frees in forward_tensors(self.sheet, self.plan, self.kind):
            for other in frees:
                self.tape.free(("head", other))
            if size:
                self.tape.make(("head", key), "logits", size)
        tail = self.sheet.tail
        for tensor in {tail.output} | unfreed(tail) - tail.saved:
            self.tape.free(("tail", tensor))

    def loss_backward(self) -> None:
        for key, size, frees in backward_tensors(self.sheet, self.plan):
            if size:
                self.tape.make(("head", key), "logits", size)
            for other in frees:
                self.tape.free(("head", other))
        made = [key for key in (("head", "typed"), ("head", "grad_weight")) if key in self.tape.alive]
        if made:
            self.weights.head_gradient(made[0])
        # The gradient of the hidden states was made in the forward pass; from here on it is the tail's to free.
        if ("head", "grad_hidden") in self.tape.alive:
            self.tape.free(("head", "grad_hidden"))
            tail = self.sheet.tail
            self.tape.make(("gradient", "tail"), "logits", self.sizes[id(tail)][tail.output])


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
