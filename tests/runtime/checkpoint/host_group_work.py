"""What the tests of the group run on each rank."""

from __future__ import annotations

import time

import torch.distributed as dist

from shardwise.runtime.checkpoint.host_group import HostGroup


def spare(rank: int, world: int, together: bool) -> tuple[str, float]:
    """Rank 1 fails; the others have done their work, or (not ``together``) wait inside of it for rank 1. What comes of
    it on this rank, and after how many seconds."""
    group = HostGroup.of(None)

    def work() -> str:
        if rank == 1:
            raise ValueError("rank 1 cannot")
        if not together:
            dist.barrier()
        return "done"

    begun = time.monotonic()
    try:
        found = group.spared(work, patience_s=1.0)
    except Exception as error:
        return f"raised {error}", time.monotonic() - begun
    return f"spared {found}", time.monotonic() - begun


def come_late(rank: int, world: int) -> tuple[str, float, list[int]]:
    """What waiting for rank 1, which comes three seconds late to a vote, ends in on this rank, after how many seconds,
    and what the vote after that says."""
    group, late = HostGroup.of(None), dist.new_group(backend="gloo")
    begun, said = time.monotonic(), ""
    if rank == 1:
        time.sleep(3.0)
    try:
        group.minimum([rank], 60.0 if rank == 1 else 0.5)
    except RuntimeError as error:
        said = str(error)
    took = time.monotonic() - begun
    dist.barrier(group=late)
    return said, took, group.minimum([rank + 5], 60.0)
