"""One optimizer step of a sheet, as events in the order in which the runtime does things.

Nothing here is a formula for a peak or for traffic: units run forward, then backward, gather and reduce when FSDP2
does. :func:`schedule` gives every event of every micro-batch. :func:`folded` is the span of the same events: it
simulates a few blocks and micro-batches, and repeats the span of those that are like the ones before them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import lcm

from shardwise.planner.events import (
    AddTiedGradients,
    Begin,
    Event,
    GradientReady,
    HeadGradientReady,
    Mark,
    Send,
    TensorKey,
    UnitName,
)
from shardwise.planner.passes import Pass, Passes
from shardwise.planner.seconds.rates import Rates
from shardwise.planner.spans import Span, joined
from shardwise.planner.tape import Folding, Tape
from shardwise.planner.weights import Replicated, Sharded, Weights
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques import optim
from shardwise.techniques.shard import gradient_bytes
from shardwise.techniques.shard.replicas import blocks_of_bucket

PERIODS = 4
"""How many periods of blocks are simulated: the first and the last, which differ by what is before and after them, and
two between, which must come to the same."""


def schedule(sheet: Sheet, plan: Plan, kind: Kind = "cpu", rates: Rates | None = None) -> list[Event]:
    """The events of one step at the sheet's place, the state of the model included, from before the first forward; with
    the workspaces of kernels where ``kind`` is cuda, and durations where there are ``rates``. Raises ValueError for the
    sheet of another plan."""
    sheet.check(plan)
    tape = Tape()
    _begin(tape, sheet, plan)
    step = Step(tape, sheet, plan, Passes.of(sheet, plan, kind, rates))
    for index in range(plan.batch.accumulation):
        step.forward(index)
        step.backward(index, last=index == plan.batch.accumulation - 1)
    tape.ended()
    tape.add(Mark("end of backward"))
    _end(tape, sheet)
    return tape.events


def _begin(tape: Tape, sheet: Sheet, plan: Plan) -> None:
    """What is there before the first forward pass and stays."""
    for category, size in optim.state_bytes(sheet, plan).items():
        tape.make(("state", category), category, size)
    # Token ids, labels and positions of the whole step, 8 bytes each; of pairs, the answer that each token is of.
    batch, each = plan.batch, 8 * (4 if plan.loss == "dpo" else 3)
    tape.make("batch", "buffers", each * batch.micro_batch_size * batch.seq_len * batch.accumulation)


def _end(tape: Tape, sheet: Sheet) -> None:
    """What is sent once, after the last backward pass."""
    for sent in sheet.step:
        tape.add(Send(sent.kind, sent.axis, sent.category, sent.bytes))


class Step:
    """Plays forward and backward passes on a tape, in whatever order they are asked for. ``stages``: the units of each
    pipeline stage of this rank, by number: 0 is the stem, then come the blocks, then the tail. What a stage takes from
    the one before it or after it, whoever asks for its passes makes first, and frees what it leaves for them."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan, passes: Passes, stages: Sequence[range] = ()) -> None:
        self.tape = tape
        self.units = (sheet.stem, *(sheet.blocks[kind] for kind in sheet.order), sheet.tail)
        self.names: list[UnitName] = ["stem", *range(len(sheet.order)), "tail"]
        self.stages = stages or (range(len(self.units)),)
        self.weights: Weights = (Sharded if plan.sharded else Replicated)(tape, sheet, plan)
        self.passes = passes

    def forward(self, micro_batch: int, stage: int = 0) -> None:
        self.tape.add(Mark("start of forward"))
        for number in self.stages[stage]:
            name = self.names[number]
            self.tape.add(Begin("forward", name, micro_batch, stage))
            self.weights.before_forward(name)
            self.play(Passes.forward, TensorKey(stage, micro_batch, number, ""))
            self.weights.after_forward(name)
        if 0 in self.stages[stage]:
            self.play(Passes.tables, TensorKey(stage, micro_batch, 0, ""))
        self.tape.add(Mark("end of forward"))

    def backward(self, micro_batch: int, stage: int = 0, *, last: bool) -> None:
        """``last``: it is the last backward of this step."""
        weights, late = self.weights, list[UnitName]()
        weights.begin(last=last)
        for number in reversed(self.stages[stage]):
            name, unit = self.names[number], self.units[number]
            if unit.backward or not isinstance(name, int):
                self.tape.add(Begin("backward", name, micro_batch, stage))
                if name != "stem":
                    weights.before_backward(name)
                self.play(Passes.backward, TensorKey(stage, micro_batch, number, ""))
            if unit.gradient_out >= 0 and name != "stem":
                weights.after_backward(name)
            else:
                late.append(name)
        # FSDP2 learns of the end of a backward from the gradient of the input; where there is none, when all is over.
        for name in reversed(late):
            weights.after_backward(name)
        weights.end()

    def play(self, which: Pass, at: TensorKey) -> None:
        """A pass of a unit, with what its weights add."""
        for piece in self.tape.pieces(which, self.passes, self.units[at.unit]):
            if isinstance(piece, Span):
                self.tape.play(piece, at)
            elif isinstance(piece, GradientReady):
                self.weights.gradient(piece.weight, self.names[at.unit])
            elif isinstance(piece, HeadGradientReady):
                self.weights.head_gradient()
            elif isinstance(piece, AddTiedGradients):
                self.weights.add_tied()
            else:
                self.tape.play(piece, at)


