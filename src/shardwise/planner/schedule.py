"""One optimizer step of a sheet, told in the order in which the runtime does things.

Nothing here is a formula for a peak or for traffic: units run forward, then backward, gather and reduce when FSDP2
does. :func:`schedule` gives every event of every micro-batch. :func:`folded` is the span of the same events: it tells
a few blocks and micro-batches, and of a run that goes on as it has gone on it repeats the span.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import lcm

from shardwise.planner.events import Event, Mark, Send, WeightsCall
from shardwise.planner.passes import Pass, Passes
from shardwise.planner.spans import Span, joined
from shardwise.planner.tape import Folding, Tape
from shardwise.planner.weights import Replicated, Sharded, Weights
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet, Unit
from shardwise.techniques import optim
from shardwise.techniques.shard import gradient_bytes
from shardwise.techniques.shard.replicas import blocks_of_bucket

PERIODS = 4
"""How many periods of blocks are told: the first and the last, which differ by what is before and after them, and two
between, which must come to the same."""


def schedule(sheet: Sheet, plan: Plan, kind: Kind = "cpu") -> list[Event]:
    """The events of one step at the sheet's place, the state of the model included, from before the first forward; with
    the workspaces of kernels where ``kind`` is cuda. Raises ValueError for the sheet of another plan."""
    sheet.check(plan)
    tape = Tape()
    _begin(tape, sheet, plan)
    step = _Step(tape, sheet, plan, kind)
    for index in range(plan.batch.accumulation):
        step.micro_batch(last=index == plan.batch.accumulation - 1)
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


class _Step:
    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan, kind: Kind) -> None:
        self.tape, self.sheet = tape, sheet
        self.blocks = [sheet.blocks[kind] for kind in sheet.order]
        self.idle = {i for i, block in enumerate(self.blocks) if not block.backward}
        self.weights: Weights = (Sharded if plan.sharded else Replicated)(tape, sheet, plan)
        self.passes = Passes.of(sheet, plan, kind)

    def micro_batch(self, *, last: bool) -> None:
        weights, stem, tail = self.weights, self.sheet.stem, self.sheet.tail
        weights.begin(last=last)
        self.tape.add(Mark("start of forward"))
        for name, unit in (("stem", stem), *enumerate(self.blocks), ("tail", tail)):
            self.tape.add(Mark(("forward", name)))
            weights.before_forward(name)
            self.play(Passes.forward, unit, name)
            weights.after_forward(name)
        self.play(Passes.tables, stem, "stem")
        self.tape.add(Mark("end of forward"))
        weights.before_backward("tail")
        self.play(Passes.loss_backward, tail, "tail")
        if tail.backward:
            self.play(Passes.backward, tail, "tail")
        running = [i for i in range(len(self.blocks) - 1, -1, -1) if i not in self.idle]
        # FSDP2 hears of the end of a backward from the gradient of the input; where there is none, when all is over.
        late: list[Hashable] = [i for i in running if self.blocks[i].gradient_out < 0]
        if tail.gradient_out < 0:
            late.append("tail")
        else:
            weights.after_backward("tail")
        for i in running:
            self.tape.add(Mark(("backward", i)))
            weights.before_backward(i)
            self.play(Passes.backward, self.blocks[i], i)
            if i not in late:
                weights.after_backward(i)
        self.tape.add(Mark(("backward", "stem")))
        self.play(Passes.backward, stem, "stem")
        for name in ("stem", *sorted(self.idle), *late):
            weights.after_backward(name)
        weights.end()

    def play(self, which: Pass, unit: Unit, name: Hashable) -> None:
        """A pass of a unit, with what its weights add."""
        place = name + 1 if isinstance(name, int) else 0 if name == "stem" else len(self.blocks) + 1
        for piece in self.tape.pieces(which, self.passes, unit):
            if isinstance(piece, WeightsCall):
                self.call(piece, name)
            else:
                self.tape.play(piece, place)

    def call(self, call: WeightsCall, name: Hashable) -> None:
        weights = self.weights
        if call.weight is None:
            weights.head_gradient()
        elif call.method == "add_tied":
            weights.add_tied()
        else:
            weights.gradient(call.weight, name)


def folded(sheet: Sheet, plan: Plan, kind: Kind = "cpu") -> Span:
    """The span of :func:`schedule`."""
    return around(sheet, plan, micro_batches(sheet, plan, kind))


def around(sheet: Sheet, plan: Plan, passes: Span) -> Span:
    """The span of a step whose micro-batches come to ``passes``. Where two places differ in their slices alone, they
    share those."""
    begin, end = Folding(), Folding()
    _begin(begin, sheet, plan)
    _end(end, sheet)
    return joined([*begin.taken().values(), passes, *end.taken().values()])


def micro_batches(sheet: Sheet, plan: Plan, kind: Kind) -> Span:
    """The span of all micro-batches of a step. Raises ValueError for the sheet of another plan."""
    sheet.check(plan)
    start, period = _period(sheet, plan)
    count = (len(sheet.order) - start) // period
    keep = PERIODS
    while keep < count:
        if span := _told(sheet, plan, kind, (start, period, keep)):
            return span
        keep *= 2
    span = _told(sheet, plan, kind, (start, period, count))
    assert span
    return span


def _told(sheet: Sheet, plan: Plan, kind: Kind, told: tuple[int, int, int]) -> Span | None:
    """The span of micro-batches of which so many periods of so many blocks are told, from the block ``start`` on, the
    second standing for those left out too. None where the second and the third are not alike."""
    start, period, keep = told
    count = (len(sheet.order) - start) // period
    order = sheet.order[: start + keep * period] + sheet.order[start + count * period :]
    tape, m = Folding(), plan.batch.accumulation
    spans: list[Span] = []
    step = _Step(tape, replace(sheet, order=order), plan, kind)
    second = range(start + period, start + 2 * period)
    for index in range(min(m, 3)):
        step.micro_batch(last=index == min(m, 3) - 1)
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
    if plan.sharded or plan.layout.dp == 1:
        return start, period
    sizes = gradient_bytes(replace(sheet, order=order[-period:]), plan)
    block = sum(size for name, size in sizes.items() if name.startswith("layers.")) // period
    return start, lcm(period, blocks_of_bucket(block, plan.shard.bucket_bytes))
