"""One optimizer step of a sheet, as events in the order in which the runtime does things.

Nothing here is a formula for a peak or for traffic: units run forward, then backward, gather and reduce when FSDP2
does. :func:`schedule` gives every event of every micro-batch. :func:`folded` is the span of the same events: it
simulates a few blocks and micro-batches, and repeats the span of those that are like the ones before them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from shardwise import techniques
from shardwise.planner.event_log import Folding, StepLog
from shardwise.planner.played import enough
from shardwise.planner.seconds.rates import Rates
from shardwise.planner.spans import Span, joined
from shardwise.planner.unit_passes import Pass, Passes, put_off
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet, read_behind
from shardwise.techniques.events import (
    GRADIENT,
    OUTPUT,
    AddTiedGradients,
    Begin,
    Event,
    ExpertsRun,
    GradientReady,
    HeadGradientReady,
    Mark,
    Send,
    TensorKey,
    UnitName,
)

BEHIND, BEHIND_GRADIENT = "behind", "behind's gradient"
"""Of a stage, what a block reads that predicts a further token, until it comes there; and its gradient."""
PERIODS = 4
"""How many periods of blocks are simulated: the first, the last, and two between, which must come to the same."""


def schedule(sheet: Sheet, plan: Plan, kind: Kind = "cpu", *, brief: bool = False) -> list[Event]:
    """The events of a step on the sheet's kind of rank, with the model's state, and with workspaces of kernels where
    ``kind`` is cuda. ``brief``: of as many micro-batches as its peak needs. Raises ValueError for another plan's."""
    sheet.check(plan)
    log, count = StepLog(), enough(plan) if brief else plan.batch.accumulation
    _begin(log, sheet, plan)
    if plan.layout.pp > 1:
        staged(log, sheet, replace(plan, batch=replace(plan.batch, accumulation=count)), kind, None)
    else:
        step = Step(log, sheet, plan, Passes.of(sheet, plan, kind))
        for index in range(count):
            step.forward(index)
            step.backward(index, last=index == count - 1)
    log.ended()
    log.add(Mark("end of backward"))
    _end(log, sheet, plan)
    return log.events


def staged(log: StepLog, sheet: Sheet, plan: Plan, kind: Kind, rates: Rates | None, known: Known | None = None) -> None:
    """Plays what a rank of a pipeline does, action by action. A message is alive until the next is sent, or the last
    has left. ``known``: passes of another step of the same sheet, which differs in its micro-batches."""
    steps = dict[int, Step]()
    for stage in sheet.rank_kind.stages:
        own = sheet.of_stage(stage)
        steps[stage.number] = Step(log, own, plan, Passes.of(own, plan, kind, rates), stage.number)
    order = techniques.orders(plan, sheet.trained)[sheet.rank_kind.coordinate("pp")]
    block = sheet.blocks[0]
    size = block.tensors[block.input].bytes(plan.batch.micro_batch_size, plan.row_tokens)
    closing = {action.stage: action.micro for action in order if action.kind in ("B", "I", "W")}
    leaving: list[TensorKey] = []
    run = _remembering(log, {} if known is None else known) if isinstance(log, Folding) else Step.run
    if sheet.rank_kind.coordinate("pp") > 0:
        for step in steps.values():
            step.weights.before_waiting(step.names)
    for action in order:
        micro, last = action.micro, closing.get(action.stage) == action.micro
        step = steps[action.stage]
        match action.kind:
            case "RECV_F" | "RECV_B":
                for key in step.passed(micro, forward=action.kind == "RECV_F", taken=True):
                    log.comes(key, size)
                    log.add(Send("recv", "pp", "activations", size, "receive"))
            case "SEND_F" | "SEND_B":
                for sent in leaving:
                    log.leaves(sent, size)
                leaving = step.passed(micro, forward=action.kind == "SEND_F", taken=False)
                for _ in leaving:
                    log.add(Send("send", "pp", "activations", size, "send"))
            case "F":
                _hand_over(log, steps, action, size)
                run(step, "F", micro)
                _turn(log, *step.turned(micro, forward=True), size)
            case "W":
                run(step, "W", micro, last=last)
            case _:
                _hand_over(log, steps, action, size)
                _turn(log, *step.turned(micro, forward=False), size)
                in_two = plan.pipeline.spec.splits_backward and sheet.trained[action.stage]
                run(step, "I" if in_two else "B", micro, last=last)
                if in_two and action.kind == "B":
                    run(step, "W", micro, last=last)
    for sent in leaving:
        log.leaves(sent, size)
    for step in steps.values():
        step.end()


