"""Documents of a row stay apart: planted leaks are seen, where parity is blind too; what is right raises no alarm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.data.pack import IGNORE
from shardwise.models.config import ModelSpec, with_fields
from shardwise.prove import certify, documents, parity
from shardwise.prove.certificate import result
from shardwise.prove.pool import RankPool
from shardwise.prove.smallest import Smallest
from shardwise.prove.workload import job_of
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.spec.recipe import Method
from tests.parity.cases import FP64, GEMMA, TIED, UNTIED
from tests.parity.cases import plan as plan_of
from tests.parity.experts import MOE
from tests.parity.mixers import NETS
from tests.parity.rings import DENSE
from tests.parity.test_cp_faults import ring
from tests.prove.faulty_ranks import FaultyRanks
from tests.prove.leaks import LEAKS, leaking
from tests.prove.test_certify import DRAWN, subject_of

OFF = DRAWN.model_copy(update={"data": DRAWN.data.model_copy(update={"mask_documents": False})})
SEEN_FIRST = "a norm looks at the row"
"""Of the leaks the one that `make test` plants."""


def planted(ranks: RankPool, name: str) -> None:
    leak = LEAKS[name]
    subject, broken = subject_of(leak.spec, leak.plan), FaultyRanks(ranks, name, leaking)
    check = certify.run(subject, "documents", 0, broken)
    assert check.problems and not check.raised, check
    assert check.figures["document"] > documents.OF_EXPERTS
    first = "the gradient" if "gradients" in name else "the loss"
    assert check.problems[0].startswith(f"{first} of a document")
    if leak.shared:
        parity.plain.cache_clear()
        with leak.planted():  # here too, where the plain loop runs
            assert not certify.run(subject, "parity", 0, broken).problems, "parity is not blind to it"
        parity.plain.cache_clear()
    found = certify.smallest_failing(subject, check, broken)
    assert isinstance(found, Smallest) and leak.needed == tuple(word for word in found.needed if word in leak.needed)


def test_a_leak_that_parity_does_not_see(ranks: RankPool) -> None:
    planted(ranks, SEEN_FIRST)


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in LEAKS if name != SEEN_FIRST])
def test_leaks_are_seen(ranks: RankPool, name: str) -> None:
    planted(ranks, name)


RIGHT: dict[str, tuple[ModelSpec, Plan]] = {
    "zero3 of two micro-batches": (UNTIED, plan_of("zero3", 2, FP64, accumulation=2)),
    "ring": (DENSE, ring()),
    "ring of nets": (NETS, ring()),
    "ulysses and windows": (
        with_fields(DENSE, sliding_window=7),
        replace(ring(), layout=Layout(cp=2, ulysses=2), cp_kind="ulysses"),
    ),
    "windows and caps x recomputation": (GEMMA, plan_of("ddp", 2, FP64, Remat("full"))),
    "pipeline of tied ends": (
        TIED,
        Plan(Layout(pp=2), Batch(1, 4, 12), precision=FP64, pipeline=Pipeline("1f1b", 1, (1, 1))),
    ),
    "adapters in 4 bits x tp": (
        DENSE,
        Plan(Layout(tp=2), Batch(2, 1, 48), precision=FP64, lora=Lora(4, nf4=True), sequence_parallel=True),
    ),
    "experts x zero3": (MOE, plan_of("zero3", 2, FP64)),
    "experts with a capacity, and a loss of routers": (
        with_fields(MOE, expert_capacity=1.0, router_aux_loss_coef=0.1),
        plan_of("ddp", 2, FP64),
    ),
    "pairs": (DENSE, Plan(Layout(dp_shard=2), Batch(2, 1, 48), Shard("zero3"), FP64, loss="dpo")),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_raises_no_alarm(ranks: RankPool, name: str) -> None:
    spec, plan = RIGHT[name]
    method = Method(name="dpo", beta=0.5) if plan.method.pairs else Method()
    check = certify.run(subject_of(spec, plan, DRAWN.model_copy(update={"method": method})), "documents", 0, ranks)
    assert not check.problems and check.figures["tensors"] > 0
    exact = "experts" not in name
    assert (check.figures["document"] == 0.0) if exact else check.figures["document"] <= documents.OF_EXPERTS
    assert result(check).startswith("equal to") or not exact


def test_it_is_proved_where_rows_are_packed() -> None:
    """Of text whose documents see each other it would say nothing."""
    case = UNTIED, plan_of("zero3", 2, FP64)
    for recipe, there in ((DRAWN, True), (OFF, False)):
        for effort in ("quick", "normal"):
            proofs = [proof for proof, _ in subject_of(*case, recipe).cases(effort)]
            assert ("documents" in proofs) == there
    assert not subject_of(*case, OFF).setting.packed


@pytest.mark.parametrize("length", [12, 24, 48])
def test_rows_differ_in_the_tokens_of_the_others_alone(length: int) -> None:
    job = replace(job_of(UNTIED, plan_of("ddp", 1, FP64), 1), seq_len=length)
    for base, other in zip(
        documents.packed_rows(job, changed=False), documents.packed_rows(job, changed=True), strict=True
    ):
        assert base.segments == other.segments and sum(base.segments) == length and max(base.segments) > 5
        assert (base.labels == other.labels).all() and (base.positions == other.positions).all()
        learnt = np.flatnonzero(base.labels != IGNORE)
        [own] = {int(number) for number in np.repeat(np.arange(3), base.segments)[learnt]}
        inside = np.repeat(np.arange(3), base.segments) == own
        assert (base.ids[inside] == other.ids[inside]).all() and (base.ids[~inside] != other.ids[~inside]).all()
        assert (base.labels[learnt] == base.ids[learnt + 1]).all() and other.ids.max() < job.spec.vocab_size
