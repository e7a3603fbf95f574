"""Paths that code takes at some sizes only: that techniques state them, that small plans keep them, and that a fault on
one of them is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise import techniques
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.lookup import load_spec
from shardwise.models.rope import RopeScaling
from shardwise.prove import certify, regimes
from shardwise.prove.certificate import Certificate, Facts
from shardwise.prove.further import further
from shardwise.prove.kept import Command
from shardwise.prove.pool import RankPool
from shardwise.prove.shrink import shrink
from shardwise.prove.workload import Workload, idle, random_everywhere
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Pipeline, Plan, Precision, Remat, Shard
from tests.planner import test_generated_plans as searched
from tests.prove import drawn
from tests.prove.faulty_ranks import FaultyRanks
from tests.prove.planted_sizes import FAULTS, LARGE, LLAMA, MOE, faulty
from tests.prove.test_certify import subject_of

GEMMA = load_spec("Gemma-2-2b")
FACTORS = {"short_factor": (1.0,) * 48, "long_factor": (2.0,) * 48}
LONG = RopeScaling("longrope", 32.0, original_max_position_embeddings=4096, **FACTORS)  # type: ignore[arg-type]
PHI = with_fields(load_spec("Phi-3-mini-4k"), rope_scaling=LONG)
MOST_RANKS = 16
COUNT = 200


@pytest.mark.prove
@pytest.mark.matrix(7)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_some_sizes_only_is_seen(ranks: RankPool, name: str) -> None:
    fault = FAULTS[name]
    assert fault.regime in regimes.held(fault.spec, fault.plan)
    subject = subject_of(fault.spec, fault.plan)
    assert subject.small is not None and not subject.lost and not subject.others
    assert (subject.small.plan.layout.world, subject.small.lost) == (fault.world, frozenset())
    assert not certify.run(subject, "parity", 0, ranks).problems, "without the fault"
    found = certify.run(subject, "parity", 0, FaultyRanks(ranks, name, faulty))
    assert found.problems and (found.raised or "relative error" in found.problems[0]), found


BLIND = [
    name for name, fault in FAULTS.items() if fault.regime not in ("an expert without rows", "more than one bucket")
]
"""These two sizes every small plan has."""


@pytest.mark.prove
@pytest.mark.parametrize("name", BLIND)
def test_without_that_path_the_same_fault_is_not_seen(ranks: RankPool, name: str) -> None:
    """So it is the path that shows it, and no other size of a small plan."""
    fault = FAULTS[name]
    blind = shrink(fault.spec, fault.plan, wanted=frozenset())
    assert fault.regime in regimes.lost(regimes.held(fault.spec, fault.plan), (blind.spec, blind.plan))
    subject = replace(subject_of(fault.spec, fault.plan), small=blind)
    assert not certify.run(subject, "parity", 0, FaultyRanks(ranks, name, faulty)).problems


def staged(schedule: str, each: int, split: tuple[int, ...], count: int) -> Plan:
    pipeline = Pipeline(schedule, each, split)
    return Plan(Layout(pp=len(split) // each), Batch(1, count, 4096), pipeline=pipeline)


STAGED = replace(LLAMA, tie_word_embeddings=False)
SLIDING = with_fields(LLAMA, sliding_window=100)
STATED: dict[str, tuple[ModelSpec, Plan, bool]] = {
    "one key head for all ranks of tp": (with_fields(LLAMA, num_key_value_heads=1), Plan(Layout(tp=4)), True),
    "key heads between one and the ranks of tp": (LLAMA, Plan(Layout(tp=8)), False),
    "tokens that the ranks of tp do not divide": (LLAMA, Plan(Layout(tp=2), Batch(3, 1, 5)), False),
    "ids that the ranks of tp do not divide": (replace(LLAMA, vocab_size=50_257), Plan(Layout(tp=4)), True),
    "a window shorter than a piece of a row": (SLIDING, Plan(Layout(cp=4), Batch(1, 1, 4096)), True),
    "a window that hides a piece of a row": (SLIDING, Plan(Layout(cp=4), Batch(1, 1, 4096)), True),
    "a window that shows a whole piece": (SLIDING, Plan(Layout(cp=4), Batch(1, 1, 256)), True),
    "gradients of keys that pass through a third rank": (LLAMA, Plan(Layout(cp=2), Batch(1, 1, 4096)), False),
    "a rank that sees none of another's keys": (LLAMA, Plan(Layout(cp=8), Batch(1, 1, 4096)), False),
    "tokens of two pieces on some ranks that exchange heads": (
        with_fields(LLAMA, num_attention_heads=24, num_key_value_heads=6),
        Plan(Layout(cp=6, ulysses=3), Batch(1, 1, 4092), cp_kind="nested"),
        True,
    ),
    "a stage without blocks of one kind": (
        with_fields(STAGED, layer_types=("sliding_attention",) * 8 + ("full_attention",) * 8, sliding_window=64),
        staged("1f1b", 1, (8, 8), 4),
        True,
    ),
    "stages of unequal length": (STAGED, staged("1f1b", 1, (9, 7), 4), True),
    "rounds of unequal length": (STAGED, staged("interleaved", 2, (4, 4, 4, 4), 5), True),
    "fewer micro-batches than ranks of a pipeline": (STAGED, staged("1f1b", 1, (4, 4, 4, 4), 3), True),
    "a first stage without trained weights": (
        STAGED,
        replace(staged("1f1b", 1, (8, 8), 4), frozen=("embed.*", "layers.[0-7].*")),
        True,
    ),
    "rows that shards do not divide": (LLAMA, Plan(Layout(dp_shard=3), shard=Shard("zero2")), True),
    "a shard without rows of a weight": (MOE, Plan(Layout(dp_shard=256), shard=Shard("zero3")), True),
    "a gradient as large as a bucket": (LLAMA, Plan(Layout(dp_replicate=2)), True),
    "a bucket of several blocks": (load_spec("SmolLM2-135M"), Plan(Layout(dp_replicate=2)), True),
    "ranks with the same experts": (MOE, Plan(Layout(dp_shard=16, ep=8), shard=Shard("zero3")), True),
    "blocks that are not computed again": (LLAMA, Plan(remat=Remat("full", 2)), True),
    "blocks before the first trained weight": (LLAMA, Plan(frozen=("embed.*", "layers.0.*")), True),
    "a weight in float8 of which ranks have no whole blocks": (
        LLAMA,
        Plan(Layout(dp_shard=8), Batch(), Shard("zero3"), Precision("bf16", products="float8", gather="float8")),
        True,
    ),
    "several groups of scales": (LLAMA, Plan(lora=Lora(nf4=True)), True),
    "a matrix that is dequantised in rounds": (LLAMA, Plan(lora=Lora(nf4=True)), True),
    "several blocks of a matrix in float8": (LLAMA, Plan(lora=Lora(float8=True)), True),
    "a matrix in float8 that is dequantised in rounds": (LLAMA, Plan(lora=Lora(float8=True)), True),
    "a block of float8 at an edge": (LLAMA, Plan(lora=Lora(float8=True)), False),
    "norms of rows in rounds": (LLAMA, Plan(lora=Lora()), False),
    "a weight that is updated in pieces": (LLAMA, Plan(optim=Optim("lion")), True),
    "sums of more gradients than buffers": (LLAMA, Plan(offload=Offload("host", sums="host"), batch=Batch(1, 3)), True),
    "several chunks of the loss": (LLAMA, Plan(batch=Batch(1, 1, 4096, 1024)), True),
    "a last chunk that is shorter": (LLAMA, Plan(batch=Batch(1, 1, 4096, 1024)), False),
    "rows longer than rotation was trained on": (PHI, Plan(batch=Batch(1, 1, 8192)), True),
    "a window shorter than a row": (GEMMA, Plan(batch=Batch(1, 1, 4096)), False),
    "an expert without rows": (with_fields(MOE, experts_per_token=MOE.experts.num_experts), Plan(), False),
}
"""By name, a model and a plan, and whether that plan's code takes the path; what faults show is not among it again."""


