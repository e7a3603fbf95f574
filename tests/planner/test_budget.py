"""What a budget of memory saves: never slower than the better of selective and full in the same memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from shardwise import techniques
from shardwise.models.lookup import load_spec
from shardwise.planner.budget import Choice, Result, Subset, _subsets
from shardwise.planner.comparison import Comparison, peak_share, seconds
from shardwise.planner.search import Search
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, SavedResult, Shard
from tests.planner.test_search import recipe

MODELS = {"Llama-3.1-8B": (8192, 65536), "Qwen3-30B-A3B": (4096, 32768), "Gemma-2-2b": (4096, 8192)}
"""With lengths of rows."""
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)
"""How much of the memory between full and selective there is."""


@pytest.mark.prove
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_never_slower_at_equal_memory(name: str, compiled: bool) -> None:
    """12 plans of each, 72 in all; what falls between is faster than full."""
    spec = load_spec(name)
    for length in MODELS[name]:
        known = Comparison(spec, parse_cluster("8xH100"), 1.0)
        plan = Plan(Layout(dp_shard=8), Batch(1, 2, length, 1024), Shard("zero3"), Precision("bf16"), compile=compiled)
        full, selective = (
            known.timed(known.priced(replace(plan, remat=Remat(mode)))) for mode in ("full", "selective")
        )
        between = peak_share(selective) - peak_share(full)
        for part in SHARES:
            share = peak_share(full) + part * between
            found = known.with_budgets([replace(plan, remat=Remat("full"))], share, full) or [full]
            best = min([full, *[selective] * (peak_share(selective) <= share)], key=lambda one: seconds(one).step_s)
            assert peak_share(found[-1]) <= share + 1e-9
            assert seconds(found[-1]).step_s <= seconds(best).step_s * 1.001
            assert seconds(found[-1]).step_s < seconds(full).step_s or part < 0.3


def test_a_knapsack_is_exact() -> None:
    """Of eight results, the best of all 256 subsets, whatever the room."""
    sizes, spared = (5, 7, 7, 11, 2, 29, 31, 3), (4.0, 6.0, 5.0, 13.0, 1.0, 22.0, 30.0, 2.5)
    each = [
        Result(str(i), 9, i, tuple(n * size for n in range(1, 9)), tuple(n * gain for n in range(1, 9)))
        for i, (size, gain) in enumerate(zip(sizes, spared, strict=True))
    ]
    choice = Choice(_subsets(each), 1.0)
    for room in range(0, 8 * sum(sizes), 13):
        whole = max(
            sum(one.seconds[7] for one in some)
            for count in range(9)
            for some in combinations(each, count)
            if sum(one.bytes[7] for one in some) <= room
        )
        taken = choice.most(lambda subset, room=room: room - subset.bytes) or Subset()  # type: ignore[misc]
        assert taken.bytes <= room and taken.seconds >= 0.95 * whole


def test_a_long_row_is_faster_by_a_budget_and_says_what_it_saves() -> None:
    asked = recipe(train={"seq_len": 16384, "global_batch_size": 64, "max_steps": 10})
    search = Search(asked, load_spec("Llama-3-70B"), parse_cluster("8x8xH100"), stages=frozenset({1}))
    best = search.best
    others = search.known.fastest(search.all)
    assert best.remat.mode == "budget" and "attention" in best.why["remat.saved"]
    assert 1.02 * seconds(best).step_s < min(seconds(plan).step_s for plan in others)


def test_blocks_that_save_are_evenly_spread() -> None:
    remat = Remat("budget", 2, (SavedResult(7, 3, 4), SavedResult(9, 3)))
    assert [remat.places(number, 7) for number in range(0, 12, 2)] == [(), (3,)] * 3
    saved = techniques.remat.budgeted(Plan(remat=Remat("full", 2)), remat.saved)
    assert saved.remat == remat and techniques.remat.saving_all(saved) is None
