"""A step of a pipeline, its lists of actions replayed by ranks that do what they can: what the planner's way through a
schedule (techniques/pp/compiled.py) is compared with, and lists that are wrong are found by."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwise.techniques.pp.actions import Action, Kind, Message
from shardwise.techniques.pp.replay import Replay, Timed

BEFORE: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
"""What must have been computed of the same stage and micro-batch."""
Seconds = Callable[[Action], float]


@dataclass
class _Channel:
    """The transfers from one rank to another: one at a time, in order, each once it is sent and its receive is
    posted."""

    sends: deque[tuple[float, Message]] = field(default_factory=deque)
    receives: deque[tuple[float, Message]] = field(default_factory=deque)
    free_s: float = 0.0


class _Progress:
    """Ranks that do their actions in order, each as far as it can."""

    def __init__(self, lists: Sequence[Sequence[Action]], seconds: Seconds, transfer_s: float, after: Seconds):
        self.lists, self.seconds, self.transfer_s, self.after = lists, seconds, transfer_s, after
        self.moved = [[(action.takes, action.gives) for action in order] for order in lists]
        self.given_s: dict[Message, float] = {}
        self.clock_s, self.place = [0.0] * len(lists), [0] * len(lists)
        self.computed: list[list[Timed]] = [[] for _ in lists]
        self.done: set[Action] = set()
        self.given: set[Message] = set()
        for order, moved in zip(lists, self.moved, strict=True):
            self.given |= {gives for action, (_, gives) in zip(order, moved, strict=True) if gives and action.computes}
        self.ready_s: list[dict[Message | None, float]] = [{} for _ in lists]  # when a rank has a tensor
        self.channels = defaultdict[tuple[int, int], _Channel](_Channel)  # by who sends and who receives
        self.awake = dict.fromkeys(range(len(lists)))  # ranks that may go on, in order: what they wait for may be there

    def finish(self) -> None:
        """Have all ranks do what they can. Raises ValueError where that is not everything."""
        while self.awake:
            del self.awake[rank := next(iter(self.awake))]
            self.advance(rank)
        if left := self.left():
            raise ValueError("; ".join(left))

    def advance(self, rank: int) -> None:
        """Have the rank do what it can."""
        order, moved, place = self.lists[rank], self.moved[rank], self.place[rank]
        while place < len(order):
            action, (takes, gives) = order[place], moved[place]
            if not action.computes:
                self.transfer(rank, action.peer, takes, gives)
            elif not self.compute(rank, action, takes, gives):
                break
            place += 1
        self.place[rank] = place

    def compute(self, rank: int, action: Action, takes: Message | None, gives: Message | None) -> bool:
        """Time a computation, if all that it needs will have come, and return whether it could be timed."""
        ready_s = self.ready_s[rank]
        if takes in self.given and takes not in ready_s:
            return False
        if action.kind in BEFORE and Action(BEFORE[action.kind], action.stage, action.micro) not in self.done:
            return False
        start_s = max(self.clock_s[rank], ready_s.get(takes, 0.0))
        self.clock_s[rank] = end_s = start_s + self.seconds(action)
        if gives:
            self.given_s[gives] = ready_s[gives] = end_s - self.after(action)
        self.computed[rank].append(Timed(action, start_s, end_s))
        self.done.add(action)
        return True

    def transfer(self, rank: int, peer: int, wanted: Message | None, sent: Message | None) -> None:
        """Post one side of a transfer; if the other was there before, find when the tensor arrives."""
        now_s = self.clock_s[rank]
        source, to = (rank, peer) if sent else (peer, rank)
        channel = self.channels[source, to]
        if sent:
            channel.sends.append((self.given_s.get(sent, now_s), sent))
        elif wanted:
            channel.receives.append((now_s, wanted))
        if channel.sends and channel.receives:
            (sent_s, sent), (posted_s, wanted) = channel.sends.popleft(), channel.receives.popleft()
            if sent != wanted:
                raise ValueError(f"rank {source} sends rank {to} {sent}, which has posted a receive of {wanted}")
            channel.free_s = max(sent_s, posted_s, channel.free_s) + self.transfer_s
            self.ready_s[to][wanted] = channel.free_s
            if to != rank:
                self.awake[to] = None

    def left(self) -> list[str]:
        """Return what the ranks could not do."""
        waits = [
            f"rank {rank} waits at {order[place]}"
            for rank, (order, place) in enumerate(zip(self.lists, self.place, strict=True))
            if place < len(order)
        ]
        for (source, to), channel in self.channels.items():
            waits += [f"rank {to} never receives {sent} of rank {source}" for _, sent in channel.sends]
            waits += [f"rank {source} never sends rank {to} {wanted}" for _, wanted in channel.receives]
        return waits


def replay(
    lists: Sequence[Sequence[Action]],
    seconds: Seconds,
    transfer_s: float = 0.0,
    after: Seconds | None = None,
    begin_s: Sequence[float] = (),
) -> Replay:
    """Replay a step in which each computation takes ``seconds(action)`` and each transfer ``transfer_s``. What a
    computation gives is there, and leaves, ``after(action)`` before it ends, or at its end. ``begin_s``: before when
    each rank does nothing. Sends never block; a rank waits only for what its next computation takes. Raises ValueError
    where ranks wait for ever, where the two sides of a channel have different orders, or where one side is missing."""
    run = _Progress(lists, seconds, transfer_s, after or (lambda action: 0.0))
    run.clock_s = [*begin_s] or run.clock_s
    run.finish()
    return Replay(max(run.clock_s), tuple(map(tuple, run.computed)))
