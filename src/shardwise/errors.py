"""Every error a user can meet. Each says what is wrong (with the value), where, and what to write instead.

    ShardwiseError              70   a defect of ours, unless a subclass says otherwise
    ├── UsageError               2   the command line
    ├── DataError               65   data or a checkpoint that is there but bad
    ├── MissingInputError       66   a file, model or checkpoint that is not there
    ├── UnavailableError        69   a service that cannot be reached
    ├── OutputError             73   where the run would write
    ├── PreemptedError          75   stopped on request after saving; start again to continue
    ├── PolicyError             77   refused because it could run code that came with a file or leave its directory
    ├── ConfigError             78   the recipe or the plan
    └── TrainingError            1   the run itself: non-finite numbers, a lost rank, no memory left

An error carries one or more problems, so that all errors of one recipe are reported together.
"""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where no more can be written: the disk, a quota, or the size of a file (``ulimit -f``)."""

UNWRITABLE = (*NO_ROOM, errno.EROFS)
"""What a disk may begin to say while somebody writes on it."""

NO_MEMORY = (
    *("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED", "Failed to CUDA "),
    *("annot allocate memory", "failed to map segment", "can't start new thread"),
)
"""Texts of errors that mean that memory ran out: torch's on a CPU; CUDA's, from its driver; those of cuBLAS, cuDNN and
cuSOLVER, which allocate workspaces; NCCL's, which allocates outside torch ("Failed to CUDA calloc"); and the system's,
below ``ulimit -v`` also of libraries that are loaded and threads that are started."""
_OF_THE_HOST = ("can't allocate memory", "annot allocate memory", "Unable to allocate", "MemoryError")
_OF_A_LIMIT = ("failed to map segment", "can't start new thread")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: a stable code such as ``CFG001``, the value, the place, and what to write instead."""

    code: str
    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"fix:   {self.fix}")
        return "\n".join(lines)


class ShardwiseError(Exception):
    """An error to be shown without a traceback. ``problems`` holds at least one :class:`Problem`."""

    exit_code: ClassVar[int] = 70

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("an error needs at least one problem")
        super().__init__("\n\n".join(str(problem) for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ShardwiseError], tuple[object, ...]]:
        return type(self), self.problems  # so that one rank can tell the others

    def as_dict(self) -> dict[str, object]:
        """Return the error as an object, for ``--json``."""
        return {"exit_code": self.exit_code, "problems": [asdict(problem) for problem in self.problems]}


def first_line(error: BaseException, most: int = 160) -> str:
    """Return an exception's first line, cut short; where it says nothing, as MemoryError does, its class."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def no_memory(error: BaseException) -> str | None:
    """The message of a failed allocation; None for any other error."""
    for line in str(error).splitlines():
        if any(mark in line for mark in NO_MEMORY):
            return ("NCCL: " if "NCCL error" in str(error) else "") + line.strip()[:160]
    return first_line(error) if isinstance(error, MemoryError) else None


def lacked(what: str) -> Literal["", "device", "host"]:
    """Return whose memory ran out by the text of a MEM001: empty where it was a limit on processes or addresses, of
    which nothing that is trained would need less."""
    if any(mark in what for mark in _OF_A_LIMIT):
        return ""
    return "host" if any(mark in what for mark in _OF_THE_HOST) else "device"


class UsageError(ShardwiseError):
    exit_code = 2


class DataError(ShardwiseError):
    exit_code = 65


class MissingInputError(ShardwiseError):
    exit_code = 66


class UnavailableError(ShardwiseError):
    exit_code = 69


class OutputError(ShardwiseError):
    exit_code = 73


class PreemptedError(ShardwiseError):
    exit_code = 75


class PolicyError(ShardwiseError):
    exit_code = 77


class ConfigError(ShardwiseError):
    exit_code = 78


class TrainingError(ShardwiseError):
    exit_code = 1
