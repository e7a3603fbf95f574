"""What no plan can beat, found without pricing it: seconds of a step, and bytes that are there at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.passes import recomputed
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step import bound_s
from shardwise.planner.seconds.wires import wires_of
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import BYTES, Batch, Plan
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques import optim


@dataclass
class LowerBounds:
    """Those of the plans of one model on one cluster."""

    spec: ModelSpec
    cluster: Cluster
    states: dict[object, int] = field(default_factory=dict)
    sizes: dict[object, tuple[int, int, int]] = field(default_factory=dict)
    computed_s: dict[object, float] = field(default_factory=dict)
    larger: dict[object, tuple[int, float]] = field(default_factory=dict)

    def stand(self, plan: Plan, share: float) -> bool:
        """Whether weights, moments, and gradients or gathered weights leave room in the memory: most plans of large
        models need no more to be ruled out."""
        key = plan.layout.fsdp, _alike(plan)
        if key not in self.states:
            self.states[key] = sum(optim.state_bytes(self._costed(plan), plan).values())
        _, gathered, trained = self._sizes(plan)
        gathered *= plan.shard.strategy in ("zero1", "zero2")
        slices = plan.layout.fsdp if plan.sharded else 1
        gradients = trained * BYTES[plan.precision.weights] // slices
        return self.states[key] + max(gradients, gathered) <= share * self.cluster.device.memory_bytes

    def _costed(self, plan: Plan) -> Sheet:
        return techniques.cost(sheet_of(self.spec, plan), plan)

    def roughly(self, plan: Plan) -> float:
        """Seconds that the plan needs at least: its products at the best rate, or what is sent of the weights and their
        gradients, whichever is more, which is found in next to no time; or what larger micro-batches compute, which no
        GPU computes faster in smaller ones."""
        flops, gathered, trained = self._sizes(plan)
        sequences = plan.batch.micro_batch_size * plan.batch.accumulation
        rates = rates_of(plan, self.cluster, own_traits())
        computed_s = flops * sequences * plan.batch.seq_len / rates.best_flops_per_s
        micro, larger_s = self.larger.get(_alike(plan), (0, 0.0))
        if plan.batch.micro_batch_size < micro:
            computed_s = max(computed_s, larger_s)
        return max(computed_s, self._sent_s(plan, gathered, trained))

    def seconds(self, plan: Plan) -> float:
        """The same with all kernels, and with what is sent between them."""
        key, group = (plan.batch, _alike(plan)), _alike(plan)
        if key not in self.computed_s:
            self.computed_s[key] = bound_s(self._costed(plan), plan, self.cluster, own_traits())
            if self.cluster.kind == "cuda":
                larger = plan.batch.micro_batch_size, self.computed_s[key]
                self.larger[group] = max(self.larger.get(group, (0, 0.0)), larger)
        return max(self.computed_s[key], self.roughly(plan))

    def _sizes(self, plan: Plan) -> tuple[int, int, int]:
        """Operations of products a token, the bytes of all weights as they are gathered (four-bit codes stay so), and
        the numbers in those that are trained, before they are sharded: what plans have in common that differ in the
        dial and in their micro-batches."""
        key = _alike(plan)
        if key not in self.sizes:
            costed = self._costed(plan)
            weights = [(weight, times) for unit, times in costed.repeated() for weight in unit.weights]
            counts = [(prod(map(int, weight.shape)) * times, weight) for weight, times in weights]
            flops = sum(times * _flops(unit) for unit, times in costed.repeated())
            gathered = sum(n * BYTES[weight.used_as] for n, weight in counts)
            self.sizes[key] = flops, gathered, sum(n for n, weight in counts if weight.trained)
        return self.sizes[key]

    def _sent_s(self, plan: Plan, gathered: int, trained: int) -> float:
        """Seconds for which the dial keeps the links of its weights busy, at least; on GPUs, gathers and reductions
        share them."""
        layout, strategy, m = plan.layout, plan.shard.strategy, plan.batch.accumulation
        wires = wires_of(layout, self.cluster)
        reduced = trained * BYTES[plan.precision.reduce]
        if strategy == "ddp":
            return wires.seconds("all_reduce", "loss", reduced)
        gathers, reduces = m if strategy == "zero3" else 1, 1 if strategy == "zero1" else m
        gathered_s = gathers * wires.seconds("all_gather", "fsdp", gathered)
        reduced_s = reduces * wires.seconds("reduce_scatter", "fsdp", reduced)
        sliced_s = gathered_s + reduced_s if self.cluster.kind == "cuda" else max(gathered_s, reduced_s)
        return max(sliced_s, wires.seconds("all_reduce", "dp_replicate", reduced // layout.fsdp))


def _alike(plan: Plan) -> object:
    """What plans have in common that compute the same in micro-batches of another size, and shard it over others."""
    return plan.remat, plan.compile, plan.layout.pp, plan.pipeline, replace(techniques.inside(plan), batch=Batch())


@lru_cache(maxsize=8 * KEPT_UNITS)
def _flops(unit: Unit) -> int:
    """Operations of a unit's products for one token, recomputation included."""
    again = [op for i, op in enumerate(recomputed(unit)) if i not in unit.saved_ops] if unit.recompute else []
    return sum(op.flops for op in (*unit.forward, *again, *unit.backward) if op.kind == "matmul" and op.per == "b*s")
