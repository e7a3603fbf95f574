"""The weights and their gradients at each moment of a step: whole on every rank, or gathered when needed.

:class:`Sharded` follows FSDP2: a group is gathered into one buffer and copied out of it; in forward the buffer lives
until the next group is copied out, in backward the next group is gathered while one computes; after a group's backward
its gradients are copied into one buffer, scattered, and the buffer lives until the next group's. Its streams are
``gather``, ``reduce`` and, of a hybrid plan, ``all_reduce``; what waits for what is as in
torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Set
from math import prod
from typing import Any

from shardwise.models.roles import is_expert
from shardwise.planner.events import Copy, ExpertsRun, Send
from shardwise.planner.leaving import Leaving
from shardwise.planner.tape import Tape
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet, Tensor
from shardwise.techniques.shard.unit_bytes import ExpertsOf, groups

HEAD = "gradient of the tied output layer"


class Weights:
    """The calls that planner/schedule.py makes: a backward of a micro-batch begins and ends, the forward and backward
    of each of its units do, a gradient is ready. What a strategy does not override does nothing."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        self.tape, self.plan, self.tied = tape, plan, sheet.tied
        ends = sheet.stem.weights[:1] if sheet.tied else sheet.tail.weights[-1:]
        self.output = ends[0] if ends else None
        self.last, self.half = True, False
        self.leaving = Leaving(tape, sheet, plan)

    def before_waiting(self, names: Iterable[Hashable]) -> None:
        """Gather what stays whole for a step before its first forward, where that comes from another rank."""
        for name in names if self.plan.sharded and self.plan.shard.strategy != "zero3" else ():
            self.before_forward(name)
            self.experts(ExpertsRun("forward", begins=True), name)
            self.after_forward("tail")

    def begin(self, *, last: bool, half: bool = False) -> None:
        """``half``: the first half of a backward begins, whose second half is the step's ``last``."""
        self.last, self.half = last, half

    def before_forward(self, name: Hashable) -> None: ...
    def after_forward(self, name: Hashable) -> None: ...
    def before_backward(self, name: Hashable) -> None: ...
    def after_backward(self, name: Hashable) -> None: ...
    def after_weight_gradients(self, name: Hashable) -> None: ...
    def end(self) -> None: ...
    def gradient(self, weight: Tensor, name: Hashable) -> None: ...
    def head_gradient(self) -> None: ...
    def experts(self, run: ExpertsRun, name: Hashable) -> None: ...

    def kept(self) -> Hashable:
        """Return where all is, for :meth:`restore`. It decides what a pass does: sizes too, of what is scattered."""
        return frozenset(self.tape.alive.items())

    def restore(self, kept: Any) -> None:
        self.tape.alive = dict(kept)

    def copy(self, size: int, stream: str = "compute") -> None:
        """``size`` bytes are copied into a flat buffer, or out of one."""
        self.tape.add(Copy("device", "device", size, stream))


def add_tied(weights: Weights) -> None:
    """Autograd adds the two gradients of a tied weight in place, but those of a DTensor into a third."""
    _, size, _ = weights.tape.alive[HEAD]
    if weights.plan.layout.tp > 1:
        weights.tape.make("sum of tied gradients", "gradients", size)
        weights.tape.free("sum of tied gradients")
    weights.tape.free(HEAD)


class Unreduced:
    """Whole gradients of one group: those that autograd has made, and those that are kept in the dtype of reduction."""

    def __init__(self, tape: Tape, plan: Plan, group: Hashable) -> None:
        self.tape, self.plan, self.group = tape, plan, group
        self.made: dict[str, int] = {}  # how many numbers each has
        self.kept: dict[str, int] = {}  # in which tensor it is

    @property
    def names(self) -> Set[str]:
        return self.made.keys() | self.kept.keys()

    def add(self, weight: Tensor) -> None:
        """Autograd takes over the first gradient as it is, and adds the next."""
        if weight.name not in self.made:
            count = prod(map(int, weight.shape))
            size = count * BYTES[weight.used_as]
            self.tape.make(("unsharded", self.group, weight.name), "accumulated gradients", size)
            self.made[weight.name] = count

    def keep(self) -> None:
        """Keep what is not reduced yet in the dtype that it is reduced in."""
        if self.plan.precision.reduce == self.plan.precision.compute:
            return
        made, self.made = self.made, {}
        new, number = {name: count for name, count in made.items() if name not in self.kept}, len(self.kept)
        if new:
            size = sum(new.values()) * BYTES[self.plan.precision.reduce]
            self.tape.make(("accumulated", self.group, number), "accumulated gradients", size)
            self.kept.update(dict.fromkeys(new, number))
        for name in made:
            self.tape.free(("unsharded", self.group, name))

    def free(self) -> None:
        for name in self.made:
            self.tape.free(("unsharded", self.group, name))
        for number in set(self.kept.values()):
            self.tape.free(("accumulated", self.group, number))
        self.made, self.kept = {}, {}


