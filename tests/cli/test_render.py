"""A plan as lines of text."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cli.render import memory_lines
from shardwise.spec.plan import Estimate


def test_what_a_step_writes_to_disks_or_that_it_only_reads() -> None:
    """Frozen weights that wait on NVMe are read in every step, and never written: a drive lasts."""
    found = Estimate({"weights": 2**30}, 2**30)
    assert not any("disks" in line for line in memory_lines(found))
    found = replace(found, disk_bytes=2**34)
    reads = "  16.0 GiB of weights are on the disks of a node, and steps do not write there"
    assert memory_lines(found)[-1] == reads
    writes = memory_lines(replace(found, written_bytes=2**31))[-1]
    assert writes.startswith("  a step writes 2.0 GiB to the disks of a node: 279,396 steps are 600 TB")
