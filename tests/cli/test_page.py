"""The page of a plan is told as it is known, and says the same however it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.cli import planned as cli_planned
from shardwise.cli.length import Asked
from shardwise.cli.planned import Planned, change_parts, page_parts, planned
from shardwise.models.lookup import load_spec
from shardwise.planner import comparison
from shardwise.planner.comparison import fits, seconds
from shardwise.planner.search import reasons
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import label
from shardwise.spec.load import load_recipe
from shardwise.spec.units import show_bytes, show_seconds

MODEL = "meta-llama/Llama-3.2-1B"


def answer() -> Planned:
    recipe = load_recipe(None, [f"model={MODEL}", "train.seq_len=4096"])
    return planned(recipe, load_spec(MODEL), parse_cluster("2xL40S"), Asked(), here=False)


def test_the_verdict_is_told_before_anything_else_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer()
    done = list[str]()

    def counted(name: str) -> Callable[..., Any]:
        known = vars(cli_planned)[name]

        def call(*words: object) -> object:
            done.append(name)
            return known(*words)

        return call

    for name in ("best_of_kinds", "explained"):
        monkeypatch.setattr(cli_planned, name, counted(name))
    parts = page_parts(asked, None)
    verdict, chosen = next(parts), next(parts)
    assert not done
    step, held = show_seconds(seconds(asked.best).step_s), show_bytes(asked.best.estimate.peak_bytes)
    assert step in verdict[0] and held in verdict[0] and label(asked.best) in chosen[0]
    next(parts)
    assert done == ["best_of_kinds"]
    assert [*parts][-1][0] == "why" and done == ["best_of_kinds", "explained"]


def test_changes_are_the_same_one_by_one() -> None:
    asked = answer()
    whole = [line.split() for part in change_parts(asked, each=False) for line in part]
    parts = [*change_parts(asked, each=True)]
    assert [line.split() for part in parts for line in part] == whole
    assert len(parts) == len(asked.alternatives) + 1 > 3


@pytest.mark.prove
def test_no_reason_names_what_is_slower_than_a_row_of_the_table() -> None:
    """Of a pipeline, which the search for the best plan does not look for where another is faster."""
    model = "Qwen/Qwen3-30B-A3B"
    asked = planned(
        load_recipe(None, [f"model={model}"]), load_spec(model), parse_cluster("2x8xH100"), Asked(), here=False
    )
    assert asked.best.layout.ep > 1
    without = min(seconds(plan).step_s for plan in asked.plans if plan.layout.ep == 1 and fits(plan))
    named = reasons(asked.search, 1.0, asked.plans).others["layout.ep"]
    assert named is not None and seconds(named).step_s <= without
    assert f"without it {show_seconds(seconds(named).step_s)}" in asked.chosen.why["layout.ep"]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model", "cluster", "prices", "plays"),
    [("meta-llama/Llama-3.1-8B", "8xH100", 100, 100), ("Qwen/Qwen3-30B-A3B", "2x8xH100", 60, 25)],
)
def test_a_verdict_prices_and_plays_few_plans(
    model: str, cluster: str, prices: int, plays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, since seconds depend on the machine: what lower bounds leave."""
    done = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        known = getattr(comparison, name)

        def call(*words: object, **more: object) -> object:
            done[name] += 1
            return known(*words, **more)

        return call

    for name in ("price", "timed"):
        monkeypatch.setattr(comparison, name, counted(name))
    planned(load_recipe(None, [f"model={model}"]), load_spec(model), parse_cluster(cluster), Asked(), here=False)
    assert 0 < done["price"] <= prices and 0 < done["timed"] <= plays, done