Known = dict[object, tuple[Span, object]]
"""The spans of passes of stages, by what decides them, and where the weights are afterwards."""


def _remembering(log: Folding, known: Known) -> Callable[..., None]:
    """Plays a pass of a stage the first time that its weights are where they are, and adds the same span when they are
    there again: what comes of a pass follows from that alone."""

    def run(step: Step, kind: str, micro_batch: int, *, last: bool = False) -> None:
        key = step.number, kind, last, step.weights.kept()
        if key not in known:
            span = log.spanned(lambda: step.run(kind, micro_batch, last=last))
            known[key] = span, step.weights.kept()
        span, after = known[key]
        log.span.goes_on(span)
        step.weights.restore(after)

    return run


def _hand_over(log: StepLog, steps: Mapping[int, Step], action: techniques.Action, size: int) -> None:
    """Turn what the neighbouring stage has left on this rank into what this one takes."""
    forward = action.kind == "F"
    if before := steps.get(action.stage - 1 if forward else action.stage + 1):
        left = before.passed(action.micro, forward=forward, taken=False)
        _turn(log, left, steps[action.stage].passed(action.micro, forward=forward, taken=True), size)


def _turn(log: StepLog, left: Sequence[TensorKey], taken: Sequence[TensorKey], size: int) -> None:
    """Give tensors other keys."""
    for old, new in zip(left, taken, strict=True):
        if old in log.alive:
            log.free(old)
            log.make(new, "activations", size)


def _begin(log: StepLog, sheet: Sheet, plan: Plan) -> None:
    """Make what is there before the first forward pass and stays."""
    for (tier, category), size in techniques.held(sheet, plan).items():
        log.make(("state", tier, category), category, size, tier)
    # Token ids, labels and positions, 8 bytes each; of pairs, each token's answer; of cut rows, its document's length.
    ahead = 3 * (sheet.per_token - 1)  # of a further token its id, and two labels
    batch, each = plan.batch, 8 * (3 + plan.method.pairs + (plan.layout.cp > 1) + ahead)
    log.make("batch", "buffers", each * batch.micro_batch_size * plan.row_tokens * batch.accumulation)


def _end(log: StepLog, sheet: Sheet, plan: Plan) -> None:
    """Add what is sent once, after the last backward pass, and what is held for a while and copied at once when weights
    are updated."""
    for sent in sheet.step:
        log.add(Send(sent.kind, sent.axis, sent.category, sent.bytes))
    log.make("update", "buffers", techniques.on_whole_matrices(sheet, plan).held_bytes)
    log.free("update")
    for copy in techniques.copied_after(sheet, plan):
        log.add(copy)


