"""A schedule as one pass of sums and maxima: the order in which its actions can be timed, whatever they take.

Plans that share a schedule share it; what :func:`replay.replay` finds with the same seconds is the same."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.techniques.pp.actions import Action, Kind, Lists, Message, actions
from shardwise.techniques.pp.replay import Progress

NONE, NOBODY = 0, 1
"""Where a computation that takes nothing looks, and one that gives nothing leaves it."""


class Computation(NamedTuple):
    """What computations have in common that take as long: whether it is the ``first`` forward of its stage, the
    ``last`` of its backwards, and the ``last_given`` of those that have a gradient of the input."""

    kind: Kind
    stage: int
    first: bool
    last: bool
    last_given: bool


@dataclass(frozen=True)
class Program:
    """``code``: of a computation its rank, which of ``kinds`` it is, from where it takes something and where it leaves
    something; of a message its channel, -1 less the number of the end behind which it is received, and the same two.
    ``last``: of each rank the stage that it computes last."""

    kinds: tuple[Computation, ...]
    code: tuple[tuple[int, int, int, int], ...]
    places: int
    channels: int
    last: tuple[int, ...]

    def ends_s(self, takes: Sequence[tuple[float, float]], transfer_s: float, begin_s: Sequence[float]) -> list[float]:
        """When each rank is done. ``takes``: of each kind, its seconds, and how long before its end what it gives is
        there."""
        clock, at, free, ends = [*begin_s], [0.0] * self.places, [0.0] * self.channels, [*begin_s]
        for rank, kind, source, target in self.code:
            if kind >= 0:
                seconds, after = takes[kind]
                start = clock[rank]
                if at[source] > start:
                    start = at[source]
                clock[rank] = end = start + seconds
                at[target] = end - after
                ends.append(end)
            else:
                free[rank] = at[target] = max(at[source], ends[-1 - kind], free[rank]) + transfer_s
        return clock


class _Compiler(Progress):
    """Goes through the actions as a replay does, and writes down in which order."""

    def __init__(self, lists: Lists) -> None:
        super().__init__(lists, lambda action: 0.0, 0.0, lambda action: 0.0)
        self.code: list[tuple[int, int, int, int]] = []
        self.places: dict[tuple[int, Message], int] = {}
        self.numbers: dict[tuple[int, int], int] = {}  # of channels
        self.waiting = defaultdict[tuple[int, int], tuple[deque[Message], deque[int]]](lambda: (deque(), deque()))
        self.latest, self.ended = [*range(len(lists))], len(lists)  # of each rank the number of its last end
        self.kinds: dict[Computation, int] = {}
        whole = [action for order in lists for action in order]
        self.first = {action.stage: action for action in reversed(whole) if action.kind == "F"}
        self.last = {action.stage: action for action in whole if action.kind in ("B", "I", "W")}
        self.last_given = {action.stage: action for action in whole if action.kind in ("B", "I")}

    def kind_of(self, action: Action) -> int:
        """The number of its kind."""
        ends = (each.get(action.stage) == action for each in (self.first, self.last, self.last_given))
        return self.kinds.setdefault(Computation(action.kind, action.stage, *ends), len(self.kinds))

    def at(self, rank: int, message: Message) -> int:
        """The place where a rank has it."""
        return self.places.setdefault((rank, message), len(self.places) + 2)

    def compute(self, rank: int, action: Action, takes: Message | None, gives: Message | None) -> bool:
        if not super().compute(rank, action, takes, gives):
            return False
        source = self.at(rank, takes) if takes in self.given and takes else NONE
        self.code.append((rank, self.kind_of(action), source, self.at(rank, gives) if gives else NOBODY))
        self.latest[rank] = self.ended
        self.ended += 1
        return True

    def transfer(self, rank: int, peer: int, wanted: Message | None, sent: Message | None) -> None:
        super().transfer(rank, peer, wanted, sent)
        channel = (rank, peer) if sent else (peer, rank)
        sends, receives = self.waiting[channel]
        if sent:
            sends.append(sent)
        else:
            receives.append(self.latest[rank])
        if sends and receives:
            number = self.numbers.setdefault(channel, len(self.numbers))
            message = sends.popleft()
            places = self.at(channel[0], message), self.at(channel[1], message)
            self.code.append((number, -1 - receives.popleft(), *places))


@lru_cache(maxsize=128)
def program(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, trained: tuple[bool, ...]) -> Program:
    """Of a schedule. Raises ValueError where its ranks wait for ever."""
    lists = actions(schedule, ranks, stages_per_rank, micro_batches, trained)
    run = _Compiler(lists)
    run.finish()
    last = tuple(next(action.stage for action in reversed(order) if action.computes) for order in lists)
    return Program(tuple(run.kinds), tuple(run.code), len(run.places) + 2, len(run.numbers), last)
