"""The proof in a plan's own dtypes: what rounds too much is seen, and what is right is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.lookup import load_spec
from shardwise.prove import rounding
from shardwise.prove.certify import subject_of
from shardwise.prove.pool import RankPool
from shardwise.prove.rounding import SHARED, Rounding
from shardwise.prove.workload import Setting, random_everywhere
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Optim, Plan, Precision, Shard
from shardwise.spec.recipe import Data, Method, Recipe
from tests.prove.faulty_ranks import FaultyRanks
from tests.prove.planted_rounding import FAULTS, NARROW, UNTIED, faulty

SETTING = Setting(draw=random_everywhere)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", FAULTS)
def test_what_rounds_too_much_is_seen(ranks: RankPool, name: str) -> None:
    _, spec, plan, said = FAULTS[name]
    assert not rounding.prove(ranks, spec, plan, SETTING).problems(), "without the fault"
    found = rounding.prove(FaultyRanks(ranks, name, faulty), spec, plan, SETTING).problems()
    assert any(said in line for line in found), found


@pytest.mark.prove
def test_updates_that_storing_hides_are_counted(ranks: RankPool) -> None:
    """Plain descent changes weights in bf16 by less than they round: nothing of it can be judged."""
    plan = replace(NARROW, optim=Optim("sgd"))
    found = rounding.prove(ranks, UNTIED, plan, SETTING)
    assert not found.problems() and found.blind > len(found.updates) / 2
    assert not rounding.prove(ranks, UNTIED, replace(NARROW, precision=Precision("bf16")), SETTING).blind


@pytest.mark.prove
def test_a_step_that_turns_on_rounding_is_no_alarm(ranks: RankPool) -> None:
    """Of the six steps' pairs of this model one is so conditioned that weights moved by half a place of bf16 change a
    gradient by as much as it is; which process comes nearer there is luck."""
    given = Plan(Layout(dp_replicate=2), Batch(2, 1, 2048, 1024), Shard("ddp"), Precision("bf16"), lora=Lora(16))
    recipe = Recipe(data=Data(path="none.jsonl"), method=Method(name="dpo"))
    subject = subject_of(recipe, load_spec("Llama-3.1-8B"), replace(given, loss="dpo"), 2)
    assert subject.small is not None
    found = rounding.prove(ranks, subject.small.spec, subject.small.own, subject.setting)
    assert not found.problems() and found.together < SHARED.together


def test_problems_are_named_the_cause_first() -> None:
    """The figures of a run that is wrong in every way, in words."""
    each, updates = {"layers.0.mlp.up.weight": 5.0, "norm.weight": 1.0}, {"norm.weight": (0.5, 0.1)}
    found = Rounding(2.0, each, 9.0, updates, ["?"], SHARED)
    assert [line.partition(":")[0] for line in found.problems()] == [
        "?",
        "gradient of layers.0.mlp.up.weight",
        "gradients",
        "loss",
        "update of norm.weight from what float64 makes of the run's own gradients",
    ]
