"""Strangers at the ports that nodes open."""

from __future__ import annotations

import os
import pickle
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

STRANGERS = 300
"""At each port, each time."""


class Deed:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def greetings(mark: Path) -> list[bytes]:
    """What strangers say: nothing, noise, a pickle, a browser's and a TLS client's first words, a secret that is none,
    lengths that are larger than any memory, and a flood."""
    client, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(client, out, server_hostname="node")
    with suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return [
        b"",
        os.urandom(1000),
        pickle.dumps(Deed(mark)),
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        out.read(),
        b"secret=0123456789abcdef\n" * 4,
        b"\xff" * 64,
        b"\x00" * 2**20,
    ]


def ports(group: int) -> set[int]:
    """Those on which the processes of a node listen."""
    found = set[int]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                connections = process.net_connections("inet")
                found |= {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def visit(port: int, said: list[bytes]) -> list[socket.socket]:
    """Connect so often, say what strangers say, and leave some connections open; those. A rank that is stopped takes no
    more of them than its queue has room for."""
    left = []
    for number in range(STRANGERS):
        with suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=0.03)
            left.append(stranger)
            stranger.sendall(said[number % len(said)])
            if number % 3:
                left.pop().close()
    return left
