"""What a strategy holds, sends and copies at least, found without a step being played: no plan takes less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple, Protocol

from shardwise.models.config import ModelSpec
from shardwise.models.roles import is_expert
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import stage_rank
from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.sheet import Sheet, Tensor, Unit
from shardwise.techniques.between import StageTimes
from shardwise.techniques.coded_gather import may_be_codes


class Own(NamedTuple):
    """Sizes of some weights before they are sharded: the bytes that they are once they are gathered (four-bit codes
    stay so), how many numbers are trained, the bytes of their gradients as backward makes them, and those that are
    ``sent`` at least to gather them."""

    gathered: int = 0
    trained: int = 0
    made: int = 0
    sent: int = 0

    @classmethod
    def of(cls, weights: Iterable[tuple[Tensor, int, bool]]) -> Own:
        """Return the sizes of weights that are there so often; some may be sent as codes of a byte."""
        each = [
            (times * prod(map(int, one.shape)), BYTES[one.used_as], one.trained, coded) for one, times, coded in weights
        ]
        made = sum(numbers * size * trained for numbers, size, trained, _ in each)
        gathered = sum(numbers * size for numbers, size, *_ in each)
        sent = sum(numbers * (1 if coded else size) for numbers, size, _, coded in each)
        return cls(gathered, sum(numbers * trained for numbers, _, trained, _ in each), made, sent)

    def reduced(self, dtype: Dtype, *, added: bool) -> int:
        """Bytes of the gradients, unless they have been ``added`` to others, and of the buffer that is reduced."""
        return self.made * (not added) + self.trained * BYTES[dtype]


class PassBytes(NamedTuple):
    """Bytes that the passes of a micro-batch hold at least: what all blocks keep from forward to backward, and the last
    of them; what is there of that one when its backward begins; and what the loss holds at once."""

    kept: int
    last: int
    saved: int
    loss: int


class Links(Protocol):
    """The links of a cluster, as the groups of a layout use them."""

    @property
    def cluster(self) -> Cluster: ...

    def seconds(self, kind: str, group: str, size: float) -> float:
        """Return the seconds of one collective."""

    def least_s(self, kind: str, group: str, size: float, calls: int) -> float:
        """Return what so many collectives take at least that send ``size`` bytes together."""

    def links(self, group: str) -> str:
        """Name the links that a group's collectives share."""


CopySeconds = Callable[[float], float]
"""What a device takes at least to copy so many bytes."""


