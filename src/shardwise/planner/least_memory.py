"""The memory that no plan can do without, found without pricing it: bytes that are there at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise.methods.head import loss_bytes
from shardwise.planner.figures import Own, PlanFigures, Sizes, alike, on_device
from shardwise.planner.held import recomputed
from shardwise.planner.overhead import fixed_bytes
from shardwise.planner.price import unstaged
from shardwise.spec.layout import stage_rank
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import KEPT_UNITS, Unit
from shardwise.techniques.offload.legal import leave_early
from shardwise.techniques.states import slices_over


class PassBytes(NamedTuple):
    """Bytes that the passes of a micro-batch hold at least: what all blocks keep from forward to backward, and the last
    of them; what is there of that one when its backward begins; and what the loss holds at once."""

    kept: int
    last: int
    saved: int
    loss: int


@dataclass
class LeastMemory:
    """The least memory of the plans whose ``figures`` are known."""

    figures: PlanFigures
    known: dict[object, PassBytes] = field(default_factory=dict)
    blocks: dict[object, tuple[float, float, float, Unit]] = field(default_factory=dict)

    def stand(self, plan: Plan, share: float) -> bool:
        """Return whether that is at most ``share`` of the device's memory."""
        return all(needed <= share for needed in self._needed(plan))

    def share(self, plan: Plan) -> float:
        """The share of the device's memory that the plan needs at least."""
        return max(self._needed(plan))

    def _needed(self, plan: Plan) -> Iterator[float]:
        """Yield shares of the memory that the plan needs. First weights, moments, and gradients or gathered weights:
        most plans of large models need no more to be ruled out."""
        sizes, slices = self.figures.sizes(plan), plan.layout.fsdp if plan.sharded else 1
        gathered = sizes.gathered * (plan.shard.strategy in ("zero1", "zero2"))
        gradients = sizes.trained * BYTES[plan.precision.weights] // slices
        experts = plan.layout.size("expert_fsdp") if plan.sharded else 1
        gradients += sizes.trained_experts * BYTES[plan.precision.weights] // experts
        if leave_early(plan) and (plan.batch.accumulation == 1 or plan.offload.sums == "host"):
            gradients = sizes.stays * BYTES[plan.precision.weights] // slices
        memory, fixed = self.figures.cluster.device.memory_bytes, sum(fixed_bytes(plan, self.figures.cluster).values())
        state, staged = self.figures.state(plan).held, plan.layout.pp > 1
        yield (fixed + (state + max(gradients, gathered)) / plan.layout.pp) / memory
        most = self._first_rank_bytes(plan) if staged else state + self._passes_bytes(plan, sizes, gradients)
        yield (fixed + most) / memory

    def _passes_bytes(self, plan: Plan, sizes: Sizes, gradients: int) -> int:
        """Return what the last micro-batch holds at least of a plan without stages, besides its state: when the loss is
        computed, when the last block's backward begins, for which its forward may have run again, and when the
        gradients of that block, or of its experts before them, have been copied to be reduced. By then what the tail
        has gathered and added up may be gone."""
        passes, dial, precision = self._held(plan), plan.shard.strategy, plan.precision
        block, experts, several = sizes.last_block, sizes.last_experts, plan.batch.accumulation > 1
        tail = added = 0  # of the gradients of other micro-batches, the tail's and those of the block's experts
        ahead, again = 0, False  # again: to those of other micro-batches autograd adds
        if dial == "ddp":
            whole = ends = 0
            block = experts = Own(0, 0, 0)
        elif dial == "zero3":
            whole = ends = sizes.tail.gathered
            ahead = 0 if plan.frozen else sizes.ahead
        else:
            whole, ends = sizes.gathered + sizes.experts, sizes.gathered - sizes.blocks
        before = gradients if several else 0
        if several and dial == "zero1":
            each = BYTES[precision.reduce]
            before, tail = (sizes.trained + sizes.trained_experts) * each, sizes.tail.trained * each
            added, again = experts.trained * each, precision.reduce == precision.compute
        elif several and plan.layout.dp_replicate > 1:  # each replica's part, as it is reduced
            before = before * min(BYTES[precision.reduce], BYTES[precision.weights]) // BYTES[precision.weights]
        elif leave_early(plan):
            tail = min(before, sizes.tail.trained * BYTES[precision.weights])
        gathered, behind = whole - ends + ahead, before - tail  # besides the last block's
        kept, stay = passes.kept - passes.last, dial in ("zero1", "zero2")
        reads = block.gathered * (dial == "zero3") + passes.saved
        apart = experts.reduced(precision.reduce, added=again)
        apart += block.gathered * (dial == "zero3") - experts.gathered * stay
        whole_block = block.reduced(precision.reduce, added=again) - (block.gathered + experts.gathered) * stay - added
        return max(
            before + whole + passes.kept + passes.loss, behind + gathered + kept + max(reads, apart, whole_block)
        )

    def _held(self, plan: Plan) -> PassBytes:
        """Return what the passes of a micro-batch hold."""
        key = plan.batch.micro_batch_size, plan.batch.loss_chunk_tokens, alike(plan)
        if key not in self.known:
            costed, b, s = self.figures.sheet(plan), plan.batch.micro_batch_size, plan.row_tokens
            last = costed.blocks[costed.order[-1]]
            order = costed.order if plan.offload.activations == "none" else ()  # of inputs that wait, the last block's
            kept = sum(_kept_bytes(costed.blocks[kind], b, s) for kind in order) or _kept_bytes(last, b, s)
            loss = loss_bytes(costed, plan, self.figures.cluster.kind)
            self.known[key] = PassBytes(kept, _kept_bytes(last, b, s), _saved_bytes(last, b, s), loss)
        return self.known[key]

    def _first_rank_bytes(self, plan: Plan) -> float:
        """Return what the first rank of a pipeline holds at least when most of its micro-batches are alive: the state
        of its blocks, their weights and gradients where they are kept whole, and what its blocks keep for backward."""
        whole, batch = unstaged(plan), plan.batch
        key = plan.layout.fsdp, plan.shard, batch.micro_batch_size, alike(plan)
        if key not in self.blocks:
            costed = self.figures.own_sheet(plan)
            least = min(costed.blocks, key=lambda one: _kept_bytes(one, batch.micro_batch_size, plan.row_tokens))
            state, gathered = on_device(costed.with_ends(stem=False, head=False), whole), 0
            times = Counter(costed.order)
            weights = [
                (times[kind] * prod(map(int, w.shape)), w) for kind in times for w in costed.blocks[kind].weights
            ]
            trained = [(n, weight) for n, weight in weights if weight.trained]
            slices = [plan.layout.size(slices_over(w.name, plan)) if plan.sharded else 1 for _, w in trained]
            own_share = sum(n // each for (n, _), each in zip(trained, slices, strict=True))
            gradients = own_share * BYTES[plan.precision.weights]
            if plan.sharded and plan.shard.strategy in ("zero1", "zero2"):
                gathered = sum(n * BYTES[weight.used_as] for n, weight in weights)
            if plan.sharded and plan.shard.strategy == "zero1":
                gradients = sum(n for n, _ in trained) * BYTES[plan.precision.reduce]
            first = costed.blocks[0]
            even = all(b.weights[0].shape == first.weights[0].shape and not b.stays for b in costed.blocks)
            count = len(costed.order) if even and len(costed.blocks) < 3 else float("inf")
            self.blocks[key] = state / count, gathered / count, gradients / count, least
        state_bytes, gathered_bytes, gradient_bytes, block = self.blocks[key]
        ranks, each, m = plan.layout.pp, plan.pipeline.stages_per_rank, batch.accumulation
        own = [n for number, n in enumerate(plan.pipeline.split) if stage_rank(plan.layout, number) == 0]
        alive, all_bytes = _alive(plan), gathered_bytes * sum(own)
        stay = min(own) if plan.offload.activations == "none" else 1  # of inputs that wait elsewhere, the last block's
        kept = all_bytes + alive * stay * _kept_bytes(block, batch.micro_batch_size, plan.row_tokens)
        # Every stage has had a backward before the last forward of so many micro-batches.
        if m * each - alive > (each - 1) * ranks:
            return state_bytes * sum(own) + kept + gradient_bytes * sum(own)
        # Else some stages are done with their last before others begin.
        one = (gathered_bytes + gradient_bytes) * max(own)
        added = 0.0 if plan.shard.strategy == "zero1" else gradient_bytes * sum(own)
        return state_bytes * sum(own) + max(kept, one, added)


def _alive(plan: Plan) -> int:
    """Return how many forwards of a stage the first rank of a pipeline has done at some time before it does a
    backward."""
    ranks, each, m = plan.layout.pp, plan.pipeline.stages_per_rank, plan.batch.accumulation
    if plan.pipeline.spec.alive is None:
        return m * each
    return min(m, 2 * ranks - 1) if plan.pipeline.spec.shape == "v" else min(m * each, each * ranks)


@lru_cache(maxsize=8 * KEPT_UNITS)
def _kept_bytes(block: Unit, b: int, s: int) -> int:
    """Return what a block keeps of a micro-batch from forward to backward, its input included."""
    ops = [op for i, op in enumerate(block.forward) if not block.recompute or i in block.saved_ops]
    freed = {tensor for op in ops for tensor in op.frees} if not block.recompute else set()
    made = {tensor for op in ops for tensor in op.allocates} - freed - {block.output}
    kept = made | ({block.input} if block.recompute or block.input in block.saved else set())
    return sum(block.tensors[tensor].bytes(b, s) for tensor in kept)


@lru_cache(maxsize=8 * KEPT_UNITS)
def _saved_bytes(block: Unit, b: int, s: int) -> int:
    """Return what a block's own operations have made that is there when its backward begins."""
    made = {tensor for op in recomputed(block) for tensor in op.allocates} & block.saved
    return sum(block.tensors[tensor].bytes(b, s) for tensor in made)
