"""What no plan can beat, found without pricing it: seconds of a step, and bytes that are there at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.seconds.step import bound_s
from shardwise.planner.seconds.wires import wires_of
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques import optim


@dataclass
class LowerBounds:
    """Those of the plans of one model on one cluster."""

    spec: ModelSpec
    cluster: Cluster

    def stand(self, plan: Plan, share: float) -> bool:
        """Whether weights, moments, and gradients or gathered weights leave room in the memory: most plans of large
        models need no more to be ruled out."""
        state = sum(optim.state_bytes(self._costed(plan), plan).values())
        _, weights, trained = self.least(plan)
        gathered = weights * BYTES[plan.precision.compute] if plan.shard.strategy in ("zero1", "zero2") else 0
        slices = plan.layout.fsdp if plan.sharded else 1
        gradients = trained * BYTES[plan.precision.weights] // slices
        return state + max(gradients, gathered) <= share * self.cluster.device.memory_bytes

    def _costed(self, plan: Plan) -> Sheet:
        return techniques.cost(sheet_of(self.spec, plan), plan)

    def seconds(self, plan: Plan) -> float:
        """Seconds that the plan needs at least: of all that is computed, or of all that is sent of the weights and
        their gradients, whichever is more."""
        computed_s, weights, trained = self.least(plan)
        return max(computed_s, self._sent_s(plan, weights, trained))

    def least(self, plan: Plan) -> tuple[float, int, int]:
        """Seconds that are computed at least, and the numbers in all weights and in those that are trained, before they
        are sharded: what plans that differ in the dial alone have in common."""
        key = plan.layout.tp, plan.remat, plan.compile, plan.batch, plan.sharded
        if key not in self._known:
            costed = self._costed(plan)
            units = [(weight, times) for unit, times in costed.repeated() for weight in unit.weights]
            sizes = [(prod(map(int, weight.shape)) * times, weight.trained) for weight, times in units]
            computed_s = bound_s(costed, plan, self.cluster, own_traits())
            self._known[key] = computed_s, sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[object, tuple[float, int, int]]:
        return {}

    def _sent_s(self, plan: Plan, weights: int, trained: int) -> float:
        """Seconds for which the dial keeps the fuller of its streams busy, at least."""
        layout, strategy, m = plan.layout, plan.shard.strategy, plan.batch.accumulation
        wires = wires_of(layout, self.cluster)
        gathered, reduced = weights * BYTES[plan.precision.compute], trained * BYTES[plan.precision.reduce]
        if strategy == "ddp":
            return wires.seconds("all_reduce", "loss", reduced)
        gathers, reduces = m if strategy == "zero3" else 1, 1 if strategy == "zero1" else m
        return max(
            gathers * wires.seconds("all_gather", "fsdp", gathered),
            reduces * wires.seconds("reduce_scatter", "fsdp", reduced),
            wires.seconds("all_reduce", "dp_replicate", reduced // layout.fsdp),
        )
