"""A plan as lines of text."""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.explain import memory_lines, why_lines
from shardwise.spec.plan import Estimate, Pipeline, Plan
from tests.said import shows


def test_what_a_step_writes_to_disks_or_that_it_only_reads() -> None:
    """Frozen weights that wait on NVMe are read in every step, and never written: a drive lasts."""
    found = Estimate({"weights": 2**30}, 2**30)
    assert not any("disks" in line for line in memory_lines(found))
    found = replace(found, disk_bytes=2**34)
    reads = memory_lines(found)[-1]
    assert shows(reads, "16.0 GiB", "weights", "disks", "not write")
    writes = memory_lines(replace(found, written_bytes=2**31))[-1]
    assert shows(writes, "writes 2.0 GiB", "disks", "279,396 steps", "600 TB")


def test_a_long_value_pads_no_column_and_an_empty_one_is_not_shown() -> None:
    split = (1, *(2,) * 64, 1)
    why = {"shard.strategy": "searched", "pipeline.split": "derived", "optim.moments": "default", "nothing": "assumed"}
    plan = Plan(pipeline=Pipeline(split=split), why=why)
    rows = {line.split()[0]: line for line in why_lines(plan)}
    assert rows["pipeline.split"].split(maxsplit=1)[1] == "1 of 1, 64 of 2, 1 of 1  derived"
    places = {line.index(reason) for line, reason in zip(rows.values(), why.values(), strict=True)}
    assert len(places) <= 3 and max(map(len, rows.values())) < 60
    assert "None" not in rows["optim.moments"] and rows["nothing"].split() == ["nothing", "assumed"]
    short = why_lines(replace(plan, pipeline=Pipeline(split=(8, 8))))
    assert any("[8, 8]" in line for line in short)
