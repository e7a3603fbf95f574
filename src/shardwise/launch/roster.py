"""The nodes of a run that goes on when it loses some: a small file of each in the run's directory, which all of them
see already, so that they need no further port.

    nodes/node-00001.json          {"node": 1, "state": "training", "beat": 42, "address": "10.0.0.2", "me": {...}, ...}
    nodes/generation-00003.json    {"number": 3, "members": [...], "why": "node 0 (a) was lost; ...", ...}

A node writes its own file and nobody else's. Of one under the same kernel its pid tells whether it lives, of any other
its beat, which changes every few seconds: who looks counts its own looks, so that clocks need not agree, and a file
system that stood still for a while has lost nobody. A generation is who trains together; its file is made once.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from shardwise.errors import OutputError, Problem
from shardwise.runtime.owner import Owner, is_alive
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import Count, from_json

State = Literal["new", "training", "saved", "lost", "left", "failed", "done"]
"""What a node does: it waits to be taken in; its ranks run; they have ended after saving, or because others were lost;
or it has gone, because it was asked to or a rank of its own was killed, because the run failed, or is done."""
OVER = ("left", "failed", "done")
_GENERATION = re.compile(r"generation-(\d+)\.json")
T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Seconds between two beats and two looks; until a node without a beat is lost; for which nodes must have come and
    gone no more before they are planned for; for which all are waited for, at the start and after a loss."""

    beat_s: float = 2.0
    look_s: float = 0.5
    lost_s: float = 30.0
    settle_s: float = 10.0
    start_s: float = 600.0
    wait_s: float = 3600.0


@dataclass(frozen=True)
class NodeEntry:
    """The contents of a node's file. ``generation``: the one that its ``state`` is of; ``address``: under which others
    reach it; the token of ``me`` is this start's."""

    node: Count
    nproc: Count
    address: str
    me: Owner
    state: State = "new"
    generation: Count = 0
    beat: Count = 0

    def __str__(self) -> str:
        return f"node {self.node} ({self.me.host})"


@dataclass(frozen=True)
class NodeMember:
    """A node of a generation, by the start of it that was there when the generation was made."""

    node: Count
    token: str
    host: str
    address: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class NodeGeneration:
    """The nodes that train together, in order of their ranks; none: the run ends, with ``code`` for nodes that have no
    ranks. ``step``: of the newest checkpoint then; ``tries``: how many before it went no further, although no node was
    lost. ``why``: what it follows from, in words; ``lost``: a node, or ranks, were."""

    number: Count
    members: list[NodeMember]
    nproc: Count = 1
    step: Count = 0
    tries: Count = 0
    why: str = ""
    lost: bool = False
    code: Count = 0


class Roster:
    """All nodes as this one sees them. ``superseded``: another process has taken this node's place."""

    def __init__(self, directory: Path, entry: NodeEntry, patience: Patience) -> None:
        self.directory = directory
        self.entry = entry
        self.patience = patience
        self.superseded = False
        self._seen: dict[int, NodeEntry] = {}
        self._still: dict[str, float] = {}
        self._beats: set[str] = set()
        self._looked_s = -1.0
        self._over = threading.Event()
        self._writing = threading.Lock()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Write this node in, and keep its file beating. Raises OutputError (OUT005) where the node is there already,
        OSError as the disk says."""
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self._read(NodeEntry, self._path(self.entry.node))
        if before is not None and before.state not in OVER and is_alive(before.me):
            what = f"{before} is there already: {before.me}"
            raise OutputError(Problem("OUT005", what, str(self.directory), "stop it first, or another PET_NODE_RANK"))
        self._write()
        thread = threading.Thread(target=self._keep_beating, daemon=True, name="node")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            if self.entry.state not in OVER:
                self.tell("left")

    def tell(self, state: State, generation: int | None = None) -> None:
        """Say what this node does now. A disk that does not take it is tried again at the next beat."""
        with self._writing:
            number = self.entry.generation if generation is None else generation
            self.entry = replace(self.entry, state=state, generation=number)
            with suppress(OSError):
                self._keep()

    def look(self) -> dict[int, NodeEntry]:
        """Return the nodes that have a file, by number, as they were at most ``look_s`` ago."""
        now = time.monotonic()
        passed_s = min(now - self._looked_s, 2 * self.patience.look_s)
        if passed_s < self.patience.look_s and self._seen:
            return self._seen
        self._looked_s = now
        for path in self.directory.glob("node-*.json"):
            entry = self._read(NodeEntry, path)
            if entry is None:
                continue
            before = self._seen.get(entry.node)
            self._seen[entry.node] = entry
            if before is not None and before.me == entry.me and before.beat != entry.beat:
                self._beats.add(entry.me.token)
                self._still[entry.me.token] = 0.0
        for entry in self._seen.values():
            self._still[entry.me.token] = self._still.get(entry.me.token, 0.0) + passed_s
        return self._seen

    def lives(self, token: str, node: int) -> bool | None:
        """Return whether this start of ``node`` is still there; None while that cannot be known yet."""
        entry = self._seen.get(node)
        if token == self.entry.me.token:
            return True
        if entry is None or entry.me.token != token or entry.state in OVER:
            return False
        if (known := is_alive(entry.me)) is not None:
            return known
        if self._still[token] >= self.patience.lost_s:
            return False
        return True if token in self._beats else None

    def newest(self) -> NodeGeneration | None:
        """Return the newest generation that can be read."""
        for number in sorted(self._numbers(), reverse=True):
            found = self._read(NodeGeneration, self._generation(number))
            if found is not None:
                return found
        return None

    def publish(self, made: NodeGeneration) -> None:
        """Make a generation: of its number, or the next where that is 0. Where another node has just made it, that
        counts."""
        number = made.number or max(self._numbers(), default=0) + 1
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(self._generation(number), flags, 0o644), "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(replace(made, number=number))))
        for old in self._numbers():
            if old < number - 1:
                self._generation(old).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return [int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))]

    def _generation(self, number: int) -> Path:
        return self.directory / f"generation-{number:05d}.json"

    def _path(self, node: int) -> Path:
        return self.directory / f"node-{node:05d}.json"

    def _read(self, kind: type[T], path: Path) -> T | None:
        """Return what the file says; None of one that is not there, or is just being written."""
        try:
            return from_json(kind, read_regular(path, NOTE_BYTES))
        except (OSError, ValueError):
            return None

    def _write(self) -> None:
        """Write this node's file, whole or not at all."""
        self.entry = replace(self.entry, beat=self.entry.beat + 1)
        draft = self.directory / f".node-{self.entry.node:05d}-{self.entry.me.token}"
        draft.write_text(json.dumps(asdict(self.entry)), encoding="utf-8")
        draft.replace(self._path(self.entry.node))

    def _keep(self) -> None:
        """Write this node's file, unless another process has taken its place."""
        standing = self._read(NodeEntry, self._path(self.entry.node))
        self.superseded |= standing is not None and standing.me.token != self.entry.me.token
        if not self.superseded:
            self._write()

    def _keep_beating(self) -> None:
        while not self._over.wait(self.patience.beat_s):
            with self._writing, suppress(OSError):
                self._keep()
