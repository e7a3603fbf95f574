"""What no plan can beat, found without pricing it: seconds of a step, and bytes that are there at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.models.roles import is_expert
from shardwise.planner.overhead import fixed_bytes
from shardwise.planner.passes import recomputed
from shardwise.planner.price import unstaged
from shardwise.planner.seconds import step
from shardwise.planner.seconds.pipeline import border_bytes
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step import Least
from shardwise.planner.seconds.wires import wires_of
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import stage_rank
from shardwise.spec.place import stages_of
from shardwise.spec.plan import BYTES, Batch, Plan
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques import offload, optim
from shardwise.techniques.offload.legal import leave_early
from shardwise.techniques.offload.updated import elsewhere
from shardwise.techniques.pp.actions import SCHEDULES


class Sizes(NamedTuple):
    """What plans have in common that differ in the dial and in their micro-batches: operations of products a token, the
    bytes of all weights as they are gathered (four-bit codes stay so) and of those in blocks, and the numbers in
    weights that are trained, before they are sharded, and in those that the device updates where the host updates
    others."""

    flops: int
    gathered: int
    blocks: int
    trained: int
    stays: int


class BlockSeconds(NamedTuple):
    """Seconds that gathering the weights of a block takes, and summing its gradients."""

    gathered: float
    reduced: float


NOTHING = BlockSeconds(0.0, 0.0)


@dataclass(frozen=True)
class Through:
    """What a micro-batch takes at least, up to each block and with the last block to the end: ``forward_s`` and
    ``backward_s`` have one entry more than there are blocks. ``whole_s``: through all of it, launches included."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    whole_s: float

    @classmethod
    def of(cls, stem: Least, blocks: list[Least], tail: Least) -> Through:
        forward, backward = [one.forward_s for one in blocks], [one.backward_s for one in blocks]
        forward[0] += stem.forward_s
        forward[-1] += tail.forward_s
        backward[0] += stem.backward_s
        backward[-1] += tail.backward_s
        host_s = sum(one.host_s for one in (stem, *blocks, tail))
        ends = [tuple(accumulate(each, initial=0.0)) for each in (forward, backward)]
        return cls(ends[0], ends[1], max(sum(forward) + sum(backward), host_s))

    def step_s(
        self, plan: Plan, micro_batches: int, parts: int, message_s: float, block_s: BlockSeconds = NOTHING
    ) -> float:
        """Of a pipeline: until the first micro-batch has come to a rank, all that the rank computes, and until the last
        has left the ranks before it; or the way of its micro-batches to the last stage and back, of which only some are
        under way at a time; for the rank of which that is most. Micro-batches are so many ``parts`` of one.
        ``message_s``: from a rank to the next. ``block_s``: of a block, what the first forward waits for its weights,
        and a rank's own last backward for the sum of its gradients, if that is longer than what it computes."""
        layout, most = plan.layout, 0.0
        halved = SCHEDULES[plan.pipeline.schedule].splits_backward
        stages, f, b = stages_of(plan.pipeline.split), self.forward_s, self.backward_s
        for rank in range(layout.pp):
            own = {n: blocks for n, blocks in enumerate(stages) if stage_rank(layout, n) == rank}
            busy = sum(f[one.stop] - f[one.start] + b[one.stop] - b[one.start] for one in own.values())
            before, after = own[rank].start, own[rank].stop
            fills, opens = rank * message_s + f[before], 0.0
            if rank == 0 or plan.shard.strategy == "zero3":  # others gather while they wait
                fills = max(fills, rank * message_s + before * block_s.gathered)
                opens = max(0.0, (after - before) * block_s.gathered - (f[after] - f[before]))
            drains = 0.0 if halved else b[before]
            closes = 0.0 if halved else max(0.0, (after - before) * block_s.reduced - (b[after] - b[before]))
            drains += rank * message_s * (b[before] > 0)
            most = max(most, fills + opens + micro_batches * busy + closes + drains)
            if b[own[rank].stop] > 0:
                borders = sum(len(stages) - 1 - n - (layout.v_shaped and n < layout.pp) for n in own)
                away = sum(f[-1] - f[one.start] + b[-1] - b[one.start] for one in own.values())
                alive = _most_alive(plan, rank, micro_batches)
                most = max(most, micro_batches * (away + 2 * borders * message_s) / alive)
        return most / parts


