"""A network of two nodes, each in a network namespace of its own, with a wire between them that is as long, as bad or
as broken as a test wants. It needs root, `ip` and /dev/net/tun.

    with joined() as wire:
        wire.delay_s, wire.loss = 0.1, 0.01
        wire.up = False
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETNS = "SHARDWISE_TEST_NETNS"
"""In the environment of a node, the namespace that it is to be in."""
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
LONGEST_PACKET = 2**16


def possible() -> bool:
    """Whether this process may make one."""
    return os.geteuid() == 0 and os.access(TUN, os.W_OK) and Path("/usr/sbin/ip").exists()


def enter(namespace: str) -> None:
    """Put this process into a namespace, by its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Wire:
    """The wire: ``delay_s`` in each direction, the share that is lost, whether it carries anything. ``carried``: how
    many packets have arrived; ``lost``: how many have not."""

    def __init__(self) -> None:
        number = os.getpid() % 10_000
        self.namespaces = [f"sw{number}-{end}" for end in range(2)]
        self.devices = [f"sw{number}t{end}" for end in range(2)]
        self.delay_s, self.loss, self.up = 0.0, 0.0, True
        self.carried = self.lost = 0
        self._ends = [self._end(end) for end in range(2)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def variables(self, node: int) -> dict[str, str]:
        """What a node needs in its environment."""
        device = self.devices[node]
        return {NETNS: self.namespaces[node], "GLOO_SOCKET_IFNAME": device, "PET_MASTER_ADDR": ADDRESSES[0]}

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for end, namespace in zip(self._ends, self.namespaces, strict=True):
            os.close(end)
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", namespace)

    def _end(self, end: int) -> int:
        tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        device, namespace = self.devices[end], self.namespaces[end]
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        ip("netns", "add", namespace)
        ip("link", "set", device, "netns", namespace)
        ip("-n", namespace, "addr", "add", ADDRESSES[end], "peer", ADDRESSES[1 - end], "dev", device)
        for name in ("lo", device):
            ip("-n", namespace, "link", "set", name, "up")
        return tun

    def _carry(self) -> None:
        drawn, order, under_way = random.Random(0), count(), list[tuple[float, int, int, bytes]]()
        while not self._over.is_set():
            wait_s = min(0.05, under_way[0][0] - time.monotonic()) if under_way else 0.05
            for tun in select.select(self._ends, [], [], max(0.0, wait_s))[0]:
                packet = os.read(tun, LONGEST_PACKET)
                if not self.up or drawn.random() < self.loss:
                    self.lost += 1
                    continue
                other = self._ends[1 - self._ends.index(tun)]
                heapq.heappush(under_way, (time.monotonic() + self.delay_s, next(order), other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(under_way)
                with suppress(OSError):  # its queue is full: lost, as on any wire
                    os.write(other, packet)
                    self.carried += 1


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def joined() -> Iterator[Wire]:
    wire = Wire()
    try:
        yield wire
    finally:
        wire.close()
