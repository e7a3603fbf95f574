"""The parts of a machine beside its GPUs: host memory and disks, as they are said, or as they are assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.errors import ConfigError, Problem

CLOUD_BYTES = 1000 * 2**30
"""Of host memory that a node in a cloud is assumed to have."""
WORKSTATION_BYTES, WORKSTATION_BYTES_EACH = 128 * 2**30, 64 * 2**30
"""What a workstation is assumed to have, or for each GPU, whichever is more."""
_SIZE = re.compile(r"(?P<size>\d+(?:\.\d+)?)\s*(?P<scale>[GT])(?P<binary>i?)B?", re.IGNORECASE)
_SAID = {"host": "host=128GB", "disk": "disk=2TB, or disk=2TB@3GB/s"}


def host_bytes(sold: str, count: int) -> tuple[int, str]:
    """Memory that the host of ``count`` GPUs is assumed to have, and whose that is. ``sold``: on what they are sold,
    ``cloud`` or ``workstation``, or with how many GB of host memory each."""
    if sold == "workstation":
        return max(WORKSTATION_BYTES, count * WORKSTATION_BYTES_EACH), "a workstation's"
    if sold in ("cloud", ""):
        return CLOUD_BYTES, "a cloud node's"
    return int(float(sold) * 1e9) * count, f"{sold} GB with each GPU"


def read_beside(part: str) -> Mapping[str, float]:
    """``host=128GB`` or ``disk=2TB@3GB/s`` as fields of a cluster. Memory is sold in powers of two, disks in powers of
    ten. Raises ConfigError (CLU001)."""
    key, _, value = (each.strip() for each in part.partition("="))
    if key not in _SAID:
        raise _unreadable(f"a machine has no `{key}`", f"write {', '.join(_SAID.values())}")
    size, at, rate = (each.strip() for each in value.partition("@"))
    found, per_s = _bytes(size, binary=key == "host"), _bytes(rate.removesuffix("/s"), binary=False)
    if not found or (at and not per_s) or (at and key == "host"):
        raise _unreadable(f"cannot read `{part}`", f"write {_SAID[key]}")
    if key == "host":
        return {"host_memory_bytes": int(found)}
    return {"disk_bytes": int(found), "disk_bytes_per_s": float(per_s)}


def _bytes(text: str, *, binary: bool) -> float:
    """0 where it is no size, or none that a machine has."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return 0.0
    scales = {"g": 2.0**30, "t": 2.0**40} if binary or match["binary"] else {"g": 1e9, "t": 1e12}
    size = float(match["size"]) * scales[match["scale"].lower()]
    return size if size < 1e18 else 0.0


def _unreadable(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem("CLU001", what, "--cluster", fix))
