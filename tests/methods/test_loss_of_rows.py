"""The loss of ranks that hold rows of the output layer each, against torch's cross-entropy on one process."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from shardwise.distributed.fake_world import fake_world
from shardwise.methods import loss_memory as paper
from shardwise.methods.loss import Output, linear_cross_entropy, token_losses
from shardwise.prove.fake_run import WorldCounter
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.records import TOKEN_FIGURES
from tests.distributed import vocabulary_ranks as rows
from tests.distributed.vocabulary_ranks import Case, Found
from tests.models.llama import relative

CASES = [
    Case(ids, padded, cap, labels, chunk)
    for (ids, padded), cap, labels, chunk in product(
        ((32, False), (29, False), (29, True)), (None, 3.0), ("mixed", "first", "last", "none"), (4, 1000)
    )
]
"""4 ranks have 8 rows of 29 each, the last 5; 2 have 15 and 14."""
CASES += [Case(factors=True, soft_cap=cap, chunk_tokens=n) for cap, n in ((None, 4), (3.0, 1000))]
CASES += [Case(frozen=True, chunk_tokens=n) for n in (4, 1000)]
CASES += [Case(scale=300.0, chunk_tokens=n) for n in (4, 1000)]


def compare(case: Case, found: list[Found], tolerance: float) -> None:
    """The gradients of hidden summed over the ranks, those of the weight one behind the other; all else to the bit the
    same on each."""
    expected = rows.alone(case)
    close = {"rtol": tolerance, "atol": tolerance}
    for name in ("loss", "each", "logits", "unlearned", "figures"):
        first, near = getattr(found[0], name), {"rtol": 1e-6, "atol": 1e-6} if name == "logits" else close
        torch.testing.assert_close(first.double(), getattr(expected, name), **near)  # logits are returned in fp32
        assert all(torch.equal(getattr(ours, name), first) for ours in found), name
    hidden = torch.stack([ours.hidden.double() for ours in found]).sum(0)
    torch.testing.assert_close(hidden, expected.hidden, rtol=tolerance, atol=tolerance * case.scale)
    if case.frozen:
        assert all(ours.weight is None for ours in found)
        return
    weight = torch.cat([ours.weight.double() for ours in found])
    torch.testing.assert_close(weight[: case.ids], expected.weight, **close)
    assert len(weight) == (case.ids + -case.ids % len(found) if case.padded else case.ids)
    assert not weight[case.ids :].any()


def differences(case: Case, found: list[Found]) -> float:
    """How far the loss and the gradient of hidden are off; infinite for NaN."""
    expected = rows.alone(case)
    hidden = torch.stack([ours.hidden for ours in found]).sum(0)
    worst = max(relative(found[0].loss, expected.loss), relative(hidden, expected.hidden))
    return worst if worst == worst else torch.inf


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_loss(ranks: RankPool, world: int) -> None:
    """fp64: only the order of additions differs. Loss, both gradients, losses of tokens, whole logits."""
    answers = ranks.run(rows.together, CASES, world=world)
    for case, *found in zip(CASES, *answers, strict=True):
        compare(case, found, 1e-11 if case.scale == 1 else 1e-9)


def test_narrow_types(ranks: RankPool) -> None:
    """Statistics are in fp32: the loss of fp32 tensors is within its rounding, that of bf16 within its logits'."""
    cases = [Case(dtype=torch.float32, soft_cap=cap) for cap in (None, 3.0)]
    cases += [Case(dtype=torch.bfloat16, soft_cap=cap, chunk_tokens=n) for cap, n in product((None, 3.0), (4, 1000))]
    for case, *found in zip(cases, *ranks.run(rows.together, cases, world=2), strict=True):
        expected, tolerance = rows.alone(case), 1e-5 if case.dtype == torch.float32 else 0.02
        assert found[0].loss.dtype == torch.float32 and found[0].hidden.dtype == case.dtype
        assert relative(found[0].loss.double(), expected.loss) < tolerance
        assert relative(sum(ours.hidden.double() for ours in found), expected.hidden) < tolerance
        assert relative(torch.cat([ours.weight.double() for ours in found])[:29], expected.weight) < tolerance


@pytest.mark.parametrize(
    "case",
    [
        Case(fault="unmasked"),
        Case(fault="unmasked", soft_cap=3.0),
        Case(fault="local"),
        Case(fault="local", scale=300.0),
    ],
)
def test_a_planted_fault_is_caught(ranks: RankPool, case: Case) -> None:
    """Rows of padding that take part, and a rank's own greatest logit taken for everybody's: each is far from right,
    where without the fault it is right."""
    [wrong], [right] = (
        zip(*ranks.run(rows.together, [chosen], world=4), strict=True)
        for chosen in (case, Case(soft_cap=case.soft_cap, scale=case.scale))
    )
    assert differences(case, list(right)) < 1e-9 and differences(case, list(wrong)) > 1e-3


