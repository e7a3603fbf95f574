"""What thousands of ranks ask of one process, of the store and of the disk, counted with few."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from bench.ranks import cut_along_the_shorter_dim
from shardwise.runtime import objects, world
from shardwise.runtime.checkpoint.manifest import FileRecord
from shardwise.runtime.checkpoint.packed import pack_plan, pack_results, unpack_plan, unpack_results
from shardwise.runtime.checkpoint.storage import ShardPlanner, ShardWriter, Target

ROOT = Path(__file__).parents[2]


def connected(ranks: int, late: bool) -> dict[str, float]:
    environment = {**os.environ, **({"TORCH_GLOO_LAZY_INIT": "1"} if late else {})}
    command = [sys.executable, "-m", "bench.ranks", "--connect", str(ranks)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.prove
def test_ranks_that_are_connected_at_once_read_what_all_wrote() -> None:
    assert connected(16, late=False)["reads"] == 16**2


def test_connected_late_ranks_read_of_those_alone_that_they_talk_with() -> None:
    """Of two neighbours in a ring, and of some in the first rank's tree."""
    ranks = 16
    found = connected(ranks, late=True)
    assert found["reads"] <= 6 * ranks
    assert found["sockets"] < 10 * ranks


def test_more_than_64_ranks_are_connected_late(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2**16))
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: limits.append(given))
    world._connect_late()
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert limits == [(2**16, 2**16)]
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    world._connect_late()
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0", "the user's word"
    assert len(limits) == 1


@pytest.mark.parametrize(
    "value", [None, True, 7, -1, "", "PK", "é\n\ud800", (None, None), ("a", (1, False)), "x" * 9000]
)
def test_plain_objects_arrive_as_they_were(value: object) -> None:
    found = objects.decode(objects.encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("data", [b"1+1", b"[1", b"(" * 4000, b"__import__('os')", b"\xff", b"", b"open('x')"])
def test_what_is_no_literal_is_refused(data: bytes) -> None:
    with pytest.raises((UnpicklingError, EOFError)):
        objects.decode(
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )


def test_plans_and_results_arrive_as_they_were(tmp_path: Path) -> None:
    state = {
        "model.a": torch.arange(6.0).view(2, 3),
        "model.b": torch.tensor(1.5),
        "optim.c": torch.zeros(4, dtype=torch.bfloat16),
    }
    planner = ShardPlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    assert pack_plan(unpack_plan(pack_plan(plan))) == pack_plan(plan)
    assert [(item.index, item.type) for item in unpack_plan(pack_plan(plan)).items] == [
        (i.index, i.type) for i in plan.items
    ]
    plan = planner.finish_plan(unpack_plan(pack_plan(planner.create_global_plan([plan])[0][0])))
    writer = ShardWriter(tmp_path, "run")
    results = writer.write_data(SavePlan(plan.items, Target(tmp_path, 0, 1)), planner).wait()
    assert unpack_results(pack_results(results)) == results
    assert {type(result.storage_data.record) for result in unpack_results(pack_results(results))} == {FileRecord}


def test_a_plan_takes_time_in_proportion_to_its_slices() -> None:
    """Also where tensors are cut along the shorter of their dims: DCP's own check compares all slices of one then."""

    def taken_s(ranks: int) -> float:
        plans = [cut_along_the_shorter_dim(["model.w"], rank, ranks) for rank in range(ranks)]
        planner = ShardPlanner()
        planner.set_up_planner({}, is_coordinator=True)
        begun_s = time.process_time()
        assert sum(len(plan.items) for plan in planner.create_global_plan(plans)[0]) == ranks
        return time.process_time() - begun_s

    taken_s(256)
    assert taken_s(8192) < 32 * taken_s(1024), "eight times as many, where all with all would be 64"
