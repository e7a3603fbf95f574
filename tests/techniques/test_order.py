"""What is folded over all techniques."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.models.load import load_spec
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Shard

SPEC = load_spec("SmolLM2-135M")
PLAN = Plan(Layout(dp_shard=4), shard=Shard("zero3"))


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
def test_an_axis_that_is_not_there_yet_is_refused(axis: str) -> None:
    """An ``ep`` that folds into the ranks there are, too: it makes the world no larger."""
    plan = replace(PLAN, layout=replace(PLAN.layout, **{axis: 2}))
    assert [problem.code for problem in techniques.check(SPEC, plan, parse_cluster("8xH100"))] == ["PLAN016"]
