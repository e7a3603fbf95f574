"""The gradients at each moment of a step where every rank holds all weights: on their way in buckets, as replicas.py
sends them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import ceil, lcm
from typing import Any

from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet, Tensor
from shardwise.techniques.between import Gradients
from shardwise.techniques.events import EventLog, Send, UnitName
from shardwise.techniques.shard.paper import HEAD, StrategyWeights
from shardwise.techniques.shard.replicas import BucketQueue, blocks_of_bucket, buckets
from shardwise.techniques.states import summed_over


def gradient_bytes(sheet: Sheet, plan: Plan) -> dict[str, int]:
    """Bytes of each trained weight's gradient, by canonical name, in the model's order."""
    own = BYTES[plan.precision.weights]
    embedding, *kinds, head = (
        [(w.name, w.numel(1, 1) * own) for w in unit.weights if w.trained] for unit in sheet.units
    )
    sizes = dict(embedding)
    for index, kind in enumerate(sheet.order):
        sizes |= {f"layers.{index}.{name}": size for name, size in kinds[kind]}
    return sizes | dict(head)


def period(sheet: Sheet, plan: Plan, order: tuple[int, ...]) -> int:
    """Return after how many blocks all is done again between units, where the kinds of blocks repeat as in ``order``:
    when as many have filled their buckets. Where weights are gathered so many blocks ahead, no period is shorter."""
    if plan.sharded or plan.layout.size("loss") == 1:
        return len(order) * max(1, ceil(plan.shard.backward_prefetch / len(order)))
    sizes = gradient_bytes(replace(sheet, order=order), plan)
    block = sum(size for name, size in sizes.items() if name.startswith("layers.")) // len(order)
    return lcm(len(order), blocks_of_bucket(block, plan.shard.bucket_bytes))


class Replicated(StrategyWeights):
    """Every rank holds all weights. The last micro-batch flattens gradients bucket by bucket."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan, gradients: Gradients) -> None:
        super().__init__(log, sheet, plan, gradients)
        self.size = gradient_bytes(sheet, plan)
        self.buckets: dict[str, list[list[str]]] = {}
        for over in ("loss", *["expert_loss"] * (plan.layout.ep > 1)):
            if plan.layout.size(over) > 1:
                sizes = [(name, size) for name, size in self.size.items() if summed_over(name, plan) == over]
                self.buckets[over] = buckets(sizes, plan.shard.bucket_bytes)
        self.queues = {over: BucketQueue(filled) for over, filled in self.buckets.items()}
        self.bucket_of = {
            name: (over, number)
            for over, filled in self.buckets.items()
            for number, names in enumerate(filled)
            for name in names
        }
        self.last_sent: Hashable = None

    def kept(self) -> Hashable:
        queues = tuple((tuple(queue.missing), queue.sent) for queue in self.queues.values())
        return super().kept(), queues, self.last_sent

    def restore(self, kept: Any) -> None:
        alive, queues, self.last_sent = kept
        super().restore(alive)
        for queue, (missing, sent) in zip(self.queues.values(), queues, strict=True):
            queue.missing, queue.sent = [*missing], sent

    def gradient(self, weight: Tensor, name: UnitName) -> None:
        if isinstance(name, int):
            self._arrived(f"layers.{name}.{weight.name}", name)
        else:
            self._arrived(weight.name, "embedding")

    def head_gradient(self) -> None:
        if self.tied:
            assert self.output is not None
            self.log.make(HEAD, "gradients", self.size[self.output.name])
        else:
            self._arrived("head.weight", "embedding")

    def _arrived(self, name: str, unit: UnitName) -> None:
        self.log.hold(("grad", name), "gradients", self.size[name])
        self.gradients.whole(unit, ("grad", name), self.size[name], last=self.last)
        if self.last and name in self.bucket_of:
            over, number = self.bucket_of[name]
            for filled in self.queues[over].arrived(number):
                self._send(over, filled)

    def _send(self, over: str, number: int) -> None:
        names, index = self.buckets[over][number], (over, number)
        total = sum(self.size[name] for name in names)
        if len(names) > 1:
            self.log.make(("bucket", index), "gradients", total)
            self.gradients.flattened(("bucket", index), tuple(("grad", name) for name in names))
            for name in names:
                self.log.free(("grad", name))
            self.copy(total)
        precision = self.plan.precision
        wired = total // BYTES[precision.weights] * BYTES[precision.reduce]
        if precision.reduce != precision.weights:
            self.log.make(("wire", index), "reduce buffers", wired)
            self.copy(total)
        self.log.follow("reduce", ("bucket", index))
        self.log.add(Send("all_reduce", over, "gradients", wired, "reduce"))
        self.last_sent = ("summed", index)
        self.log.record("reduce", self.last_sent)

    def end(self) -> None:
        if self.last and self.last_sent:  # behind all others in their stream
            self.log.wait("compute", self.last_sent)
