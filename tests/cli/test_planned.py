"""Rows of the page of a plan, beside one another."""

from __future__ import annotations

import pytest

from shardwise.cli.length import Asked
from shardwise.cli.planned import Planned, planned, schedule_of
from shardwise.cli.render import change_lines, same_split
from shardwise.launch.worker import state_directory
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import fits, kind, seconds, tokens_per_s
from shardwise.planner.search import Search, strategies
from shardwise.planner.seconds.history import remember
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.units import show_count, show_seconds

ONE_B, EIGHT_B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"


def page(*words: str, here: bool = False) -> Planned:
    recipe, spec = load_recipe(None, [f"model={ONE_B}", *words]), load_spec(ONE_B)
    return planned(recipe, spec, parse_cluster("2xL40S"), Asked(), here=here)


@pytest.mark.parametrize("pin", ["auto", "zero2"])
def test_plans_that_are_one_program_have_one_row(pin: str) -> None:
    """ZeRO-1 and ZeRO-2 with one micro-batch a step; the chosen one stays."""
    answer = page(f"strategy={pin}", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=4")
    rows = [plan for plan in answer.plans if plan.batch.accumulation == 1 and kind(plan) in ("zero1", "zero2")]
    assert answer.chosen.batch.accumulation == 1 and len(rows) == 1 and same_split(rows[0], answer.chosen)


def test_nothing_slower_is_sold_as_a_change() -> None:
    answer = page("train.seq_len=4096")
    rate = tokens_per_s(answer.chosen)
    assert answer.alternatives
    for remedy, line in zip(answer.alternatives, change_lines(answer.alternatives), strict=True):
        assert tokens_per_s(remedy.plan) >= rate and f"{show_count(tokens_per_s(remedy.plan))} tokens/s" in line
        assert seconds(remedy.plan).step_s < seconds(answer.chosen).step_s or remedy.plan.layout.world > 2


def test_what_fits_of_the_chosen_degrees_is_told() -> None:
    """Of stages whose weights are sharded one way, the other ways too."""
    recipe = load_recipe(None, [f"model={EIGHT_B}", "train.seq_len=4096", "train.global_batch_size=64"])
    search = Search(recipe, load_spec(EIGHT_B), parse_cluster("8xA100"))
    chosen, found = search.best, strategies(search, search.best)
    assert chosen.layout.pp > 1 and {chosen.shard.strategy} < {"zero1", "zero3"}
    assert [plan.shard.strategy for plan in found] == ["zero1" if chosen.shard.strategy == "zero3" else "zero3"]
    assert all(fits(plan) and plan.pipeline == chosen.pipeline for plan in found)


def test_what_earlier_runs_taught_is_in_every_figure_of_a_page() -> None:
    """Of the headline, the table, why and the changes; not in which of them is faster."""
    words = ["train.seq_len=2048", "train.global_batch_size=256", "precision.weights=bf16"]
    bare = page(*words, here=True)
    remember(bare.chosen, parse_cluster("2xL40S"), 1.0, 4.0, state_directory())
    taught = page(*words, here=True)
    pairs = [(bare.chosen, taught.chosen), *zip(bare.plans, taught.plans, strict=True)]
    pairs += [(one.plan, two.plan) for one, two in zip(bare.alternatives, taught.alternatives, strict=True)]
    assert len(pairs) > 6
    for before, after in pairs:
        assert seconds(after).scale == pytest.approx(4.0)
        assert seconds(after).step_s == pytest.approx(4 * seconds(before).step_s)
    for answer in (bare, taught):
        said, step = answer.chosen.why["shard.strategy"], show_seconds(seconds(answer.chosen).step_s)
        fastest = min(seconds(plan).step_s for plan in answer.plans if fits(plan))
        assert f"{step} a step" in said and show_seconds(fastest) in said
    assert [each.change for each in bare.alternatives] == [each.change for each in taught.alternatives]


def test_the_schedule_is_as_long_as_the_passes_of_the_step() -> None:
    """On several nodes too, of which all wait for the slowest."""
    recipe = load_recipe(None, ["model.path=meta-llama/Llama-3.1-8B", "parallel.pp=4", "train.global_batch_size=8"])
    cluster = parse_cluster("4x1xH100")
    answer = planned(recipe, load_spec(recipe.model.path), cluster, Asked(), here=False)
    told = seconds(answer.best)
    passes_s = told.step_s - told.optimizer_s - told.host_s - told.exposed_s.get("control", 0.0)
    assert schedule_of(answer).makespan_s == pytest.approx(
        passes_s, rel=1e-4
    )  # what comes once, around all passes, is not drawn
