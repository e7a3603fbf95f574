"""What nodes agree on: who trains together. They meet before the first ranks start, and whenever ranks have ended and
not the run.

One node decides and the others follow the file that it writes: of those that trained together last and are still there,
the first; where none is, the first of all. It decides when every one of those has no rank left that runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import (
    ConfigError,
    OutputError,
    PreemptedError,
    Problem,
    ShardwiseError,
    TrainingError,
    UnavailableError,
)
from shardwise.launch.local import Requests
from shardwise.launch.roster import NodeEntry, NodeGeneration, NodeMember, Roster
from shardwise.runtime.owner import Owner
from shardwise.spec.units import counted

MOST_TRIES = 3
"""So often ranks that lost one another while every node was there are started again without a new checkpoint."""
OnLoss = Literal["wait", "replan"]


@dataclass(frozen=True)
class Rules:
    """What a run of at most ``nodes`` does when one is lost; it ``begins`` with so many, and goes on with ``least``.
    ``replan`` says in words what the plan for so many nodes does otherwise; it raises ShardwiseError where there is
    none. ``step``: of the newest checkpoint, 0 without one. ``record`` keeps what happened; ``say`` tells it."""

    on_loss: OnLoss
    nodes: int
    begins: int
    least: int
    replan: Callable[[int], str]
    step: Callable[[], int]
    record: Callable[[str], None]
    say: Callable[[str], None]


class Meeting:
    """This node among the others, made before it is written in: what is decided from then on may concern it.
    ``current``: the generation that it is of."""

    def __init__(self, roster: Roster, rules: Rules) -> None:
        self.roster = roster
        self.rules = rules
        self.current: NodeGeneration | None = None
        newest = roster.newest()
        self._known = newest.number if newest else 0
        self._people: list[Owner] = []
        self._since_s = 0.0
        self._grows_after: int | None = None
        self._refused = 0

    @property
    def me(self) -> NodeEntry:
        return self.roster.entry

    def meet(self, asked: Requests) -> NodeGeneration | None:
        """Wait for the next generation that has this node, or that ends the run; None if this process was asked to
        stop. Raises UnavailableError (NET005) if the others do not come, OutputError (OUT005) if another process has
        taken this node's place."""
        begun_s = time.monotonic()
        self._since_s, told_s = begun_s, begun_s
        self._grows_after, self._refused = None, 0
        while asked.first is None:
            found = self.roster.newest()
            if found is not None and found.number > self._known:
                self._known = found.number
                if not found.members or self.me.me.token in [each.token for each in found.members]:
                    self.current = found
                    self.roster.tell("training" if found.members else self.me.state, found.number)
                    return found
                self.current = None  # it was taken for lost
                self.roster.tell("new")
            if self.roster.superseded:
                raise OutputError(replaced(self.roster))
            if self.current is None:
                _check_ranks(self.roster, found)
            waited_s = time.monotonic() - begun_s
            self._decide(waited_s)
            if self.current is None and waited_s > self.roster.patience.start_s and not standing(self.roster):
                raise UnavailableError(_absent(self.roster, self.rules.nodes, waited_s))
            if time.monotonic() - told_s > self.roster.patience.settle_s * 3:
                told_s = float("inf")
                self.rules.say(f"waiting: {_there(self.roster, self.rules.nodes)}")
            time.sleep(self.roster.patience.look_s)
        return None

    def look(self) -> Literal["", "save", "end"]:
        """Return what the ranks of this node are to do: go on, save and end because a node left or waits to be taken
        in, or end because one is lost. They go on where the directory cannot be read just now."""
        with suppress(OSError):
            return self._asked_for()
        return ""

    def _asked_for(self) -> Literal["", "save", "end"]:
        newest = self.roster.newest()
        if newest is not None and newest.members and self.current is not None and newest.number > self.current.number:
            return "end"  # the others have gone on without this node
        seen, asks = self.roster.look(), set[str]()
        for member in self.current.members if self.current else []:
            if (entry := seen.get(member.node)) is not None:
                asks.add(self._asks(member, entry))
        if self.roster.superseded or "end" in asks:
            return "end"
        return "save" if "save" in asks or self._grows() else ""

    def _asks(self, member: NodeMember, entry: NodeEntry) -> str:
        """Return what follows from the state of another node."""
        same = entry.me.token == member.token
        ended = same and self.current is not None and entry.generation == self.current.number
        if ended and entry.state in ("saved", "left"):
            return "save"
        if ended and entry.state == "done":
            return ""
        lost = ended and entry.state == "lost"
        return "end" if lost or self.roster.lives(member.token, member.node) is False else ""

    def end(self, code: int, why: str = "") -> None:
        """Let every node end, those without ranks with ``code``."""
        self.roster.publish(NodeGeneration(0, [], why=why, lost=bool(why), code=code))

    def _grows(self) -> bool:
        """Return whether ranks are to save and end, because others wait, and there is a checkpoint since they came."""
        current = self.current
        if current is None or self.me.me.token != self._first_of(current):
            return False
        standing = len(current.members)
        new = newcomers(self.roster)[: self.rules.nodes - standing]
        if not new or len(new) == self._refused:
            self._grows_after = None
        elif self._grows_after is None:
            found = self._planned(range(standing + len(new), standing, -1))
            if isinstance(found, ShardwiseError):
                self._refused = len(new)
                self.rules.say(f"{_listed(new)} waits, and is not taken in: {found.problems[0].what}")
            else:
                self._grows_after = self.rules.step()
                self.rules.say(f"{_listed(new)} is there, and is taken in at the next checkpoint")
        else:
            return self.rules.step() > self._grows_after
        return False

    def _planned(self, counts: Iterable[int]) -> tuple[int, str] | ShardwiseError:
        """Return the first of these numbers of nodes for which there is a plan, and what that does otherwise; or why
        there is none for the first of them."""
        refused = None
        for count in counts:
            try:
                return count, self.rules.replan(count)
            except ShardwiseError as error:
                refused = refused or error
        return refused or ConfigError(Problem("RUN009", "too few nodes are there"))

    def _first_of(self, current: NodeGeneration) -> str:
        alive = [each for each in current.members if self.roster.lives(each.token, each.node)]
        return min(alive, key=lambda each: each.node).token if alive else ""

    def _decide(self, waited_s: float) -> None:
        """Make the next generation, if that is for this node to do, and the time has come."""
        seen, newest = self.roster.look(), self.roster.newest()
        members = newest.members if newest else []
        lives = {each.node: self.roster.lives(each.token, each.node) for each in members}
        there = [seen[each.node] for each in members if lives[each.node]]
        ready = [
            each for each in there if each.state in ("saved", "lost") and newest and each.generation == newest.number
        ]
        new = newcomers(self.roster)
        first = min(there or new, key=lambda each: each.node, default=None)
        if None in lives.values() or len(ready) < len(there) or first is None or first.me != self.me.me:
            return
        people = [*there, *new][: self.rules.nodes]
        if [each.me for each in people] != self._people:
            self._people, self._since_s = [each.me for each in people], time.monotonic()
        settled = time.monotonic() - self._since_s >= self.roster.patience.settle_s
        enough = settled and len(people) >= (self.rules.least if there else self.rules.begins)
        if there and newest is not None:
            gone = [each for each in members if not lives[each.node]]
            self._go_on(newest, people, gone, enough and self.rules.on_loss == "replan", waited_s)
        elif enough or len(people) == self.rules.nodes:
            self._make(people, newest)

    def _go_on(
        self,
        newest: NodeGeneration,
        people: Sequence[NodeEntry],
        gone: Sequence[NodeMember],
        enough: bool,
        waited_s: float,
    ) -> None:
        """Make the generation that follows ``newest``, of which members are ``gone``, or end the run."""
        added = [each for each in people if each.me.token not in [one.token for one in newest.members]]
        same = not gone and not added
        story = _story(gone, added, waited_s)
        if same and all(each.state == "saved" for each in people):
            self.end(PreemptedError.exit_code)  # a rank was asked to stop, and not its node
        elif same and newest.tries >= MOST_TRIES and newest.step == self.rules.step():
            tries = f"{MOST_TRIES + 1} times in a row, with every node there and no checkpoint in between"
            self.end(TrainingError.exit_code, f"ranks lost one another {tries}: they are not started again")
        elif enough or len(people) >= len(newest.members):
            self._make(people, newest, story, lost=bool(gone) or any(each.state == "lost" for each in people))
        elif waited_s > self.roster.patience.wait_s:
            self.end(UnavailableError.exit_code, f"{story}, and too few are there: the run ends")

    def _make(
        self, people: Sequence[NodeEntry], before: NodeGeneration | None, story: str = "", *, lost: bool = False
    ) -> None:
        """Make a generation of ``people``, or of the first of them if there is a plan for fewer only; end the run where
        there is none. It follows from the ``story``, which is empty at the start of a run."""
        step, words = self.rules.step(), "the same plan"
        if len(people) != (len(before.members) if before and story else self.rules.nodes):
            least = self.rules.least if story else self.rules.begins
            found = self._planned(range(len(people), least - 1, -1))
            if isinstance(found, ShardwiseError):
                why = f"there is no plan for {counted(len(people), 'node')}: {found.problems[0].what}"
                self.end(found.exit_code, f"{story}; {why}" if story else why)
                return
            people, words = people[: found[0]], found[1]
        placed = sorted(people, key=lambda each: each.node)
        members = [NodeMember(each.node, each.me.token, each.me.host, each.address) for each in placed]
        went_on = f"goes on from the newest checkpoint, of step {step}" if step else "begins anew: nothing is saved"
        now = f"{counted(len(people), 'node')} now: {words}"
        why = f"{story}; {now}; it {went_on}" if story else now if len(people) < self.rules.nodes else ""
        stays = before is not None and [each.token for each in before.members] == [each.token for each in members]
        tries = before.tries + 1 if before is not None and stays and step == before.step else 0
        if why:
            self.rules.record(why)
        number = before.number + 1 if before is not None else 1
        self.roster.publish(NodeGeneration(number, members, self.me.nproc, step, tries, why, lost))


