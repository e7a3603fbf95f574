"""The ownership of a run's directory: one process at a time may write into it. No torch here: the launcher claims
before ranks start.

    .owner-3      {"token": "8f0c...", "host": "n1", "pid": 4711, ..., "beat": "0000000042"}

The highest number owns the directory. A claim creates the next number (O_EXCL, so one of several wins) once the owner
before it is dead. Of an owner under the same kernel its pid and the time it was started tell at once: the time in
ticks since boot, which neither a reused pid nor a clock that is set can imitate. Of any other, its heartbeat tells: it
changes every 10 s, and who waits takes over when it has stood still for 60 s. Clocks are never compared.

An owner that was frozen for a minute may have lost its directory. Before it writes it looks whether it has.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Annotated

from pydantic import Field

from shardwise.errors import OutputError, Problem
from shardwise.runtime.checkpoint.locate import newest
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import Count, from_json

_FILE = re.compile(r"\.owner-(\d+)")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True)
class Pace:
    """Seconds between two beats, until an owner without one is dead, and between two looks at it."""

    beat_s: float = 10.0
    stale_s: float = 60.0
    look_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep


PACE = Pace()


@dataclass(frozen=True)
class Owner:
    """The contents of an owner's file. ``kernel`` names the machine's boot and the pid namespace; ``token`` is known to
    all ranks of the owning start."""

    token: str
    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: Count
    kernel: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Claim:
    """The directory is held under ``token``: by the file ``number``, which this process wrote and keeps beating, or
    (``number`` None) by whatever process of the same start claimed it. A rank that ``follows`` rank 0 may end after it:
    then nobody owns the directory, and what this rank has to say of its end may still be written."""

    def __init__(self, directory: Path, token: str, number: int | None = None, follows: bool = False) -> None:
        self.directory = directory
        self.token = token
        self.number = number
        self.follows = follows
        self._done = threading.Event()
        self._held_s = -math.inf

    def held(self) -> bool:
        """Return whether the directory is still this start's. A disk that does not answer says nothing against it."""
        try:
            number, owner = _owner(self.directory)
        except OSError as error:
            return error.errno not in _GONE
        if self.follows and not number:
            return True
        return owner is not None and owner.token == self.token and self.number in (None, number)

    def check(self, again_after_s: float = 0.0) -> None:
        """Raise OutputError OUT005 if the directory has become somebody else's. Nothing is read again before
        ``again_after_s`` have passed, for steps may be short."""
        if time.monotonic() - self._held_s >= again_after_s:
            if not self.held():
                raise OutputError(self.lost())
            self._held_s = time.monotonic()

    def lost(self) -> Problem:
        """Return the problem that says why this start stops."""
        owner = None
        with suppress(OSError):
            owner = _owner(self.directory)[1]
        who = f"was taken over by {owner}" if owner else "is no longer owned: its .owner file was removed"
        fix, last = f"when the other one has ended: `{train_again(self.directory)}`", None
        if not self.directory.is_dir():
            who, fix = "was removed", "start the run again with its recipe"
        else:
            with suppress(OSError):
                last = newest(self.directory / "checkpoints")
        left = f"{last.name} is its newest checkpoint" if last else "it holds no checkpoint"
        what = f"{self.directory} {who}; this start stopped without saving" + (f", and {left}" if owner or last else "")
        return Problem("OUT005", what, str(self.directory), fix)

    def release(self) -> None:
        """Give the directory up, if this process claimed it."""
        self._done.set()
        with suppress(OSError):
            if self.number is not None and self.held():
                _path(self.directory, self.number).unlink()

    def beat(self, owner: Owner, pace: Pace) -> None:
        """Change the file every few seconds, in place, since one that was removed must not come back. A failed write is
        tried again at the next beat."""
        count = 0
        while not self._done.wait(pace.beat_s):
            count += 1
            with suppress(OSError):
                if not self.held():
                    return
                with _path(self.directory, self.number or 0).open("r+b") as file:
                    file.write(_text(owner, count))


