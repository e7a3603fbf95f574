"""Measured bytes: of known allocations and known collectives; and the report that shows them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.distributed.meshes import Meshes
from shardwise.models.config import parameter_count
from shardwise.prove.pool import RankPool
from shardwise.runtime.metrics.measure import Meter, resident_bytes, return_freed_memory
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.results import Memory, Validation
from shardwise.runtime.state import TrainState
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Estimate, Plan, Seconds, Shard, Traffic
from shardwise.spec.units import show_bytes
from tests.parity.cases import TIED
from tests.runtime import rank_work
from tests.said import shows

MIB = 2**20


def test_the_peak_is_that_of_torchs_allocations() -> None:
    """In the third step 4 MiB live, then 8 MiB more, then 2 MiB: beside 3 x 1 MiB of weights and moments the peak is
    12 MiB."""
    layer = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.state[layer.weight] = {name: torch.zeros(512, 512) for name in ("exp_avg", "exp_avg_sq")}
    state = TrainState([layer], optimizer)
    meter = Meter(Meshes(), torch.device("cpu"))
    for _ in range(4):
        with meter.measuring(state):
            kept = torch.zeros(MIB)
            more = torch.zeros(2 * MIB)
            del more
            less = torch.zeros(MIB // 2)
            del less, kept
    assert meter.memory is not None
    assert meter.memory.state == {"weights": MIB, "moments": 2 * MIB}
    assert meter.memory.peak_bytes == 15 * MIB
    assert meter.memory.categories()["the rest"] == 12 * MIB
    assert meter.memory.resident_bytes > 15 * MIB
    assert not meter.measured


@pytest.mark.parametrize(
    ("layout", "strategy", "axis"),
    [(Layout(dp_replicate=2), "ddp", "dp_replicate"), (Layout(dp_shard=2), "zero2", "dp_shard")],
)
def test_the_bytes_of_a_step_on_the_wire(ranks: RankPool, layout: Layout, strategy: str, axis: str) -> None:
    """fp32 gradients: 4 bytes a parameter. FSDP pads what two ranks cannot share alike (this model: nothing odd)."""
    plan = Plan(layout=layout, shard=Shard(strategy=strategy))  # type: ignore[arg-type]
    whole = 4 * parameter_count(TIED)
    for traffic in ranks.run(rank_work.traffic_of_a_step, plan, world=2):
        assert traffic[("control", "all_reduce")] == (24, 1)
        if strategy == "ddp":
            assert traffic[(axis, "all_reduce")][0] == whole
            assert set(traffic) == {("control", "all_reduce"), (axis, "all_reduce")}
        else:
            assert traffic[(axis, "all_gather")] == (whole, 3)  # two blocks and the root, once each
            assert traffic[(axis, "reduce_scatter")] == (whole, 3)


def report(**changes: object) -> Report:
    estimate = Estimate(
        memory={"weights": 100, "moments": 200, "activations": 50, "logits": 30, "reserve": 999},
        traffic=(
            Traffic("dp_shard", "all_gather", "weights", 400, 3),
            Traffic("world", "all_reduce", "control", 32, 2),
        ),
    )
    facts: dict[str, object] = {
        "directory": Path("runs/r"),
        "steps": 8,
        "tokens": 512,
        "seconds": 75.0,
        "step_s": 0.5,
        "estimate": estimate,
        "memory": Memory({"weights": 100, "moments": 200}, 390, 10**6),
        "traffic": (Traffic("dp_shard", "all_gather", "", 400, 3), Traffic("dp_shard", "reduce_scatter", "", 7, 1)),
        "validation": Validation(100.0, 50, 40.0),
    }
    return Report(**(facts | changes))  # type: ignore[arg-type]


def test_what_is_offloaded_on_a_cpu_stands_by_itself() -> None:
    estimate = Estimate(memory={"weights": 100, "moments": 0, "offloaded": 400, "activations": 50})
    memory = Memory({"weights": 100, "moments": 0, "offloaded": 440}, 600, 10**6)
    rows = {row[0]: row[1:] for row in report(estimate=estimate, memory=memory).rows()}
    assert rows["memory: offloaded"] == ("400 B", "440 B", "+10.0 %")
    assert rows["memory: all else at the peak"] == ("50 B", "60 B", "+20.0 %")
    assert "memory: offloaded" not in {row[0] for row in report().rows()}


def test_predicted_and_measured_stand_side_by_side() -> None:
    rows = {row[0]: row[1:] for row in report().rows()}
    assert rows["memory: weights"] == ("100 B", "100 B", "0")
    assert rows["memory: all else at the peak"] == ("80 B", "90 B", "+12.5 %")
    assert rows["memory per rank"] == ("380 B", "390 B", "+2.6 %")
    assert rows["all-gather over dp_shard"][2] == "0"
    assert rows["reduce-scatter over dp_shard"][2] == "unforeseen"
    assert rows["all-reduce of control messages"][2] == "-100.0 %"
    assert rows["step time"] == ("-", "0.500 s", "")
    timed = report(estimate=Estimate(seconds=Seconds(step_s=0.4)))
    assert ("step time", "0.400 s", "0.500 s", "+25.0 %") in timed.rows()


def test_what_was_not_measured_is_not_shown() -> None:
    short = report(memory=None, traffic=(), step_s=0.0)
    assert short.rows() == []
    assert shows(short.text(), "memory", "third step", "fewer")
    bare = report(estimate=Estimate())
    assert {row[0]: row[1] for row in bare.rows()}["memory per rank"] == "-"


def test_the_report_as_text() -> None:
    text = report(skipped=2, after="def f|(x)", before="def f|zz").markdown()
    assert "8 steps, 512 tokens in 1:15." in text
    assert "2 steps were skipped" in text
    assert shows(text, "2.000 nats", "3.607 bits")  # 100 nats / ln 2 / 40 bytes
    assert f"the process takes {show_bytes(10**6)}" in text
    assert "    def f|(x)" in text and "    def f|zz" in text
    assert 'shardwise generate runs/r --prompt "..."' in text
    assert shows(report(since=3).markdown(), "8 steps", "512 tokens", "1:15", "since step 3")
    assert "8 steps, 512 tokens in 26:01:15." in report(seconds=26 * 3600 + 75.0).markdown()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's heap only")
def test_freed_memory_goes_back_to_the_system() -> None:
    """A block in use on top of the heap keeps glibc from shrinking it: 100 MiB freed below it stay resident."""
    blocks = [torch.ones(25_000) for _ in range(1_000)]
    last = blocks[-1]
    blocks.clear()
    held = resident_bytes()
    return_freed_memory()
    assert held - resident_bytes() > 50 * MIB and last.sum() == 25_000


@pytest.mark.prove
def test_measuring_on_a_cpu_writes_nothing_to_the_terminal_and_holds_back_nothing_else() -> None:
    """In a process of its own: torch counts its lines by process, and writes the first."""
    code = """
import os, torch
from torch.profiler import ProfilerActivity, profile
from shardwise.runtime.metrics.measure import start_quietly

class Speaking(profile):
    def start(self):
        super().start()
        os.write(2, b"another line\\n")

older = [torch.zeros(1000) for _ in range(5)]
profiler = Speaking(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
start_quietly(profiler)
older.clear()
profiler.stop()
"""
    quiet = {**os.environ, "KINETO_LOG_LEVEL": "99"}  # as runtime/world.py sets it
    ended = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "another line\n")
