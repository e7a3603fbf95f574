"""The weights and their gradients at each moment of a step, where they are gathered when needed.

:class:`Sharded` follows FSDP2: a group is gathered into one buffer and copied out of it; in forward the buffer lives
until the next group is copied out, in backward the next group is gathered while one computes; after a group's backward
its gradients are copied into one buffer, scattered, and the buffer lives until the next group's. Its streams are
``gather``, ``reduce`` and, of a hybrid plan, ``all_reduce``; what waits for what is as in
torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from math import prod
from typing import Any

from shardwise.models.roles import is_expert
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet, Tensor
from shardwise.techniques.between import Gradients, Weights
from shardwise.techniques.events import Copy, EventLog, ExpertsRun, Send, TensorKey, UnitName
from shardwise.techniques.shard.prefetch import head_gathers_ahead
from shardwise.techniques.shard.unit_bytes import ExpertsOf, groups

HEAD = "gradient of the tied output layer"
Group = UnitName | ExpertsOf
"""What is gathered and reduced as one."""


class StrategyWeights(Weights):
    """The rules that strategies have in common. ``gradients``: is told of gradients that are whole."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan, gradients: Gradients) -> None:
        self.log = log
        self.plan = plan
        self.gradients = gradients
        self.tied = sheet.tied
        ends = sheet.embedding.weights[:1] if sheet.tied else sheet.head.weights[-1:]
        self.output = ends[0] if ends else None
        self.last = True
        self.half = False

    def begin(self, *, last: bool, half: bool = False) -> None:
        self.last, self.half = last, half

    def kept(self) -> Hashable:
        return frozenset(self.log.alive.items()), self.gradients.kept()

    def restore(self, kept: Any) -> None:
        alive, gradients = kept
        self.log.alive = dict(alive)
        self.gradients.restore(gradients)

    def copy(self, size: int, stream: str = "compute") -> None:
        """``size`` bytes are copied into a flat buffer, or out of one."""
        self.log.add(Copy("device", "device", size, stream))

    def add_tied(self) -> None:
        """Autograd adds the two gradients of a tied weight in place, but those of a DTensor into a third."""
        _, size, _ = self.log.alive[HEAD]
        if self.plan.layout.tp > 1:
            self.log.make("sum of tied gradients", "gradients", size)
            self.log.free("sum of tied gradients")
        self.log.free(HEAD)


class Unreduced:
    """Whole gradients of one group: those that autograd has made, and those that are kept in the dtype of reduction.
    FSDP2 still has the one of the ``last`` weight in hand while the others' sum arrives."""

    def __init__(self, log: EventLog, plan: Plan, group: Hashable, last: str) -> None:
        self.log = log
        self.plan = plan
        self.group = group
        self.last = last
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
            self.log.make(("unsharded", self.group, weight.name), "accumulated gradients", size)
            self.made[weight.name] = count

    def keep(self) -> None:
        """Keep what is not reduced yet in the dtype that it is reduced in."""
        if self.plan.precision.reduce == self.plan.precision.compute:
            return
        made, self.made = self.made, {}
        for held in (False, True):
            new = [name for name in made if name not in self.kept and (name == self.last) == held]
            number, size = len(self.kept), sum(made[name] for name in new) * BYTES[self.plan.precision.reduce]
            if new:
                self.log.make(("accumulated", self.group, number), "accumulated gradients", size)
                self.kept.update(dict.fromkeys(new, number))
        for name in made:
            self.log.free(("unsharded", self.group, name))

    def join(self) -> None:
        """Add what autograd has made to what is kept of the same weights."""
        for name in [name for name in self.made if name in self.kept]:
            self.log.free(("unsharded", self.group, name))
            del self.made[name]

    def free(self, *, last: bool) -> None:
        """Free all but the last, or the last."""
        for name in [name for name in self.made if (name == self.last) == last]:
            self.log.free(("unsharded", self.group, name))
            del self.made[name]
        for number in {number for name, number in self.kept.items() if (name == self.last) == last}:
            self.log.free(("accumulated", self.group, number))
        self.kept = {name: number for name, number in self.kept.items() if (name == self.last) != last}


