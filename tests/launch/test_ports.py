"""The rendezvous port: free, or named with its owner (B-73)."""

from __future__ import annotations

import os
import socket

import pytest

from shardwise.errors import UnavailableError, UsageError
from shardwise.launch.ports import check_port


def test_a_port_in_use_is_told_with_its_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError) as caught:
            check_port(port)
        (problem,) = caught.value.problems
        assert problem.code == "NET001"
        assert problem.what.startswith(f"port {port} is in use by pid {os.getpid()} (")
        assert "python" in problem.what
        assert problem.fix == "`--port 0` picks a free one"
        assert caught.value.exit_code == 69
    check_port(port)
    check_port(0)


def test_a_port_that_is_none() -> None:
    with pytest.raises(UsageError):
        check_port(70_000)
