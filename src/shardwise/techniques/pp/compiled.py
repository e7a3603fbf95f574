"""A schedule as one pass of sums and maxima: the order in which its actions can be timed, whatever they take.

Plans that share a schedule share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from shardwise.techniques.pp.actions import Kind, Lists, actions

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
    """A schedule, ready to be timed. ``code``: of a computation its rank, which of ``kinds`` it is, from where it takes
    something and where it leaves something; of a message its channel, -1 less the number of the end behind which it is
    received, and the same two. ``last``: of each rank the stage that it computes last."""

    kinds: tuple[Computation, ...]
    code: tuple[tuple[int, int, int, int], ...]
    places: int
    channels: int
    last: tuple[int, ...]

    def ends_s(
        self, takes: Sequence[tuple[float, float]], transfer_s: float, begin_s: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return when each rank is done; and, in one list, when each rank begins and then when each computation ends,
        in the order of the code. ``takes``: of each kind, its seconds, and how long before its end what it gives is
        there."""
        clock = [*begin_s]
        at = [0.0] * self.places
        free = [0.0] * self.channels
        ends = [*begin_s]
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
        return clock, ends


Coded = tuple[int, int, int, int]
"""Of a computation -1, its kind, and the messages that it takes and gives, which are numbers, 0 for none. Of one side
of a transfer the peer, the channel, what is sent, 0 where that is received, and 0."""


class _Code:
    """The parts of a :class:`Program`, of the lists of all ranks, in an order in which each action can be timed."""

    def __init__(self, lists: Lists) -> None:
        self.kinds: dict[Computation, int] = {}
        self.channels: dict[tuple[int, int], int] = {}
        self.code: list[tuple[int, int, int, int]] = []
        self.places = 2
        steps = [*self._coded(lists)]
        computed = [step for order in steps for step in order if step[0] < 0]
        self.made = {gives: NOBODY for _, _, _, gives in computed}  # where a message is
        self.come = {takes: NONE for _, _, takes, _ in computed if not takes or takes not in self.made}  # where taken
        self.sent = {message for order in steps for peer, _, message, _ in order if peer >= 0}
        self._order(steps)

    def _coded(self, lists: Lists) -> Iterator[list[Coded]]:
        whole = [action for order in lists for action in order if action.peer < 0]
        first = {action.stage: action for action in reversed(whole) if action.kind == "F"}
        last = {action.stage: action for action in whole if action.kind != "F"}
        given = {action.stage: action for action in whole if action.kind in ("B", "I")}
        micros = 1 + max((action.micro for action in whole), default=0)
        for rank, order in enumerate(lists):
            found = list[Coded]()
            for action in order:
                kind, stage, micro, peer = action
                forward = 2 * stage * micros + micro + 1  # what the stage takes, and its backward
                backward = forward + 3 * micros
                moved = (
                    (forward, forward + 2 * micros) if kind in ("F", "SEND_F") else (backward, backward - 2 * micros)
                )
                if peer < 0:
                    marks = first.get(stage) == action, last.get(stage) == action, given.get(stage) == action
                    number = self.kinds.setdefault(Computation(kind, stage, *marks), len(self.kinds))
                    found.append((-1, number, *(moved if kind != "W" else (0, 0))))
                else:
                    sends = kind in ("SEND_F", "SEND_B")
                    way = (rank, peer) if sends else (peer, rank)
                    found.append((peer, self.channels.setdefault(way, len(self.channels)), moved[1] * sends, 0))
            yield found

    def _order(self, steps: list[list[Coded]]) -> None:
        code = self.code
        made = self.made
        come = self.come
        ended = len(steps)
        latest, done = [*range(len(steps))], [0] * len(steps)  # latest: of each rank the number of its last end
        waiting = [(deque[int](), deque[int]()) for _ in self.channels]
        awake = dict.fromkeys(range(len(steps)))
        while awake:
            del awake[rank := next(iter(awake))]
            for peer, which, takes, gives in islice(steps[rank], done[rank], None):
                if peer < 0:
                    if takes not in come:
                        break
                    if gives:
                        made[gives] = self.places
                        self.places += 1
                        if gives not in self.sent:
                            come[gives] = made[gives]
                    code.append((rank, which, come[takes], made[gives] if gives else NOBODY))
                    latest[rank] = ended
                    ended += 1
                else:
                    sent, posted = waiting[which]
                    (sent if takes else posted).append(takes or latest[rank])
                    if sent and posted:
                        message = sent.popleft()
                        code.append((which, -1 - posted.popleft(), made[message], self.places))
                        come[message] = self.places
                        self.places += 1
                        if takes:
                            awake[peer] = None
                done[rank] += 1
        if any(step < len(order) for step, order in zip(done, steps, strict=True)):
            raise ValueError("the ranks of a pipeline wait for one another for ever")


@lru_cache(maxsize=128)
def program(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, trained: tuple[bool, ...]) -> Program:
    """Return the program of a schedule. Raises ValueError where its ranks wait for ever."""
    lists = actions(schedule, ranks, stages_per_rank, micro_batches, trained)
    made = _Code(lists)
    last = tuple(next(action.stage for action in reversed(order) if action.computes) for order in lists)
    return Program(tuple(made.kinds), tuple(made.code), made.places, len(made.channels), last)