class Gathers:
    """The gathered weights of the groups of a plan, and the buffers that they are copied out of."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan) -> None:
        self.log = log
        self.plan = plan
        self.groups = groups(sheet, plan)
        self.resharded = plan.shard.reshard_after_forward if plan.shard.strategy == "zero3" else False
        order: list[UnitName] = ["embedding", *range(len(sheet.order)), "head"]
        self.before = dict(zip(order[1:], order, strict=False))
        self.group_of: dict[UnitName, Group] = {name: name if name in self.groups else "head" for name in order}
        self.buffers: list[Group] = []  # groups whose gathered buffer is there; one, or two as the next arrives
        # What backward does not read: of the embedding, a lookup's does not.
        self.once = {"embedding", *(i for i, kind in enumerate(sheet.order) if not sheet.blocks[kind].backward)}

    def begin_forward(self, name: UnitName) -> None:
        if name == "embedding":  # the optimizer has written the slices that are gathered
            self.log.follow("gather", "start of forward")
        self.copy_out_for_forward(self.group_of[name])

    def begin_backward(self, name: UnitName) -> None:
        """Have the weights of a unit, and gather those of the units whose backward comes next."""
        self.copy_out_for_backward(self.group_of[name])
        if name == "head" and not head_gathers_ahead(self.plan):
            return
        for _ in range(self.plan.shard.backward_prefetch):
            if name == "embedding":
                return
            name = self.before[name]
            ahead = self.group_of[name]
            if not self.is_whole(ahead) and ahead not in self.once:
                for one in (ahead, *self.experts_of(ahead)):
                    if not self.is_whole(one) and one not in self.buffers:
                        self._gather(one)

    def copy_out_for_forward(self, group: Group) -> None:
        if self.is_whole(group):
            return
        if group not in self.buffers:
            self._gather(group)
        others, several = [other for other in self.buffers if other != group], len(self.groups[group].gathers) > 1
        # torch lets go of what it gathered before once it has copied out; of several calls the first, a small one.
        if several:
            self.let_go(others)
        self._copy_out(group)
        self.let_go([] if several else others)
        for experts in self.experts_of(group):
            if not self.is_whole(experts):
                self._gather(experts)

    def copy_out_for_backward(self, group: Group) -> None:
        if self.is_whole(group) or group in self.once:
            return
        if group not in self.buffers:
            self._gather(group)
        self._copy_out(group)
        self.let_go([group])

    def reshard(self, group: Group) -> None:
        """Free the weights of a group after its forward, unless backward finds them there."""
        if self.resharded is False or group == "head":
            return
        if self.resharded is not True and group not in self.once and not isinstance(group, ExpertsOf):
            self.log.make(("post forward", group), "gathered", self.groups[group].kept_bytes)
            self.log.record("compute", ("kept", group))
        self.log.drop(("weights", group))

    def is_whole(self, group: Group) -> bool:
        return ("weights", group) in self.log.alive

    def experts_of(self, group: Group) -> list[ExpertsOf]:
        """Return what is gathered with a block, before it is needed: its experts, where these are units."""
        experts = ExpertsOf(group) if isinstance(group, int) else None
        return [experts] if experts in self.groups and experts else []

    def _gather(self, group: Group) -> None:
        """Copies this rank's slice into the compute type, then gathers into a buffer."""
        size, again = self.groups[group], ("post forward", group) in self.log.alive
        self.log.make(("slice", group), "gather buffers", size.cast_bytes if size.buffer_bytes and not again else 0)
        self.log.make(("gather", group), "gather buffers", size.buffer_bytes)
        if again:
            self.log.wait("gather", ("kept", group))
        else:
            self.log.add(Copy("device", "device", size.cast_bytes + size.coding_bytes, "gather"))
        for call in size.regathers if again else size.gathers:
            if self.plan.layout.size(call.over) > 1:
                self.log.add(Send("all_gather", call.over, "weights", call.bytes, "gather"))
        self.log.record("gather", ("gathered", group))
        self.log.free(("slice", group))
        self.buffers.append(group)

    def _copy_out(self, group: Group) -> None:
        self.log.wait("compute", ("gathered", group))
        size = self.groups[group]
        self.log.make(("weights", group), "gathered", size.whole_bytes)
        self.log.make(("codes", group), "gather buffers", size.codes_bytes)
        self.log.add(Copy("device", "device", size.wire_bytes + size.decoding_bytes))
        self.log.free(("codes", group))
        self.log.record("compute", ("copied out", group))
        self.log.drop(("post forward", group))

    def let_go(self, groups: list[Group]) -> None:
        """Free the buffers of these groups, which have been copied out of."""
        for group in groups:
            self.log.wait("gather", ("copied out", group))
            self.log.free(("gather", group))
            self.buffers.remove(group)


