"""Bounds that no plan beats, found without pricing it: seconds of a step, and bytes that are there at one moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from shardwise.models.config import ModelSpec
from shardwise.planner.figures import PlanFigures, Sizes, alike
from shardwise.planner.least_memory import LeastMemory
from shardwise.planner.price import unstaged
from shardwise.planner.seconds import step
from shardwise.planner.seconds.pipeline import PipelineReplay, StageTimes, border_bytes
from shardwise.planner.seconds.rates import Rates, own_traits, rates_of
from shardwise.planner.seconds.step import Least
from shardwise.planner.seconds.wires import wires_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import stage_rank
from shardwise.spec.place import stages_of
from shardwise.spec.plan import BYTES, Plan
from shardwise.techniques.pp.split import trained_stages


class BlockSeconds(NamedTuple):
    """Seconds that gathering the weights of a block takes, and summing its gradients; and copying both, out of one
    buffer and into the other. ``apart``: of the first two, those of experts that other ranks have. ``replicas``: of a
    hybrid, adding up what its replicas have summed."""

    gathered: float = 0.0
    reduced: float = 0.0
    out: float = 0.0
    into: float = 0.0
    apart: tuple[float, float] = (0.0, 0.0)
    replicas: float = 0.0


@dataclass(frozen=True)
class Through:
    """The least that a micro-batch takes, up to each block and with the last block to the end: ``forward_s``,
    ``backward_s`` and, of that, ``later_s``, which a backward in two halves puts off, have one entry more than there
    are blocks. Through all of it: ``device_s``, and ``host_s`` for what the host launches meanwhile."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    later_s: tuple[float, ...]
    device_s: float
    host_s: float

    @classmethod
    def of(cls, stem: Least, blocks: list[Least], tail: Least) -> Through:
        forward, backward = [one.forward_s for one in blocks], [one.backward_s for one in blocks]
        forward[0] += stem.forward_s
        forward[-1] += tail.forward_s
        backward[0] += stem.backward_s
        backward[-1] += tail.backward_s
        host_s = sum(one.host_s for one in (stem, *blocks, tail))
        later = [one.later_s for one in blocks]
        ends = [tuple(accumulate(each, initial=0.0)) for each in (forward, backward, later)]
        return cls(ends[0], ends[1], ends[2], sum(forward) + sum(backward), host_s)

    def stages(self, plan: Plan, trained: tuple[bool, ...], block_s: BlockSeconds) -> Iterator[StageTimes]:
        """The times of the stages of a pipeline, or of all blocks as one. Gathers follow one another, and so do sums of
        gradients, between which these are copied; the last of a backward is waited for."""
        halved, dial = plan.pipeline.spec.splits_backward, plan.shard
        each_time = dial.strategy == "zero3" and dial.reshard_after_forward is True
        experts_s = block_s.apart
        for number, blocks in enumerate(plan.stages(len(self.forward_s) - 1)):
            n, ends = len(blocks), (self.forward_s, self.backward_s, self.later_s)
            f, b, w = (each[blocks.stop] - each[blocks.start] for each in ends)
            in_two, last_s = halved and trained[number], block_s.reduced - experts_s[1]
            again = n * each_time * (not plan.frozen)
            b += again * block_s.out
            gathered_s = max(n * block_s.out, n * block_s.gathered - f)
            # With the sums of gradients, until the last is begun.
            given_s = max(b, n * block_s.reduced - last_s) + n * block_s.into
            given_s = max(given_s, (again - 1) * (block_s.gathered - experts_s[0]) + (n - 1) * last_s)
            reduced_s = n * (block_s.reduced + block_s.into) if in_two else given_s + last_s - b
            waiting_s = opening_s = closing_s = 0.0
            if each_time:
                f, b, w = f + gathered_s, b + reduced_s, w + reduced_s
            elif dial.strategy == "ddp":
                closing_s = max(0.0, n * block_s.reduced - b)
            elif dial.strategy in ("zero1", "zero2"):
                if dial.strategy == "zero1":
                    closing_s = reduced_s
                else:
                    b, w = b + reduced_s, w + reduced_s
                if stage_rank(plan.layout, number) == 0:
                    opening_s = gathered_s
                else:
                    waiting_s = n * (block_s.gathered + block_s.out)
            each_s = {"F": f, "B": b} | ({"I": b - w, "W": w} if in_two else {})
            after_s = (last_s * (dial.strategy in ("zero2", "zero3")), last_s) if not in_two else (0.0, 0.0)
            yield StageTimes(each_s, waiting_s, opening_s, closing_s, after_s, ())

    def step_s(self, plan: Plan, micro_batches: int, parts: int, message_s: float) -> float:
        """Return the seconds that a step of a pipeline takes at least, for the rank that needs most: until the first
        micro-batch has come to it, all that it computes, and until the last has left the ranks before it; or the way of
        its micro-batches to the last stage and back, of which only some are under way at a time. Micro-batches are so
        many ``parts`` of one. ``message_s``: from a rank to the next."""
        layout, most = plan.layout, 0.0
        halved = plan.pipeline.spec.splits_backward
        stages, f, b = stages_of(plan.pipeline.split), self.forward_s, self.backward_s
        for rank in range(layout.pp):
            own = {n: blocks for n, blocks in enumerate(stages) if stage_rank(layout, n) == rank}
            busy = sum(f[one.stop] - f[one.start] + b[one.stop] - b[one.start] for one in own.values())
            before = own[rank].start
            drains = (0.0 if halved else b[before]) + rank * message_s * (b[before] > 0)
            most = max(most, rank * message_s + f[before] + micro_batches * busy + drains)
            if b[own[rank].stop] > 0:
                borders = sum(len(stages) - 1 - n - (layout.v_shaped and n < layout.pp) for n in own)
                away = sum(f[-1] - f[one.start] + b[-1] - b[one.start] for one in own.values())
                alive = _most_alive(plan, rank, micro_batches)
                most = max(most, micro_batches * (away + 2 * borders * message_s) / alive)
        return most / parts