class Step:
    """Plays forward and backward passes of a stage on a log, in whatever order they are asked for; of a whole model,
    the only one. ``number``: the stage's. What a stage takes from the one before it or after it, whoever asks for its
    passes makes first, and frees what it leaves for them: the output and its gradient of the unit before its blocks,
    or of its last unit."""

    def __init__(self, log: StepLog, sheet: Sheet, plan: Plan, passes: Passes, number: int = 0) -> None:
        self.log, self.number, self.embedding, self.head = log, number, sheet.rank_kind.embedding, sheet.rank_kind.head
        self.units = (sheet.embedding, *(sheet.blocks[kind] for kind in sheet.order), sheet.head)
        self.names: list[UnitName] = ["embedding", *range(len(sheet.order)), "head"]
        self.passes, self.plan, self.further = passes, plan, sheet.per_token - 1
        self.weights, self.between = techniques.between(log, sheet, plan, number)

    def run(self, kind: str, micro_batch: int, *, last: bool = False) -> None:
        """A pass by the kind of its action."""
        if kind == "F":
            self.forward(micro_batch)
            return
        back = {"I": self.input_gradients, "W": self.weight_gradients, "B": self.backward}[kind]
        back(micro_batch, last=last)

    def forward(self, micro_batch: int) -> None:
        self.log.add(Mark("start of forward"))
        for unit, name in enumerate(self.names):
            at = self.at(micro_batch, unit)
            self.log.add(Begin("forward", name, micro_batch, self.number))
            for one in self.between:
                one.before_forward(name, at)
            if name != "head" or self.head:
                self.play(Passes.forward, at)
            for one in reversed(self.between):
                one.after_forward(name, at)
        self.play(Passes.tables, self.at(micro_batch, 0))
        self.log.add(Mark("end of forward"))

    def backward(self, micro_batch: int, *, last: bool) -> None:
        """``last``: it is the last backward of this step."""
        self.weights.begin(last=last)
        self._backward(Passes.backward, micro_batch)
        if last and self.plan.layout.pp == 1:
            self.end()

    def input_gradients(self, micro_batch: int, *, last: bool) -> None:
        """The first half of a backward that comes in two. ``last``: its second half is the last of this step."""
        self.weights.begin(last=last, half=True)
        self._backward(Passes.input_gradients, micro_batch)

    def weight_gradients(self, micro_batch: int, *, last: bool) -> None:
        """The second half. ``last``: it is the last of this step."""
        self.weights.begin(last=last)
        for unit, name in reversed([*enumerate(self.names)]):
            if put_off(self.units[unit]):
                self.log.add(Begin("backward", name, micro_batch, self.number))
                self.play(Passes.weight_gradients, self.at(micro_batch, unit))
        for name in reversed(self.names):
            self.weights.after_weight_gradients(name)
        for one in reversed(self.between):
            one.end()

    def _backward(self, which: Pass, micro_batch: int) -> None:
        late = list[UnitName]()
        for number, name in reversed([*enumerate(self.names)]):
            unit = self.units[number]
            if unit.backward or not isinstance(name, int):
                self.log.add(Begin("backward", name, micro_batch, self.number))
                at = self.at(micro_batch, number)
                for one in self.between:
                    one.before_backward(name, at)
                if name != "head" or self.head:
                    self.play(which, at)
            if unit.gradient_out >= 0 and name != "embedding":
                self.weights.after_backward(name)
            else:
                late.append(name)
        # FSDP2 learns of the end of a backward from the gradient of the input; where there is none, when all is over.
        for name in reversed(late):
            self.weights.after_backward(name)
        self.log.add(Mark("gradient of the input"))
        for one in reversed(self.between):
            one.end()

    def end(self) -> None:
        """The last backward of the step is over, or those of all stages are."""
        for one in self.between:
            one.end_step()

    def at(self, micro_batch: int, unit: int, tensor: int | str = "") -> TensorKey:
        """The key of a tensor of a unit."""
        return TensorKey(self.number, micro_batch, unit, tensor)

    def passed(self, micro_batch: int, *, forward: bool, taken: bool) -> list[TensorKey]:
        """What is ``taken`` from the neighbouring stage that comes before in this pass, or is left for the one after.
        Where a block predicts a further token, what it reads, or the gradient of that, goes behind."""
        unit = 0 if taken is forward else len(self.units) - 2
        hidden = self.at(micro_batch, unit, OUTPUT if forward else GRADIENT)
        return [hidden, *self.behind(micro_batch, forward=forward)]

    def behind(self, micro_batch: int, *, forward: bool) -> list[TensorKey]:
        return [self.at(micro_batch, 0, BEHIND if forward else BEHIND_GRADIENT)] * self.further

    def turned(self, micro_batch: int, *, forward: bool) -> tuple[list[TensorKey], list[TensorKey]]:
        """Return keys of what goes behind, and what these are called from here on: the first unit makes it and frees
        its gradient; in the last stage the gradient takes its place."""
        read, gradient = (self.behind(micro_batch, forward=way) for way in (True, False))
        if read and self.embedding:
            made = [self.at(micro_batch, 0, read_behind(self.units[0]))]
            return (made, read) if forward else (gradient, made)
        return (read, gradient) if self.head and not forward else ([], [])

    def play(self, which: Pass, at: TensorKey) -> None:
        """A pass of a unit, with what its weights add."""
        for piece in self.log.pieces(which, self.passes, self.units[at.unit]):
            if isinstance(piece, Span):
                self.log.play(piece, at)
            elif isinstance(piece, GradientReady):
                self.weights.gradient(piece.weight, self.names[at.unit])
            elif isinstance(piece, HeadGradientReady):
                self.weights.head_gradient()
            elif isinstance(piece, AddTiedGradients):
                self.weights.add_tied()
            elif isinstance(piece, ExpertsRun):
                self.weights.experts(piece, self.names[at.unit])
            else:
                self.log.play(piece, at)


