"""What broke pipelines in the field, each by the number it has in the threads that told of it, in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from shardwise import techniques
from shardwise.prove import parity, workload
from shardwise.prove.distance import differences
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Plan, Precision, Remat
from tests.parity import drawn, field_ranks
from tests.parity.pipes import layout_of, plan, spec_of
from tests.parity.test_fp64 import holds
from tests.parity.test_tp_dropout import LAYERS

UNTIED, TIED = spec_of("untied", 4), spec_of("tied", 4)
TWO = ["1f1b", pytest.param("zbv", marks=pytest.mark.prove)]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(plan("1f1b", UNTIED), id="P1 the norm is of all stages, and clips"),
        pytest.param(plan("gpipe", UNTIED, micro=1), id="P2 one micro-batch", marks=pytest.mark.prove),
        pytest.param(plan("interleaved", UNTIED, micro=2), id="P2 two", marks=pytest.mark.prove),
        pytest.param(plan("zbv", UNTIED, micro=8), id="P2 eight", marks=pytest.mark.prove),
        pytest.param(plan("1f1b", UNTIED, pp=4), id="P3 P4 tokens differ, over four stages", marks=pytest.mark.prove),
        pytest.param(plan("interleaved", UNTIED, micro=3), id="P6 P7 S7 documents of each micro-batch"),
        pytest.param(
            plan("zbv", UNTIED, dp_replicate=2), id="P11 halves of a backward beside replicas", marks=pytest.mark.prove
        ),
        pytest.param(
            replace(plan("zbv", UNTIED), remat=Remat("full")), id="P10 recomputed in halves", marks=pytest.mark.prove
        ),
    ],
)
def test_is_one_process(ranks: RankPool, of: Plan) -> None:
    """Losses, norms (the clip is at work), every first gradient, and weights after two steps."""
    holds(drawn.prove(ranks, UNTIED, [of], 2), [of])
    assert min(drawn.plain(parity.job_of(UNTIED, of, 2)).norms) > workload.OPTIM.max_grad_norm  # type: ignore[operator]


@pytest.mark.parametrize("schedule", TWO)
def test_P5_P21_lengths_that_differ_within_a_step(ranks: RankPool, schedule: str) -> None:
    """Gradients are the sum of all micro-batches', to the last token of the longest: 1e-12 relative."""
    of = plan(schedule, UNTIED, micro=len(field_ranks.LENGTHS))
    job, batches = parity.job_of(UNTIED, of, 1), field_ranks.of_many_lengths(UNTIED)
    weights = parity.plain_parameters(replace(job, setting=drawn.RANDOM))
    model, tokens = parity.model_of(UNTIED).double(), sum(batch.supervised_tokens() for batch in batches)
    for batch in batches:
        loss = parity.plain_loss(model, weights, batch, job)
        (loss * batch.supervised_tokens() / tokens).backward()
    right = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    found = {name: grad for rank in ranks.run(field_ranks.lengths, UNTIED, of) for name, grad in rank.items()}
    assert max(differences(right, found).values()) < 1e-12


def test_P8_blocks_that_are_compiled_cannot_have_a_backward_in_halves() -> None:
    problems = techniques.check(UNTIED, replace(plan("zbv", UNTIED), compile=True), parse_cluster("2xCPU"))
    assert [problem.code for problem in problems] == ["PLAN023"] and "`compile=false`" in problems[0].fix


def test_P10_what_is_recomputed_for_the_first_half_is_kept_no_longer_than_the_second() -> None:
    """Between them live the operands of its products: less than without recomputation, and what the plan says."""
    kept = {mode: replace(plan("zbv", UNTIED), remat=Remat(mode)) for mode in ("none", "full")}  # type: ignore[arg-type]
    found = {mode: drift(UNTIED, of) for mode, of in kept.items()}
    assert not found["none"].differences() and not found["full"].differences()
    assert found["full"].measured.peak_bytes < found["none"].measured.peak_bytes


@pytest.mark.prove
@pytest.mark.parametrize(
    ("schedule", "strategy", "ids"),
    [
        pytest.param("1f1b", "ddp", 67, id="P12 two ranks"),
        pytest.param("zbv", "ddp", 67, id="P12 one rank has both", marks=pytest.mark.prove),
        pytest.param("interleaved", "zero3", 67, id="S1 slices that nothing divides", marks=pytest.mark.prove),
    ],
)
def test_tied_ends_are_alike_after_each_of_twenty_steps(
    ranks: RankPool, schedule: str, strategy: str, ids: int
) -> None:
    """Bit by bit; every row moves in every step, and all are one process's to 1e-9: sums are taken in another order, in
    float64. Gradients of both uses are one process's in test_pp_pairwise.py. (P13: there is one optimizer for all
    weights, and no Muon.)"""
    spec = replace(TIED, vocab_size=ids)
    of = plan(schedule, spec, strategy, **({} if strategy == "ddp" else {"dp_shard": 2}))
    alone = replace(of, layout=layout_of("1f1b", 1), pipeline=Plan().pipeline, shard=Plan().shard)
    alone = replace(alone, batch=replace(of.batch, accumulation=of.batch.accumulation * of.layout.dp))
    [right] = ranks.run(field_ranks.ends, spec, alone, 20, world=1)
    found = ranks.run(field_ranks.ends, spec, of, 20, world=of.layout.world)
    before = drawn.whole("embed.weight", spec)
    for number in range(20):
        copies = [weight for rank in found for weight in rank[number].values()]
        assert len(copies) == 2 * (1 if strategy == "ddp" else 2), schedule
        assert all(torch.equal(copies[0], other) for other in copies[1:]), number
        assert (copies[0] != before).any(1).all(), number
        assert differences(right[number], {"embed.weight": copies[0]})["embed.weight"] < 1e-9, number
        before = copies[0]


