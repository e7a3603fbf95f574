"""The rendezvous port: free, or who has it."""

from __future__ import annotations

import socket

from shardwise.errors import Problem, UnavailableError, UsageError


def check_port(port: int) -> None:
    """Port 0 lets the system choose. Raises UnavailableError (NET001) when another process listens there."""
    if not 0 <= port <= 65535:
        what = f"port {port} is not between 0 and 65535"
        raise UsageError(Problem("CLI001", what, "--port", "`--port 0` picks a free one"))
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
    import psutil

    try:
        for found in psutil.net_connections("tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN and found.pid:
                return f" by pid {found.pid} ({' '.join(psutil.Process(found.pid).cmdline())[:60]})"
    except (psutil.Error, OSError):
        pass
    return ""
