"""When plans have a pipeline, which, and what bounds the search of them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.models.lookup import load_spec
from shardwise.planner.bounds import LowerBounds
from shardwise.planner.candidates import Pipelines, candidates
from shardwise.planner.comparison import TIE, fits, kind, name, peak_share, seconds, simplest
from shardwise.planner.price import price
from shardwise.planner.search import Search, best_of_kinds, fastest_pipelines
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Recipe

EIGHT_B, SEVENTY_B = load_spec("Llama-3.1-8B"), load_spec("Llama-3.1-70B")
ONE_B = load_spec("Llama-3.2-1B")


def recipe(sequences: int = 64, **sections: object) -> Recipe:
    return Recipe.model_validate({"train": {"seq_len": 4096, "global_batch_size": sequences}, **sections})


@pytest.mark.matrix(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(("spec", "cluster"), [(EIGHT_B, "2x8xH100+400Gb/node"), (ONE_B, "8xL40S")])
def test_bounds_of_pipelines_are_below_what_they_bound(schedule: str, spec: Any, cluster: str) -> None:
    """Of seconds and of memory, in whatever order plans are asked."""
    machines = parse_cluster(cluster)
    plans = candidates(recipe(parallel={"pp": 4, "schedule": schedule}), spec, machines)[0]
    bounds, drawn = LowerBounds(spec, machines), Random(2).sample(plans, 12)
    for plan in drawn:
        rough_s, bound_s = bounds.roughly(plan), bounds.seconds(plan)
        priced = timed(spec, price(spec, plan, machines), machines)
        assert rough_s <= bound_s * (1 + 1e-9) <= seconds(priced).step_s * (1 + 2e-9), name(plan)
        assert bound_s <= bounds.replayed(plan) <= seconds(priced).step_s * (1 + 2e-9), name(plan)
        assert bounds.may_fit(plan, peak_share(priced)), name(plan)


def test_bounds_of_degrees_are_below_all_of_their_plans() -> None:
    machines = parse_cluster("2x8xH100+400Gb/node")
    pipelines, bounds = Pipelines(recipe(), EIGHT_B, machines, 64), LowerBounds(EIGHT_B, machines)
    for degrees in Random(3).sample([*pipelines.degrees()], 6):
        least_s = min(bounds.degrees_s(fast) for fast, _ in degrees.ends)
        for plan in Random(4).sample(pipelines.plans(degrees), 3):
            assert least_s <= seconds(timed(EIGHT_B, price(EIGHT_B, plan, machines), machines)).step_s


@pytest.mark.matrix
def test_of_pipelines_as_fast_the_simplest_is_found() -> None:
    """Whatever the order in which they are looked at: as when all are priced and timed."""
    cluster = parse_cluster("8xH100")
    search = Search(recipe(128), EIGHT_B, cluster, stages=frozenset({2}))
    found = simplest(fastest_pipelines(search, tp=False))
    every = [plan for each in search.pipelines if each.staged.layout.tp == 1 for plan in search.tried.plans(each)]
    priced = [price(EIGHT_B, plan, cluster) for plan in every]
    best = simplest([timed(EIGHT_B, plan, cluster) for plan in priced if fits(plan)])
    assert len(every) > 20 and name(found) == name(best) and seconds(found) == seconds(best)


@pytest.mark.parametrize(
    ("model", "machines", "sequences", "counts"),
    [
        ("meta-llama/Llama-3.1-8B", "8xH100", 1024, [(12, 8), (26, 18)]),
        ("meta-llama/Llama-3.1-70B", "64x8xH100", 1024, [(16, 8)]),  # a budget is faster
        ("mistralai/Mixtral-8x7B-v0.1", "8xH100", 64, [(1, 1), (17, 8)]),  # none fits
        ("Qwen/Qwen3-30B-A3B", "2x8xH100", 64, [(4, 3)]),  # one is tried
    ],
)
def test_few_plans_are_priced_and_timed(
    model: str, machines: str, sequences: int, counts: list[tuple[int, int]]
) -> None:
    """Of hundreds, so many until the best is known, and then of every kind: no more than when bounds were last made
    better."""
    search = Search(recipe(sequences), load_spec(model), parse_cluster(machines))
    known = search.known
    for most, find in zip(counts, (lambda: search.best, lambda: best_of_kinds(search)), strict=False):
        find()
        counted = len(known.prices) + len(known.too_large), len(known.times)
        assert len(search.all) > 100 and counted[0] <= most[0] and counted[1] <= most[1]


@pytest.mark.prove
def test_a_pipeline_is_taken_where_it_is_faster_than_all_else() -> None:
    """70 B on eight nodes with one slow card each: what tensor parallelism in the node leaves to be summed between
    nodes takes longer than what stages idle. A model of 1 B on one node of fast links gains nothing by stages."""
    search = Search(recipe(1024), SEVENTY_B, parse_cluster("8x8xH100+400Gb/node"))
    chosen, without = search.chosen, Search(recipe(1024, parallel={"pp": 1}), SEVENTY_B, search.cluster).chosen
    assert chosen.layout.pp > 1 and fits(chosen) and without.layout.pp == 1
    assert seconds(chosen).step_s * (1 + TIE) < seconds(without).step_s
    assert chosen.why["layout.pp"].startswith("searched") and f"pp {chosen.layout.pp} (" in name(chosen)
    assert chosen.batch.global_batch_size(chosen.layout.dp) == 1024
    assert Search(recipe(), ONE_B, parse_cluster("8xH100")).chosen.layout.pp == 1


@pytest.mark.prove
def test_a_pin_wins() -> None:
    for pins in ({"pp": 2}, {"pp": 4, "schedule": "interleaved", "stages_per_rank": 4}, {"pp": 2, "schedule": "zbv"}):
        plan = Search(recipe(parallel=pins), EIGHT_B, parse_cluster("8xH100")).chosen
        assert plan.layout.pp == pins["pp"] and plan.why["layout.pp"] == "pinned"
        assert plan.pipeline.schedule == pins.get("schedule", plan.pipeline.schedule)
    assert not plan.compile and plan.why["compile"].startswith("derived: off")


@pytest.mark.parametrize(
    ("pins", "code", "fix"),
    [
        ({"pp": 3}, "PLAN001", "1, 2, 4, 8"),
        ({"pp": 64}, "PLAN001", "1, 2, 4, 8"),
        ({"pp": 2, "schedule": "interleaved", "stages_per_rank": 32}, "PLAN023", "pp=1"),
        ({"pp": 2, "schedule": "1f1b", "stages_per_rank": 2}, "PLAN023", "stages_per_rank=1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(pins: dict[str, object], code: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Search(recipe(parallel=pins), EIGHT_B, parse_cluster("8xH100")).chosen  # noqa: B018
    assert code in {problem.code for problem in refused.value.problems}
    assert any(fix in problem.fix for problem in refused.value.problems)


@pytest.mark.prove
def test_the_table_has_the_best_pipelines_with_and_without_tensor_parallelism() -> None:
    found = {
        kind(plan): plan for plan in best_of_kinds(Search(recipe(256), EIGHT_B, parse_cluster("2x8xH100+400Gb/node")))
    }
    assert found["pp"].layout.tp == 1 < found["pp"].layout.pp and found["pp x tp"].layout.tp > 1
    steps = [seconds(plan).step_s for plan in found.values() if fits(plan)]
    assert steps == sorted(steps)


def test_so_many_stages_as_are_asked_for_are_tried() -> None:
    recipe = load_recipe(None, ["model=meta-llama/Llama-3.1-70B", "seq_len=4096", "global_batch=64"])
    spec, cluster = load_spec("meta-llama/Llama-3.1-70B"), parse_cluster("2x8xH100")
    any_number, two, none = (
        {one.staged.layout.pp for one in Search(recipe, spec, cluster, stages=stages).pipelines}
        for stages in (None, frozenset({1, 2}), frozenset({1}))
    )
    assert any_number > {2, 4, 8} and two == {2} and none == set()
