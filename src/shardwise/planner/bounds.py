"""Bounds that no plan beats, found without pricing it: seconds of a step, and bytes that are there at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.figures import PlanFigures, alike
from shardwise.planner.least_memory import LeastMemory
from shardwise.planner.price import unstaged
from shardwise.planner.seconds import step_seconds
from shardwise.planner.seconds.network import network_of
from shardwise.planner.seconds.rates import Rates, own_traits, rates_of
from shardwise.planner.seconds.stages import border_bytes
from shardwise.planner.seconds.step_seconds import Least
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan


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
    def of(cls, embedding: Least, blocks: list[Least], head: Least) -> Through:
        forward, backward = [one.forward_s for one in blocks], [one.backward_s for one in blocks]
        forward[0] += embedding.forward_s
        forward[-1] += head.forward_s
        backward[0] += embedding.backward_s
        backward[-1] += head.backward_s
        host_s = sum(one.host_s for one in (embedding, *blocks, head))
        later = [one.later_s for one in blocks]
        ends = [tuple(accumulate(each, initial=0.0)) for each in (forward, backward, later)]
        return cls(ends[0], ends[1], ends[2], sum(forward) + sum(backward), host_s)

    def stages(
        self, plan: Plan, trained: tuple[bool, ...], block_s: techniques.BlockSeconds
    ) -> Iterator[techniques.StageTimes]:
        """The times of the stages of a pipeline, or of all blocks as one."""
        for number, blocks in enumerate(plan.stages(len(self.forward_s) - 1)):
            ends = self.forward_s, self.backward_s, self.later_s
            passes_s = tuple(each[blocks.stop] - each[blocks.start] for each in ends)
            yield block_s.stage(plan, number, len(blocks), passes_s, trained=trained[number])

    def step_s(self, plan: Plan, micro_batches: int, message_s: float) -> float:
        """Return the seconds that a step of a pipeline takes at least."""
        return techniques.least_step_s(plan, (self.forward_s, self.backward_s), micro_batches, message_s)


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
        self.slower = step_seconds.straggling(self.cluster)
        self.figures = PlanFigures(self.spec, self.cluster)
        least = LeastMemory(self.figures)
        self.may_fit, self.share = least.may_fit, least.share

    def roughly(self, plan: Plan) -> float:
        """Seconds that the plan needs at least: its products at the best rate, or what is sent of the weights and their
        gradients, whichever is more, which is found in next to no time; or what larger micro-batches compute, which no
        GPU computes faster in smaller ones."""
        batch, ranks = plan.batch, plan.layout.pp
        sequences = batch.micro_batch_size * batch.accumulation
        if plan not in self.rough:
            flops_s = self.figures.flops(plan) * sequences * plan.row_tokens / self._rates(plan).best_flops_per_s
            network = network_of(plan.layout, self.cluster)
            sent_s = self.slower * self.figures.sizes(plan).sent_s(plan, self.spec, network)
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
            step_s = through.step_s(plan, batch.accumulation, self._message_s(plan))
            return max(self.slower * step_s + once_s / ranks, self.roughly(plan))
        block_s = self._block_s(plan)
        whole = next(self._through(plan).stages(plan, (True,), block_s))
        closing_s = max(whole.closing_s, self.spec.num_hidden_layers * block_s.replicas - whole.each_s["B"])
        passes_s = whole.opening_s + batch.accumulation * sum(whole.each_s.values()) + closing_s
        step_s = max(self._computed_s(plan), self.slower * passes_s)
        return max(step_s + self.figures.state(plan).once_s, self.roughly(plan))

    def replayed(self, plan: Plan) -> float:
        """Return the same of a pipeline, its schedule replayed with what its stages take at least."""
        trained = techniques.trained_stages(self.spec, plan)
        stages = tuple(self._through(plan).stages(plan, trained, self._block_s(plan)))
        line = techniques.PipelineReplay(plan, trained, stages, self._message_s(plan), plan.sharded)
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
        return network_of(plan.layout, self.cluster).message_s(border_bytes(self.figures.sheet(plan), plan))

    def _block_s(self, plan: Plan) -> techniques.BlockSeconds:
        sizes, network = self.figures.sizes(plan), network_of(plan.layout, self.cluster)
        return techniques.BlockSeconds.of(sizes, plan, self.spec, network, self._rates(plan).least_copy_s)

    def degrees_s(self, plan: Plan) -> float:
        """Return the seconds that no plan of these degrees and this schedule can beat, with micro-batches of any size
        up to the plan's."""
        batch, once_s = plan.batch, self.figures.state(plan).once_s
        sequences = batch.micro_batch_size * batch.accumulation
        step_s = self._through(plan).step_s(plan, sequences, self._message_s(plan)) / batch.micro_batch_size
        return self.slower * step_s + once_s / plan.layout.pp

    def _computed_s(self, plan: Plan) -> float:
        """Return what, without stages, the plan's micro-batches take, and copies of weights and gradients."""
        key = alike(plan)
        batch = plan.batch
        through = self._through(plan)
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
            kinds = step_seconds.least(costed, whole, self.cluster, own_traits())
            embedding, *blocks, head = (kinds[0], *(kinds[1 + kind] for kind in costed.order), kinds[-1])
            self.through[key] = Through.of(embedding, blocks, head)
        return self.through[key]

    def _copied_s(self, plan: Plan) -> float:
        """Seconds for which the device copies weights and gradients."""
        copied_s = self.figures.sizes(plan).copied_s(plan, self._rates(plan).least_copy_s)
        return self.slower * copied_s
