"""What is folded over all techniques."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.models.load import load_spec
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Shard
from shardwise.techniques import shard, tp

SPEC = load_spec("SmolLM2-135M")
PLAN = Plan(Layout(dp_shard=4), shard=Shard("zero3"))


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
def test_an_axis_that_is_not_there_yet_is_refused(axis: str) -> None:
    """An ``ep`` that folds into the ranks there are, too: it makes the world no larger."""
    plan = replace(PLAN, layout=replace(PLAN.layout, **{axis: 2}))
    assert [problem.code for problem in techniques.check(SPEC, plan, parse_cluster("8xH100"))] == ["PLAN016"]


def test_within_a_step_each_technique_is_called_that_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """After backward the last applied comes first: tp adds up what replicas have summed."""
    called: list[tuple[str, ...]] = []

    def acting(name: str, *moments: str) -> ModuleType:
        technique = ModuleType(name)
        for moment in moments:
            vars(technique)[moment] = lambda *args, moment=moment, **named: called.append((name, moment, *named))
        return technique

    moments = ("before_micro_batch", "after_backward", "after_inference")
    order = (acting("a", *moments), acting("silent"), acting("b", *moments[:2]), acting("c", "after_inference"))
    monkeypatch.setattr(techniques, "ORDER", order)
    techniques.before_micro_batch([], PLAN, last=True)
    techniques.after_backward([], PLAN, Meshes())
    techniques.after_inference([], PLAN)
    assert called == [
        ("a", "before_micro_batch", "last"),
        ("b", "before_micro_batch", "last"),
        ("b", "after_backward"),
        ("a", "after_backward"),
        ("a", "after_inference"),
        ("c", "after_inference"),
    ]


def test_tensor_parallelism_adds_what_the_replicas_have_summed() -> None:
    assert techniques.ORDER.index(tp) < techniques.ORDER.index(shard)