def test_preferences(ranks: RankPool) -> None:
    """dpo: log-probabilities first, then tokens with factors."""
    hidden, weight, batch = rows.preference()
    weight.requires_grad_()
    total = rows.prefer(hidden, weight, batch)
    total.backward()
    for world in (2, 4):
        answers = ranks.run(rows.preferred, world=world)
        for ours, _, _ in answers:
            torch.testing.assert_close(ours, total.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(sum(grad for _, grad, _ in answers), hidden.grad, rtol=1e-11, atol=1e-13)
        found = torch.cat([grad for *_, grad in answers])[:29]
        torch.testing.assert_close(found, weight.grad, rtol=1e-11, atol=1e-13)


def test_of_equal_logits_the_first_is_the_choice(ranks: RankPool) -> None:
    """As argmax has it, whichever rank holds it; not asked for, nothing is told."""
    for world in (1, 2, 4):
        for found in ranks.run(rows.chosen, TOKEN_FIGURES[:1], world=world):
            assert found.tolist() == [[5.0], [1.0], [0.0]]
        assert all(found.numel() == 0 for found in ranks.run(rows.chosen, (), world=world))


def tracked(
    tokens: int, chunk_tokens: int, scored: bool, dtype: torch.dtype, figures: tuple[str, ...] = ()
) -> tuple[WorldCounter, int]:
    """A loss of 8,000 ids over 8 ranks on fake tensors, and the bytes of its logits of one chunk, in fp32."""
    with fake_world(Layout(tp=8)) as groups:
        tracker = WorldCounter(FakeTensorMode(allow_non_fake_inputs=True), groups.called())
        assert tracker.fake is not None
        with tracker.fake, tracker:
            local = torch.empty(1000, 4, dtype=dtype)
            weight = DTensor.from_local(local, groups.mesh("tp"), [Shard(0)], run_check=False).requires_grad_()
            hidden = torch.empty(tokens, 4, dtype=dtype, requires_grad=True)
            labels: Tensor = torch.zeros(tokens, dtype=torch.int64)
            tracker.peak_bytes, before = tracker.alive_bytes, tracker.alive_bytes
            if scored:
                token_losses(hidden, Output(weight), labels, chunk_tokens)
            told = Output(weight, figures=figures)
            linear_cross_entropy(hidden, told, labels, chunk_tokens).backward()
        tracker.peak_bytes -= before
    return tracker, chunk_tokens * 1000 * 4


def test_whole_logits_never_stand_on_a_rank() -> None:
    """At the most: one chunk's logits of a rank's rows in fp32, in bf16 once more and a half of it narrow. What is
    beside them, gradients and numbers of tokens, is less than an eighth; entropies need the logits once more."""
    for dtype, times in ((torch.float32, 1.0), (torch.bfloat16, 1.5)):
        for figures, more in (((), 0.0), (TOKEN_FIGURES[:1], 0.0), (TOKEN_FIGURES, 2.0 - times)):
            tracker, logits = tracked(512, 128, False, dtype, figures)
            assert (times + more) * logits < tracker.peak_bytes < (times + more + 0.12) * logits


def test_what_entropies_send() -> None:
    """One more number a token of each rank."""
    plan = Plan(Layout(tp=8), Batch(1, 1, 500, 128), entropy=True)
    tracker, _ = tracked(500, 128, False, torch.float32, plan.loss_figures)
    assert tracker.sent == Counter(("tp", "all_gather", size) for size in paper.gathers(plan))
    assert paper.gathers(plan) == [16_384] * 3 + [14_848]


@pytest.mark.parametrize("loss", ["cross_entropy", "dpo"])
def test_what_is_sent(loss: str) -> None:
    """Paper and program: a gather for each chunk, the last of them shorter; dpo's scores in one more."""
    plan = Plan(Layout(tp=8), Batch(1, 1, 500, 128), loss=loss)  # type: ignore[arg-type]
    tracker, _ = tracked(500, 128, loss == "dpo", torch.float32, plan.loss_figures * (loss != "dpo"))
    sent = paper.gathers(plan)
    assert tracker.sent == Counter(("tp", "all_gather", size) for size in sent)
    assert sent == ([48_000] if loss == "dpo" else []) + [12_288] * 3 + [11_136]
    assert paper.gathers(Plan(batch=plan.batch)) == []
