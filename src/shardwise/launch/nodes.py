"""The ports that torchrun leaves open (docs/security.md)."""

from __future__ import annotations

import ipaddress
import os
import socket

from shardwise.launch.worker import by_our_launcher, is_worker, meets_again, rank, started


def exposure() -> str | None:
    """The warning of torchrun's first rank that other machines can reach its port; None if they cannot."""
    if by_our_launcher() or not is_worker() or rank() or "MASTER_PORT" not in os.environ:
        return None
    world, local_world = started()
    port = os.environ.get("MASTER_PORT", "")
    if world == local_world and not meets_again():
        what = f"torchrun listens on port {port} of every network interface, without authentication"
        return f"warning[NET001]: {what}\nfix:   on one machine, `shardwise train`, which opens no port to a network"
    address = os.environ.get("MASTER_ADDR", "")
    public = sorted(found for found in _addresses(address) if ipaddress.ip_address(found).is_global)
    if not public:
        return None
    what = f"{address} is {public[0]}, a public address: anybody who reaches its port {port} can disturb this run"
    return f"warning[NET001]: {what}\nfix:   the address of a private network between the nodes, or a firewall"


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()
