"""One node of a run that goes on when a node is lost: it stays when its ranks have ended, meets the others that are
left, and starts its ranks again with them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Literal

from shardwise.errors import OutputError, PreemptedError
from shardwise.launch.local import Failure, Requests, environment, together
from shardwise.launch.meeting import Meeting, Rules, replaced
from shardwise.launch.node import Node, await_first, code_of
from shardwise.launch.roster import NodeEntry, NodeGeneration, Patience, Roster
from shardwise.launch.worker import WITH_MEETING
from shardwise.runtime.faults.outcome import clear_exit, read_exit
from shardwise.runtime.faults.signals import received
from shardwise.runtime.owner import me

NODES = "nodes"
"""The directory, in the run's, of what nodes say of themselves."""
OWN_ADDRESS = "SHARDWISE_NODE_ADDR"
"""Under which name or address other nodes reach this one, where that is not the one from which it reaches the first."""

FROM_OTHERS = ("hang", "peer_lost", "preempted")
"""The kinds of outcome after which ranks may be started again as they were."""


@dataclass
class OwnRanks:
    """The ranks of this node from one meeting to the next. ``ran``: they were started; ``wanted``: what other nodes
    have asked of them."""

    words: Sequence[str]
    module: str = "shardwise"
    failures: dict[int, Failure] = field(default_factory=dict)
    wanted: str = ""
    ran: bool = False

    def run(self, place: Node, meeting: Meeting, asked: Requests) -> None:
        """Start them and wait until all have ended."""
        self.failures, self.wanted, self.ran = {}, "", False

        def others() -> Literal["", "save", "end"]:
            found = meeting.look()
            self.wanted = self.wanted or found
            return found

        if place.nodes > 1:
            await_first(place, vain=lambda: asked.first is not None or others() == "end")
        if asked.first is not None or self.wanted == "end":
            return
        self.ran = True
        own = {WITH_MEETING: os.getpid()}
        places = [environment(place.nproc, {**place.places(local), **own}) for local in range(place.nproc)]
        self.failures = together([sys.executable, "-u", "-m", self.module, *self.words], places, asked, others)

    @property
    def saved(self) -> bool:
        """True where all have saved and ended, as they were asked to."""
        return {each.exit_code for each in self.failures.values()} == {PreemptedError.exit_code}

    def were_lost(self, directory: Path, meeting: Meeting) -> bool:
        """Return whether they failed because others were lost, and not for a reason that would only come again."""
        told = read_exit(directory)
        if self.wanted or meeting.look():
            return told is None or told.kind in FROM_OTHERS or (told.kind == "crash" and not told.step)
        if told is None or (self.killed() and told.kind != "hang"):  # one that hangs is killed by its neighbours
            return False
        return told.kind in FROM_OTHERS

    def killed(self) -> bool:
        """Return whether one was killed, not by us."""
        codes = [each.exit_code for each in self.failures.values()]
        return self.wanted != "end" and any(code < 0 and code != -signal.SIGTERM for code in codes)


def stay(ranks: OwnRanks, node: Node, directory: Path, rules: Rules, patience: Patience = Patience()) -> int:  # noqa: B008
    """Train as one of several nodes, of which any may go and come; the exit code. Raises UnavailableError (NET002,
    NET005) where others do not come, OutputError (OUT005) where this node is there already, and TrainingError (RUN004)
    for a rank that was killed."""
    entry = NodeEntry(node.node, node.nproc, _address(node), me(token_hex(8)))
    roster, asked = Roster(directory / NODES, entry, patience), Requests(True)
    meeting = Meeting(roster, rules)
    with received(asked.receive), roster.joined():
        while True:
            found = meeting.meet(asked)
            if found is None:
                roster.tell("left")
                return _stopped(asked, rules)
            if found.why:
                rules.say(f"warning[LOST002]: {found.why}" if found.lost else f"nodes: {found.why}")
            if not found.members:
                left_out = roster.entry.state == "new"  # since its ranks have ended
                roster.tell("failed" if found.code else "done")
                own = found.code != 0 and not left_out and bool(ranks.failures)
                return code_of(ranks.failures, node) if own else found.code
            place = _place(node, found, roster)
            if place.node == 0:
                clear_exit(directory)
            ranks.run(place, meeting, asked)
            code = _ended(ranks, place, meeting, asked, directory)
            if code is not None:
                return code


def _stopped(asked: Requests, rules: Rules) -> int:
    """Return the exit code of a node that was asked to stop while it had no ranks."""
    step = rules.step()
    rules.say(f"stopped while nodes meet; {f'step {step} is saved' if step else 'nothing is saved'}")
    return PreemptedError.exit_code if step else 128 + (asked.first or 0)


def _ended(ranks: OwnRanks, place: Node, meeting: Meeting, asked: Requests, directory: Path) -> int | None:
    """Say how the ranks have ended; the exit code, or None where the nodes meet again."""
    roster = meeting.roster
    if roster.superseded:
        raise OutputError(replaced(roster))
    if asked.again or (asked.first is not None and (ranks.failures or not ranks.ran)):
        roster.tell("left")
        if asked.again:
            return 128 + signal.SIGINT
        return code_of(ranks.failures, place) if ranks.failures else _stopped(asked, meeting.rules)
    if ranks.ran and not ranks.failures and ranks.wanted != "end":
        if place.node == 0:
            meeting.end(0)
        roster.tell("done")
        return 0
    if ranks.saved:
        roster.tell("saved")
        return None
    if not ranks.failures or ranks.were_lost(directory, meeting):
        roster.tell("lost")
        return None
    if ranks.killed():
        roster.tell("left")  # the others may go on without it
    else:
        meeting.end(code_of(ranks.failures, place))
        roster.tell("failed")
    return code_of(ranks.failures, place)


def _place(node: Node, found: NodeGeneration, roster: Roster) -> Node:
    """Return the place of this node in a generation."""
    tokens = [each.token for each in found.members]
    first, rank = found.members[0], tokens.index(roster.entry.me.token)
    start = f"{node.start}-{found.number}" if node.start else f"generation-{found.number}"
    return replace(node, nodes=len(tokens), node=rank, first=first.address, start=start)


def _address(node: Node) -> str:
    """Return under what others reach this node: what the environment says, the first node's name if it is that, or the
    address from which it reaches the first. Nothing is sent for it."""
    if told := os.environ.get(OWN_ADDRESS, ""):
        return told
    if node.node == 0:
        return node.first
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(node.first, node.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:  # the first node is not there now, and so its name is not known
        return socket.gethostname()
