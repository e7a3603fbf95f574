"""The actions of each rank of a pipeline, in order, under each schedule. The planner tells a step along these lists,
and the runtime executes them.

    kind            of (stage, micro-batch)
    F, B            forward, and the whole backward
    I, W            backward in two parts: the gradient of the stage's input, and those of its weights
    SEND_F, RECV_F  hidden states, from a stage to the next
    SEND_B, RECV_B  the gradient of hidden states, from a stage to the one before

A send starts right after the computation that made its tensor and does not block. A receive is posted early, so that
its tensor may arrive while the rank computes, and is waited for where it is used. Nothing is sent between two stages
of one rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from shardwise.spec.layout import Layout, stage_rank
from shardwise.spec.pipelines import PIPELINES as SCHEDULES
from shardwise.techniques.pp import schedule_orders
from shardwise.techniques.pp.schedule_orders import ANY, COMPUTATIONS, Computed, Corner, Turn

Way = Literal["F", "B"]
Kind = Literal[Computed, "SEND_F", "SEND_B", "RECV_F", "RECV_B"]
Message = tuple[Way, int, int]
"""(F, stage, micro-batch): that stage's input; (B, stage, micro-batch): the gradient of that stage's output."""
Lists = tuple[tuple["Action", ...], ...]
"""The actions of every rank of a pipeline."""

SEND: dict[Way, Kind] = {"F": "SEND_F", "B": "SEND_B"}
RECEIVE: dict[Way, Kind] = {"F": "RECV_F", "B": "RECV_B"}
TAKEN: dict[Kind, Way] = {"F": "F", "RECV_F": "F", "B": "B", "I": "B", "RECV_B": "B"}
GIVEN: dict[Kind, Way] = {"F": "F", "SEND_F": "F", "B": "B", "I": "B", "SEND_B": "B"}


class Action(NamedTuple):
    """One thing that a rank does; ``peer`` is the pipeline rank at the other end of a send or receive."""

    kind: Kind
    stage: int
    micro: int
    peer: int = -1

    def __str__(self) -> str:
        """Return ``3F0``: stage, kind, micro-batch."""
        return f"{self.stage}{self.kind}{self.micro}"

    @property
    def computes(self) -> bool:
        """Return whether it is a computation, and not a send or receive."""
        return self.kind in COMPUTATIONS

    @property
    def takes(self) -> Message | None:
        """The message that a computation uses from a neighbouring stage (which the first and last stage do not have),
        or that a receive brings."""
        way = TAKEN.get(self.kind)
        return way and (way, self.stage, self.micro)

    @property
    def gives(self) -> Message | None:
        """The message that a computation makes for a neighbouring stage, or that a send carries."""
        way = GIVEN.get(self.kind)
        return way and (way, self.stage + (1 if way == "F" else -1), self.micro)


class Illegal(NamedTuple):
    """A number that a schedule cannot have: its name (``stages_per_rank`` or ``micro_batches``), why not, and the
    nearest legal one."""

    name: str
    what: str
    nearest: int


def illegal(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Illegal]:
    """Return what is wrong with these numbers; empty if nothing is."""
    facts, found = SCHEDULES[schedule], []
    least, most = facts.least_stages, facts.most_stages
    nearest = max(least, stages_per_rank if most is None else min(stages_per_rank, most))
    if nearest != stages_per_rank:
        legal = f"{least} or more" if most is None else str(least)
        what = f"{schedule} takes {legal} stages per rank, not {stages_per_rank}"
        found.append(Illegal("stages_per_rank", what, nearest))
    if micro_batches < (fewest := facts.least_micro_batches(ranks)):
        what = f"{schedule} over {ranks} ranks needs {fewest} micro-batches or more, not {micro_batches}"
        found.append(Illegal("micro_batches", what, fewest))
    return found


def rank_of(schedule: str, stage: int, ranks: int) -> int:
    """Return the pipeline rank that has a stage."""
    return stage_rank(Layout(pp=ranks, v_shaped=SCHEDULES[schedule].shape == "v"), stage)


@lru_cache(maxsize=64)
def actions(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, trained: tuple[bool, ...] = ()
) -> Lists:
    """Return each rank's actions in a training step. ``trained`` says of every stage, in order, whether it has weights
    to train; if empty, all have. Stages before the first that has do no backward. Raises ValueError for illegal
    numbers."""
    _refuse(illegal(schedule, ranks, stages_per_rank, micro_batches))
    stages = ranks * stages_per_rank
    if len(trained) not in (0, stages):
        raise ValueError(f"trained is of {len(trained)} stages, the pipeline has {stages}")
    orders = []
    for rank in range(ranks):
        turns = schedule_orders.turns(SCHEDULES[schedule], Corner(rank, ranks, stages_per_rank, micro_batches))
        order = [action for action in _numbered(turns) if action.micro < micro_batches]
        orders.append(_needed(order, trained or (True,) * stages))
    return _with_transfers(orders)


@lru_cache(maxsize=64)
def forward_actions(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Lists:
    """Return each rank's actions in an evaluation: forward alone, of any number of micro-batches, which go through all
    of a rank's stages in groups of as many as there are ranks. Raises ValueError for an illegal number of stages."""
    _refuse(illegal(schedule, ranks, stages_per_rank, SCHEDULES[schedule].least_micro_batches(ranks)))
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, micro_batches, ranks):
        group = range(first, min(first + ranks, micro_batches))
        for stage in range(ranks * stages_per_rank):
            orders[rank_of(schedule, stage, ranks)] += [Action("F", stage, micro) for micro in group]
    return _with_transfers(orders)


