"""Certificates: that what is right is certified, and that a planted fault is found, named, and traced to the smallest
layout that has it. (That each technique is right is proved in tests/parity and tests/drift.)"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardwise import techniques
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.lookup import load_spec
from shardwise.planner import sheets, trace
from shardwise.prove import certify
from shardwise.prove.certify import Certification, Check
from shardwise.prove.drift import predict
from shardwise.prove.pool import PATIENCE_S, RankPool
from shardwise.prove.smallest import Outcome, Smallest, smallest
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Data, Method, Recipe
from shardwise.techniques.pp.actions import SCHEDULES
from tests.parity import test_cp_faults, test_ep_faults, test_faults, test_offload, test_pp_faults, test_tp_faults
from tests.parity.cases import FP64, GEMMA, QWEN, TIED, UNTIED
from tests.parity.cases import plan as plan_of
from tests.parity.test_tp import EVEN
from tests.parity.test_tp import plan as tp_plan
from tests.prove.certified_ranks import FIELD, faulty
from tests.prove.faulty_ranks import FaultyRanks
from tests.prove.planted import DRIFT, RESUME
from tests.said import shows

DRAWN = Recipe(data=Data(path="nothing-here.jsonl"))
SMALL = ("parity", "documents", "dtypes", "checkpoint")


def subject_of(spec: ModelSpec, plan: Plan, recipe: Recipe = DRAWN) -> Certification:
    found = certify.subject_of(recipe, spec, plan, 16)
    assert found.small is not None, found.why
    return found


HOST = "the optimizer on the host"
SUMMED = f"{HOST} and sums of gradients on the host"
NEEDS = {
    "mean instead of sum, replicas": ("dp_replicate 2",),
    "mean instead of sum, shards": ("dp_shard 2", "zero3"),
    "no all-reduce between replicas": ("dp_replicate 2",),
    "no all-reduce between replicas of a hybrid": ("dp_replicate 2", "zero3"),
    "each rank divides by its own tokens": ("dp_replicate 2",),
    "clipping by the local norm": ("dp_replicate 2",),
    "gradients of early micro-batches are lost": ("dp_replicate 2", "2 micro-batches"),
    "padded rows are counted in the norm": ("dp_shard 2", "zero3"),
    "buckets leave after the first micro-batch": ("dp_replicate 2", "2 micro-batches"),
    "two ranks read the same rows": ("dp_replicate 2",),
    "norms' gradients are not summed over tokens": ("tp 2", "sequence parallelism"),
    "key heads that all ranks hold are not summed": ("tp 2",),
    "the gradient of a column product's input is not reduced": ("tp 2",),
    "what every rank holds counts once for each in the norm": ("tp 2",),
    "a product that is saved is summed in place": ("tp 2", "selective recomputation"),
    "every rank adds the bias of a row product": ("tp 2", "biases"),
    "the loss is scaled once a stage": ("pp 2",),
    "a stage's last micro-batch is not reduced": ("dp_replicate 2", "pp 2"),
    "a stage's last micro-batch is not reduced, of shards": ("dp_replicate 2", "pp 2"),
    "the gradients of tied ends are not summed": ("pp 2", "tied embeddings"),
    "the gradients of tied ends are summed twice": ("pp 2", "tied embeddings"),
    "the gradients of tied ends of one rank are not summed": ("pp 2", "tied embeddings"),
    "the gradients of tied ends of one rank are summed twice": ("pp 2", "tied embeddings"),
    "what two stages of a rank send is swapped": ("pp 2", "schedule interleaved"),
    "the norm is of one stage": ("pp 2",),
    **dict.fromkeys(test_cp_faults.FAULTS, ("cp 2",)),
    "a window is measured from the piece": ("cp 2", "window"),
    "keys are those of the step before": ("cp 3", "ring"),
    **dict.fromkeys(("the state of the piece before is lost", "states pass in the order of ranks"), ("cp 2", "mixer")),
    "gradients of experts are summed over the ranks of all tokens": ("ep 2",),
    "E14: gradients of experts are not summed over replicas": ("ep 2", "dp_replicate 2", "zero3"),
    "E1: gradients of experts are means": ("ep 2", "zero3"),
    "T1: gradients of routers are not summed over tokens": ("tp 2", "sequence parallelism", "experts"),
    "the last step's gradient": (HOST,),
    "weights that return before the step": (HOST,),
    "a read that overtakes a write": ("the optimizer on NVMe",),
    **dict.fromkeys(("a sum of one micro-batch", "a sum in a buffer"), ("2 micro-batches", SUMMED)),
    "narrow weights that do not return": (HOST,),
    "shards that do not return": (HOST,),
    "gradients as narrow as their weights": (HOST,),
    "gradients that leave after each micro-batch": ("2 micro-batches", HOST),
    "what ranks of tp make of the MLP that all share is not summed": ("tp 2", "shared expert", "experts"),
}
"""Without what a fault is not seen. Those that are not here are wrong in one process too, or are faults of experts that
these five stand for."""
CASES: dict[str, tuple[ModelSpec, Plan]] = {
    **{name: (UNTIED, plan) for name, (_, plan) in test_faults.FAULTS.items()},
    **{name: (spec, plan) for name, (_, spec, plan) in test_tp_faults.FAULTS.items()},
    **{name: (spec, plan) for name, (_, spec, plan) in test_pp_faults.FAULTS.items()},
    **{name: (spec, plan) for name, (_, spec, plan) in test_cp_faults.FAULTS.items()},
    **{name: (spec, plan) for name, (_, spec, plan) in test_ep_faults.FAULTS.items() if name in NEEDS},
    **{name: (spec, plan) for name, (_, spec, plan) in test_offload.FAULTS.items()},
    **{name: (UNTIED, plan_of("zero3", 2, FP64)) for name in RESUME},
}


def failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.problems]


@pytest.mark.rare(40)
@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_and_its_smallest_layout_is_right(ranks: RankPool, name: str) -> None:
    subject, broken = subject_of(*CASES[name]), FaultyRanks(ranks, name, faulty)
    proof = "checkpoint" if name in RESUME else "parity"
    check = certify.run(subject, proof, 0, broken)
    assert check.problems
    assert check.raised or any(word in check.problems[0] for word in ("layers.", "weight", "loss", "norm"))
    found = certify.smallest_failing(subject, check, broken)
    assert found is not None
    assert found.needed == NEEDS.get(name, ()), found


@pytest.fixture
def _traced_anew() -> Iterator[None]:
    """Units that were traced with a fault in the model's code are forgotten."""
    yield
    trace.trace_once.cache_clear()
    sheets._sheet.cache_clear()


