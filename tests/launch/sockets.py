"""What other machines, and other users of this one, could reach of a process."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def network_addresses(pid: int) -> list[str]:
    """The local addresses of a process's internet sockets."""
    return [found.laddr.ip for found in psutil.Process(pid).net_connections("inet") if found.laddr]


def listening(pid: int) -> list[str]:
    """Those that wait for connections."""
    found = psutil.Process(pid).net_connections("inet")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM]


def stays_here(address: str) -> bool:
    """Whether this address belongs to the loopback interface."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