@pytest.mark.parametrize("name", STATED)
def test_what_a_plan_does_is_stated(name: str) -> None:
    spec, plan, holds = STATED[name]
    assert (name in regimes.held(spec, plan)) == holds, sorted(regimes.held(spec, plan))


def test_a_technique_states_its_paths_or_that_it_has_none() -> None:
    """And where it has, says of any plan of any model by the same names whether it takes them."""
    for technique in techniques.ORDER:
        own = {"regimes", "NO_REGIMES"} & vars(technique).keys()
        assert len(own) == 1, f"{technique.__name__}: regimes, or NO_REGIMES, which says why there are none"
        assert vars(technique).get("NO_REGIMES", "why").strip()
        if "regimes" in own:
            of = [technique.regimes(spec, plan, {}) for spec in (LLAMA, MOE) for plan in (Plan(), FULL)]
            assert all(each.keys() == of[0].keys() for each in of), technique.__name__
            assert all(type(holds) is bool for each in of for holds in each.values()), technique.__name__


FULL = Plan(Layout(tp=2, cp=2, dp_shard=2), Batch(2, 2, 4096), Shard("zero2"), lora=Lora(nf4=True))


def test_names_are_those_of_one_technique() -> None:
    names = [name for _, says in regimes.stated(MOE, FULL) for name in says(MOE, FULL)]
    assert len(names) == len(set(names)) > 20


