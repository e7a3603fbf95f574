"""A schedule as one pass of sums and maxima: the order in which its actions can be timed, whatever they take.

Plans that share a schedule share it; what :func:`replay.replay` finds with the same seconds is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.techniques.pp.actions import SEND, Action, Kind, Lists, Message, actions

NONE, NOBODY = 0, 1
"""Where a computation that takes nothing looks, and one that gives nothing leaves it."""


class Computation(NamedTuple):
    """Traits that computations have in common that take as long: whether it is the ``first`` forward of its stage, the
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
        """Return when each rank is done. ``takes``: of each kind, its seconds, and how long before its end what it
        gives is there."""
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
                start = at[source]
                if ends[-1 - kind] > start:
                    start = ends[-1 - kind]
                if free[rank] > start:
                    start = free[rank]
                free[rank] = at[target] = start + transfer_s
        return clock


class _Code:
    """The parts of a :class:`Program`, of the lists of all ranks, in an order in which each action can be timed."""

    def __init__(self, lists: Lists) -> None:
        whole = [action for order in lists for action in order if action.computes]
        first = {action.stage: action for action in reversed(whole) if action.kind == "F"}
        last = {action.stage: action for action in whole if action.kind != "F"}
        given = {action.stage: action for action in whole if action.kind in ("B", "I")}
        self.marked = [set(each.values()) for each in (first, last, given)]
        self.known = {action.gives for action in whole} - {None}
        self.kinds: dict[Computation, int] = {}
        self.code: list[tuple[int, int, int, int]] = []
        self.places = 2
        self.ready: list[dict[Message | None, int]] = [{} for _ in lists]  # where a rank has what has come to it
        self.channels: dict[tuple[int, int], tuple[int, deque[Message], deque[int]]] = {}
        self.latest, self.ended = [*range(len(lists))], len(lists)  # of each rank the number of its last end
        steps, awake = [0] * len(lists), dict.fromkeys(range(len(lists)))
        while awake:
            del awake[rank := next(iter(awake))]
            order, step = lists[rank], steps[rank]
            while step < len(order):
                action = order[step]
                if action.peer >= 0:
                    if (to := self.moves(rank, action)) not in (None, rank):
                        awake[to] = None
                elif not self.computes(rank, action):
                    break
                step += 1
            steps[rank] = step
        if any(step < len(order) for step, order in zip(steps, lists, strict=True)):
            raise ValueError("the ranks of a pipeline wait for one another for ever")

    def computes(self, rank: int, action: Action) -> bool:
        """Return whether what it takes has come, so that it could be timed."""
        takes, gives, ready = action.takes, action.gives, self.ready[rank]
        source = ready.get(takes, NONE)
        if source == NONE and takes in self.known:
            return False
        kind = Computation(action.kind, action.stage, *(action in each for each in self.marked))
        target = NOBODY
        if gives:
            target = ready[gives] = self.places
            self.places += 1
        self.code.append((rank, self.kinds.setdefault(kind, len(self.kinds)), source, target))
        self.latest[rank] = self.ended
        self.ended += 1
        return True

    def moves(self, rank: int, action: Action) -> int | None:
        """One side of a message; if the other was there before, which rank it has come to."""
        sends = action.kind in SEND.values()
        way = (rank, action.peer) if sends else (action.peer, rank)
        number, sent, posted = self.channels.setdefault(way, (len(self.channels), deque(), deque()))
        if sends and action.gives:
            sent.append(action.gives)
        else:
            posted.append(self.latest[rank])
        if not (sent and posted):
            return None
        message = sent.popleft()
        self.code.append((number, -1 - posted.popleft(), self.ready[way[0]][message], self.places))
        self.ready[way[1]][message] = self.places
        self.places += 1
        return way[1]


@lru_cache(maxsize=128)
def program(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, trained: tuple[bool, ...]) -> Program:
    """Return the program of a schedule. Raises ValueError where its ranks wait for ever."""
    lists = actions(schedule, ranks, stages_per_rank, micro_batches, trained)
    made = _Code(lists)
    last = tuple(next(action.stage for action in reversed(order) if action.computes) for order in lists)
    return Program(tuple(made.kinds), tuple(made.code), made.places, len(made.channels), last)