def folded(sheet: Sheet, plan: Plan, kind: Kind = "cpu") -> Span:
    """The span of :func:`schedule`."""
    return around(sheet, plan, micro_batches(sheet, plan, Passes.of(sheet, plan, kind)))


def around(sheet: Sheet, plan: Plan, passes: Span) -> Span:
    """The span of a step whose micro-batches come to ``passes``. Kinds of rank that differ only in their slices share
    them."""
    begin, end = Folding(), Folding()
    _begin(begin, sheet, plan)
    _end(end, sheet, plan)
    return joined([*begin.taken().values(), passes, *end.taken().values()])


def micro_batches(sheet: Sheet, plan: Plan, passes: Passes) -> Span:
    """The span of all micro-batches of a step. Raises ValueError for the sheet of another plan."""
    sheet.check(plan)
    if plan.layout.pp > 1:
        return _piped(sheet, plan, passes)
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


def _piped(sheet: Sheet, plan: Plan, passes: Passes) -> Span:
    """The span of all micro-batches of a pipeline. Of many a few rounds are played, each of as many as there are ranks;
    what is left out does what a round does, and holds no more."""
    ranks, m, few = plan.layout.pp, plan.batch.accumulation, enough(plan)
    if few == m:
        return _played_through(sheet, plan, passes, m, {})
    known: Known = {}
    span, before = (_played_through(sheet, plan, passes, count, known) for count in (few, few - ranks))
    rounds = (m - few) // ranks
    span.flops += rounds * (span.flops - before.flops)
    span.host_ns += rounds * (span.host_ns - before.host_ns)
    span.busy_ns = {kind: ns + rounds * (ns - before.busy_ns[kind]) for kind, ns in span.busy_ns.items()}
    span.sent = {send: n + rounds * (n - before.sent.get(send, 0)) for send, n in span.sent.items()}
    span.copied = {copy: n + rounds * (n - before.copied.get(copy, 0)) for copy, n in span.copied.items()}
    return span


def _played_through(sheet: Sheet, plan: Plan, passes: Passes, micro_batches: int, known: Known) -> Span:
    log = Folding()
    log.through = True
    fewer = replace(plan, batch=replace(plan.batch, accumulation=micro_batches))
    staged(log, sheet, fewer, passes.kind, passes.rates, known)
    return joined(log.taken().values())


def _simulated(sheet: Sheet, plan: Plan, passes: Passes, blocks: tuple[int, int, int]) -> Span | None:
    """The span of all micro-batches, of which three are simulated at most. ``blocks``: from which block on they repeat,
    after how many (a period), and how many periods are simulated; the second stands for those left out. None where the
    second and the third do not come to the same."""
    start, period, keep = blocks
    count = (len(sheet.order) - start) // period
    order = sheet.order[: start + keep * period] + sheet.order[start + count * period :]
    log, m = Folding(), plan.batch.accumulation
    spans: list[Span] = []
    step = Step(log, replace(sheet, order=order), plan, passes)
    second = range(start + period, start + 2 * period)
    for index in range(played := enough(plan)):
        step.forward(index)
        step.backward(index, last=index == played - 1)
        found = log.taken()
        if keep < count and any(
            found.get((way, i)) != found.get((way, i + period))
            for way in ("forward", "backward", "leaving")
            for i in second
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
        way = key[0] if isinstance(key, tuple) else ""
        own = [i for i in (second if way == "forward" else reversed(second)) if (way, i) in found]
        if times and own and key == (way, own[-1]):
            span.goes_on(joined(found[way, i] for i in own).times(times))
    return span


def _period(sheet: Sheet, plan: Plan) -> tuple[int, int]:
    """Return the block from which on blocks repeat, and after how many: by their kinds, and by their buckets."""
    order = sheet.order
    for period in range(1, len(order) // (PERIODS + 1) + 1):
        start = len(order) - period
        while start > 0 and order[start - 1] == order[start - 1 + period]:
            start -= 1
        if len(order) - start > PERIODS * period:
            break
    else:
        return 0, len(order)
    return start, techniques.period(sheet, plan, order[-period:])
