"""One optimizer step of a sheet, as events in the order in which the runtime does things.

Nothing here is a formula for a peak or for traffic: units run forward, then backward, gather and reduce when FSDP2
does. :func:`schedule` gives every event of every micro-batch. :func:`folded` is the span of the same events: it
simulates a few blocks and micro-batches, and repeats the span of those that are like the ones before them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from math import lcm

from shardwise.planner.events import (
    AddTiedGradients,
    Begin,
    Copy,
    Event,
    ExpertsRun,
    GradientReady,
    HeadGradientReady,
    Mark,
    Send,
    TensorKey,
    UnitName,
)
from shardwise.planner.leaving import Fetching, Inputs, in_flight
from shardwise.planner.passes import GRADIENT, OUTPUT, Pass, Passes, put_off
from shardwise.planner.replicated import Replicated
from shardwise.planner.seconds.rates import Rates
from shardwise.planner.spans import Span, joined
from shardwise.planner.tape import Apart, Folding, Tape
from shardwise.planner.weights import Sharded, Weights, add_tied
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques import offload, optim, pp
from shardwise.techniques.offload.updated import elsewhere, returned_late
from shardwise.techniques.pp.actions import Action
from shardwise.techniques.shard import gradient_bytes
from shardwise.techniques.shard.replicas import blocks_of_bucket

PERIODS = 4
"""How many periods of blocks are simulated: the first, the last, and two between, which must come to the same."""


def schedule(sheet: Sheet, plan: Plan, kind: Kind = "cpu") -> list[Event]:
    """The events of one step at the sheet's place, the model's state included; with the workspaces of kernels where
    ``kind`` is cuda. Raises ValueError for the sheet of another plan."""
    sheet.check(plan)
    tape = Tape()
    _begin(tape, sheet, plan)
    if plan.layout.pp > 1:
        staged(tape, sheet, plan, kind, None)
    else:
        step = Step(tape, sheet, plan, Passes.of(sheet, plan, kind))
        for index in range(plan.batch.accumulation):
            step.forward(index)
            step.backward(index, last=index == plan.batch.accumulation - 1)
    tape.ended()
    tape.add(Mark("end of backward"))
    _end(tape, sheet, plan)
    return tape.events


def staged(tape: Tape, sheet: Sheet, plan: Plan, kind: Kind, rates: Rates | None, known: Known | None = None) -> None:
    """Plays what a rank of a pipeline does, action by action. A message is alive until the next is sent, or the last
    has left. ``known``: passes of another step of the same sheet, which differs in its micro-batches."""
    steps = dict[int, Step]()
    for stage in sheet.place.stages:
        own = sheet.of_stage(stage)
        steps[stage.number] = Step(tape, own, plan, Passes.of(own, plan, kind, rates), stage.number)
    order = pp.orders(plan, sheet.trained)[sheet.place.coordinate("pp")]
    block = sheet.blocks[0]
    size = block.tensors[block.input].bytes(plan.batch.micro_batch_size, plan.row_tokens)
    closing = {action.stage: action.micro for action in order if action.kind in ("B", "I", "W")}
    halved = plan.pipeline.spec.splits_backward
    leaving: list[TensorKey] = []
    run = _remembering(tape, {} if known is None else known) if isinstance(tape, Folding) else Step.run
    if sheet.place.coordinate("pp") > 0:
        for step in steps.values():
            step.weights.before_waiting(step.names)
    for action in order:
        micro, last = action.micro, closing.get(action.stage) == action.micro
        step = steps[action.stage]
        inside, outside = step.at(micro, 0), step.at(micro, len(step.units) - 2)
        match action.kind:
            case "RECV_F" | "RECV_B":
                key = inside._replace(tensor=OUTPUT) if action.kind == "RECV_F" else outside._replace(tensor=GRADIENT)
                tape.comes(key, size)
                tape.add(Send("recv", "pp", "activations", size, "receive"))
            case "SEND_F" | "SEND_B":
                key = outside._replace(tensor=OUTPUT) if action.kind == "SEND_F" else inside._replace(tensor=GRADIENT)
                for sent in leaving:
                    tape.leaves(sent, size)
                leaving = [key]
                tape.add(Send("send", "pp", "activations", size, "send"))
            case "F":
                _hand_over(tape, steps, action, size)
                run(step, "F", micro)
            case "W":
                run(step, "W", micro, last=last)
            case _:
                _hand_over(tape, steps, action, size)
                in_two = halved and sheet.trained[action.stage]
                run(step, "I" if in_two else "B", micro, last=last)
                if in_two and action.kind == "B":
                    run(step, "W", micro, last=last)
    for sent in leaving:
        tape.leaves(sent, size)
    for step in steps.values():
        step.weights.leaving.rest()


Known = dict[object, tuple[Span, object]]
"""The spans of passes of stages, by what decides them, and where the weights are afterwards."""


def _remembering(tape: Folding, known: Known) -> Callable[..., None]:
    """Plays a pass of a stage the first time that its weights are where they are, and adds the same span when they are
    there again: what comes of a pass follows from that alone."""

    def run(step: Step, kind: str, micro_batch: int, *, last: bool = False) -> None:
        key = step.number, kind, last, step.weights.kept()
        if key not in known:
            span = tape.spanned(lambda: step.run(kind, micro_batch, last=last))
            known[key] = span, step.weights.kept()
        span, after = known[key]
        tape.span.goes_on(span)
        step.weights.restore(after)

    return run


def _hand_over(tape: Tape, steps: Mapping[int, Step], action: Action, size: int) -> None:
    """Turn what the neighbouring stage has left on this rank into what this one takes."""
    forward = action.kind == "F"
    before = steps.get(action.stage - 1 if forward else action.stage + 1)
    if before is None:
        return
    step, micro = steps[action.stage], action.micro
    if forward:
        left, taken = before.at(micro, len(before.units) - 2, OUTPUT), step.at(micro, 0, OUTPUT)
    else:
        left, taken = before.at(micro, 0, GRADIENT), step.at(micro, len(step.units) - 2, GRADIENT)
    if left in tape.alive:
        tape.free(left)
        tape.make(taken, "activations", size)


def _begin(tape: Tape, sheet: Sheet, plan: Plan) -> None:
    """Make what is there before the first forward pass and stays."""
    state, moved = (optim.state_bytes(each, plan) for each in (sheet, elsewhere(sheet)))
    for tier, held in offload.tiers(sheet, plan, moved["moments"], in_flight(sheet, plan)).items():
        for category, size in held.items():
            tape.make((tier, category), category, size, tier)
    for category, size in offload.on_device(state, moved["moments"], sheet, plan).items():
        tape.make(("state", category), category, size)
    # Token ids, labels and positions, 8 bytes each; of pairs, each token's answer; of cut rows, its document's length.
    ahead = 3 * (sheet.per_token - 1)  # of a further token its id, and two labels
    batch, each = plan.batch, 8 * (3 + plan.method.pairs + (plan.layout.cp > 1) + ahead)
    tape.make("batch", "buffers", each * batch.micro_batch_size * plan.row_tokens * batch.accumulation)


def _end(tape: Tape, sheet: Sheet, plan: Plan) -> None:
    """Send what is sent once, after the last backward pass, and copy what the host has updated that comes at once."""
    for sent in sheet.step:
        tape.add(Send(sent.kind, sent.axis, sent.category, sent.bytes))
    if size := returned_late(sheet, plan):
        tape.add(Copy("host", "device", size, "home"))


class Step:
    """Plays forward and backward passes of a stage on a tape, in whatever order they are asked for; of a whole model,
    the only one. ``number``: the stage's. What a stage takes from the one before it or after it, whoever asks for its
    passes makes first, and frees what it leaves for them: the output and its gradient of the unit before its blocks,
    or of its last unit."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan, passes: Passes, number: int = 0) -> None:
        self.tape, self.number, self.head = tape, number, sheet.place.head
        self.units = (sheet.stem, *(sheet.blocks[kind] for kind in sheet.order), sheet.tail)
        self.names: list[UnitName] = ["stem", *range(len(sheet.order)), "tail"]
        own = tape if plan.layout.pp == 1 else Apart(tape, number)
        self.weights: Weights = (Sharded if plan.sharded else Replicated)(own, sheet, plan)
        self.passes = passes
        self.inputs, self.fetching = Inputs(tape, self.units, plan, number), Fetching(own, sheet, plan)

    def run(self, kind: str, micro_batch: int, *, last: bool = False) -> None:
        """A pass by the kind of its action."""
        if kind == "F":
            self.forward(micro_batch)
        elif kind == "I":
            self.input_gradients(micro_batch, last=last)
        elif kind == "W":
            self.weight_gradients(micro_batch, last=last)
        else:
            self.backward(micro_batch, last=last)

    def forward(self, micro_batch: int) -> None:
        self.tape.add(Mark("start of forward"))
        for unit, name in enumerate(self.names):
            self.tape.add(Begin("forward", name, micro_batch, self.number))
            self.fetching.before_forward(name, micro_batch)
            self.weights.before_forward(name)
            self.inputs.begins(self.at(micro_batch, unit))
            if name != "tail" or self.head:
                self.play(Passes.forward, self.at(micro_batch, unit))
            self.inputs.ends(self.at(micro_batch, unit))
            self.fetching.after_forward(name)
            self.weights.after_forward(name)
        self.play(Passes.tables, self.at(micro_batch, 0))
        self.tape.add(Mark("end of forward"))

    def backward(self, micro_batch: int, *, last: bool) -> None:
        """``last``: it is the last backward of this step."""
        self.weights.begin(last=last)
        self._backward(Passes.backward, micro_batch)
        if last and self.weights.plan.layout.pp == 1:
            self.weights.leaving.rest()

    def input_gradients(self, micro_batch: int, *, last: bool) -> None:
        """The first half of a backward that comes in two. ``last``: its second half is the last of this step."""
        self.weights.begin(last=last, half=True)
        self._backward(Passes.input_gradients, micro_batch)

    def weight_gradients(self, micro_batch: int, *, last: bool) -> None:
        """The second half. ``last``: it is the last of this step."""
        self.weights.begin(last=last)
        for unit, name in reversed([*enumerate(self.names)]):
            if put_off(self.units[unit]):
                self.tape.add(Begin("backward", name, micro_batch, self.number))
                self.play(Passes.weight_gradients, self.at(micro_batch, unit))
        for name in reversed(self.names):
            self.weights.after_weight_gradients(name)
        self.weights.end()

    def _backward(self, which: Pass, micro_batch: int) -> None:
        late = list[UnitName]()
        for number, name in reversed([*enumerate(self.names)]):
            unit = self.units[number]
            if unit.backward or not isinstance(name, int):
                self.tape.add(Begin("backward", name, micro_batch, self.number))
                self.fetching.before_backward(name)
                if name != "stem":
                    self.weights.before_backward(name)
                self.inputs.again(self.at(micro_batch, number))
                if name != "tail" or self.head:
                    self.play(which, self.at(micro_batch, number))
            if unit.gradient_out >= 0 and name != "stem":
                self.weights.after_backward(name)
            else:
                late.append(name)
        # FSDP2 learns of the end of a backward from the gradient of the input; where there is none, when all is over.
        for name in reversed(late):
            self.weights.after_backward(name)
        self.tape.add(Mark("gradient of the input"))
        self.weights.end()
        self.fetching.rest()

    def at(self, micro_batch: int, unit: int, tensor: int | str = "") -> TensorKey:
        """The key of a tensor of a unit."""
        return TensorKey(self.number, micro_batch, unit, tensor)

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
                add_tied(self.weights)
            elif isinstance(piece, ExpertsRun):
                self.weights.experts(piece, self.names[at.unit])
            else:
                self.tape.play(piece, at)


def folded(sheet: Sheet, plan: Plan, kind: Kind = "cpu") -> Span:
    """The span of :func:`schedule`."""
    return around(sheet, plan, micro_batches(sheet, plan, Passes.of(sheet, plan, kind)))


def around(sheet: Sheet, plan: Plan, passes: Span) -> Span:
    """The span of a step whose micro-batches come to ``passes``. Where two places differ in their slices alone, they
    share those."""
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
    ranks, m = plan.layout.pp, plan.batch.accumulation
    few = 2 * ranks * plan.pipeline.stages_per_rank
    if plan.pipeline.spec.alive is None or m <= few + ranks or m % ranks:
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
    tape = Folding()
    tape.through = True
    fewer = replace(plan, batch=replace(plan.batch, accumulation=micro_batches))
    staged(tape, sheet, fewer, passes.kind, passes.rates, known)
    return joined(tape.taken().values())


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
    if plan.sharded or plan.layout.size("loss") == 1:
        return start, period
    sizes = gradient_bytes(replace(sheet, order=order[-period:]), plan)
    block = sum(size for name, size in sizes.items() if name.startswith("layers.")) // period
    return start, lcm(period, blocks_of_bucket(block, plan.shard.bucket_bytes))
