"""The control groups that this process is in: what they leave it of the machine's memory, and how many of their
processes the kernel has killed for memory. Both versions of cgroups; a limit of any level above counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file", "memory.events"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
}
"""Of each version: the limit, what is used, the line of memory.stat with how much of that is files which can be
dropped, and the file that counts kills."""


def memory_limits() -> list[tuple[int, int]]:
    """(bytes allowed, bytes used) of every group that this process is in, at every level, and that has a limit."""
    found = []
    for version, directory in _directories():
        limit, usage, cached, _ = _FILES[version]
        allowed, used = _numbers(directory / limit), _numbers(directory / usage)
        if allowed and used:
            found.append((allowed[""], used[""] - _numbers(directory / "memory.stat").get(cached, 0)))
    return found


def oom_kills() -> int | None:
    """Return how many processes of this process's own group the kernel has killed for memory; where no group says so,
    of the whole machine. None where that is unknown."""
    files = [directory / _FILES[version][3] for version, directory in _directories()]
    counts = (_numbers(file).get("oom_kill") for file in (*files, _ROOT / "proc/vmstat"))
    return next((count for count in counts if count is not None), None)


def _directories() -> Iterator[tuple[str, Path]]:
    """(version, directory) of the groups that account for memory, each followed by those above it."""
    groups = {}
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in _lines(_ROOT / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        version, _, options = kind.split(" ", 2)
        if version in groups and (version == "cgroup2" or "memory" in options.split(",")):
            root, point = (word.replace("\\040", " ") for word in mount.split()[3:5])
            own = groups[version]
            # Seen from inside a container, what is mounted may be its own group, whatever the path says.
            inside = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else PurePosixPath()
            for level in (inside, *inside.parents):
                yield version, _ROOT / point.lstrip("/") / level


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file with ``number`` or ``name number`` on each line; "max" is not a number."""
    words = (line.rpartition(" ") for line in _lines(path))
    return {name: int(value) for name, _, value in words if value.isdigit()}