@pytest.mark.matrix(28)
@pytest.mark.parametrize("name", DRIFT)
def test_planted_drift_is_found_and_its_smallest_layout_is_right(name: str, _traced_anew: None) -> None:
    fault = DRIFT[name]
    subject = subject_of(fault.spec, fault.plan)
    ends = certify.drift_ranks(fault.plan.layout, "quick")
    assert not failed([certify.run(subject, "drift", rank, NoRanks()) for rank in ends]), "without the fault"
    with fault.planted():
        check, *_ = failed([certify.run(subject, "drift", rank, NoRanks()) for rank in ends])
        assert any(fault.seen in line for line in check.problems)
        found = certify.smallest_failing(subject, check, NoRanks()) if name in DRIFT_NEEDS else None
    assert found is None or found.needed == DRIFT_NEEDS[name], found


DRIFT_NEEDS = {
    "weights are not freed after forward": ("dp_shard 2", "zero3"),
    "the root is freed after forward": ("dp_shard 2", "zero3"),
    "weights are gathered for every micro-batch": ("dp_shard 2", "zero2", "2 micro-batches"),
    "gradients are scattered for every micro-batch": ("dp_shard 2", "zero1", "2 micro-batches"),
    "replicas are summed for every micro-batch": ("dp_replicate 2", "zero3", "2 micro-batches"),
    "a bucket too many": ("dp_replicate 2",),
    "a vote too many": ("dp_replicate 2",),
    "gradients travel in fp32 instead of bf16": ("dp_shard 2", "zero3", "computing in bf16"),
    "moments in fp32 instead of bf16": ("moments in bf16",),
}
"""Not of what is wrong inside a block, with which the small plan's units would be traced; nor of peaks, which are
compared at the plan's own size."""