def folded(sheet: Sheet, plan: Plan, kind: Kind = "cpu", rates: Rates | None = None) -> Span:
    """The span of :func:`schedule`."""
    return around(sheet, plan, micro_batches(sheet, plan, Passes.of(sheet, plan, kind, rates)))


def around(sheet: Sheet, plan: Plan, passes: Span) -> Span:
    """The span of a step whose micro-batches come to ``passes``. Where two places differ in their slices alone, they
    share those."""
    begin, end = Folding(), Folding()
    _begin(begin, sheet, plan)
    _end(end, sheet)
    return joined([*begin.taken().values(), passes, *end.taken().values()])


def micro_batches(sheet: Sheet, plan: Plan, passes: Passes) -> Span:
    """The span of all micro-batches of a step. Raises ValueError for the sheet of another plan."""
    sheet.check(plan)
    start, period = _period(sheet, plan)
    count = (len(sheet.order) - start) // period
    keep = PERIODS
    while keep < count:
        if span := _simulated(sheet, plan, passes, (start, period, keep)):
            return span
        keep *= 2
    span = _simulated(sheet, plan, passes, (start, period, count))
    assert span
    return span


def _simulated(sheet: Sheet, plan: Plan, passes: Passes, blocks: tuple[int, int, int]) -> Span | None:
    """The span of all micro-batches, of which three are simulated at most. ``blocks``: from which block on they repeat,
    after how many (a period), and how many periods are simulated; the second stands for those left out. None where the
    second and the third do not come to the same."""
    start, period, keep = blocks
    count = (len(sheet.order) - start) // period
    order = sheet.order[: start + keep * period] + sheet.order[start + count * period :]
    tape, m = Folding(), plan.batch.accumulation
    spans: list[Span] = []
    step = Step(tape, replace(sheet, order=order), plan, passes)
    second = range(start + period, start + 2 * period)
    for index in range(min(m, 3)):
        step.forward(index)
        step.backward(index, last=index == min(m, 3) - 1)
        found = tape.taken()
        if keep < count and any(
            found.get((way, i)) != found.get((way, i + period)) for way in ("forward", "backward") for i in second
        ):
            return None
        spans.append(_repeated(found, second, count - keep))
        if index == 1:
            spans.append(spans[-1].times(max(0, m - 3)))
    return joined(spans)


def _repeated(found: dict[Hashable, Span], second: range, times: int) -> Span:
    """The span of a micro-batch, that of the blocks of ``second`` so many times more."""
    span = Span()
    for key, each in found.items():
        span.goes_on(each)
        if times and key == ("forward", second[-1]):
            span.goes_on(joined(found["forward", i] for i in second).times(times))
        elif times and key == ("backward", second[0]):
            span.goes_on(joined(found["backward", i] for i in reversed(second)).times(times))
    return span


def _period(sheet: Sheet, plan: Plan) -> tuple[int, int]:
    """From which block on the blocks repeat, and after how many: by their kinds, and by the buckets that they fill."""
    order = sheet.order
    for period in range(1, len(order) // (PERIODS + 1) + 1):
        start = len(order) - period
        while start > 0 and order[start - 1] == order[start - 1 + period]:
            start -= 1
        if len(order) - start > PERIODS * period:
            break
    else:
        return 0, len(order)
    if plan.sharded or plan.layout.size("loss") == 1:
        return start, period
    sizes = gradient_bytes(replace(sheet, order=order[-period:]), plan)
    block = sum(size for name, size in sizes.items() if name.startswith("layers.")) // period
    return start, lcm(period, blocks_of_bucket(block, plan.shard.bucket_bytes))