def claim(directory: Path, token: str = "", say: Callable[[str], None] = print, pace: Pace = PACE) -> Claim:
    """Own ``directory`` from now on, after waiting for an owner of which only its heartbeat can be seen. Raises
    OutputError OUT005 while another process owns it; OSError as the disk says."""
    mine = me(token or token_hex(8))
    while True:
        before = max(_numbers(directory), default=0)
        if before:
            _outlive(_path(directory, before), mine, say, pace)
        number = before + 1
        try:
            file = os.open(_path(directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(_text(mine, 0))
        except OSError:
            _path(directory, number).unlink()
            raise
        others = set(_numbers(directory)) - {number}
        if max(others, default=0) > number or (before and before not in others):  # another one was here meanwhile
            _path(directory, number).unlink()
            continue
        for older in others:
            _path(directory, older).unlink(missing_ok=True)
        made = Claim(directory, mine.token, number)
        threading.Thread(target=made.beat, args=(mine, pace), daemon=True, name="owner").start()
        return made


def standing(directory: Path) -> Claim | None:
    """The claim under which this process's launcher started it."""
    owner = _owner(directory)[1]
    return Claim(directory, owner.token) if owner else None


def follow(directory: Path, token: str, patience_s: float, pace: Pace = PACE) -> Claim:
    """Wait until rank 0 has claimed ``directory`` under ``token``. An owner of that name may be an earlier start's:
    one elsewhere must be seen to come or to beat. Raises OutputError OUT005 after ``patience_s``."""
    before = _newest(directory)
    for _ in range(math.ceil((patience_s + pace.stale_s) * 10)):
        now = _newest(directory)
        owner = _parse(now[1])
        if owner and owner.token == token:
            alive = is_alive(owner)
            if alive or (alive is None and now != before):
                return Claim(directory, token, follows=True)
        pace.sleep(0.1)
    what = f"rank 0 has not claimed {directory} in {patience_s + pace.stale_s:.0f} s"
    raise OutputError(Problem("OUT005", what, str(directory), "read the log of rank 0"))


def check_free(directory: Path) -> None:
    """Raise OutputError OUT005 if ``directory`` surely has a living owner; nothing is waited for or written."""
    with suppress(OSError):
        owner = _owner(directory)[1]
        if owner and is_alive(owner) and owner.pid != os.getpid():
            raise OutputError(_lives(directory, owner))


def holder(directory: Path) -> tuple[Owner, bool | None] | None:
    """Return the owner of ``directory``, and whether it lives (None: that cannot be known from here); None where no
    owner can be read."""
    with suppress(OSError):
        owner = _owner(directory)[1]
        return None if owner is None else (owner, is_alive(owner))
    return None


def _outlive(path: Path, mine: Owner, say: Callable[[str], None], pace: Pace) -> None:
    """Return when the owner in ``path`` is dead, or the file gone. Raises OUT005 if it lives."""
    try:
        text = read_regular(path, NOTE_BYTES)
        owner = _parse(text)
        alive = is_alive(owner) if owner else None
        if alive is False or (
            owner and (owner.pid, owner.started, owner.kernel) == (mine.pid, mine.started, mine.kernel)
        ):
            return
        for look in range(0 if alive else math.ceil(pace.stale_s / pace.look_s)):
            pace.sleep(pace.look_s)
            now = read_regular(path, NOTE_BYTES)
            if now != text:
                owner, alive = _parse(now), True
                break
            if look == 0:
                say(f"{path.parent} is owned by {owner or 'somebody'}: waiting {pace.stale_s:.0f} s for its heartbeat")
    except FileNotFoundError:
        return
    if alive:
        raise OutputError(_lives(path.parent, owner))


def _lives(directory: Path, owner: Owner | None) -> Problem:
    what = f"{directory} is in use by {owner or 'another process'}"
    fix = "wait until it has ended, stop it, or use another `--run`"
    return Problem("OUT005", what, str(directory), fix)


def is_alive(owner: Owner) -> bool | None:
    """Return whether ``owner`` lives; None if that cannot be known from here."""
    if not owner.kernel or owner.kernel != _kernel():
        return None
    started = _started(owner.pid)
    if started is not None:
        return started == owner.started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None  # /proc hides the processes of other users
    return False  # it has ended, and its parent does not know yet


def _started(pid: int) -> int | None:
    """Ticks from boot to the start of a process; None of one that has ended or is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def me(token: str) -> Owner:
    """Return this process as an owner."""
    pid = os.getpid()
    return Owner(token, socket.gethostname(), pid, _started(pid) or 0, _kernel())


def _numbers(directory: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(directory) if (match := _FILE.fullmatch(name))]


def _owner(directory: Path) -> tuple[int, Owner | None]:
    """The highest number, and what its file says: None if there is none, or if it is just being written."""
    number = max(_numbers(directory), default=0)
    return number, _parse(read_regular(_path(directory, number), NOTE_BYTES)) if number else None


def _newest(directory: Path) -> tuple[int, bytes]:
    """The highest number and the bytes of its file, which change with every beat; nothing where they cannot be read."""
    with suppress(OSError):
        number = max(_numbers(directory), default=0)
        return number, read_regular(_path(directory, number), NOTE_BYTES)
    return 0, b""


def _path(directory: Path, number: int) -> Path:
    return directory / f".owner-{number}"


def _text(owner: Owner, count: int) -> bytes:
    """Return the contents of an owner's file, always of the same length, so that it can be overwritten in place."""
    return json.dumps(asdict(owner) | {"beat": f"{count:010}"}).encode()


def _parse(text: bytes) -> Owner | None:
    """Return the owner that the bytes of a file name; None if it is just being written, or damaged."""
    try:
        return from_json(Owner, text)
    except ValueError:
        return None
