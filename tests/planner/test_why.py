"""What a plan says of its settings is true: the plan that each was compared with, and both times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import MARGIN, fits, name, seconds
from shardwise.planner.search import Search, reasons
from shardwise.planner.why import difference
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.units import show_seconds
from tests.said import shows

ONE_B, EIGHT_B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
CASES = {
    "of two micro-batches the simpler": (EIGHT_B, "4xA100", ["offload.optimizer=auto", "seq_len=4096", "batch=2"]),
    "stages": (EIGHT_B, "8xH100", ["seq_len=4096", "batch=64"]),
    "recomputation": (ONE_B, "8xRTX-4090", ["seq_len=4096", "batch=64"]),
    "the host": (EIGHT_B, "1xH100", ["offload.optimizer=auto", "seq_len=4096", "batch=2"]),
    "a tie": (ONE_B, "2xL40S", ["seq_len=2048", "precision.weights=bf16", "batch=256"]),
}


def searched(case: str) -> Search:
    model, cluster, words = CASES[case]
    words = [word.replace("batch=", "train.global_batch_size=") if word[0] == "b" else word for word in words]
    return Search(load_recipe(None, [f"model={model}", *words]), load_spec(model), parse_cluster(cluster))


def beside(plan: Plan, key: str, chosen: Plan) -> bool:
    """Whether it is a plan that the reason for ``key`` may be about."""
    if key == "remat.mode":
        return plan.layout == chosen.layout and plan.remat.mode != chosen.remat.mode
    section, _, leaf = key.partition(".")
    if section == "layout":
        return getattr(plan.layout, leaf) == 1
    return getattr(getattr(plan, section), leaf) != getattr(getattr(chosen, section), leaf)


@pytest.mark.parametrize("case", CASES)
def test_a_reason_names_another_plan_and_both_times(case: str) -> None:
    search = searched(case)
    chosen, told = search.chosen, reasons(search)
    assert told.others or case == "a tie"
    for key, other in told.others.items():
        said = chosen.why[key]
        if other is None:
            assert show_seconds(seconds(chosen).step_s) not in said
            tried = [plan for plan in search.all if beside(plan, key, chosen)]
            assert not search.known.fastest(tried, MARGIN)
            continue
        assert fits(other) and beside(other, key, chosen)
        assert f"{show_seconds(seconds(chosen).step_s)} a step" in said and show_seconds(seconds(other).step_s) in said
        assert difference(other, chosen) in said
        assert ("simpler" in said) is (seconds(other).step_s < seconds(chosen).step_s)


def test_the_next_kind_is_no_other_name_of_the_same_program() -> None:
    """With one micro-batch a step ZeRO-2 is ZeRO-1."""
    words = [f"model={ONE_B}", "train.global_batch_size=4", "parallel.tp=1", "parallel.pp=1"]
    chosen = Search(load_recipe(None, words), load_spec(ONE_B), parse_cluster("2xL40S")).chosen
    assert chosen.shard.strategy == "zero1" and chosen.batch.accumulation == 1
    assert "; " in chosen.why["shard.strategy"] and "zero2" not in chosen.why["shard.strategy"]


@pytest.mark.parametrize("case", CASES)
def test_the_reason_for_the_split_is_not_the_plan_itself(case: str) -> None:
    """Nothing that fits is faster than what is called the fastest; what is called simpler is told with what it costs,
    beside a plan that differs."""
    search = searched(case)
    chosen = search.chosen
    said, step = chosen.why["shard.strategy"], seconds(chosen).step_s
    if chosen.layout.world == 1:
        return
    assert show_seconds(step) in said
    fastest = min(map(search.known.with_larger_chunks, search.fitting), key=lambda plan: seconds(plan).step_s)
    if "simpler" in said:
        assert difference(fastest, chosen) != name(chosen) and difference(fastest, chosen) in said
        assert show_seconds(seconds(fastest).step_s) in said
        assert f"{step / seconds(fastest).step_s - 1:.1%}" in said
    else:
        assert step <= seconds(fastest).step_s


def test_what_differs_is_named_beside_a_plan_of_the_same_split() -> None:
    plan = Plan(batch=replace(Plan().batch, micro_batch_size=4))
    assert shows(difference(plan, Plan()), "the same", "micro-batch 4")
    assert name(plan) in difference(plan, replace(Plan(), layout=replace(plan.layout, tp=2)))