def test_the_second_expert_is_chosen_by_no_token() -> None:
    spec = with_fields(MOE, num_experts=6, experts_per_token=2, hidden_size=8)
    weight = random_everywhere("layers.0.mlp.router.weight", (6, 8), (slice(0, 6), slice(0, 8)), 0, spec)
    part = random_everywhere("layers.0.mlp.router.weight", (6, 8), (slice(1, 3), slice(0, 4)), 0, spec)
    assert torch.equal(part, weight[1:3, :4])
    logits = torch.randn(10_000, 8) @ weight.T
    chosen = logits.topk(2, -1).indices.flatten().bincount(minlength=6)
    assert chosen[1] == 0 and (chosen[[0, 2, 3, 4, 5]] > 0).all()
    bias = idle(torch.randn(6), 2)
    assert ((logits + bias).topk(2, -1).indices != 1).all()


@pytest.mark.parametrize("length", [8192, 2048])
def test_rotation_beyond_its_training_stays_beyond(length: int) -> None:
    few = shrink(PHI, Plan(batch=Batch(1, 1, length)))
    scaling = few.spec.positions.rope_scaling
    assert scaling is not None and (scaling.original_max_position_embeddings < few.plan.batch.seq_len) == (
        length > 4096
    )


def test_ranks_of_one_axis_alone_show_what_the_small_plan_has_too_few_for() -> None:
    """Two replicas of two stages of two tensor-parallel ranks would be 16 with four of the last."""
    pipeline = Pipeline("1f1b", 1, (8, 8))
    plan = Plan(Layout(dp_replicate=2, pp=2, tp=16), Batch(1, 4, 4096), pipeline=pipeline)
    subject = subject_of(STAGED, plan)
    assert subject.small is not None and subject.small.lost == {"key heads between one and the ranks of tp"}
    [(other, _)] = subject.others
    assert other.plan.layout.axes() == (("tp", 4),) and not other.lost and not subject.lost
    assert subject.ranks == 8


def test_what_no_case_keeps_is_told() -> None:
    plan = Plan(Layout(dp_replicate=2, pp=2, tp=16), Batch(1, 4, 4096), pipeline=Pipeline("1f1b", 1, (8, 8)))
    small = shrink(STAGED, plan)
    _, others, lost = further(STAGED, plan, small, 3)
    assert not others
    [line] = lost
    assert "key heads between one" in line
    subject = replace(subject_of(STAGED, plan), others=(), lost=lost)
    facts = Facts("recipe", "machines", "plan", "normal", "begun", Command(), {})
    assert line in Certificate(subject, facts, [], {}).unseen()


def unkept(spec: ModelSpec, plan: Plan) -> tuple[frozenset[str], tuple[str, ...]] | None:
    """Of the paths that a plan takes those that its small cases do not, by their own sizes; and those that are told."""
    small = shrink(spec, plan)
    if small.plan.layout.world > MOST_RANKS:
        return None
    small, others, lost = further(spec, plan, small, MOST_RANKS)
    with regimes.scaled():
        kept = [regimes.held(one.spec, one.plan) for one in (small, *others)]
    return regimes.held(spec, plan) - frozenset().union(*kept), lost


def plan_of(number: int) -> tuple[ModelSpec, Plan]:
    """Drawn plans: one that a search of recipes allows, then one along all axes, by turns."""
    if number % 2:
        return drawn.drawn(number // 2)
    _, spec, _, plan = searched.drawn(number // 2)
    return spec, plan


@pytest.mark.matrix(40)
@pytest.mark.parametrize("number", range(COUNT))
def test_what_a_drawn_plan_lacks_in_small_is_told(number: int) -> None:
    found = unkept(*plan_of(number))
    assert found is None or sorted(found[0]) == sorted(
        name for name in regimes.held(*plan_of(number)) if any(f"there is {name}:" in line for line in found[1])
    )


@pytest.mark.big
@pytest.mark.timeout(1800)
def test_nearly_all_drawn_plans_lack_nothing() -> None:
    each = [found for number in range(COUNT) if (found := unkept(*plan_of(number))) is not None]
    assert len(each) >= 0.8 * COUNT and sum(not missing for missing, _ in each) >= 0.98 * len(each)


def test_a_single_row_has_labels_throughout() -> None:
    """With one label at a document's start, gradients of queries and keys would be zero but for rounding."""
    [row] = Workload(replace(LLAMA, vocab_size=67), 1, 13, "fp64", "fp64").batch(0)
    assert (row.labels >= 0).all()


def test_a_large_models_sums_over_tp_are_on_both_sides_of_a_bucket() -> None:
    few = shrink(LARGE, Plan(Layout(tp=16), Batch(1, 1, 4096), sequence_parallel=True), raised={"tp": 4})
    with regimes.scaled():
        held = regimes.held(few.spec, few.plan)
    assert {name for name in held if "summed over tp" in name} == {
        "a gradient as large as a bucket, summed over tp",
        "gradients smaller than a bucket, summed over tp",
    }