def _check_ranks(roster: Roster, newest: NodeGeneration | None) -> None:
    """Raise ConfigError (RUN007) where this node would never be taken in."""
    if newest is not None and newest.members and newest.nproc != roster.entry.nproc and standing(roster):
        what = f"this node has {roster.entry.nproc} ranks, and those that train have {newest.nproc} each"
        raise ConfigError(Problem("RUN007", what, "the environment", "the same PET_NPROC_PER_NODE on every node"))


def replaced(roster: Roster) -> Problem:
    """Return the problem of a node whose place another process has taken."""
    what = f"{roster.entry} was started a second time: that process has its place"
    return Problem("OUT005", what, str(roster.directory), "start each node once")


def newcomers(roster: Roster) -> list[NodeEntry]:
    """Return the nodes that wait to be taken in, in order; of those with another number of ranks none can be."""
    found = [
        entry
        for entry in roster.look().values()
        if entry.state == "new" and entry.nproc == roster.entry.nproc and roster.lives(entry.me.token, entry.node)
    ]
    return sorted(found, key=lambda entry: entry.node)


def standing(roster: Roster) -> bool:
    """Return whether a node of the newest generation is still there, as far as is known."""
    newest = roster.newest()
    lives = [roster.lives(each.token, each.node) for each in newest.members] if newest else []
    return any(known is not False for known in lives)