class Sharded(StrategyWeights):
    """Every rank holds a slice, as FSDP2 does it. Where embedding and head are one group, it is ``head``: gathered
    before the embedding's forward and reduced after its backward."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan, gradients: Gradients) -> None:
        super().__init__(log, sheet, plan, gradients)
        self.gathers = Gathers(log, sheet, plan)
        self.groups, self.group_of = self.gathers.groups, self.gathers.group_of
        self.strategy, self.accumulates = plan.shard.strategy, plan.shard.accumulates
        self.unreduced = {group: Unreduced(log, plan, group, one.last) for group, one in self.groups.items()}
        self.reduced = ""  # the mark behind what was reduced last

    def before_waiting(self, names: Iterable[UnitName]) -> None:
        """Gather what stays whole for a step before its first forward, where that comes from another rank."""
        for name in names if self.strategy != "zero3" else ():
            self.gathers.begin_forward(name)
            for experts in self.gathers.experts_of(name):
                self.gathers.copy_out_for_forward(experts)
            self.gathers.let_go([*self.gathers.buffers])

    def before_forward(self, name: UnitName, at: TensorKey) -> None:
        self.gathers.begin_forward(name)

    def after_forward(self, name: UnitName, at: TensorKey) -> None:
        if name == "head":
            self.gathers.let_go([*self.gathers.buffers])
        else:
            self.gathers.reshard(self.group_of[name])

    def before_backward(self, name: UnitName, at: TensorKey) -> None:
        if name != "embedding":
            self.gathers.begin_backward(name)

    def experts(self, run: ExpertsRun, name: UnitName) -> None:
        """Gather or free experts that are units: their weights come and go with their forward and their backward."""
        for experts in self.gathers.experts_of(name):
            if run.which == "forward":
                (self.gathers.copy_out_for_forward if run.begins else self.gathers.reshard)(experts)
            else:
                (self.gathers.copy_out_for_backward if run.begins else self._end_backward)(experts)

    def gradient(self, weight: Tensor, name: UnitName) -> None:
        apart = self.plan.layout.ep > 1 and is_expert(weight.name) and isinstance(name, int)
        self.unreduced[ExpertsOf(name) if apart else self.group_of[name]].add(weight)  # type: ignore[arg-type]

    def head_gradient(self) -> None:
        assert self.output is not None
        if self.tied:
            size = prod(map(int, self.output.shape)) * BYTES[self.plan.precision.compute]
            self.log.make(HEAD, "accumulated gradients", size)
        else:
            self.unreduced["head"].add(self.output)

    def after_backward(self, name: UnitName) -> None:
        if name != "head" or "embedding" in self.groups:
            self._end_backward(self.group_of[name])

    def _end_backward(self, group: Group) -> None:
        if not self.groups[group].gathers:
            return
        last = self.last and not self.half
        if last or self.strategy == "zero3":
            self.log.drop(("weights", group))
        if (last or not self.accumulates) and not self.half:
            self._reduce(group, summed=self.last)
        else:
            self.unreduced[group].keep()

    def after_weight_gradients(self, name: UnitName) -> None:
        for group in (*self.gathers.experts_of(name), self.group_of[name]):
            if self.last:
                self.log.drop(("weights", group))
            self.unreduced[group].keep()
            if (self.last or not self.accumulates) and self.unreduced[group].names:
                self._reduce(group, summed=True)

    def end(self) -> None:
        if self.half:
            return
        if self.reduced and (self.last or not self.accumulates):
            self.log.wait("compute", self.reduced)
        if self.last:
            self.log.drop("scatter")

    def kept(self) -> Hashable:
        waiting = ((group, tuple(one.made.items()), tuple(one.kept.items())) for group, one in self.unreduced.items())
        return super().kept(), tuple(self.gathers.buffers), tuple(waiting), self.reduced

    def restore(self, kept: Any) -> None:
        alive, buffers, waiting, self.reduced = kept
        super().restore(alive)
        self.gathers.buffers = [*buffers]
        for group, made, unreduced in waiting:
            self.unreduced[group].made, self.unreduced[group].kept = dict(made), dict(unreduced)

    def _reduce(self, group: Group, *, summed: bool) -> None:
        """``summed``: the replicas of a hybrid sum what each has."""
        size, replicas = self.groups[group], self.plan.layout.dp_replicate
        if "scatter" in self.log.alive:  # of the group before
            self.log.wait("compute", "scattered")
            self.log.free("scatter")
        calls = size.reduces_of(self.unreduced[group].names)
        total, share = sum(call.bytes for call in calls), sum(call.part for call in calls)
        self.unreduced[group].join()
        self.log.make("scatter", "reduce buffers", total)
        self.copy(total)
        self.log.follow("reduce", ("to scatter", group))
        for call in calls:
            if self.plan.layout.size(call.over) > 1:
                self.log.add(Send("reduce_scatter", call.over, "gradients", call.bytes, "reduce"))
        self.log.record("reduce", "scattered")
        self.reduced = "scattered"
        self.unreduced[group].free(last=False)
        if share == total:
            self.unreduced[group].free(last=True)
        self.log.make(("scattered", group), "reduce buffers", share)
        if share == total:  # of no other rank: torch divides it, by one
            self.log.make(("divided", group), "reduce buffers", total)
            self.log.free(("divided", group))
        if replicas > 1 and not summed:
            self.log.hold(("partial", group), "gradients", share)
        else:
            if replicas > 1:
                self.log.wait("all_reduce", "scattered")
                for call in calls:
                    self.log.add(Send("all_reduce", "dp_replicate", "gradients", call.part, "all_reduce"))
                self.log.record("all_reduce", "summed")
                self.reduced = "summed"
            self.log.drop(("partial", group))
            if ("grad", group) not in self.log.alive and self.plan.precision.reduce == self.plan.precision.weights:
                self.log.free(("scattered", group))  # it becomes the gradient
            self.log.hold(("grad", group), "gradients", size.gradient_bytes)
            block = group.block if isinstance(group, ExpertsOf) else group
            unit: UnitName = block if isinstance(block, int) else "embedding"
            self.gradients.whole(unit, ("grad", group), size.unpadded_bytes, last=self.last, summed=self.reduced)
        self.log.drop(("scattered", group))
        if share < total:
            self.unreduced[group].free(last=True)
