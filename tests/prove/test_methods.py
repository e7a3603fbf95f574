"""Every method of pairs is certified, with rows cut along the sequence, stages, and cut matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove import certify
from shardwise.prove.pool import RankPool
from shardwise.spec.methods import METHODS
from shardwise.spec.plan import Pipeline, Plan
from shardwise.spec.recipe import Method
from tests.prove.pairs import SPEC, with_all
from tests.prove.test_certify import DRAWN, NoRanks

LAYOUTS = {
    "cp and zero3": with_all("ZeRO-3", "ring")[1],
    "tp and stages": replace(with_all("sp", "1f1b")[1], pipeline=Pipeline("1f1b", 1, (4, 4))),
}


@pytest.mark.prove
@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if spec.pairs])
def test_it_is_certified(ranks: RankPool, name: str, plan: Plan) -> None:
    recipe = DRAWN.model_copy(update={"method": Method(name=name, beta=0.5)})
    subject = certify.subject_of(recipe, SPEC, replace(plan, loss=METHODS[name].loss), 16)
    assert subject.small is not None and subject.ranks == 4
    checks = [certify.run(subject, proof, 0, ranks) for proof in ("parity", "checkpoint")]
    checks += [
        certify.run(subject, "drift", rank, NoRanks()) for rank in certify.drift_ranks(subject.plan.layout, "quick")
    ]
    assert not [check for check in checks if check.problems]