def _there(roster: Roster, nodes: int) -> str:
    seen = [entry for entry in roster.look().values() if roster.lives(entry.me.token, entry.node)]
    found = _listed(sorted(seen, key=lambda each: each.node))
    return f"{len(seen)} of {nodes} nodes are there, {found}; they meet in {roster.directory}"


def _absent(roster: Roster, nodes: int, waited_s: float) -> Problem:
    what = f"after {waited_s:.0f} s {_there(roster, nodes)}"
    fix = "read the logs of the others; all must see that directory: `--out` on a file system that they share"
    return Problem("NET005", what, f"pid {os.getpid()}", fix)


def _listed(nodes: Sequence[NodeEntry | NodeMember]) -> str:
    return ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def _story(gone: Sequence[NodeMember], added: Sequence[NodeEntry], waited_s: float) -> str:
    """Return in words what has happened since the last generation."""
    came_back = [each for each in gone if each.node in [one.node for one in added]]
    lost = [each for each in gone if each not in came_back]
    fresh = [each for each in added if each.node not in [one.node for one in came_back]]
    told = [f"{_listed(lost)} was lost"] * bool(lost) + [f"{_listed(came_back)} was lost and came back"] * bool(
        came_back
    )
    told += [f"{_listed(fresh)} was taken in"] * bool(fresh)
    return f"{' and '.join(told) or 'ranks lost one another'}, after {waited_s:.0f} s"