def _refuse(problems: Sequence[Illegal]) -> None:
    if problems:
        raise ValueError("; ".join(f"{p.what} (nearest: {p.name} {p.nearest})" for p in problems))


def _numbered(turns: Iterable[Turn]) -> list[Action]:
    """Return computations with their micro-batches: forward takes those of a stage in order, and so does backward,
    whole or in parts. W completes the I that has waited longest."""
    begun = Counter[tuple[bool, int]]()
    waiting = list[Action]()
    order = list[Action]()
    for kind, stage in turns:
        if kind == "W":
            oldest = next(action for action in waiting if stage in (action.stage, ANY))
            waiting.remove(oldest)
            order.append(oldest._replace(kind="W"))
            continue
        order.append(Action(kind, stage, begun[kind == "F", stage]))
        begun[kind == "F", stage] += 1
        if kind == "I":
            waiting.append(order[-1])
    return order


def _needed(order: Iterable[Action], trained: Sequence[bool]) -> list[Action]:
    """Leave out the backward of the stages before the first that is trained, and the W of those that are not. Nobody
    needs the gradient of that first stage's input: its I and W are one B, where I stood, so that its activations and
    what it receives are not held any longer."""
    first, kept = trained.index(True) if True in trained else len(trained), []
    for action in order:
        if action.kind == "F" or (action.stage > first and (action.kind != "W" or trained[action.stage])):
            kept.append(action)
        elif action.stage == first and action.kind != "W":
            kept.append(action._replace(kind="B"))
    return kept


def _with_transfers(orders: Sequence[Sequence[Action]]) -> Lists:
    """Return the computations, with sends right after what made their tensors, and receives posted one computation
    before their use. What one rank sends another is received in the order of the sends: where a tensor that is sent
    later is used earlier, those before it are posted earlier too."""
    users = {
        message: (rank, place)
        for rank, order in enumerate(orders)
        for place, action in enumerate(order)
        if (message := action.takes)
    }
    sent = defaultdict[tuple[int, int], list[Message]](list)
    sends: list[dict[int, Action]] = [{} for _ in orders]  # of each rank, by the place of what made the tensor
    for rank, order in enumerate(orders):
        for place, action in enumerate(order):
            if (message := action.gives) in users and (peer := users[message][0]) != rank:
                sent[rank, peer].append(message)
                sends[rank][place] = Action(SEND[message[0]], action.stage, action.micro, peer)
    posts = defaultdict[tuple[int, int], list[Action]](list)
    for (source, rank), messages in sorted(sent.items()):
        latest = [max(users[message][1] - 1, 0) for message in messages]
        places = reversed(list(accumulate(reversed(latest), min)))
        for (way, stage, micro), place in zip(messages, places, strict=True):
            posts[rank, place].append(Action(RECEIVE[way], stage, micro, source))
    lists = []
    for rank, order in enumerate(orders):
        whole: list[Action] = []
        for place, action in enumerate(order):
            whole += [*posts[rank, place], action, *([sends[rank][place]] if place in sends[rank] else [])]
        lists.append(tuple(whole))
    return tuple(lists)
