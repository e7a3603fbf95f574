"""The times at which each rank of a pipeline computes and idles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.techniques.pp.actions import Action


class Timed(NamedTuple):
    """A computation, and when it starts and ends."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replay:
    """A step of a pipeline, and what each rank computes in it."""

    makespan_s: float
    computed: tuple[tuple[Timed, ...], ...]

    def scaled(self, factor: float) -> Replay:
        """Return the same step where all takes ``factor`` times as long."""
        computed = (tuple(Timed(a, factor * start, factor * end) for a, start, end in each) for each in self.computed)
        return Replay(factor * self.makespan_s, tuple(computed))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each rank in which it computes."""
        return tuple(sum(one.end_s - one.start_s for one in rank) for rank in self.computed)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of each rank in which it computes nothing."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Each rank's part of the makespan in which it computes nothing."""
        return tuple(idle / self.makespan_s if self.makespan_s else 0.0 for idle in self.idle_s)

    @property
    def bubble(self) -> float:
        """The part of the makespan in which a rank computes nothing, on average over all ranks."""
        return sum(self.idle_shares) / len(self.idle_shares)
