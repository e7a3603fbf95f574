"""Frozen parameters outside of the proofs: checkpoints, recipes, plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.models.config import parameter_shapes
from shardwise.models.lookup import load_spec
from shardwise.planner.search import choose
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.recipe import Model, Parallel, Recipe, Train
from shardwise.techniques.states import frozen
from tests.parity.cases import TIED
from tests.runtime.rank_work import LENGTH, ROWS
from tests.techniques import frozen_ranks

ONE_B = load_spec("meta-llama/Llama-3.2-1B")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_checkpoint_holds_frozen_weights_without_moments_and_resumes(
    ranks: RankPool, strategy: str, tmp_path: Path
) -> None:
    layout = Layout(dp_replicate=2) if strategy == "ddp" else Layout(dp_shard=2)
    plan = Plan(layout, Batch(ROWS // 2, 1, LENGTH, 16), Shard(strategy), frozen=("embed.*", "*.mlp.*"))  # type: ignore[arg-type]
    for straight, resumed in ranks.run(frozen_ranks.two_and_one, plan, str(tmp_path), world=2):
        names = set(parameter_shapes(TIED))
        trained = {name for name in names if not frozen(name, plan)}
        moments = {f"optim.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in trained}
        assert set(straight) == {f"model.{name}" for name in names} | moments
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def recipe(*patterns: str) -> Recipe:
    return Recipe(
        model=Model(frozen=list(patterns)),
        train=Train(seq_len=2048, global_batch_size=8),
        parallel=Parallel(strategy="ddp", tp=1),
    )


def test_a_plan_keeps_the_patterns_and_counts_what_is_saved(tmp_path: Path) -> None:
    """Of 16 bytes a parameter the frozen ones keep 4: no moments, no gradients; and nothing of them is reduced."""
    cluster = parse_cluster("8xH100")
    plan, whole = choose(recipe("embed.*", "layers.[0-7].*"), ONE_B, cluster), choose(recipe(), ONE_B, cluster)
    held = sum(torch.Size(shape).numel() for name, shape in parameter_shapes(ONE_B).items() if frozen(name, plan))
    assert plan.frozen == ("embed.*", "layers.[0-7].*")
    reduced, all_reduced = (
        sum(t.bytes for t in p.estimate.traffic if t.category == "gradients") for p in (plan, whole)
    )
    assert all_reduced - reduced == 4 * held
    fewer = whole.estimate.memory["moments"] - plan.estimate.memory["moments"]
    assert 8 * held <= fewer <= 8 * held + 4 * 100
    assert plan.estimate.flops_per_step < whole.estimate.flops_per_step
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == replace(plan)


def test_a_pattern_that_matches_nothing_stops_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"`layers\.16\.\*` matches no parameter"):
        choose(recipe("layers.16.*"), ONE_B, parse_cluster("8xH100"))
