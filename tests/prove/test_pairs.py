"""Pairs of techniques that no other test's rows have (docs/compositions.md): certified, some compiled too."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from shardwise.prove import certify, parity
from shardwise.prove.certify import Certification
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import job_of
from shardwise.spec.recipe import Method
from tests.parity.test_tp_compile import trained
from tests.prove.pairs import COMPILED, ROWS, with_all
from tests.prove.test_certify import DRAWN, NoRanks


def subject_of(names: tuple[str, ...]) -> Certification:
    spec, plan = with_all(*names)
    method = Method(name="dpo", beta=0.5) if plan.loss == "dpo" else Method()
    found = certify.subject_of(DRAWN.model_copy(update={"method": method}), spec, plan, 16)
    assert found.small is not None, found.why
    return found


@pytest.mark.rare(72)
@pytest.mark.parametrize("names", ROWS, ids=", ".join)
def test_both_are_certified(ranks: RankPool, names: tuple[str, ...]) -> None:
    subject = subject_of(names)
    with RankPool(subject.ranks) if subject.ranks > 4 else nullcontext(ranks) as pool:
        checks = [certify.run(subject, proof, 0, pool) for proof in ("parity", "documents", "dtypes")]
    ends = certify.drift_ranks(subject.plan.layout, "quick")
    checks += [certify.run(subject, "drift", rank, NoRanks()) for rank in ends]
    assert not [check for check in checks if check.problems]


@pytest.mark.rare(11)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", COMPILED, ids=", ".join)
def test_compiled(names: tuple[str, ...]) -> None:
    """In the plan's own dtypes, which compiled code computes in another order."""
    few, setting = (subject := subject_of(names)).small, subject.setting
    assert few is not None
    of = replace(few.own, compile=True)
    with RankPool(subject.ranks) as pool:
        found = pool.run(trained, few.spec, of, setting, world=of.layout.world)
    assert all(graphs > 0 and breaks == 0 for _, graphs, breaks in found)
    right = parity.plain(job_of(few.spec, of, 2, setting))
    measured = parity.compare(right, [trace for trace, *_ in found], staged=of.layout.pp > 1)
    most = {"fp32": 1e-4, "bf16": 0.1}[of.precision.compute]  # products of a small model, added in another order
    assert measured.loss.error <= most and measured.norm.error <= most and measured.turn.error <= most, measured
    assert not measured.apart