class Sizes(NamedTuple):
    """Sizes that plans have in common that differ in the strategy, in their micro-batches and in what they compute
    again: of all weights, of those in blocks, in the head and in the last block. ``experts`` that other ranks have than
    those of ``fsdp`` are told apart, all of them and the last block's. ``stays``: how many numbers the device updates
    where the host updates others; ``ahead``: what is gathered of the smallest block, if there are several."""

    whole: Own
    blocks: Own
    stays: int
    experts: Own
    head: Own
    last_block: Own
    last_experts: Own
    ahead: int

    @classmethod
    def of(cls, sheet: Sheet, plan: Plan) -> Sizes:
        codes = {unit: may_be_codes(unit, plan) for unit in sheet.units}

        def own(units: Iterable[tuple[Unit, int]], *, experts: bool = False) -> Own:
            weights = ((weight, times, weight.name in codes[unit]) for unit, times in units for weight in unit.weights)
            apart = plan.layout.ep > 1
            return Own.of(each for each in weights if (apart and is_expert(each[0].name)) is experts)

        units, last = [*sheet.repeated()], [(sheet.blocks[sheet.order[-1]], 1)]
        return cls(
            whole=own(units),
            blocks=own((unit, times) for unit, times in units if unit.name == "block"),
            stays=own((unit, times) for unit, times in units if unit.stays).trained,
            experts=own(units, experts=True),
            head=own([(sheet.head, 1)]),
            last_block=own(last),
            last_experts=own(last, experts=True),
            ahead=min(own([(block, 1)]).sent for block in sheet.blocks) if len(sheet.order) > 1 else 0,
        )

    def gradient_bytes(self, plan: Plan, *, leave: bool) -> int:
        """Return the bytes of a rank's gradients once they are summed, without stages; where they ``leave`` the device
        at once, of those that stay."""
        each, slices = BYTES[plan.precision.weights], plan.layout.fsdp if plan.sharded else 1
        if leave:
            return self.stays * each // slices
        experts = plan.layout.size("expert_fsdp") if plan.sharded else 1
        return self.whole.trained * each // slices + self.experts.trained * each // experts

    def gathered_bytes(self, plan: Plan) -> int:
        """Return the bytes of gathered weights that stay for the whole step."""
        return self.whole.gathered * _stays(plan)

    def block_bytes(self, plan: Plan) -> tuple[int, int, int]:
        """Return, of all blocks on ranks of a pipeline, the bytes of gathered weights that stay, and those of
        gradients: that wait for the last micro-batch, and when all are summed, unless only that sums them."""
        gathered = (self.blocks.gathered + self.experts.gathered) * _stays(plan)
        summed = self._replace(whole=self.blocks).gradient_bytes(plan, leave=False)
        if plan.shard.accumulates:
            return gathered, (self.blocks.trained + self.experts.trained) * BYTES[plan.precision.reduce], 0
        return gathered, summed, summed

    def passes_bytes(self, passes: PassBytes, plan: Plan, gradients: int, *, early: bool) -> int:
        """Return what the last micro-batch holds at least of a plan without stages, besides its state: when the loss
        is computed, when the last block's backward begins, for which its forward may have run again, and when the
        gradients of that block, or of its experts before them, have been copied to be reduced. By then what the head
        has gathered and added up may be gone. ``gradients``: of a rank; they may leave ``early``."""
        strategy = plan.shard.strategy
        precision = plan.precision
        several = plan.batch.accumulation > 1
        block = self.last_block
        experts = self.last_experts
        each_time = strategy == "zero3"
        stays = _stays(plan)
        head = added = 0  # of the gradients of other micro-batches, the head's and those of the block's experts
        ahead, again = 0, False  # again: to those of other micro-batches they are added first
        if strategy == "ddp":
            whole = ends = 0
            block = experts = Own()
        elif each_time:
            whole = ends = self.head.gathered
            ahead = 0 if plan.frozen or not plan.shard.backward_prefetch else self.ahead
        else:
            whole = self.whole.gathered + self.experts.gathered
            ends = self.whole.gathered - self.blocks.gathered
        before = gradients if several else 0
        if several and plan.shard.accumulates:
            each = BYTES[precision.reduce]
            before, head = (self.whole.trained + self.experts.trained) * each, self.head.trained * each
            added, again = experts.trained * each, True
        elif several and plan.layout.dp_replicate > 1:  # each replica's part, as it is reduced
            before = before * min(BYTES[precision.reduce], BYTES[precision.weights]) // BYTES[precision.weights]
        elif early:
            head = min(before, self.head.trained * BYTES[precision.weights])
        reads = block.gathered * each_time + passes.saved
        apart = experts.reduced(precision.reduce, added=again)
        apart += block.gathered * each_time - experts.gathered * stays
        whole_block = block.reduced(precision.reduce, added=again) - (block.gathered + experts.gathered) * stays - added
        behind = before - head + whole - ends + ahead + passes.kept - passes.last  # besides the last block's
        return max(before + whole + passes.kept + passes.loss, behind + max(reads, apart, whole_block))

    def sent_s(self, plan: Plan, spec: ModelSpec, network: Links) -> float:
        """Return the seconds of a step for which a strategy keeps the links of its weights busy; on GPUs, gathers and
        reductions share them."""
        layout, each = plan.layout, BYTES[plan.precision.reduce]
        reduced, experts = self.whole.trained * each, self.experts.trained * each
        if plan.shard.strategy == "ddp":
            summed_s = network.seconds("all_reduce", "loss", reduced)
            return max(summed_s, network.seconds("all_reduce", "expert_loss", experts)) if experts else summed_s
        (gathers, again, reduces), blocks = _rounds(plan), spec.num_hidden_layers
        gathered = (gathers * self.whole.sent + again * self.blocks.sent) // (gathers + again)
        of_experts = sum(map(spec.has_experts, range(blocks)))
        busy, ways = defaultdict[str, float](float), defaultdict[str, float](float)
        for group, calls, size, summed in (
            ("fsdp", blocks, gathered, reduced),
            ("expert_fsdp", of_experts, self.experts.sent, experts),
        ):
            if size:
                gathered_s = (gathers + again) * network.least_s("all_gather", group, size, calls)
                summing = calls if _all_trained(plan) else 1
                reduced_s = reduces * network.least_s("reduce_scatter", group, summed, summing)
                busy[network.links(group)] += gathered_s + reduced_s
                ways["gather"] += gathered_s
                ways["reduce"] += reduced_s
        most_s = max((busy if network.cluster.kind == "cuda" else ways).values())
        return max(most_s, network.seconds("all_reduce", "dp_replicate", reduced // layout.fsdp))

    def copied_s(self, plan: Plan, copy_s: CopySeconds) -> float:
        """Return the seconds of a step, without stages, for which the device copies weights out of what was gathered,
        and gradients into what is reduced."""
        if not plan.sharded or plan.layout.pp > 1:
            return 0.0
        gathers, again, reduces = _rounds(plan)
        gathered = (gathers + again) * self.experts.gathered
        gathered += gathers * self.whole.gathered + again * self.blocks.gathered
        reduced = reduces * (self.whole.trained + self.experts.trained) * BYTES[plan.precision.reduce]
        return copy_s(gathered + reduced)


def _stays(plan: Plan) -> bool:
    """Return whether weights are gathered once, and stay for the whole step."""
    return plan.shard.strategy in ("zero1", "zero2")


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

    @classmethod
    def of(cls, sizes: Sizes, plan: Plan, spec: ModelSpec, network: Links, copy_s: CopySeconds) -> BlockSeconds:
        """Return those of a block of the mean size; of a stage, whose blocks may differ, of the smallest."""
        count, staged = spec.num_hidden_layers, plan.layout.pp > 1
        mean, sent = sizes.blocks.gathered / count, sizes.blocks.sent / count
        gathered, sent = (min(size, sizes.ahead or size) if staged else size for size in (mean, sent))
        each = BYTES[plan.precision.reduce] * _all_trained(plan)
        reduced = gathered * sizes.whole.trained * each / max(1, sizes.whole.gathered)
        if not plan.sharded:  # in buckets of many blocks, perhaps
            return cls(reduced=network.seconds("all_reduce", "loss", reduced * count) / count * (reduced > 0))
        even = not staged or all(map(spec.has_experts, range(count)))
        experts = sizes.experts
        spread, spread_sent, spread_reduced = (
            even * size / count for size in (experts.gathered, experts.sent, experts.trained * each)
        )

        def each_s(kind: str, group: str, size: float) -> float:
            return network.least_s(kind, group, size * count, count) / count

        apart = (
            each_s("all_gather", "expert_fsdp", spread_sent),
            each_s("reduce_scatter", "expert_fsdp", spread_reduced),
        )
        parts = reduced / plan.layout.fsdp, spread_reduced / plan.layout.size("expert_fsdp")
        return cls(
            each_s("all_gather", "fsdp", sent) + apart[0],
            each_s("reduce_scatter", "fsdp", reduced) + apart[1],
            copy_s(gathered + spread),
            copy_s(reduced + spread_reduced),
            apart,
            sum(each_s("all_reduce", "dp_replicate", part) for part in parts),
        )

    def stage(self, plan: Plan, number: int, blocks: int, passes_s: tuple[float, ...], *, trained: bool) -> StageTimes:
        """The times of a stage of so many blocks, of whose passes forward, backward and what of that may be put off
        compute so long. Gathers follow one another, and so do sums of gradients, between which these are copied; the
        last of a backward is waited for."""
        (forward, backward, later), n, strategy = passes_s, blocks, plan.shard.strategy
        halved = plan.pipeline.spec.splits_backward and trained
        each_time = strategy == "zero3" and plan.shard.reshard_after_forward is True
        again, last = n * each_time * (not plan.frozen), self.reduced - self.apart[1]
        backward += again * self.out
        gathered = max(n * self.out, n * self.gathered - forward)
        # With the sums of gradients, until the last is begun.
        given = max(backward, n * self.reduced - last) + n * self.into
        given = max(given, (again - 1) * (self.gathered - self.apart[0]) + (n - 1) * last)
        reduced = n * (self.reduced + self.into) if halved else given + last - backward
        waiting = opening = closing = 0.0
        if each_time:
            forward += gathered
        if plan.shard.accumulates:
            closing = reduced
        elif each_time or strategy == "zero2":
            backward, later = backward + reduced, later + reduced
        elif strategy == "ddp":
            closing = max(0.0, n * self.reduced - backward)
        if _stays(plan) and stage_rank(plan.layout, number) == 0:
            opening = gathered
        elif _stays(plan):
            waiting = n * (self.gathered + self.out)
        if halved:
            return StageTimes(
                {"F": forward, "B": backward, "I": backward - later, "W": later}, waiting, opening, closing, (0.0, 0.0)
            )
        after = last * (strategy in ("zero2", "zero3") and not plan.shard.accumulates), last
        return StageTimes({"F": forward, "B": backward}, waiting, opening, closing, after)


def _rounds(plan: Plan) -> tuple[int, int, int]:
    """Return how often a strategy gathers all weights in a step, and those of blocks again for backward, and how often
    it reduces gradients."""
    strategy, m = plan.shard.strategy, plan.batch.accumulation
    gathers, reduces = m if strategy == "zero3" else 1, 1 if plan.shard.accumulates else m
    again = strategy == "zero3" and plan.shard.reshard_after_forward is True and not plan.frozen
    return gathers, m * again, reduces


def _all_trained(plan: Plan) -> bool:
    return plan.lora is None and not plan.frozen
