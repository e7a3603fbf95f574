"""The newest collective, out of the recorders of gloo and NCCL: the second is the form that NCCL's recorder writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from shardwise.runtime.faults.flight import LastCollective, newest_collective
from shardwise.runtime.world import world
from shardwise.spec.layout import Layout

LATER = 2 * 10**18
"""Nanoseconds since 1970, after whatever other tests have left in the recorder."""


def entry(number: int, name: str, created: int, group: str = "default_pg", **changes: Any) -> dict[str, Any]:
    """What ``FlightRecorderDetail.hpp`` writes of a collective that a device has finished."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0" if group == "default_pg" else "1", group],
        "thread_name": "python",
        "thread_id": "140",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": LATER + created,
        "duration_ms": 0.25,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": LATER + created + 1,
        "time_discovered_completed_ns": LATER + created + 2,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | changes


WAITS: dict[str, Any] = {"state": "started", "retired": False, "time_discovered_completed_ns": 0}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What NCCL's recorder remembers; a build without NCCL has none."""
    entries: list[dict[str, Any]] = []

    def dump(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        assert includeCollectives and not onlyActive
        return json.dumps({"version": "2.10", "nccl_comm_state": {}, "entries": entries}).encode()

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    return entries


def test_a_collective_of_nccl_is_seen_and_counted_beside_those_of_gloo(nccl: list[dict[str, Any]]) -> None:
    with world(Layout(), "cpu", 10.0):
        dist.all_reduce(torch.ones(1))
        gloo = newest_collective()
        assert gloo.name == "all_reduce #1" and not gloo.pending
        nccl += [entry(6, "all_reduce", 0), entry(41, "reduce_scatter", 2, "mesh_dp_shard")]
        assert newest_collective() == LastCollective("reduce_scatter #41", gloo.number + 6 + 41)
        nccl += [entry(9, "broadcast", 3, "undefined", **WAITS), entry(0, "send", 4, is_p2p=True)]
        assert newest_collective().name == "reduce_scatter #41", "neither another group's nor a send"


def test_what_nccl_was_asked_for_and_has_not_ended_is_pending(nccl: list[dict[str, Any]]) -> None:
    nccl += [entry(6, "all_reduce", 0), entry(7, "all_gather", 1, **WAITS)]
    assert newest_collective().name == "all_gather #7" and newest_collective().pending
    nccl[1] |= {"retired": True}
    assert not newest_collective().pending


def test_a_recorder_that_both_names_show_counts_once(
    nccl: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in releases of torch after 2.13."""
    nccl += [entry(7, "all_gather", 0)]
    dump = vars(_distributed_c10d)["_dump_nccl_trace_json"]
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", dump)
    assert newest_collective() == LastCollective("all_gather #7", 7)