@dataclass
class LowerBounds:
    """Those of the plans of one model on one cluster. Of a pipeline they are found without its stages' sheets: what the
    plan would be without stages is divided among its ranks, of which the largest has no less than the mean."""

    spec: ModelSpec
    cluster: Cluster
    states: dict[object, int] = field(default_factory=dict)
    sizes: dict[object, Sizes] = field(default_factory=dict)
    computed_s: dict[object, tuple[float, float]] = field(default_factory=dict)
    larger: dict[object, tuple[int, float, float]] = field(default_factory=dict)
    through: dict[object, Through] = field(default_factory=dict)
    blocks: dict[object, tuple[float, float, Unit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slower = step.straggling(self.cluster)

    def stand(self, plan: Plan, share: float) -> bool:
        """Whether weights, moments, and gradients or gathered weights leave room in the memory: most plans of large
        models need no more to be ruled out."""
        key, whole = (plan.layout.fsdp, _alike(plan)), unstaged(plan)
        if key not in self.states:
            self.states[key] = sum(_on_device(self._costed(whole), whole).values())
        sizes, slices = self._sizes(whole), plan.layout.fsdp if plan.sharded else 1
        gathered = sizes.gathered * (plan.shard.strategy in ("zero1", "zero2"))
        gradients = sizes.trained * BYTES[plan.precision.weights] // slices
        if leave_early(plan) and (plan.batch.accumulation == 1 or plan.offload.sums == "host"):
            gradients = sizes.stays * BYTES[plan.precision.weights] // slices
        room = share * self.cluster.device.memory_bytes - sum(fixed_bytes(plan, self.cluster).values())
        held = self.states[key] + max(gradients, gathered)
        return held <= room * plan.layout.pp and (plan.layout.pp == 1 or self._first_rank_bytes(plan) <= room)

    def _first_rank_bytes(self, plan: Plan) -> float:
        """What the first rank of a pipeline holds at least when most of its micro-batches are alive: the state of its
        blocks, their weights and gradients where they are kept whole, and what its blocks keep for backward."""
        key, whole, batch = (plan.layout.fsdp, plan.shard, _alike(plan)), unstaged(plan), plan.batch
        if key not in self.blocks:
            costed = self._costed(whole)
            least = min(costed.blocks, key=lambda block: _kept_bytes(block, 1, plan.row_tokens))
            state = sum(_on_device(costed.with_ends(stem=False, head=False), whole).values())
            weights = [weight for kind in costed.order for weight in costed.blocks[kind].weights]
            trained = sum(prod(map(int, weight.shape)) for weight in weights if weight.trained)
            gradients = trained * BYTES[plan.precision.weights] // (plan.layout.fsdp if plan.sharded else 1)
            if plan.sharded and plan.shard.strategy in ("zero1", "zero2"):
                state += sum(prod(map(int, weight.shape)) * BYTES[weight.used_as] for weight in weights)
            if plan.sharded and plan.shard.strategy == "zero1":
                gradients = trained * BYTES[plan.precision.reduce]
            first = costed.blocks[0]
            even = all(b.weights[0].shape == first.weights[0].shape and not b.stays for b in costed.blocks)
            alike = len(costed.order) if even and len(costed.blocks) < 3 else float("inf")
            self.blocks[key] = state / alike, gradients / alike, least
        state_bytes, gradient_bytes, block = self.blocks[key]
        ranks, each, m = plan.layout.pp, plan.pipeline.stages_per_rank, batch.accumulation
        own = [n for number, n in enumerate(plan.pipeline.split) if stage_rank(plan.layout, number) == 0]
        alive = _alive(plan)
        stay = min(own) if plan.offload.activations == "none" else 1  # of inputs that wait elsewhere, the last block's
        kept = alive * stay * _kept_bytes(block, batch.micro_batch_size, plan.row_tokens)
        gradient_bytes *= sum(own)
        # Every stage has had a backward before the last forward of so many micro-batches.
        together = m * each - alive > (each - 1) * ranks
        return state_bytes * sum(own) + (kept + gradient_bytes if together else max(kept, gradient_bytes))

    def _costed(self, whole: Plan) -> Sheet:
        return techniques.cost(sheet_of(self.spec, whole), whole)

    def roughly(self, plan: Plan) -> float:
        """Seconds that the plan needs at least: its products at the best rate, or what is sent of the weights and their
        gradients, whichever is more, which is found in next to no time; or what larger micro-batches compute, which no
        GPU computes faster in smaller ones."""
        sizes = self._sizes(unstaged(plan))
        batch, ranks = plan.batch, plan.layout.pp
        sequences = batch.micro_batch_size * batch.accumulation
        rates = rates_of(plan, self.cluster, own_traits())
        computed_s = sizes.flops * sequences * plan.row_tokens / rates.best_flops_per_s / ranks
        micro, each_s, once_s = self.larger.get(_alike(plan), (0, 0.0, 0.0))
        if batch.micro_batch_size < micro:
            computed_s = max(computed_s, (each_s * sequences + once_s) / ranks)
        return max(computed_s, self.slower * self._sent_s(plan, sizes) / ranks)

    def seconds(self, plan: Plan) -> float:
        """The same with all kernels, and with what is sent between them; of a pipeline, until all stages are filled and
        drained."""
        batch, ranks = plan.batch, plan.layout.pp
        if ranks > 1:
            through, once_s = self._through(plan), self._computed_s(plan)[1]
            step_s = through.step_s(plan, batch.accumulation, 1, self._message_s(plan), self._block_s(plan))
            return max(self.slower * step_s + once_s / ranks, self.roughly(plan))
        return max(sum(self._computed_s(plan)), self.roughly(plan))

    def _message_s(self, plan: Plan) -> float:
        """What the hidden states of a micro-batch take from a rank to the next."""
        return wires_of(plan.layout, self.cluster).message_s(border_bytes(self._costed(unstaged(plan)), plan))

    def _block_s(self, plan: Plan) -> BlockSeconds:
        """Of a block as large as the mean, by what is gathered and reduced of all."""
        if not plan.sharded:
            return NOTHING
        sizes, wires = self._sizes(unstaged(plan)), wires_of(plan.layout, self.cluster)
        share = sizes.blocks / max(1, sizes.gathered)
        gathered_s = wires.seconds("all_gather", "fsdp", sizes.gathered)
        reduced_s = wires.seconds("reduce_scatter", "fsdp", sizes.trained * BYTES[plan.precision.reduce])
        count = self.spec.num_hidden_layers
        all_trained = plan.lora is None and not plan.frozen
        return BlockSeconds(share * gathered_s / count, share * reduced_s / count * all_trained)

    def degrees_s(self, plan: Plan) -> float:
        """What no plan of these degrees and this schedule can beat, with micro-batches of any size up to the plan's."""
        batch, once_s = plan.batch, self._computed_s(plan)[1]
        sequences, parts = batch.micro_batch_size * batch.accumulation, batch.micro_batch_size
        step_s = self._through(plan).step_s(plan, sequences, parts, self._message_s(plan))
        return self.slower * step_s + once_s / plan.layout.pp

    def _computed_s(self, plan: Plan) -> tuple[float, float]:
        """Of the plan without stages, what its micro-batches take, and what is done once a step."""
        key, whole, batch = (plan.batch, _alike(plan)), unstaged(plan), plan.batch
        if key not in self.computed_s:
            costed, traits = self._costed(whole), own_traits()
            each_s, once_s = self._through(plan).whole_s, step.once_s(costed, whole, self.cluster, traits)
            self.computed_s[key] = batch.accumulation * each_s * self.slower, once_s
            if self.cluster.kind == "cuda":
                larger = batch.micro_batch_size, each_s / batch.micro_batch_size * self.slower, once_s
                self.larger[_alike(plan)] = max(self.larger.get(_alike(plan), (0, 0.0, 0.0)), larger)
        return self.computed_s[key]

    def _through(self, plan: Plan) -> Through:
        """Through all units, what a micro-batch takes."""
        key, whole = (replace(plan.batch, accumulation=1), _alike(plan)), unstaged(plan)
        if key not in self.through:
            costed = self._costed(whole)
            kinds = step.least(costed, whole, self.cluster, own_traits())
            stem, *blocks, tail = (kinds[0], *(kinds[1 + kind] for kind in costed.order), kinds[-1])
            self.through[key] = Through.of(stem, blocks, tail)
        return self.through[key]

    def _sizes(self, whole: Plan) -> Sizes:
        key = _alike(whole)
        if key not in self.sizes:
            costed = self._costed(whole)
            weights = [
                (prod(map(int, weight.shape)) * times, weight, unit)
                for unit, times in costed.repeated()
                for weight in unit.weights
            ]
            flops = sum(times * _flops(unit) for unit, times in costed.repeated())
            if whole.layout.ep > 1:  # what other ranks than those of fsdp have: not counted, so a bound
                weights = [each for each in weights if not is_expert(each[1].name)]
            gathered = [(n * BYTES[weight.used_as], unit.name) for n, weight, unit in weights]
            self.sizes[key] = Sizes(
                flops,
                sum(size for size, _ in gathered),
                sum(size for size, name in gathered if name == "block"),
                sum(n for n, weight, _ in weights if weight.trained),
                sum(n for n, weight, unit in weights if weight.trained and unit.stays),
            )
        return self.sizes[key]

    def _sent_s(self, plan: Plan, sizes: Sizes) -> float:
        """Seconds for which the dial keeps the links of its weights busy, at least; on GPUs, gathers and reductions
        share them."""
        layout, strategy, m = plan.layout, plan.shard.strategy, plan.batch.accumulation
        wires = wires_of(layout, self.cluster)
        reduced = sizes.trained * BYTES[plan.precision.reduce]
        if strategy == "ddp":
            return wires.seconds("all_reduce", "loss", reduced)
        gathers, reduces = m if strategy == "zero3" else 1, 1 if strategy == "zero1" else m
        again = sizes.blocks if strategy == "zero3" and not plan.frozen else 0  # for backward
        gathered_s = gathers * wires.seconds("all_gather", "fsdp", sizes.gathered + again)
        reduced_s = reduces * wires.seconds("reduce_scatter", "fsdp", reduced)
        sliced_s = gathered_s + reduced_s if self.cluster.kind == "cuda" else max(gathered_s, reduced_s)
        return max(sliced_s, wires.seconds("all_reduce", "dp_replicate", reduced // layout.fsdp))


def _on_device(costed: Sheet, plan: Plan) -> dict[str, int]:
    """What of weights and moments the device holds."""
    state, moved = (optim.state_bytes(each, plan) for each in (costed, elsewhere(costed)))
    return offload.on_device(state, moved["moments"], costed, plan)


def _alive(plan: Plan) -> int:
    """How many forwards of a stage the first rank of a pipeline has done at some time before it does a backward."""
    ranks, each, m = plan.layout.pp, plan.pipeline.stages_per_rank, plan.batch.accumulation
    if SCHEDULES[plan.pipeline.schedule].shape == "v" or plan.pipeline.schedule == "gpipe":
        return m if plan.pipeline.schedule == "gpipe" else min(m, 2 * ranks - 1)
    return min(m * each, each * ranks)


def _most_alive(plan: Plan, rank: int, m: int) -> int:
    """At most so many forwards has a rank of a pipeline done whose gradients are not."""
    ranks, each = plan.layout.pp, plan.pipeline.stages_per_rank
    most = {
        "gpipe": m,
        "1f1b": ranks - rank,
        "interleaved": (each - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
        "interleaved_zb": each * ranks,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }
    return min(m * each, most[plan.pipeline.schedule])


@lru_cache(maxsize=8 * KEPT_UNITS)
def _kept_bytes(block: Unit, b: int, s: int) -> int:
    """What a block keeps of a micro-batch from forward to backward, its input included."""
    ops = [op for i, op in enumerate(block.forward) if not block.recompute or i in block.saved_ops]
    freed = {tensor for op in ops for tensor in op.frees} if not block.recompute else set()
    made = {tensor for op in ops for tensor in op.allocates} - freed - {block.output}
    kept = made | ({block.input} if block.recompute or block.input in block.saved else set())
    return sum(block.tensors[tensor].bytes(b, s) for tensor in kept)


def _alike(plan: Plan) -> object:
    """What plans have in common that compute the same in micro-batches of another size, and shard it over others."""
    return plan.remat, plan.compile, plan.offload, replace(techniques.inside(plan), batch=Batch())


@lru_cache(maxsize=8 * KEPT_UNITS)
def _flops(unit: Unit) -> int:
    """Operations of a unit's products for one token, recomputation included."""
    again = [op for i, op in enumerate(recomputed(unit)) if i not in unit.saved_ops] if unit.recompute else []
    return sum(op.flops for op in (*unit.forward, *again, *unit.backward) if op.kind == "matmul" and op.per == "b*s")
