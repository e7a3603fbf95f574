"""The price of a pipeline is that of its whole list of actions, of which few are played."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner.event_log import StepLog
from shardwise.planner.price import of_rank_kinds, price
from shardwise.planner.schedule import folded, micro_batches, schedule
from shardwise.planner.schedule import staged as staged_on
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import Span, fold, same
from shardwise.planner.unit_passes import Passes
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Offload, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.techniques import cost
from shardwise.techniques.pp import even
from shardwise.techniques.pp.actions import SCHEDULES

SPEC, H100S = replace(load_spec("Llama-3.1-8B"), num_hidden_layers=8), parse_cluster("8xH100")
LEAST = {name: facts.least_stages for name, facts in SCHEDULES.items()}


def staged(schedule: Any, ranks: int, m: int, strategy: Any, each: int = 0) -> Plan:
    each = each or LEAST[schedule]
    pp: Any = {"pp": ranks, "v_shaped": SCHEDULES[schedule].shape == "v", "ranks_per_node": 8}
    layout = Layout(dp_replicate=2, **pp) if strategy == "ddp" else Layout(dp_shard=2, **pp)
    asked = Pipeline(schedule, each, even(SPEC, 256, ranks * each))
    return Plan(layout, Batch(1, m, 256, 128), Shard(strategy), Precision("bf16"), Remat("selective"), pipeline=asked)


@cache
def full(plan: Plan, rank: int) -> Span:
    """Every action of a rank."""
    rank_kind = rank_kind_of(plan.layout.rank({"pp": rank}), plan.layout, plan.stages(SPEC.num_hidden_layers))
    costed = cost(sheet_of(SPEC, plan, rank_kind), plan)
    log = StepLog()
    staged_on(log, costed, plan, "cuda", None)
    return fold(log.events)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize(("ranks", "m"), [(2, 20), (3, 30)])
def test_of_many_micro_batches_few_are_played(schedule: str, strategy: str, ranks: int, m: int) -> None:
    """Peak, what is sent, and operations are those of all, at every place."""
    plan = staged(schedule, ranks, m, strategy)
    for costed in of_rank_kinds(SPEC, plan):
        found = micro_batches(costed, plan, Passes.of(costed, plan, "cuda"))
        assert same(found, full(plan, costed.rank_kind.coordinate("pp"))), costed.rank_kind


@pytest.mark.parametrize(("each", "m"), [(3, 28), (2, 17), (2, 20)])
def test_of_interleaved_stages_too(each: int, m: int) -> None:
    plan = staged("interleaved", 2, m, "zero2", each)
    for costed in of_rank_kinds(SPEC, plan):
        found = micro_batches(costed, plan, Passes.of(costed, plan, "cuda"))
        assert same(found, full(plan, costed.rank_kind.coordinate("pp")))


def test_of_gradients_that_leave_a_rank_with_fewer_rows_than_others() -> None:
    """What is copied of each is without its padding, in the step that is played and in those that follow from it."""
    plan = replace(staged("1f1b", 2, 12, "zero3"), offload=Offload("host"))
    plan = replace(plan, layout=Layout(dp_shard=3, pp=2, ranks_per_node=8))
    rank_kind = rank_kind_of(plan.layout.rank({"dp_shard": 2}), plan.layout, plan.stages(SPEC.num_hidden_layers))
    costed = cost(sheet_of(SPEC, plan, rank_kind), plan)
    assert same(folded(costed, plan), fold(schedule(costed, plan)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_operations_are_those_of_all_stages(schedule: str) -> None:
    plan = staged(schedule, 3, 12, "zero1")
    by_rank = [full(plan, rank).flops for rank in range(3)]
    priced = price(SPEC, plan, H100S)
    assert priced.estimate.flops_per_step == 2 * sum(by_rank) and len({*by_rank}) > 1
    alone = replace(plan, layout=Layout(dp_shard=2, ranks_per_node=8), pipeline=Pipeline())
    assert priced.estimate.flops_per_step == price(SPEC, alone, H100S).estimate.flops_per_step


def test_the_fullest_of_places_that_have_like_units_is_found() -> None:
    """Down and up a V every rank but the first has blocks alone: they differ in how many, and in how long."""
    plan = staged("zbv", 3, 12, "zero1")
    peaks = {full(plan, rank).top_bytes for rank in range(3)}
    assert len(peaks) == 3 and price(SPEC, plan, H100S).estimate.peak_bytes > max(peaks)