class NoRanks:
    """Drift needs none."""

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = PATIENCE_S) -> list[Any]:
        raise AssertionError(fn)


STAGES = plan_of("ddp", 1, FP64, accumulation=4)
FIELD_CASES: dict[str, tuple[ModelSpec, Plan, str, tuple[str, ...]]] = {
    "T6: a norm of heads is not summed over tensor-parallel ranks": (
        replace(QWEN, intermediate_size=28),
        tp_plan("ddp", 1, 2, sequence=False),
        "_norm.weight",
        ("tp 2", "norms of queries and keys"),
    ),
    "T11: the loss is taken of whole logits as if they were cut": (
        EVEN,
        tp_plan("ddp", 2, 2, sequence=True),
        "loss of step",
        ("tp 2",),
    ),
    "K3: a stage loads the layers that have its own numbers": (
        replace(UNTIED, num_hidden_layers=4),
        replace(STAGES, layout=Layout(pp=2), pipeline=Pipeline("1f1b", 1, (2, 2))),
        "layers.",
        ("pp 2",),
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FIELD)
def test_what_was_wrong_elsewhere_is_found(ranks: RankPool, name: str) -> None:
    """Megatron-LM#7452: T6 and T11 by parity, K3 by the checkpoint. (C2 and E7 are of axes that are not there yet.)"""
    spec, plan, named, needed = FIELD_CASES[name]
    subject, broken = subject_of(spec, plan), FaultyRanks(ranks, name, faulty)
    checks = failed([certify.run(subject, proof, 0, broken) for proof in ("parity", "checkpoint")])
    assert any(named in line for check in checks for line in check.problems), checks
    found = certify.smallest_failing(subject, checks[0], broken)
    assert isinstance(found, Smallest) and found.needed == needed, found


def layout(schedule: str = "1f1b", **degrees: int) -> Layout:
    return Layout(**degrees, v_shaped=SCHEDULES[schedule].shape == "v")


def staged(schedule: str, each: int, split: tuple[int, ...], micro: int = 8, **degrees: int) -> Plan:
    pipeline = Pipeline(schedule, each, split)  # type: ignore[arg-type]
    return Plan(layout(schedule, pp=len(split) // each, **degrees), Batch(1, micro, 4096), pipeline=pipeline)


BF16, LLAMA = Precision("bf16"), load_spec("Llama-3.2-1B")
QWEN_MOE, GPT_OSS, SHARED = (
    replace(load_spec(name), num_hidden_layers=layers)
    for name, layers in (("Qwen3-30B-A3B", 8), ("gpt-oss-20b", 24), ("Qwen1.5-MoE-A2.7B", 24))
)
GEMMAS = with_fields(GEMMA, num_hidden_layers=8, layer_types=("sliding_attention", "full_attention") * 4)
COMPOSITIONS: dict[str, tuple[ModelSpec, Plan]] = {
    "tp x zero3 x replicas, selective": (
        LLAMA,
        Plan(
            Layout(dp_replicate=2, dp_shard=4, tp=4),
            Batch(2, 2, 4096),
            Shard("zero3"),
            BF16,
            Remat("selective"),
            sequence_parallel=True,
        ),
    ),
    "1f1b x tp x zero1": (
        LLAMA,
        replace(staged("1f1b", 1, (8, 8), dp_shard=4, tp=2), shard=Shard("zero1"), precision=BF16),
    ),
    "interleaved x replicas x zero2, uneven": (
        replace(LLAMA, tie_word_embeddings=False),
        replace(staged("interleaved", 2, (5, 4, 4, 3), dp_replicate=2, dp_shard=2), shard=Shard("zero2")),
    ),
    "zbv x tp, tied, full": (LLAMA, replace(staged("zbv", 2, (4, 4, 4, 4), tp=2), remat=Remat("full", 2))),
    "dualpipev x zero3, tied": (LLAMA, replace(staged("dualpipev", 2, (4,) * 4, 16, dp_shard=2), shard=Shard("zero3"))),
    "4 bits x tp x zero3": (
        LLAMA,
        Plan(
            Layout(dp_shard=2, tp=2),
            Batch(1, 2, 4096),
            Shard("zero3"),
            BF16,
            lora=Lora(16, frozen="bf16", nf4=True),
        ),
    ),
    "magnitudes x gpipe": (LLAMA, replace(staged("gpipe", 1, (8, 8)), lora=Lora(8, dora=True))),
    "pairs x 1f1b x tp": (LLAMA, replace(staged("1f1b", 1, (8, 8), tp=2), loss="dpo")),
    "pairs x zero3 x adapters": (
        LLAMA,
        Plan(Layout(dp_shard=8), Batch(2, 2, 4096), Shard("zero3"), BF16, lora=Lora(16), loss="dpo"),
    ),
    "frozen first blocks x interleaved_zb x tp": (
        LLAMA,
        replace(staged("interleaved_zb", 2, (4,) * 4, tp=2), frozen=("embed.*", "layers.[0-7].*")),
    ),
    "a stage with nothing to train x 1f1b x zero1": (
        LLAMA,
        replace(staged("1f1b", 1, (8, 8), dp_shard=2), shard=Shard("zero1"), frozen=("embed.*", "layers.[0-7].*")),
    ),
    "windows and caps x tp x zero1": (
        GEMMAS,
        Plan(Layout(dp_shard=2, tp=2), Batch(1, 1, 2048), Shard("zero1"), BF16, sequence_parallel=True),
    ),
    "fewer key heads than ranks x zero2": (
        replace(TIED, intermediate_size=32),
        Plan(Layout(dp_shard=2, tp=4), Batch(1, 1, 256), Shard("zero2"), Precision("fp16")),
    ),
    "ep x tp x replicas, sinks and biases": (
        GPT_OSS,
        Plan(Layout(dp_replicate=2, tp=4, ep=4), Batch(1, 2, 4096), precision=BF16, sequence_parallel=True),
    ),
    "ep over all axes x 1f1b, a shared expert": (
        SHARED,
        replace(
            staged("1f1b", 1, (12, 12), dp_shard=2, cp=2, ep=4),
            shard=Shard("zero2"),
            remat=Remat("selective"),
            cp_kind="ring",
        ),
    ),
    "ep x zero3, ranks with the same experts": (
        QWEN_MOE,
        Plan(Layout(dp_shard=64, ep=8), Batch(1, 2, 4096), Shard("zero3"), BF16, Remat("full")),
    ),
    "four axes": (
        LLAMA,
        replace(staged("1f1b", 1, (8, 8), dp_replicate=2, dp_shard=2, tp=2), shard=Shard("zero1"), precision=BF16),
    ),
}


@pytest.mark.big
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_of_several_axes_are_certified(ranks: RankPool, name: str) -> None:
    spec, plan = COMPOSITIONS[name]
    assert not techniques.check(spec, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    recipe = DRAWN.model_copy(update={"method": Method(name="dpo", beta=0.5) if plan.loss == "dpo" else Method()})
    subject = subject_of(spec, plan, recipe)
    assert subject.small is not None
    with RankPool(world) if (world := subject.small.plan.layout.world) > 4 else nullcontext(ranks) as pool:
        checks = [certify.run(subject, proof, 0, pool) for proof in SMALL]
    checks.append(certify.run(subject, "drift", plan.layout.world - 1, NoRanks()))
    assert not failed(checks)


@pytest.mark.parametrize("effort", ["quick", "normal", "thorough"])
def test_which_ranks_are_looked_at(effort: certify.Effort) -> None:
    of = Layout(pp=4, dp_shard=3, tp=2)
    found = certify.drift_ranks(of, effort)
    assert {"quick": [0, 23], "normal": [0, 5, 12, 17, 18, 23], "thorough": list(range(24))}[effort] == found
    assert {of.coordinate(rank, "pp") for rank in certify.drift_ranks(of, "normal")} == {0, 2, 3}


@pytest.mark.parametrize(
    ("pp", "stages", "count", "run"), [(1, 0, 2, 2), (1, 0, 64, 3), (2, 4, 32, 8), (4, 4, 33, 9), (16, 64, 16, 16)]
)
def test_how_many_micro_batches_drift_runs(pp: int, stages: int, count: int, run: int) -> None:
    """Of a round over the ranks as many are left over as of the step."""
    plan = Plan(Layout(pp=pp), Batch(1, count, 4096), pipeline=Pipeline("interleaved", 2, (1,) * stages))
    assert certify.micro_batches(plan) == run


def test_micro_batches_that_are_left_out_repeat_the_others() -> None:
    """What 12 send beyond 8 is what 16 send beyond 12; the peak grows by their ids, labels and positions alone."""
    spec, plan = replace(UNTIED, num_hidden_layers=4), staged("interleaved", 2, (1, 1, 1, 1), 8)
    steps = [predict(spec, replace(plan, batch=Batch(1, count, 64)), 1) for count in (8, 12, 16)]
    calls = [sum(step.sent.values()) for step in steps]
    assert calls[2] - calls[1] == calls[1] - calls[0] > 0
    assert [later.peak_bytes - step.peak_bytes for step, later in pairwise(steps)] == 2 * [4 * 3 * 64 * 8]


def test_a_failure_is_the_line_that_names_the_exception() -> None:
    try:
        raise ValueError("narrow\nand more")
    except ValueError as error:
        error.add_note("while training under a plan")
        report = traceback.format_exc()
    assert certify._cause(report) == "ValueError: narrow"
    for one in ("no answer after 300 s; it stood in", "died without an answer (SIGKILL)"):
        assert certify._cause(f"{one}\n  File a") == certify._cause(one) == one


def test_what_fails_in_another_way_does_not_pass() -> None:
    """Without its pipeline this one is wrong in another way, and without tied ends it is right."""

    def outcome(spec: ModelSpec, plan: Plan) -> Outcome:
        if not spec.tie_word_embeddings:
            return "passes"
        return "fails" if plan.layout.pp > 1 else "fails otherwise"

    spec, plan = COMPOSITIONS["1f1b x tp x zero1"]
    found = smallest(spec, plan, outcome)
    assert (found.words, found.needed, found.changing) == (
        ("pp 2", "tied embeddings"),
        ("tied embeddings",),
        ("pp 2",),
    )
    assert shows(found, "without tied embeddings", "fails", "without pp 2")


def test_a_schedule_of_several_stages_a_rank_is_made_plain() -> None:
    spec, plan = LLAMA, staged("interleaved", 4, (3, 2, 2, 2, 2, 2, 2, 1))
    found = smallest(spec, plan, lambda spec, plan: "fails" if plan.layout.pp > 1 else "passes")
    assert (found.plan.pipeline, found.needed) == (Pipeline("1f1b", 1, (9, 7)), ("pp 2",))


def test_a_layout_that_no_machine_of_this_size_holds() -> None:
    subject = certify.subject_of(DRAWN, *COMPOSITIONS["four axes"], 8)
    assert subject.small is None and "16 ranks" in subject.why
    assert {proof for proof, _ in subject.cases("normal")} == {"drift", "recipe"}
