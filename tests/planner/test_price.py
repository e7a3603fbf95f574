"""A plan is priced with its own sheet, at every kind of rank, and costs what the fullest takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.models.config import with_fields
from shardwise.models.lookup import load_spec
from shardwise.planner.price import flops, most_rows, of_rank_kinds, price
from shardwise.planner.schedule import folded, schedule
from shardwise.planner.search import Search, choose
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import Span
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.recipe import Parallel, Recipe, Train
from shardwise.spec.sheet import EXPERT_ROWS, Sheet, Tensor
from shardwise.techniques import optim
from tests.parity.mixtures import MIXTRAL

SPEC = load_spec("SmolLM2-135M")
CLUSTER = parse_cluster("8xH100")
PLAN = Plan(Layout(dp_shard=2, tp=3), Batch(1, 2, 512, 256), Shard("zero3"), Precision("bf16"), model=SPEC.name)


def test_a_sheet_of_another_plan_is_an_error() -> None:
    """It was priced: a plan of tp 2 took 12.5, 8.4 and 6.5 GB on the sheets of tp 1, 2 and 4."""
    sheet = sheet_of(SPEC, PLAN)
    for changed in (
        {"layout": Layout(dp_shard=2)},
        {"layout": Layout(dp_shard=2, tp=9)},
        {"precision": Precision()},
        {"frozen": ("embed.*",)},
        {"model": "SmolLM2-360M"},
    ):
        with pytest.raises(ValueError, match=r"another plan, .*model"):
            techniques.cost(sheet, replace(PLAN, **changed))  # type: ignore[arg-type]
    assert techniques.cost(sheet, replace(PLAN, batch=replace(PLAN.batch, accumulation=5), compile=True))


def test_a_step_is_told_of_a_sheet_that_its_plan_has_rewritten() -> None:
    sheet = sheet_of(SPEC, PLAN)
    costed = techniques.cost(sheet, PLAN)
    assert schedule(costed, replace(PLAN)) and folded(costed, replace(PLAN)).top_bytes
    for tell in (schedule, folded):
        with pytest.raises(ValueError, match="by another plan"):
            tell(costed, replace(PLAN, shard=Shard("zero2")))
        with pytest.raises(ValueError, match="by no plan"):
            tell(sheet, PLAN)


def test_places_differ_in_their_slices() -> None:
    """An odd vocabulary over three ranks, 49,153 ids as twice 16,385 and 16,383, whose halves are uneven once more."""
    found = list(of_rank_kinds(replace(SPEC, vocab_size=49_153), PLAN))
    moments = [optim.state_bytes(costed, PLAN)["moments"] for costed in found]
    assert [costed.rank_kind.rank for costed in found] == [0, 2, 3, 5]
    assert moments[0] == max(moments) > min(moments)
    assert len(list(of_rank_kinds(SPEC, PLAN))) == 1, "each has as much"


def test_the_fullest_need_not_be_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last stage of a pipeline may be, whose output layer is wider than a block: here the last shard has a
    weight that no other has."""
    spec = replace(SPEC, vocab_size=49_153)
    usual, real = price(spec, PLAN, CLUSTER).estimate, techniques.cost

    def more(sheet: Sheet, plan: Plan) -> Sheet:
        costed = real(sheet, plan)
        if costed.rank_kind.rank < 5:
            return costed
        extra = Tensor("extra", (2**28,), "fp32", "weights", used_as="fp32", trained=False)
        return replace(costed, head=replace(costed.head, weights=(*costed.head.weights, extra)))

    monkeypatch.setattr(techniques, "cost", more)
    found = price(spec, PLAN, CLUSTER).estimate
    assert found.memory["weights"] > 4 * 2**28
    assert found.peak_bytes > usual.peak_bytes + 2**29


def test_operations_of_all_axes_count() -> None:
    """Each rank of a stage computes what its place says: on paper 2 x 2 x 3 of them in the first and in the second."""
    layout = Layout(dp_shard=2, cp=2, tp=3, pp=2)
    assert flops([Span(flops=10), Span(flops=7)], layout) == 12 * 10 + 12 * 7
    assert flops([Span(flops=10)], Layout(dp_replicate=2, dp_shard=2, tp=3)) == 12 * 10
    assert flops([Span(flops=10)], Layout()) == 10


def test_a_capacity_bounds_what_is_reserved_for_an_uneven_routing() -> None:
    """Of 256 tokens and 8 experts each takes 64 where all take as many; of 250, where that is 62.5, still 63."""
    plan = Plan(Layout(dp_shard=2, ep=2), Batch(2, 1, 256, 256), Shard("zero3"), Precision("bf16"))
    usual = price(MIXTRAL, plan, CLUSTER).estimate
    for capacity, share in ((1.0, 0.0), (1.25, 0.5), (1.5, 1.0), (4.0, 1.0)):
        found = price(with_fields(MIXTRAL, expert_capacity=capacity), plan, CLUSTER).estimate
        reserve = round(share * usual.memory["expert reserve"])
        assert usual.memory["expert reserve"] > 0 and reserve == pytest.approx(found.memory["expert reserve"], abs=1)
        assert {**found.memory, "expert reserve": 0} == {**usual.memory, "expert reserve": 0}
    odd = replace(plan, batch=Batch(2, 1, 250, 250))
    assert most_rows(with_fields(MIXTRAL, expert_capacity=1.0), odd) == pytest.approx(63 / 62.5)


def test_with_a_capacity_ranks_have_whole_rows() -> None:
    """A pinned tp is planned without sequence parallelism, and no plan cuts rows by itself."""
    capped = with_fields(MIXTRAL, expert_capacity=1.25, vocab_size=64)
    train = Train(seq_len=256, global_batch_size=8)
    tensor = choose(Recipe(train=train, parallel=Parallel(tp=2)), capped, CLUSTER)
    assert (tensor.layout.tp, tensor.layout.ep, tensor.sequence_parallel) == (2, 1, False)
    every = Search(Recipe(train=train), capped, CLUSTER).all
    assert {plan.layout.cp for plan in every} == {1} and not any(plan.sequence_parallel for plan in every)
    assert {plan.layout.ep for plan in every} > {1, 2}


def test_memory_is_kept_for_the_fullest_of_ranks_with_different_experts() -> None:
    """What comes to a rank in an even share counts with the activations; above it as much again for each time that
    ``expert_imbalance`` is more than once."""
    plan = Plan(Layout(dp_shard=4, ep=2), Batch(2, 1, 512, 256), Shard("zero3"), Precision("bf16"))

    def memory(imbalance: float) -> dict[str, int]:
        return price(MIXTRAL, replace(plan, expert_imbalance=imbalance), parse_cluster("4xCPU")).estimate.memory

    span, even = folded(techniques.cost(sheet_of(MIXTRAL, plan), plan), plan), memory(1.0)
    assert sum(even.values()) == span.top_bytes and span.top[EXPERT_ROWS] > 0
    for imbalance in (1.5, 3.0):
        assert memory(imbalance) == even | {"expert reserve": (imbalance - 1) * span.top[EXPERT_ROWS]}
