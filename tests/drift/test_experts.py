"""Layers with experts: what a plan sends, holds and saves with the losses of routers, and with what is counted, is what
was predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from shardwise import techniques
from shardwise.distributed.meshes import meshes
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.planner.price import traffic
from shardwise.planner.schedule import folded
from shardwise.planner.sheets import sheet_of
from shardwise.planner.variants import chosen
from shardwise.prove import parity
from shardwise.prove.drift import drift, predict
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import job_of
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.metrics.measure import Meter
from shardwise.runtime.step import step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import OptimSection, Recipe
from tests.runtime.rank_work import rules_of

PLAIN = model_spec(
    "drift-experts", 67, 64, 96, 2, 4, 4, 16, num_experts=6, experts_per_token=2, expert_size=40, shared_expert_size=24
)
SPEC = with_fields(PLAIN, router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
DEEP = with_fields(SPEC, num_hidden_layers=4, dense_layers=(2,))
BF16 = Precision("bf16")


def plan(layout: Layout, strategy: str = "ddp", remat: str = "none", batch: Batch = Batch(3, 1, 32, 24)) -> Plan:  # noqa: B008
    shard, recompute = Shard(strategy, bucket_bytes=4096), Remat(remat)  # type: ignore[arg-type]
    return Plan(layout, batch, shard, remat=recompute, sequence_parallel=layout.tp > 1)


MANY = Batch(1, 4, 32, 24)
PLANS: dict[str, tuple[ModelSpec, Plan]] = {
    "alone": (SPEC, plan(Layout())),
    "ddp": (SPEC, plan(Layout(dp_replicate=2), remat="full")),
    "zero3": (SPEC, replace(plan(Layout(dp_shard=4), "zero3", "selective", MANY), precision=BF16)),
    "hsdp": (SPEC, plan(Layout(dp_replicate=2, dp_shard=2), "zero3")),
    "tp": (SPEC, plan(Layout(tp=2), remat="selective")),
    "tp, uneven": (SPEC, plan(Layout(tp=4), batch=Batch(1, 1, 34, 24), remat="full")),
    "tp, whole stream": (SPEC, replace(plan(Layout(tp=2)), sequence_parallel=False)),
    "dp x tp": (SPEC, plan(Layout(dp_shard=2, tp=2), "zero3")),
    "cp": (SPEC, plan(Layout(cp=2), remat="full")),
    "cp, nested": (SPEC, replace(plan(Layout(cp=4, ulysses=2)), cp_kind="nested")),
    "cp x tp": (SPEC, plan(Layout(cp=2, tp=2), remat="selective")),
    "pp": (DEEP, replace(plan(Layout(pp=2), batch=MANY), pipeline=Pipeline("1f1b", 1, (2, 2)))),
    "zbv": (DEEP, replace(plan(Layout(pp=2, v_shaped=True), batch=MANY), pipeline=Pipeline("zbv", 2, (1,) * 4))),
    "a capacity": (with_fields(SPEC, expert_capacity=1.25), plan(Layout(dp_shard=2), "zero3", "full")),
    "a capacity, pp": (
        with_fields(DEEP, expert_capacity=1.25),
        replace(plan(Layout(pp=2), batch=MANY), pipeline=Pipeline("1f1b", 1, (2, 2))),
    ),
    "a capacity, ep": (
        with_fields(SPEC, expert_capacity=1.25),
        replace(plan(Layout(dp_shard=2, ep=2), "zero3", "selective"), expert_imbalance=1.0),
    ),
    "counted alone": (PLAIN, plan(Layout(tp=2), remat="full")),
}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", PLANS)
def test_with_the_losses_of_routers(name: str) -> None:
    spec, of = PLANS[name]
    for rank in {0, of.layout.world - 1}:
        assert drift(spec, of, rank).differences() == []


def test_what_the_losses_send_by_hand() -> None:
    """Counts of 3 rows and 6 experts in fp32 a layer and axis that shares rows, and once more where a block runs again;
    with the figures of a step, of which token accuracy is one, two losses and 2 x 6 loads in fp64."""
    counts, figures = 3 * 6 * 4, 16 + 8 * (1 + 2 + 2 * 6)
    for layout, remat, axis, calls in (
        (Layout(tp=2), "none", "tp", 2),
        (Layout(tp=2), "full", "tp", 4),
        (Layout(cp=2), "none", "cp", 2),
        (Layout(dp_replicate=2), "full", "", 0),
    ):
        more, less = (predict(spec, plan(layout, remat=remat)).sent for spec in (SPEC, PLAIN))
        assert more - less == (Counter({(axis, "all_reduce", counts): calls}) if calls else Counter()), layout
        assert not less - more
        assert [n for (_, kind, size), n in more.items() if (kind, size) == ("all_reduce", figures)] == [1]


def test_a_capacity_sends_what_it_drops_with_the_figures() -> None:
    """8 bytes a layer. What experts compute on paper is what they do without: an even routing has room."""
    of = plan(Layout(dp_replicate=2))
    more, less = (predict(spec, of) for spec in (with_fields(SPEC, expert_capacity=1.0), SPEC))
    figures = 16 + 8 * (1 + 2 + 2 * 6)
    assert [size for _, _, size in (more.sent - less.sent)] == [figures + 8 * 2]
    assert [size for _, _, size in (less.sent - more.sent)] == [figures]
    assert replace(more, sent=less.sent) == less


def test_variants_say_whether_a_loss_is_there_not_its_coefficient() -> None:
    """And nothing of it where there are no experts."""

    def variant(spec: ModelSpec, block: int) -> object:
        return chosen(spec, Plan(), RankKind(Layout(), 0, range(4)), block).variant

    other = with_fields(DEEP, router_aux_loss_coef=0.25)
    assert variant(DEEP, 0) == variant(other, 0) != variant(with_fields(DEEP, router_aux_loss_coef=0.0), 0)
    assert variant(DEEP, 2) == variant(with_fields(DEEP, router_aux_loss_coef=0.0, router_z_loss_coef=0.0), 2)


def sent(rank: int, world: int, spec: ModelSpec, plans: list[Plan]) -> list[dict[tuple[str, str], tuple[int, int]]]:
    """By axis and kind what a run's report has measured of a step under each plan."""
    found = []
    for of in plans:
        groups = meshes(of.layout, "cpu")
        state, rules = build(Recipe(), spec, of, groups, torch.device("cpu")), rules_of(of, OptimSection())
        meter = Meter(groups, torch.device("cpu"))
        for number in range(Meter.TRAFFIC_STEP):
            rows = parity.share_of_rank(job_of(spec, of, 1).batch(number), groups, of)
            with meter.measuring(state):
                reduce.count_supervised(groups, 1)
                step(state, rows, 1, rules)
        found.append(meter.traffic)
    return found


@pytest.mark.parametrize("experts", [2, 6])
def test_a_report_compares_what_is_alike(ranks: RankPool, experts: int) -> None:
    """Of few experts the counts of rows, or the figures of a step, are small enough to pass for control messages."""
    spec = with_fields(SPEC, num_hidden_layers=1, num_experts=experts)
    plans = [plan(layout) for layout in (Layout(dp_replicate=2), Layout(tp=2), Layout(cp=2))]
    for rank_kind, measured in enumerate(ranks.run(sent, spec, plans, world=2)[0]):
        predicted: Counter[tuple[str, str]] = Counter()
        for item in traffic(
            folded(techniques.cost(sheet_of(spec, plans[rank_kind]), plans[rank_kind]), plans[rank_kind]),
            plans[rank_kind],
        ):
            predicted["control" if item.category == "control" else item.axis, item.kind] += item.bytes
        assert predicted == {key: size for key, (size, _) in measured.items()}, plans[rank_kind]
