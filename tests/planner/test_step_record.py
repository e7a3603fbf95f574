"""What pictures of a step are drawn from is what its estimate says: the same peak, the same seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.cli.length import Asked
from shardwise.cli.planned import Planned, planned
from shardwise.models.resolve import resolve
from shardwise.planner.comparison import seconds
from shardwise.planner.played import enough
from shardwise.planner.price import price
from shardwise.planner.step_record import memory_by_pass, streams_of_kinds
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe

ONE_B = "model.path=meta-llama/Llama-3.2-1B"


def answer(machines: str, *words: str) -> Planned:
    recipe = load_recipe(None, [ONE_B, "train.seq_len=1024", *words])
    return planned(recipe, resolve(recipe), parse_cluster(machines), Asked(), here=False)


CASES = {
    "ddp": ("2xL40S", "parallel.strategy=ddp"),
    "zero3, many micro-batches": ("2xL40S", "parallel.tp=1", "train.micro_batch_size=1", "train.global_batch_size=16"),
    "tp": ("4xH100", "parallel.tp=2", "train.global_batch_size=16"),
    "pipeline": ("8xH100", "parallel.pp=4", "train.micro_batch_size=1", "train.global_batch_size=64"),
    "interleaved": ("8xH100", "parallel.pp=4", "parallel.schedule=interleaved", "train.global_batch_size=64"),
    "on the host": ("1xRTX-4090", "offload.optimizer=host"),
    "cpu": ("2xCPU,host=64GB", "parallel.strategy=zero2", "train.global_batch_size=4"),
}
NODES = "2x8xL40S", "parallel.strategy=zero3", "train.global_batch_size=64"


@pytest.mark.parametrize("case", CASES)
def test_the_highest_moment_is_the_peak_of_the_estimate(case: str) -> None:
    found = answer(*CASES[case])
    levels = memory_by_pass(found.spec, found.best, found.cluster)
    highest = max(levels, key=lambda level: sum(level.values()))
    assert sum(highest.values()) == found.best.estimate.peak_bytes
    assert highest == found.best.estimate.memory


def test_there_is_a_level_for_each_pass_of_a_unit() -> None:
    """Before the first, then embedding, blocks and head, forward and backward, for each micro-batch that is played."""
    found = answer(*CASES["zero3, many micro-batches"])
    assert found.best.batch.accumulation > enough(found.best) == 3
    levels = memory_by_pass(found.spec, found.best, found.cluster)
    assert len(levels) == 1 + 3 * 2 * (found.spec.num_hidden_layers + 2)
    assert levels[0]["weights"] == found.best.estimate.memory["weights"] and not levels[0]["activations"]


def test_memory_of_experts_counts_what_is_reserved() -> None:
    recipe = load_recipe(None, ["model.path=mistralai/Mixtral-8x7B-v0.1", "train.seq_len=1024", "parallel.ep=8"])
    spec, cluster = resolve(recipe), parse_cluster("16xH200")
    best = planned(recipe, spec, cluster, Asked(), here=False).best
    assert best.estimate.memory["expert reserve"] > 0
    highest = max(memory_by_pass(spec, best, cluster), key=lambda level: sum(level.values()))
    assert highest == best.estimate.memory == price(spec, best, cluster).estimate.memory


@pytest.mark.parametrize("case", ["ddp", "tp", "cpu"])
def test_streams_end_with_the_step_and_wait_as_long_as_it_says(case: str) -> None:
    found = answer(*CASES[case])
    plan = found.best
    assert plan.batch.accumulation <= 2
    told, records = seconds(plan), streams_of_kinds(found.spec, plan, found.cluster)
    assert records[0].micro_batches == plan.batch.accumulation
    streams = records[0].streams
    assert streams["compute"][-1].end_s == pytest.approx(told.step_s, rel=1e-6)
    waits_s = sum(one.end_s - one.begin_s for one in streams["compute"] if one.kind == "waits")
    assert waits_s == pytest.approx(sum(told.exposed_s.values()), rel=1e-6, abs=1e-9)
    for played in streams.values():
        assert all(one.end_s > one.begin_s >= 0 for one in played)
        assert all(later.begin_s >= earlier.end_s - 1e-9 for earlier, later in pairwise(played))


def test_streams_are_named_by_what_they_do() -> None:
    found = answer(*NODES)
    streams = streams_of_kinds(found.spec, found.best, found.cluster)[0].streams
    assert {"compute", "gather", "reduce"} <= {*streams}
    kinds = Counter(one.kind for one in streams["compute"])
    assert kinds["forward"] > found.spec.num_hidden_layers < kinds["backward"] and kinds["optimizer"] == 1
    assert {one.kind for one in streams["gather"]} <= {"sends", "copies"}
    assert any("all-gather of weights" in one.what for one in streams["gather"])


@pytest.mark.parametrize("case", ["ddp", "tp", "zero3, many micro-batches", "nodes"])
def test_the_device_is_idle_only_where_its_seconds_say_that_it_waits(case: str) -> None:
    """Kernels that collectives slow are drawn as long as they take: there is no gap before them."""
    found = answer(*CASES.get(case, NODES))
    row = streams_of_kinds(found.spec, found.best, found.cluster)[0].streams["compute"]
    assert row[0].begin_s == pytest.approx(0.0, abs=1e-4 * row[-1].end_s)
    gaps_s = [later.begin_s - earlier.end_s for earlier, later in pairwise(row)]
    assert sum(gaps_s) <= 1e-4 * row[-1].end_s, max(gaps_s)
    assert min(gaps_s) >= -1e-9


def test_earlier_runs_stretch_what_is_drawn() -> None:
    found = answer(*CASES["ddp"])
    told = seconds(found.best)
    slow = replace(told, scale=2.0, optimizer_s=2 * told.optimizer_s, host_s=2 * told.host_s)
    plan = replace(found.best, estimate=replace(found.best.estimate, seconds=slow))
    plain, stretched = (streams_of_kinds(found.spec, each, found.cluster)[0].streams for each in (found.best, plan))
    assert stretched["compute"][-1].end_s == pytest.approx(2 * plain["compute"][-1].end_s)