@dataclass
class LowerBounds:
    """The bounds of the plans of one model on one cluster. Of a pipeline they are found without its stages' sheets:
    what the plan would be without stages is divided among its ranks, of which the largest has no less than the mean."""

    spec: ModelSpec
    cluster: Cluster
    larger: dict[object, tuple[int, float, float]] = field(default_factory=dict)
    through: dict[object, Through] = field(default_factory=dict)
    rates: dict[int, Rates] = field(default_factory=dict)
    rough: dict[Plan, tuple[float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slower = step.straggling(self.cluster)
        self.figures = PlanFigures(self.spec, self.cluster)
        least = LeastMemory(self.figures)
        self.stand, self.share = least.stand, least.share

    def roughly(self, plan: Plan) -> float:
        """Seconds that the plan needs at least: its products at the best rate, or what is sent of the weights and their
        gradients, whichever is more, which is found in next to no time; or what larger micro-batches compute, which no
        GPU computes faster in smaller ones."""
        batch, ranks = plan.batch, plan.layout.pp
        sequences = batch.micro_batch_size * batch.accumulation
        if plan not in self.rough:
            flops_s = self.figures.flops(plan) * sequences * plan.row_tokens / self._rates(plan).best_flops_per_s
            sent_s = self.slower * self._sent_s(plan, self.figures.sizes(plan))
            self.rough[plan] = flops_s / ranks, self._copied_s(plan), sent_s / ranks
        computed_s, copied_s, sent_s = self.rough[plan]
        micro, device_s, host_s = self.larger.get(alike(plan), (0, 0.0, 0.0))
        if batch.micro_batch_size < micro:
            computed_s = max(computed_s, device_s * sequences / ranks)
        else:
            host_s = 0.0
        passes_s = max(computed_s + copied_s, host_s * sequences / ranks, sent_s)
        return passes_s + self.figures.state(plan).once_s / ranks

    def seconds(self, plan: Plan) -> float:
        """Return the seconds that the plan needs at least with all kernels, and with what is sent between them; of a
        pipeline, until all stages are filled and drained."""
        batch, ranks = plan.batch, plan.layout.pp
        if ranks > 1:
            through, once_s = self._through(plan), self.figures.state(plan).once_s
            step_s = through.step_s(plan, batch.accumulation, 1, self._message_s(plan))
            return max(self.slower * step_s + once_s / ranks, self.roughly(plan))
        block_s = self._block_s(plan)
        whole = next(self._through(plan).stages(plan, (True,), block_s))
        closing_s = max(whole.closing_s, self.spec.num_hidden_layers * block_s.replicas - whole.each_s["B"])
        passes_s = whole.opening_s + batch.accumulation * sum(whole.each_s.values()) + closing_s
        step_s = max(self._computed_s(plan), self.slower * passes_s)
        return max(step_s + self.figures.state(plan).once_s, self.roughly(plan))

    def replayed(self, plan: Plan) -> float:
        """Return the same of a pipeline, its schedule replayed with what its stages take at least."""
        trained = trained_stages(self.spec, plan)
        stages = tuple(self._through(plan).stages(plan, trained, self._block_s(plan)))
        line = PipelineReplay(plan, trained, stages, self._message_s(plan), plan.sharded)
        step_s = line.replayed()[1]
        return max(self.slower * step_s + self.figures.state(plan).once_s / plan.layout.pp, self.seconds(plan))

    def _rates(self, plan: Plan) -> Rates:
        """Return the rates of all plans that compute the same."""
        key = alike(plan)
        if key not in self.rates:
            self.rates[key] = rates_of(plan, self.cluster, own_traits())
        return self.rates[key]

    def _message_s(self, plan: Plan) -> float:
        """Return the seconds that the hidden states of a micro-batch take from a rank to the next."""
        return wires_of(plan.layout, self.cluster).message_s(border_bytes(self.figures.sheet(plan), plan))

    def _block_s(self, plan: Plan) -> BlockSeconds:
        """Return the seconds of a block of the mean size; of a stage, whose blocks may be smaller than others, those of
        the smallest."""
        sizes, wires = self.figures.sizes(plan), wires_of(plan.layout, self.cluster)
        count = self.spec.num_hidden_layers
        mean, staged = sizes.blocks / count, plan.layout.pp > 1
        gathered = min(mean, sizes.ahead or mean) if staged else mean
        all_trained = plan.lora is None and not plan.frozen
        each = BYTES[plan.precision.reduce] * all_trained
        reduced = gathered * sizes.trained * each / max(1, sizes.gathered)
        if not plan.sharded:  # in buckets of many blocks, perhaps
            return BlockSeconds(reduced=wires.seconds("all_reduce", "loss", reduced * count) / count * (reduced > 0))
        even = not staged or all(map(self.spec.has_experts, range(count)))
        spread, spread_reduced = (even * size / count for size in (sizes.experts, sizes.trained_experts * each))

        def calls_s(kind: str, group: str, size: float) -> float:
            calls = 1 if self.cluster.measured else count  # what was measured need not grow evenly with its bytes
            return wires.seconds(kind, group, size * count / calls) * calls / count if size else 0.0

        apart = calls_s("all_gather", "expert_fsdp", spread), calls_s("reduce_scatter", "expert_fsdp", spread_reduced)
        gathered_s = calls_s("all_gather", "fsdp", gathered) + apart[0]
        reduced_s = calls_s("reduce_scatter", "fsdp", reduced) + apart[1]
        parts = reduced / plan.layout.fsdp, spread_reduced / plan.layout.size("expert_fsdp")
        replicas_s = sum(calls_s("all_reduce", "dp_replicate", part) for part in parts)
        copied_s = self._rates(plan).least_copy_s
        copies = copied_s(gathered + spread), copied_s(reduced + spread_reduced)
        return BlockSeconds(gathered_s, reduced_s, *copies, apart, replicas_s)

    def degrees_s(self, plan: Plan) -> float:
        """Return the seconds that no plan of these degrees and this schedule can beat, with micro-batches of any size
        up to the plan's."""
        batch, once_s = plan.batch, self.figures.state(plan).once_s
        sequences, parts = batch.micro_batch_size * batch.accumulation, batch.micro_batch_size
        step_s = self._through(plan).step_s(plan, sequences, parts, self._message_s(plan))
        return self.slower * step_s + once_s / plan.layout.pp

    def _computed_s(self, plan: Plan) -> float:
        """Return what, without stages, the plan's micro-batches take, and copies of weights and gradients."""
        key, batch, through = alike(plan), plan.batch, self._through(plan)
        device_s, host_s = (self.slower * each for each in (through.device_s, through.host_s))
        if self.cluster.kind == "cuda":
            larger = batch.micro_batch_size, device_s / batch.micro_batch_size, host_s / batch.micro_batch_size
            self.larger[key] = max(self.larger.get(key, (0, 0.0, 0.0)), larger)
        return max(batch.accumulation * device_s + self._copied_s(plan), batch.accumulation * host_s)

    def _through(self, plan: Plan) -> Through:
        """Through all units, what a micro-batch takes."""
        key, whole = (replace(plan.batch, accumulation=1), alike(plan)), unstaged(plan)
        if key not in self.through:
            costed = self.figures.sheet(plan)
            kinds = step.least(costed, whole, self.cluster, own_traits())
            stem, *blocks, tail = (kinds[0], *(kinds[1 + kind] for kind in costed.order), kinds[-1])
            self.through[key] = Through.of(stem, blocks, tail)
        return self.through[key]

    def _sent_s(self, plan: Plan, sizes: Sizes) -> float:
        """Seconds for which the dial keeps the links of its weights busy, at least; on GPUs, gathers and reductions
        share them."""
        layout, wires, reduce = plan.layout, wires_of(plan.layout, self.cluster), BYTES[plan.precision.reduce]
        reduced, experts = sizes.trained * reduce, sizes.trained_experts * reduce
        if plan.shard.strategy == "ddp":
            summed_s = wires.seconds("all_reduce", "loss", reduced)
            return max(summed_s, wires.seconds("all_reduce", "expert_loss", experts)) if experts else summed_s
        gathers, again, reduces = _rounds(plan)
        blocks, all_trained = self.spec.num_hidden_layers, plan.lora is None and not plan.frozen
        each = [("fsdp", blocks, (gathers * sizes.gathered + again * sizes.blocks) // (gathers + again), reduced)]
        if sizes.experts:
            each.append(("expert_fsdp", sum(map(self.spec.has_experts, range(blocks))), sizes.experts, experts))
        busy, ways = defaultdict[str, float](float), defaultdict[str, float](float)
        for group, blocks, gathered, summed in each:
            # A call for each block; what was measured need not grow evenly with its bytes.
            calls = 1 if self.cluster.measured else blocks
            summing = calls if all_trained else 1
            gathered_s = (gathers + again) * calls * wires.seconds("all_gather", group, gathered / calls)
            reduced_s = reduces * summing * wires.seconds("reduce_scatter", group, summed / summing)
            busy[wires.links(group)] += gathered_s + reduced_s
            ways["gather"] += gathered_s
            ways["reduce"] += reduced_s
        most_s = max((busy if self.cluster.kind == "cuda" else ways).values())
        return max(most_s, wires.seconds("all_reduce", "dp_replicate", reduced // layout.fsdp))

    def _copied_s(self, plan: Plan) -> float:
        """Seconds for which the device copies weights out of what was gathered, and gradients into what is reduced."""
        if not plan.sharded or plan.layout.pp > 1:
            return 0.0
        sizes, (gathers, again, reduces) = self.figures.sizes(plan), _rounds(plan)
        gathered = gathers * (sizes.gathered + sizes.experts) + again * (sizes.blocks + sizes.experts)
        reduced = reduces * (sizes.trained + sizes.trained_experts) * BYTES[plan.precision.reduce]
        return self.slower * self._rates(plan).least_copy_s(gathered + reduced)


def _rounds(plan: Plan) -> tuple[int, int, int]:
    """Return how often the dial gathers all weights in a step, and those of blocks again for backward, and how often it
    reduces gradients."""
    strategy, m = plan.shard.strategy, plan.batch.accumulation
    gathers, reduces = m if strategy == "zero3" else 1, 1 if strategy == "zero1" else m
    again = strategy == "zero3" and plan.shard.reshard_after_forward is True and not plan.frozen
    return gathers, m * again, reduces


def _most_alive(plan: Plan, rank: int, m: int) -> int:
    """Return how many forwards of a rank of a pipeline wait for their gradients at most."""
    return plan.pipeline.spec.most_alive(plan.layout.pp, rank, plan.pipeline.stages_per_rank, m)
