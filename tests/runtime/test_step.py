"""One optimizer step: independent of the layout, and harmless when its numbers are not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods import pretrain
from shardwise.methods.loss import Loss, Output
from shardwise.prove.pool import RankPool
from shardwise.runtime.passes import StepRules
from shardwise.runtime.state import LossScale, TrainState
from shardwise.runtime.step import draw_anew, step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Offload, Plan, Precision
from shardwise.spec.recipe import OptimSection
from tests.runtime import part_ranks, rank_work
from tests.runtime.rank_work import CPU
from tests.runtime.test_reduce import plan_of

ONE = plan_of(Layout(), "ddp")
SPLITS = {
    "1 rank, 8 micro-batches": (1, plan_of(Layout(), "ddp", 8)),
    "ddp": (2, plan_of(Layout(dp_replicate=2), "ddp", 2)),
    "zero1": (2, plan_of(Layout(dp_shard=2), "zero1", 2)),
    "zero2": (2, plan_of(Layout(dp_shard=2), "zero2", 4)),
    "zero3 over 4": (4, plan_of(Layout(dp_shard=4), "zero3")),
    "hsdp": (4, plan_of(Layout(dp_replicate=2, dp_shard=2), "zero3", 2)),
}


def test_what_is_dropped_differs_where_tokens_do() -> None:
    """And is the same on ranks that share each layer of the same tokens."""
    layout, drawn = Layout(dp_replicate=2, cp=2, tp=2), []
    for rank in range(layout.world):
        draw_anew(7, 3, Meshes(layout, rank))
        drawn.append(torch.initial_seed())
    assert len(set(drawn)) == 4 and drawn[::2] == drawn[1::2]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", SPLITS)
def test_the_split_of_a_batch_does_not_matter(ranks: RankPool, name: str) -> None:
    """Rows have different numbers of supervised tokens, so a mean over ranks or micro-batches would differ. fp64 and
    four AdamW steps: 1e-9 relative."""
    world, plan = SPLITS[name]
    (expected, state), *_ = ranks.run(rank_work.few_steps, ONE, world=1)
    for stats, tensors in ranks.run(rank_work.few_steps, plan, world=world):
        for a, b in zip(stats, expected, strict=True):
            assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-9)
            assert (a.tokens, a.supervised_tokens, a.learning_rate) == (b.tokens, b.supervised_tokens, b.learning_rate)
        for key, value in state.items():
            torch.testing.assert_close(tensors[key], value, rtol=1e-9, atol=1e-12)


def test_a_method_reports_figures_beside_its_loss() -> None:
    """Their sums over the micro-batches. One that is not finite skips no step."""
    plan = Plan(batch=part_ranks.BATCH)
    state = part_ranks.state_of(part_ranks.SPEC, part_ranks.TWO, plan, Meshes())

    def finish(hidden: Tensor, head: Output, batch: MicroBatch, denominator: float) -> Loss:
        tokens = torch.tensor(batch.supervised_tokens() / denominator)
        value = pretrain.finish(hidden, head, batch, denominator, chunk_tokens=8).value
        return Loss(value, {"share": tokens, "odd": tokens * torch.nan})

    rules = StepRules(plan, Meshes(), OptimSection(), 3, finish)
    before = [parameter.detach().clone() for parameter in state.trained()]
    found = step(state, part_ranks.rows(0), 48, rules)
    assert found.figures["share"] == 0.5 and math.isnan(found.figures["odd"])
    assert math.isfinite(found.loss) and not found.skipped
    assert not any(torch.equal(old, new) for old, new in zip(before, state.trained(), strict=True))


@pytest.mark.prove
@pytest.mark.parametrize(
    "plan",
    [
        plan_of(Layout(dp_replicate=2), "ddp"),
        plan_of(Layout(dp_shard=2), "zero3", 2),
        replace(plan_of(Layout(dp_shard=2), "zero3", 2), offload=Offload("host")),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(ranks: RankPool, plan: Plan) -> None:
    """The last step is poisoned on one rank only: weights and moments are bitwise those of a run without that step."""
    clean = ranks.run(rank_work.few_steps, plan, rank_work.STEPS, world=2)
    skipped = ranks.run(rank_work.few_steps, plan, rank_work.STEPS - 1, world=2)
    for (good, after), (stats, tensors) in zip(clean, skipped, strict=True):
        assert not any(s.skipped for s in good)
        assert [s.skipped for s in stats] == [False] * (rank_work.STEPS - 1) + [True]
        assert all(torch.isfinite(value).all() for value in tensors.values())
        assert not torch.equal(after["model.embed.weight"], tensors["model.embed.weight"])
    (_, before), *_ = ranks.run(rank_work.few_steps, plan, rank_work.STEPS, rank_work.STEPS - 1, world=2)
    for _, tensors in skipped:
        for key, value in before.items():
            assert torch.equal(tensors[key], value), key


def test_loss_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scale = LossScale(value=8.0, growth_steps=3, enabled=True)
    for finite, value in [(True, 8.0), (False, 4.0), (True, 4.0), (True, 4.0), (True, 8.0), (False, 4.0)]:
        scale.on(CPU)
        assert scale.update(torch.tensor(finite), torch.tensor(True)).tolist()[0] == value
    assert scale.update(torch.tensor(False), torch.tensor(False)).tolist()[0] == 4.0, "no scale cures a loss"
    constant = LossScale()
    assert constant.on(CPU)[0] == 1.0
    assert not len(constant.update(torch.tensor(False), torch.tensor(True)))
    assert constant.on(CPU)[0] == 1.0


def test_a_search_for_the_loss_scale_is_no_sign_of_a_poisoned_run() -> None:
    layer = torch.nn.Linear(1, 1)
    state = TrainState([layer], torch.optim.AdamW(layer.parameters()), scale=LossScale(8.0, enabled=True))
    state.scale.on(CPU)
    for loss, value, in_row in [(9.0, 4, 0), (math.inf, 4, 1), (9.0, 2, 1), (9.0, 1, 1), (9.0, 1, 2), (math.nan, 1, 3)]:
        state.advance(64)
        state.book(True, loss, state.scale.update(torch.tensor(False), torch.tensor(loss).isfinite()).tolist())
        assert (state.scale.value, state.skipped_in_row) == (value, in_row)
    state.advance(64)
    state.book(False, 9.0, state.scale.update(torch.tensor(True), torch.tensor(True)).tolist())
    assert (state.skipped_in_row, state.step, state.updates, state.tokens) == (0, 7, 1, 448)


def test_fp16_gradients_are_unscaled_before_they_are_clipped(ranks: RankPool) -> None:
    """With a scale of 2^16, loss and norm of the first step are those of fp32 within fp16's resolution: 2^-11 a number,
    1e-2 for a norm through three layers. A scale left in would be 65,536 times off."""
    full, half = (replace(ONE, precision=precision) for precision in (Precision(), Precision(compute="fp16")))
    (a, _), (b, _) = (ranks.run(rank_work.few_steps, plan, world=1)[0] for plan in (full, half))
    assert not any(s.skipped for s in b)
    assert {s.loss_scale for s in a} == {None} and {s.loss_scale for s in b} == {2.0**16}
    assert b[0].loss == pytest.approx(a[0].loss, rel=2e-3)
    assert b[0].grad_norm == pytest.approx(a[0].grad_norm, rel=1e-2)
    assert b[-1].loss == pytest.approx(a[-1].loss, rel=1e-2)


def test_names_are_canonical_and_a_tied_weight_is_there_once(ranks: RankPool) -> None:
    for plan, world in ((ONE, 1), (plan_of(Layout(dp_shard=2), "zero3"), 2)):
        for names, tied in ranks.run(rank_work.gathered_names, plan, world=world):
            assert tied
            assert len(names) == len(set(names))
            assert {name.partition(".")[0] for name in names} == {"model", "optim"}
            assert "model.embed.weight" in names and not any(name.endswith("head.weight") for name in names)
            assert "optim.exp_avg_sq.layers.1.attention.k.bias" in names