@pytest.mark.prove
@pytest.mark.parametrize("schedule", [*TWO, pytest.param("interleaved", marks=pytest.mark.prove)])
def test_P15_P16_evaluation_before_and_between_steps(ranks: RankPool, schedule: str) -> None:
    """Every rank comes through, and all say what one process says."""
    of = plan(schedule, UNTIED)
    alone = replace(of, layout=layout_of("1f1b", 1), pipeline=Plan().pipeline)
    [right] = ranks.run(field_ranks.between, UNTIED, alone, 2, world=1)
    for found in ranks.run(field_ranks.between, UNTIED, of, 2):
        assert found == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_P18_ranks_that_come_late(ranks: RankPool, pp: int) -> None:
    """However ranks lag, none waits for ever, and the numbers are the same."""
    spec = spec_of("untied", 2 * pp)
    of = plan("interleaved", spec, pp=pp, micro=2 * pp)
    slow = ranks.run(field_ranks.sleepy, spec, of, 2, world=pp)
    right = drawn.plain(parity.job_of(spec, of, 2))
    assert parity.compare(right, slow, staged=True).weight.error < 1e-9


@pytest.mark.parametrize("schedule", TWO)
def test_P22_first_weights_are_one_processs(ranks: RankPool, schedule: str) -> None:
    of = plan(schedule, UNTIED)
    found = {name: weight for rank in ranks.run(field_ranks.begun, UNTIED, of) for name, weight in rank.items()}
    for name, weight in found.items():
        assert torch.equal(weight, drawn.whole(name, UNTIED)), name
    assert found.keys() == set(parity.parameter_shapes(UNTIED))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_S4_S5_few_receives_are_posted_and_each_has_memory_of_its_own(ranks: RankPool, schedule: str) -> None:
    """Of eight micro-batches, three at most."""
    of = plan(schedule, UNTIED, micro=8)
    for found in ranks.run(field_ranks.received, UNTIED, of):
        assert 1 <= found.most <= 3 and not found.shared


@pytest.mark.parametrize("schedule", TWO)
def test_a_gradient_that_overflows_on_one_stage_skips_the_step_of_all(ranks: RankPool, schedule: str) -> None:
    """And halves the scale of all, once; the step after it is taken again."""
    of = replace(plan(schedule, UNTIED), precision=Precision(compute="fp16"))
    found = ranks.run(field_ranks.overflowing, UNTIED, of)
    for first, second, third in found:
        assert [skipped for skipped, _, _ in (first, second, third)] == [False, True, False]
        assert all(torch.equal(weight, first[2][name]) for name, weight in second[2].items())
        assert not all(torch.equal(weight, second[2][name]) for name, weight in third[2].items())
    assert {tuple(scale for _, scale, _ in steps) for steps in found} == {(2.0**16, 2.0**16, 2.0**15)}


@pytest.mark.parametrize(
    ("schedule", "mode", "times"),
    [("1f1b", "none", 1), pytest.param("zbv", "full", 2, marks=pytest.mark.prove)],
    ids=["drawn once", "recomputed in halves"],
)
def test_masks_of_dropout_are_others_on_every_stage(ranks: RankPool, schedule: str, mode: str, times: int) -> None:
    """No two of any step, stage, block, layer and micro-batch are alike; each is drawn again where it is recomputed;
    and the same run draws the same, to the last weight."""
    settings = Lora(4, 8.0, frozen="fp64", dropout=0.4)
    of = replace(plan(schedule, UNTIED), lora=settings, remat=Remat(mode))  # type: ignore[arg-type]
    found, again = (ranks.run(field_ranks.dropping, UNTIED, of, 2) for _ in range(2))
    drawn_by = Counter(mask for masks, _ in found for mask in masks)
    assert len(drawn_by) == 2 * of.batch.accumulation * UNTIED.num_hidden_layers * LAYERS
    assert set(drawn_by.values()) == {times}
    for (masks, weights), (others, same) in zip(found, again, strict=True):
        assert masks == others and weights.keys() == same.keys()
        assert all(torch.equal(weight, same[name]) for name, weight in weights.items())


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.prove)])
def test_nothing_is_waited_for_in_vain(ranks: RankPool, schedule: str) -> None:
    """Every gradient leaves before the rank waits for sums, and ranks after the first gather while they wait for it."""
    of = plan(schedule, UNTIED, "zero1", dp_shard=2)
    for rank, found in enumerate(ranks.run(field_ranks.meanwhile, UNTIED, of, world=4)):
        assert found.early == found.sent and (found.sent > 0) is (schedule == "interleaved" or rank >= 2)
        assert found.whole is True or rank < 2
