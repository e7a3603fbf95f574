"""A technique that sends is one file, too: once in ORDER it is searched for, run and proved, with no other change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.config import model_spec
from shardwise.planner import candidates, sheets
from shardwise.planner.comparison import MARGIN
from shardwise.planner.search import choose
from shardwise.prove import parity
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import BYTES, Batch, Precision, Remat, Shard
from tests.parity.cases import FP64, UNTIED
from tests.parity.test_fp64 import holds
from tests.techniques import spread, spread_ranks
from tests.techniques.spread import PlanWithSpread, RecipeWithSpread

SPEC = model_spec("spread", 600, 48, 96, 3, 8, 4, 8)
LARGER = model_spec("spread", 2_000, 512, 1_408, 16, 8, 2, 64)
CLUSTER = parse_cluster("2xH100")
EVEN = replace(UNTIED, intermediate_size=28)
"""What two ranks can divide."""


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in ORDER and the field of the plan."""
    monkeypatch.setattr(techniques, "ORDER", spread_ranks.ORDER)
    monkeypatch.setattr(candidates, "Plan", PlanWithSpread)


def recipe(**sections: object) -> RecipeWithSpread:
    pinned = {"parallel": {"tp": 2, "sequence_parallel": False}, "recompute": {"mode": "full"}}
    return RecipeWithSpread.model_validate({**pinned, "train": {"seq_len": 2048, "micro_batch_size": 4}, **sections})


def fitting(peak_bytes: int) -> Cluster:
    """GPUs on which a plan with this peak is just below the margin."""
    return replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=int(peak_bytes / MARGIN) + 2**16))


def plan(layout: Layout, batch: Batch, **settings: object) -> PlanWithSpread:
    made = PlanWithSpread(layout, batch, Shard("zero3" if layout.dp_shard > 1 else "ddp", bucket_bytes=100_000))
    return replace(made, spread=True, **settings)


def test_the_search_tries_it_last_and_says_why() -> None:
    whole, own = (choose(recipe(spread=on), LARGER, CLUSTER) for on in (False, True))
    assert own.estimate.peak_bytes < whole.estimate.peak_bytes
    found = choose(recipe(), LARGER, fitting(whole.estimate.peak_bytes))
    assert isinstance(found, PlanWithSpread) and not found.spread and "spread" not in found.why
    found = choose(recipe(), LARGER, fitting(own.estimate.peak_bytes))
    assert isinstance(found, PlanWithSpread) and found.spread and found.why["spread"].startswith("derived")


def test_its_check_refuses_a_pin() -> None:
    with pytest.raises(ConfigError) as refused:
        choose(recipe(spread=True, parallel={"tp": 2, "sequence_parallel": True}), LARGER, CLUSTER)
    assert [(problem.code, problem.where) for problem in refused.value.problems] == [("PLAN017", "spread")]


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("layout", "precision", "remat"),
    [
        (Layout(tp=2), Precision(), Remat()),
        (Layout(dp_shard=2, tp=4), Precision("bf16"), Remat("full")),
        (Layout(dp_replicate=2, tp=2), Precision("bf16"), Remat("selective", 2)),
    ],
)
def test_what_it_applies_is_what_it_costs(layout: Layout, precision: Precision, remat: Remat) -> None:
    found = drift(SPEC, plan(layout, Batch(2, 2, 32, 64), precision=precision, remat=remat), layout.world - 1)
    assert not found.differences()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_sends_as_much_as_arithmetic_says(dtype: str) -> None:
    """At each edge between units, of which there is one more than blocks, the stream is scattered and gathered, once in
    forward and once in backward."""
    asked = plan(Layout(tp=2), Batch(2, 3, 32, 64), precision=Precision(dtype))  # type: ignore[arg-type]
    b, s, d, micro_batches, edges = 2, 32, SPEC.hidden_size, 3, SPEC.num_hidden_layers + 1
    calls = {
        ("tp", kind, b * s * d * BYTES[dtype]): 2 * micro_batches * edges for kind in ("all_gather", "reduce_scatter")
    }
    found, without = (drift(SPEC, replace(asked, spread=on)) for on in (True, False))
    assert found.predicted.sent - without.predicted.sent == Counter(calls)
    assert found.measured.sent - without.measured.sent == Counter(calls)


def test_a_program_that_sends_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan(Layout(tp=2), Batch(2, 1, 32, 64))
    assert not drift(SPEC, asked).differences()  # units are traced, and kept
    monkeypatch.setattr(spread, "apply", lambda parts, plan, meshes: parts)
    assert any("all_gather" in told for told in drift(SPEC, asked).differences())


@pytest.mark.prove
def test_two_ranks_compute_what_one_process_does(ranks: RankPool) -> None:
    plans = [
        plan(Layout(tp=2), Batch(4, 2, 12, 7), precision=FP64, remat=Remat(mode))  # type: ignore[arg-type]
        for mode in ("none", "selective", "full")
    ]
    answers = ranks.run(spread_ranks.train, EVEN, plans, parity.STEPS, world=2)
    right = [parity.plain(parity.job_of(EVEN, one, parity.STEPS)) for one in plans]
    holds([parity.compare(known, found) for known, *found in zip(right, *answers, strict=True)], [*plans])


def test_units_of_its_plans_have_names_of_their_own() -> None:
    """Or one would be taken for the other wherever units are kept."""
    without, with_it = (
        sheets.chosen(SPEC, PlanWithSpread(Layout(tp=2), spread=on), sheets.RankKind(Layout(tp=2)), 0).variant
        for on in (False, True)
    )
    assert sheets.key_of(without) != sheets.key_of(with_it)
    assert sheets.name_of(without) != sheets.name_of(replace(without, plan=replace(without.plan, spread=True)))
    with pytest.raises(ValueError, match="trailing"):
        sheets.variant_of(sheets.name_of(with_it))