class Sharded(Weights):
    """Every rank holds a slice, as FSDP2 does it. Where stem and tail are one group, it is ``tail``: gathered before
    the stem's forward and reduced after its backward."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        super().__init__(tape, sheet, plan)
        self.groups = groups(sheet, plan)
        self.strategy = plan.shard.strategy
        self.reshard = plan.shard.reshard_after_forward if self.strategy == "zero3" else False
        order: list[Hashable] = ["stem", *range(len(sheet.order)), "tail"]
        self.before = dict(zip(order[1:], order, strict=False))
        for experts in [one for one in self.groups if isinstance(one, ExpertsOf)]:
            order.append(experts)
            self.before[experts] = experts
        self.group_of = {name: name if name in self.groups else "tail" for name in order}
        self.buffers: list[Hashable] = []  # groups whose gathered buffer is there; one, or two as the next arrives
        self.unreduced = {group: Unreduced(tape, plan, group) for group in self.groups}
        self.reduced = ""  # the mark behind what was reduced last
        # What backward does not read: of the stem, a lookup's does not.
        self.once = {"stem", *(i for i, kind in enumerate(sheet.order) if not sheet.blocks[kind].backward)}

    def _gather(self, group: Hashable) -> None:
        """Copies this rank's slice into the compute type, then gathers into a buffer."""
        size, again = self.groups[group], ("post forward", group) in self.tape.alive
        self.tape.make(("slice", group), "buffers", size.cast_bytes if size.buffer_bytes and not again else 0)
        self.tape.make(("gather", group), "buffers", size.buffer_bytes)
        if again:
            self.tape.wait("gather", ("kept", group))
        if not again:
            self.copy(size.cast_bytes, "gather")
        for call in size.regathers if again else size.gathers:
            if self.plan.layout.size(call.over) > 1:
                self.tape.add(Send("all_gather", call.over, "weights", call.bytes, "gather"))
        self.tape.record("gather", ("gathered", group))
        self.tape.free(("slice", group))
        self.buffers.append(group)

    def _copy_out(self, group: Hashable) -> None:
        self.tape.wait("compute", ("gathered", group))
        self.tape.make(("weights", group), "gathered", self.groups[group].wire_bytes)
        self.copy(self.groups[group].wire_bytes)
        self.tape.record("compute", ("copied out", group))
        self.tape.drop(("post forward", group))

    def before_forward(self, name: Hashable) -> None:
        group = self.group_of[name]
        if name == "stem":  # the optimizer has written the slices that are gathered
            self.tape.record("compute", "start of forward")
            self.tape.wait("gather", "start of forward")
        if ("weights", group) in self.tape.alive:
            return
        if group not in self.buffers:
            self._gather(group)
        others, several = [other for other in self.buffers if other != group], len(self.groups[group].gathers) > 1
        # torch lets go of what it gathered before once it has copied out; of several calls the first, a small one.
        if several:
            _let_go(self, others)
        self._copy_out(group)
        _let_go(self, [] if several else others)
        for experts in _experts_of(self.groups, group):
            if ("weights", experts) not in self.tape.alive:
                self._gather(experts)

    def after_forward(self, name: Hashable) -> None:
        group = self.group_of[name]
        if name == "tail":
            _let_go(self, [*self.buffers])
        elif self.reshard is not False and group != "tail":
            if self.reshard is not True and group not in self.once and not isinstance(group, ExpertsOf):
                self.tape.make(("post forward", group), "gathered", self.groups[group].kept_bytes)
                self.tape.record("compute", ("kept", group))
            self.tape.drop(("weights", group))

    def before_backward(self, name: Hashable) -> None:
        group, ahead = self.group_of[name], self.group_of[self.before[name]]
        needed = {one for one in (group, ahead) if ("weights", one) not in self.tape.alive and one not in self.once}
        if group in needed:
            if group not in self.buffers:
                self._gather(group)
            self._copy_out(group)
            _let_go(self, [group])
        for one in (ahead, *_experts_of(self.groups, ahead)) if ahead in needed else ():
            if ("weights", one) not in self.tape.alive and one not in self.buffers:
                self._gather(one)

    def experts(self, run: ExpertsRun, name: Hashable) -> None:
        """Gather or free experts that are units: their weights come and go with their forward and their backward."""
        for experts in _experts_of(self.groups, name):
            if run.which == "forward":
                (self.before_forward if run.begins else self.after_forward)(experts)
            else:
                (self.before_backward if run.begins else self.after_backward)(experts)

    def gradient(self, weight: Tensor, name: Hashable) -> None:
        apart = self.plan.layout.ep > 1 and is_expert(weight.name)
        self.unreduced[ExpertsOf(name) if apart else self.group_of[name]].add(weight)  # type: ignore[arg-type]

    def head_gradient(self) -> None:
        assert self.output is not None
        if self.tied:
            size = prod(map(int, self.output.shape)) * BYTES[self.plan.precision.compute]
            self.tape.make(HEAD, "accumulated gradients", size)
        else:
            self.unreduced["tail"].add(self.output)

    def after_backward(self, name: Hashable) -> None:
        group = self.group_of[name]
        if (name == "tail" and "stem" not in self.groups) or not self.groups[group].gathers:
            return
        last = self.last and not self.half
        if last or self.strategy == "zero3":
            self.tape.drop(("weights", group))
        if (last or self.strategy != "zero1") and not self.half:
            self._reduce(group, summed=self.last)
        else:
            self.unreduced[group].keep()

    def kept(self) -> Hashable:
        waiting = ((group, tuple(one.made.items()), tuple(one.kept.items())) for group, one in self.unreduced.items())
        return super().kept(), tuple(self.buffers), tuple(waiting), self.reduced

    def restore(self, kept: Any) -> None:
        alive, buffers, waiting, self.reduced = kept
        super().restore(alive)
        self.buffers = [*buffers]
        for group, made, unreduced in waiting:
            self.unreduced[group].made, self.unreduced[group].kept = dict(made), dict(unreduced)

    def after_weight_gradients(self, name: Hashable) -> None:
        for group in (ExpertsOf(name), self.group_of[name]):  # type: ignore[arg-type]
            if group not in self.groups:
                continue
            if self.last:
                self.tape.drop(("weights", group))
            self.unreduced[group].keep()
            if (self.last or self.strategy != "zero1") and self.unreduced[group].names:
                self._reduce(group, summed=True)

    def end(self) -> None:
        if self.half:
            return
        if self.reduced and (self.last or self.strategy != "zero1"):
            self.tape.wait("compute", self.reduced)
        if self.last:
            self.tape.drop("scatter")

    def _reduce(self, group: Hashable, *, summed: bool) -> None:
        """``summed``: the replicas of a hybrid sum what each has."""
        size, replicas = self.groups[group], self.plan.layout.dp_replicate
        if "scatter" in self.tape.alive:  # of the group before
            self.tape.wait("compute", "scattered")
            self.tape.free("scatter")
        calls = size.reduces_of(self.unreduced[group].names)
        total, share = sum(call.bytes for call in calls), sum(call.part for call in calls)
        self.tape.make("scatter", "buffers", total)
        self.copy(total)
        self.tape.record("compute", "to scatter")
        self.tape.wait("reduce", "to scatter")
        for call in calls:
            if self.plan.layout.size(call.over) > 1:
                self.tape.add(Send("reduce_scatter", call.over, "gradients", call.bytes, "reduce"))
        self.tape.record("reduce", "scattered")
        self.reduced = "scattered"
        self.unreduced[group].free()
        self.tape.make(("scattered", group), "buffers", share)
        if share == total:  # of no other rank: torch divides it, by one
            self.tape.make(("divided", group), "buffers", total)
            self.tape.free(("divided", group))
        if replicas > 1 and not summed:
            self.tape.hold(("partial", group), "gradients", share)
        else:
            if replicas > 1:
                self.tape.wait("all_reduce", "scattered")
                for call in calls:
                    self.tape.add(Send("all_reduce", "dp_replicate", "gradients", call.part, "all_reduce"))
                self.tape.record("all_reduce", "summed")
                self.reduced = "summed"
            self.tape.drop(("partial", group))
            self.tape.hold(("grad", group), "gradients", size.gradient_bytes)
            self.leaving.whole(("grad", group), size.unpadded_bytes, last=self.last, summed=self.reduced)
        self.tape.free(("scattered", group))


def _experts_of(groups: Container[Hashable], group: Hashable) -> list[ExpertsOf]:
    """Return what is gathered with a block, before it is needed: its experts, where these are units."""
    experts = ExpertsOf(group) if isinstance(group, int) else None
    return [experts] if experts in groups and experts else []


def _let_go(weights: Sharded, groups: list[Hashable]) -> None:
    """Free the buffers of these groups, which have been copied out of."""
    for group in groups:
        weights.tape.wait("gather", ("copied out", group))
        weights.tape.free(("gather", group))
        weights.buffers.remove(group)
