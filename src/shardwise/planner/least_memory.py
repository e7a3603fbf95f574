"""The memory that no plan can do without, found without pricing it: bytes that are there at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from shardwise import techniques
from shardwise.methods.loss_memory import loss_bytes
from shardwise.planner.figures import PlanFigures, alike, on_device
from shardwise.planner.held import recomputed
from shardwise.planner.overhead import fixed_bytes
from shardwise.planner.price import unstaged
from shardwise.spec.layout import stage_rank
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import KEPT_UNITS, Unit


@dataclass
class LeastMemory:
    """The least memory of the plans whose ``figures`` are known."""

    figures: PlanFigures
    known: dict[object, techniques.PassBytes] = field(default_factory=dict)
    blocks: dict[object, tuple[tuple[float, ...], Unit]] = field(default_factory=dict)

    def may_fit(self, plan: Plan, share: float) -> bool:
        """Return whether the least memory of the plan is at most ``share`` of the device's."""
        return all(needed <= share for needed in self._needed(plan))

    def share(self, plan: Plan) -> float:
        """The share of the device's memory that the plan needs at least."""
        return max(self._needed(plan))

    def _needed(self, plan: Plan) -> Iterator[float]:
        """Yield shares of the memory that the plan needs. First weights, moments, and gradients or gathered weights:
        most plans of large models need no more to be ruled out."""
        sizes = self.figures.sizes(plan)
        state = self.figures.state(plan).held
        staged = plan.layout.pp > 1
        gradients = sizes.gradient_bytes(plan, leave=techniques.leave_at_once(plan))
        gathered = sizes.gathered_bytes(plan)
        memory, fixed = self.figures.cluster.device.memory_bytes, sum(fixed_bytes(plan, self.figures.cluster).values())
        yield (fixed + (state + max(gradients, gathered)) / plan.layout.pp) / memory
        if staged:
            yield (fixed + self._first_rank_bytes(plan)) / memory
        else:
            early = techniques.leave_early(plan)
            passes = sizes.passes_bytes(self._held(plan), plan, gradients, early=early)
            yield (fixed + state + passes) / memory

    def _held(self, plan: Plan) -> techniques.PassBytes:
        """Return what the passes of a micro-batch hold."""
        key = plan.batch.micro_batch_size, plan.batch.loss_chunk_tokens, alike(plan)
        if key not in self.known:
            costed = self.figures.sheet(plan)
            b = plan.batch.micro_batch_size
            s = plan.row_tokens
            last = costed.blocks[costed.order[-1]]
            order = costed.order if plan.offload.activations == "none" else ()  # of inputs that wait, the last block's
            kept = sum(_kept_bytes(costed.blocks[kind], b, s) for kind in order) or _kept_bytes(last, b, s)
            loss = loss_bytes(costed, plan, self.figures.cluster.kind)
            self.known[key] = techniques.PassBytes(kept, _kept_bytes(last, b, s), _saved_bytes(last, b, s), loss)
        return self.known[key]

    def _first_rank_bytes(self, plan: Plan) -> float:
        """Return what the first rank of a pipeline holds at least when most of its micro-batches are alive: the state
        of its blocks, their weights and gradients where they are kept whole, and what its blocks keep for backward."""
        whole, batch = unstaged(plan), plan.batch
        key = plan.layout.fsdp, plan.shard, batch.micro_batch_size, alike(plan)
        if key not in self.blocks:
            costed = self.figures.own_sheet(plan)
            least = min(costed.blocks, key=lambda one: _kept_bytes(one, batch.micro_batch_size, plan.row_tokens))
            state = on_device(costed.with_ends(embedding=False, head=False), whole)
            first, sizes = costed.blocks[0], self.figures.sizes(plan)
            even = all(b.weights[0].shape == first.weights[0].shape and not b.stays for b in costed.blocks)
            count = len(costed.order) if even and len(costed.blocks) < 3 else float("inf")
            self.blocks[key] = tuple(each / count for each in (state, *sizes.block_bytes(plan))), least
        (state_bytes, gathered_bytes, gradient_bytes, summed_bytes), block = self.blocks[key]
        ranks = plan.layout.pp
        each = plan.pipeline.stages_per_rank
        m = batch.accumulation
        own = [n for number, n in enumerate(plan.pipeline.split) if stage_rank(plan.layout, number) == 0]
        alive, all_blocks = techniques.alive_before(plan), sum(own)
        stay = min(own) if plan.offload.activations == "none" else 1  # of inputs that wait elsewhere, the last block's
        kept = gathered_bytes * all_blocks + alive * stay * _kept_bytes(block, batch.micro_batch_size, plan.row_tokens)
        # Every stage has had a backward before the last forward of so many micro-batches.
        if m * each - alive > (each - 1) * ranks:
            return (state_bytes + gradient_bytes) * all_blocks + kept
        # Else some stages are done with their last before others begin.
        one = (gathered_bytes + gradient_bytes) * max(own)
        return state_bytes * all_blocks + max(kept, one, summed_bytes * all_blocks)


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
