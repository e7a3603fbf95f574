"""The rendezvous port: free, or who has it."""

from __future__ import annotations

import socket
from pathlib import Path

from shardwise.errors import Problem, UnavailableError, UsageError

_LISTENING = "0A"


def check_port(port: int) -> None:
    """Port 0 lets the system choose. Raises UnavailableError (NET001) when another process listens there."""
    if not 0 <= port <= 65535:
        raise UsageError(
            Problem("CLI001", f"port {port} is not between 0 and 65535", "--port", "`--port 0` picks a free one")
        )
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise UnavailableError(_taken(port, "needs privileges")) from None
        except OSError:
            raise UnavailableError(_taken(port, "is in use" + _holder(port))) from None


def _taken(port: int, what: str) -> Problem:
    return Problem("NET001", f"port {port} {what}", "--port", "`--port 0` picks a free one")


def _holder(port: int) -> str:
    """`` by pid 4121 (python train.py)``, where this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(descriptor.readlink()) in wanted for descriptor in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                return f" by pid {process.name} ({b' '.join(words).decode(errors='replace').strip()[:60]})"
        except OSError:
            continue
    return ""
