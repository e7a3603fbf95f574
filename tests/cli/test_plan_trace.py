"""``shardwise plan --trace``: what a reader of the Trace Event Format finds is the planned step."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import plan as command
from shardwise.cli.app import main
from shardwise.cli.length import Asked
from shardwise.cli.plan_trace import trace_of
from shardwise.cli.planned import Planned, planned
from shardwise.models.resolve import resolve
from shardwise.planner.comparison import seconds
from shardwise.planner.step_record import streams_of_kinds
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.range_names import sent_name, unit_name
from tests.cli import traces
from tests.said import refuses, shows

SMALL = ["train.micro_batch_size=1"]
CPU = ["--cluster", "2xCPU,host=64GB"]
CASES = {
    "zero3": ("2xCPU,host=64GB", "parallel.strategy=zero3", "train.global_batch_size=4"),
    "ddp": ("2xL40S", "parallel.strategy=ddp", "train.global_batch_size=4"),
    "tp": ("4xH100", "parallel.tp=2", "parallel.strategy=zero3", "train.global_batch_size=16"),
    "hsdp": ("2x2xH100", "parallel.dp_replicate=2", "parallel.strategy=zero3", "train.global_batch_size=8"),
    "many": (
        "2xL40S",
        "parallel.strategy=zero2",
        "parallel.dp_shard=2",
        "train.micro_batch_size=1",
        "train.global_batch_size=12",
    ),
    "on the host": ("1xRTX-4090", "offload.optimizer=host", "train.global_batch_size=4"),
}
STAGED = ("4xCPU,host=64GB", "parallel.pp=4", "train.micro_batch_size=1", "train.global_batch_size=8")


@cache
def answer(machines: str, *words: str) -> Planned:
    recipe = load_recipe(None, ["model.path=meta-llama/Llama-3.2-1B", "train.seq_len=1024", *words])
    return planned(recipe, resolve(recipe), parse_cluster(machines), Asked(), here=False)


def events_of(found: Planned) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(json.dumps(trace_of(found.spec, found.best, found.cluster)))[
        "traceEvents"
    ]
    return events


@pytest.mark.parametrize("case", CASES)
def test_a_reader_finds_the_planned_step(case: str) -> None:
    found = answer(*CASES[case])
    events = events_of(found)
    assert traces.faults(events) == []
    assert found.best.batch.accumulation <= 8
    end_us = max(one["ts"] + one["dur"] for one in traces.spans(events))
    assert end_us == pytest.approx(1e6 * seconds(found.best).step_s, abs=0.2)


@pytest.mark.parametrize("case", CASES)
def test_passes_without_their_waits_are_what_the_record_computes(case: str) -> None:
    """Of the compute track: what lies around others, less what waits within it, is what the device computes; and all of
    it beside what is exposed is the step."""
    found = answer(*CASES[case])
    events, told = events_of(found), seconds(found.best)
    [record, *_] = streams_of_kinds(found.spec, found.best, found.cluster, 8)
    own = [one for one in traces.spans(events) if one["pid"] == record.rank and one["tid"] == 0]
    by_kind = defaultdict[str, float](float)
    for one in own:
        by_kind[one["cat"]] += one["dur"] / 1e6
    waits_s = by_kind.pop("waits", 0.0)
    computed_s = sum(one.end_s - one.begin_s for one in record.streams["compute"] if one.kind != "waits")
    waits_outside_s = sum(
        one.end_s - one.begin_s for one in record.streams["compute"] if one.kind == "waits" and one.during < 0
    )
    inside_s = waits_s - waits_outside_s
    assert sum(by_kind.values()) - inside_s == pytest.approx(computed_s, rel=1e-4)
    assert waits_s == pytest.approx(sum(told.exposed_s.values()) + told.offload_s, rel=1e-4, abs=1e-7)
    assert sum(by_kind.values()) + waits_outside_s == pytest.approx(told.step_s, rel=1e-4)


def test_units_are_named_in_their_order_and_messages_by_what_they_carry() -> None:
    found = answer(*CASES["zero3"])
    spans = traces.spans(events_of(found))
    blocks = range(found.spec.num_hidden_layers)
    forward = [one["name"] for one in spans if one["cat"] == "forward" and one["args"]["micro_batch"] == 0]
    assert forward == ["forward embedding", *(f"forward block {number}" for number in blocks), "forward head"]
    backward = [one["name"] for one in spans if one["cat"] == "backward" and one["args"]["micro_batch"] == 0]
    assert backward[:2] == ["backward head", f"backward block {blocks[-1]}"]
    gathers = [one for one in spans if one["name"].startswith("all-gather")]
    assert {sent_name("all_gather", "weights", unit_name(number)) for number in blocks} < {
        one["name"] for one in gathers
    }
    for one in gathers:
        assert one["args"]["bytes"] > 0 and one["args"]["axis"] == "dp_shard"
    reductions = [one for one in spans if one["name"].startswith("reduce-scatter")]
    named = {one["name"] for one in reductions}
    assert {sent_name("reduce_scatter", "gradients", unit_name(number)) for number in blocks} < named
    sent = sum(one["args"]["bytes"] for one in reductions)
    [reduced] = [one for one in found.best.estimate.traffic if one.kind == "reduce_scatter"]
    assert sent == reduced.bytes


def test_threads_are_streams_by_axis_and_memory_is_that_of_the_estimate() -> None:
    found = answer(*CASES["hsdp"])
    events = events_of(found)
    names = {*traces.named(events, "thread_name").values()}
    assert {"compute", "gather (dp_shard)", "reduce (dp_shard)", "all_reduce (dp_replicate)"} <= names
    for case in CASES:
        plan = answer(*CASES[case]).best
        levels = [one["args"] for one in events_of(answer(*CASES[case])) if one["ph"] == "C"]
        assert max(sum(level.values()) for level in levels) == plan.estimate.peak_bytes


def test_of_very_many_micro_batches_some_are_left_out_and_told() -> None:
    found = answer("2xL40S", "parallel.pp=1", "train.micro_batch_size=1", "train.global_batch_size=40")
    events = events_of(found)
    assert traces.faults(events) == []
    assert {one["args"].get("micro_batch") for one in traces.spans(events)} - {None} == {*range(8)}
    [name] = traces.named(events, "process_name").values()
    assert shows(name, 8, 20)
    levels = [one["args"] for one in events if one["ph"] == "C"]
    assert max(sum(level.values()) for level in levels) == found.best.estimate.peak_bytes


def test_stages_begin_one_after_another() -> None:
    found = answer(*STAGED)
    events = events_of(found)
    assert traces.faults(events) == []
    processes = traces.named(events, "process_name")
    assert [pid for pid, _ in processes] == [0, 1, 2, 3]
    assert all(f"stage {pid}" in name for (pid, _), name in processes.items())
    firsts = [min(one["ts"] for one in traces.spans(events) if one["pid"] == pid) for pid in range(4)]
    assert firsts[0] == 0 and all(later > earlier for earlier, later in pairwise(firsts))
    turns = [min(one["ts"] for one in traces.spans(events) if one["name"] == f"backward stage {n}") for n in range(4)]
    assert all(later < earlier for earlier, later in pairwise(turns))
    end_us = max(one["ts"] + one["dur"] for one in traces.spans(events))
    assert end_us == pytest.approx(1e6 * seconds(found.best).step_s, abs=0.2)


def test_a_trace_is_written_beside_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed, page = (tmp_path / name for name in ("a.json", "new/b.json.gz", "plan.html"))
    assert main(["plan", *CPU, "--trace", str(packed), "--html", str(page), "--json"]) == 0
    assert "plan" in json.loads(capsys.readouterr().out) and page.is_file()
    assert main(["plan", *CPU, "--trace", str(plain)]) == 0
    assert traces.read(plain) == traces.read(packed) and traces.faults(traces.read(plain)) == []


def searched(*given: object, **named: object) -> Any:
    raise AssertionError("a plan was searched for")


def test_what_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "planned", searched)
    there = tmp_path / "there.json"
    there.write_text("mine")
    same, damaged = str(tmp_path / "same"), [tmp_path / "cut.json.gz", tmp_path / "other.json"]
    damaged[0].write_bytes(gzip.compress(b"{}")[:10] + b"not deflated")
    damaged[1].write_text('{"traceEvents": [1]}')
    wrong: list[tuple[list[str], str, str]] = [
        (["--trace", str(there)], "OUT001", "--trace"),
        (["--trace", str(tmp_path)], "OUT001", "--trace"),
        (["--trace", str(there / "below.json")], "OUT002", ""),
        (["--trace", str(tmp_path / ("x" * 300))], "OUT002", "--trace"),
        (["--trace", same, "--html", same], "CLI001", "--html"),
        (["--trace", same, "-o", same], "CLI001", "--trace"),
        (["--trace", same, "--smallest"], "CLI001", "--trace"),
        (["--beside", str(there)], "CLI001", "--beside"),
        (["--trace", same, "--beside", str(there)], "CLI001", "--beside"),
        (["--trace", same, "--beside", str(tmp_path / "nowhere")], "CLI001", "--beside"),
        *((["--trace", same, "--beside", str(each)], "CLI001", "--beside") for each in damaged),
    ]
    for more, code, where in wrong:
        assert main(["plan", *CPU, *more]) != 0
        said = capsys.readouterr().err
        assert refuses(said, code, where=where), (more, said)
    assert there.read_text() == "mine" and {*tmp_path.iterdir()} == {there, *damaged}


def test_a_plan_of_a_file_has_no_model_to_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    assert main(["plan", *CPU, "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["plan", "--plan", str(plan), "--trace", str(tmp_path / "a.json")]) != 0
    assert refuses(capsys.readouterr().err, "CLI001", where="--trace")
    assert [*tmp_path.iterdir()] == [plan]


def test_a_planned_step_begins_with_the_first_that_was_measured(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "step 10", "pid": 0, "tid": 7, "ts": 250.5, "dur": 9.0}
    other = {"ph": "X", "cat": "cpu_op", "name": "step aside", "pid": "Spans", "tid": 7, "ts": 1.0, "dur": 2.0}
    measured, both = tmp_path / "rank-0.json", tmp_path / "both.json.gz"
    measured.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [other, step]}))
    assert main(["plan", *CPU, "--trace", str(both), "--beside", str(measured)]) == 0
    events = traces.read(both)
    assert events[:2] == [other, step]
    mine = events[2:]
    assert {one["pid"] for one in mine}.isdisjoint({0, "Spans"})
    assert min(one["ts"] for one in mine if "ts" in one) == 250
    assert traces.faults(mine) == []
