"""The gradients at each moment of a step where every rank holds all weights: on their way in buckets."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from shardwise.planner.events import Send
from shardwise.planner.tape import Tape
from shardwise.planner.weights import HEAD, Weights
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.sheet import Sheet, Tensor
from shardwise.techniques.shard import gradient_bytes
from shardwise.techniques.shard.replicas import buckets
from shardwise.techniques.states import summed_over


class Queue:
    """Buckets of gradients that are summed over one group, in the order in which they are sent."""

    def __init__(self, buckets: list[list[str]], over: str) -> None:
        self.buckets, self.over, self.sent = buckets, over, 0
        self.missing = [len(names) for names in buckets]
        self.bucket_of = {name: i for i, names in enumerate(buckets) for name in names}

    def arrived(self, name: str) -> Iterator[int]:
        """The numbers of the buckets that are sent once the gradient of this name is there."""
        self.missing[self.bucket_of[name]] -= 1
        while self.sent < len(self.buckets) and self.missing[self.sent] == 0:
            yield self.sent
            self.sent += 1


class Replicated(Weights):
    """Every rank holds all weights. The last micro-batch flattens gradients bucket by bucket."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        super().__init__(tape, sheet, plan)
        self.bytes = BYTES[plan.precision.weights]
        self.size = gradient_bytes(sheet, plan)
        over = ["loss", *["expert_loss"] * (plan.layout.ep > 1)]
        self.queues = [Queue(self._of(group), group) for group in over if plan.layout.size(group) > 1]
        self.queue_of = {name: queue for queue in self.queues for names in queue.buckets for name in names}
        self.last_sent: Hashable = None

    def _of(self, group: str) -> list[list[str]]:
        """The buckets of gradients that are summed over a group."""
        sizes = [(name, size) for name, size in self.size.items() if summed_over(name, self.plan) == group]
        return buckets(sizes, self.plan.shard.bucket_bytes)

    def kept(self) -> Hashable:
        return super().kept(), tuple((tuple(queue.missing), queue.sent) for queue in self.queues), self.last_sent

    def restore(self, kept: Any) -> None:
        alive, queues, self.last_sent = kept
        super().restore(alive)
        for queue, (missing, sent) in zip(self.queues, queues, strict=True):
            queue.missing, queue.sent = [*missing], sent

    def gradient(self, weight: Tensor, name: Hashable) -> None:
        self._arrived(f"layers.{name}.{weight.name}" if isinstance(name, int) else weight.name)

    def head_gradient(self) -> None:
        if self.tied:
            assert self.output is not None
            self.tape.make(HEAD, "gradients", self.size[self.output.name])
        else:
            self._arrived("head.weight")

    def _arrived(self, name: str) -> None:
        self.tape.hold(("grad", name), "gradients", self.size[name])
        self.leaving.whole(("grad", name), self.size[name], last=self.last)
        if self.last and (queue := self.queue_of.get(name)):
            for index in queue.arrived(name):
                self._send(queue, index)

    def _send(self, queue: Queue, number: int) -> None:
        names, index = queue.buckets[number], (queue.over, number)
        total = sum(self.size[name] for name in names)
        if len(names) > 1:
            self.tape.make(("bucket", index), "gradients", total)
            self.leaving.bucketed["bucket", index] = [("grad", name) for name in names]
            for name in names:
                self.tape.free(("grad", name))
            self.copy(total)
        wire = BYTES[self.plan.precision.reduce]
        if self.plan.precision.reduce != self.plan.precision.weights:
            self.tape.make(("wire", index), "buffers", total // self.bytes * wire)
            self.copy(total)
        self.tape.record("compute", ("bucket", index))
        self.tape.wait("reduce", ("bucket", index))
        self.tape.add(Send("all_reduce", queue.over, "gradients", total // self.bytes * wire, "reduce"))
        self.last_sent = ("summed", index)
        self.tape.record("reduce", self.last_sent)

    def end(self) -> None:
        if self.last and self.last_sent:  # behind all others in their stream
            self.tape.wait("compute", self.last_sent)
