"""The seconds of a step of a pipeline, against what can be said of it by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.models.config import model_spec
from shardwise.models.lookup import load_spec
from shardwise.models.predictor import with_predictor
from shardwise.planner.seconds.network import network_of
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.seconds.stages import border_bytes, pipeline_times
from shardwise.planner.seconds.step_seconds import timed
from shardwise.planner.sheets import sheet_of
from shardwise.planner.trace import traced_here
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout, stage_rank
from shardwise.spec.plan import Batch, Pipeline, Plan, Precision, Seconds, Shard
from shardwise.techniques.pp import even, orders
from shardwise.techniques.pp.actions import SCHEDULES, Action
from shardwise.techniques.pp.compiled import Computation
from shardwise.techniques.pp.replay import Replay
from shardwise.techniques.pp.seconds import PipelineReplay, StageTimes
from tests.techniques.pp.replays import replay

EIGHT_B = load_spec("Llama-3.1-8B")
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved_zb": 2, "zbv": 2, "dualpipev": 2, "looped_bfs": 2}


def staged(schedule: Any, ranks: int, m: int, strategy: Any = "ddp", **axes: int) -> Plan:
    each, spec = STAGES[schedule], EIGHT_B
    layout = Layout(pp=ranks, v_shaped=SCHEDULES[schedule].shape == "v", **{"ranks_per_node": 8, **axes})
    split = even(spec, 4096, ranks * each)
    shard, precision, batch = Shard(strategy), Precision("bf16"), Batch(1, m, 4096, 1024)
    return Plan(layout, batch, shard, precision, pipeline=Pipeline(schedule, each, split), model=spec.name)


def line(plan: Plan, forward_s: list[float], *, chained: bool = False, early: bool = True) -> PipelineReplay:
    """Stages of which each backward takes twice its forward, half of it for inputs, and what is sent none. Gathers take
    0.3 s: before the first message, or on the first rank within its first forwards; sums 0.7 s after the last backward,
    of which the gradient of the input is there before them (``early``), or after."""
    halved, ranks = SCHEDULES[plan.pipeline.schedule].splits_backward, plan.layout.pp
    stages = []
    for number, f in enumerate(forward_s):
        each_s = {"F": f, "B": 2 * f} | ({"I": f, "W": f} if halved else {})
        waits = chained and stage_rank(plan.layout, number) > 0
        waiting_s, opening_s = (0.3 / (len(forward_s) // ranks), 0.0) if waits else (0.0, 0.3)
        stages.append(StageTimes(each_s, waiting_s, opening_s, 0.7, (0.0, 0.7 * early)))
    return PipelineReplay(plan, (True,) * len(stages), tuple(stages), 0.0, chained)


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (4, 64), (8, 128)])
def test_the_bubble_of_even_stages_is_p_less_1_over_m_v(schedule: str, v: int, ranks: int, m: int) -> None:
    """Of the ideal time of a rank, m v (F + B); Narayanan et al., arXiv 2104.04473, section 2.2."""
    plan = staged(schedule, ranks, m)
    found = line(plan, [1.0] * ranks * v)
    ideal_s = 3.0 * m * v
    assert found.replayed()[1] == pytest.approx(ideal_s * (1 + (ranks - 1) / (m * v)) + 0.3 + 0.7)


def by_actions(line: PipelineReplay, micro_batches: int) -> Replay:
    """The same step, its lists of actions replayed: of each stage the first forward, the last backward and the last
    that gives a gradient take times of their own."""
    batch = replace(line.plan.batch, accumulation=micro_batches)
    lists = orders(replace(line.plan, batch=batch), line.trained)
    whole = [action for order in lists for action in order if action.computes]
    first = {one.stage: one for one in reversed(whole) if one.kind == "F"}
    last = {one.stage: one for one in whole if one.kind != "F"}
    given = {one.stage: one for one in whole if one.kind in ("B", "I")}

    def takes(one: Action) -> tuple[float, float]:
        marks = (each.get(one.stage) == one for each in (first, last, given))
        return line._takes(Computation(one.kind, one.stage, *marks))

    after = (lambda one: takes(one)[1]) if line.chained else None
    return replay(lists, lambda one: takes(one)[0], line.message_s, after, line._waiting_s())


def ends_s(line: PipelineReplay, step: Replay) -> float:
    """When all ranks are done with a step that was replayed."""
    if line.chained:
        return step.makespan_s
    last = (computed[-1] for computed in step.computed)
    closed_s = (one.end_s + line.stages[one.action.stage].closing_s for one in last)
    return max(stage.opening_s for stage in line.stages) + max(closed_s)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "m"), [(2, 64), (4, 150), (8, 97)])
def test_many_micro_batches_take_as_long_as_a_replay_of_all(schedule: str, ranks: int, m: int) -> None:
    """Whatever the stages are, and the messages between them."""
    plan = staged(schedule, ranks, m)
    stages = ranks * STAGES[schedule]
    for worst, chained, message_s in product((0, stages // 2, stages - 1), (False, True), (0.0, 0.4)):
        uneven = [1.0 + 0.01 * ((5 * stage) % 7) + 0.6 * (stage == worst) for stage in range(stages)]
        found = replace(line(plan, uneven, chained=chained), message_s=message_s)
        assert found.replayed()[1] == pytest.approx(ends_s(found, by_actions(found, m)), rel=1e-9)


def test_ranks_wait_for_their_own_gathers_and_sums_alone() -> None:
    """0.3 s before each stage's first forward and 0.7 s in its last backward: once, of the first rank. Were gradients
    sent only when sums are done, all four sums would follow one another."""
    plan, ideal_s = staged("1f1b", 4, 8), 3.0 * (8 + 3)
    apart, own = (line(plan, [1.0] * 4, chained=each).replayed()[1] for each in (False, True))
    assert apart == pytest.approx(ideal_s + 1.0) and own == pytest.approx(ideal_s + 1.0)
    late = line(plan, [1.0] * 4, chained=True, early=False)
    assert late.replayed()[1] == pytest.approx(ideal_s + 0.3 + 4 * 0.7)


def seconds(plan: Plan, cluster: str = "8xH100") -> Seconds:
    found = timed(EIGHT_B, plan, parse_cluster(cluster)).estimate.seconds
    assert found is not None
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_parts_of_a_step_add_up(schedule: str, strategy: str) -> None:
    found = seconds(staged(schedule, 4, 8, strategy, dp_shard=2) if strategy != "ddp" else staged(schedule, 4, 8))
    parts = found.compute_s + sum(found.exposed_s.values()) + found.optimizer_s + found.host_s
    assert parts == pytest.approx(found.step_s) and found.exposed_s["pp"] > 0 and found.sent_s["pp"] > 0
    assert found.products_s + found.attention_s + found.pointwise_s <= found.compute_s * (1 + 1e-9)


def test_a_rank_computes_its_part_of_what_one_device_would() -> None:
    """All stages together what a model in one piece does, in as many micro-batches; the slowest at least a fourth."""
    plan = staged("1f1b", 4, 8)
    times = pipeline_times(EIGHT_B, plan, parse_cluster("8xH100"), own_traits())
    whole = replace(plan, layout=Layout(ranks_per_node=8), pipeline=Pipeline())
    computes_s = seconds(whole, "1xH100").compute_s
    busy_s = [times.elapsed(rank).at_s["compute"] for rank in range(4)]
    assert sum(busy_s) == pytest.approx(computes_s, rel=0.01) and max(busy_s) >= computes_s / 4
    assert seconds(plan).compute_s == pytest.approx(max(busy_s), rel=1e-6)


def test_more_micro_batches_idle_less_and_zero_bubble_least() -> None:
    shares = {m: seconds(staged("1f1b", 4, m)).exposed_s["pp"] / m for m in (4, 16, 64)}
    assert shares[4] > shares[16] > shares[64]
    idle = [seconds(staged(each, 4, 8)).exposed_s["pp"] for each in ("gpipe", "1f1b", "interleaved", "zbv")]
    assert idle == sorted(idle, reverse=True)


def test_messages_between_nodes_share_their_cards() -> None:
    """256 MiB at the rate of 8 cards of 50 GB/s a node, as the constants reach it: eight pipelines cross it, or one."""
    cluster = parse_cluster("2x8xH100+3.2Tb/node")
    for layout, sharing in ((Layout(pp=2, tp=8, ranks_per_node=8), 8), (Layout(pp=2, ranks_per_node=1), 1)):
        network = network_of(layout, cluster, share=1.0)
        assert network.message_s(2**28) == pytest.approx(2**28 / (400e9 / sharing), rel=0.05)
    inside = network_of(Layout(pp=2, tp=4, ranks_per_node=8), cluster)
    assert inside.message_s(2**28) < network_of(Layout(pp=2, tp=8, ranks_per_node=8), cluster).message_s(2**28)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_program_is_what_a_replay_comes_to(schedule: str, chained: bool) -> None:
    """Exactly: the same sums and maxima. Of stages that take differently long, and messages that take some time."""
    for ranks, m in ((2, 4), (4, 8), (4, 12)):
        plan = staged(schedule, ranks, m, "zero3", dp_shard=2)
        apart = line(plan, [1.0 + n % 3 for n in range(ranks * STAGES[schedule])], chained=chained)
        for found in (apart, replace(apart, message_s=0.25)):
            step = by_actions(found, m)
            assert found.makespan_s(m) == ends_s(found, step)
            for drawn, expected in zip(found.step(m).computed, step.computed, strict=True):
                assert [one.action for one in drawn] == [one.action for one in expected]
                assert [one[1:] for one in drawn] == [pytest.approx(one[1:]) for one in expected]


def test_a_message_has_what_a_predictor_reads_too() -> None:
    spec = model_spec("messages", 64, 32, 64, 3, 2, 2, 16)
    plan = Plan(batch=Batch(1, 1, 16))
    sheets = (sheet_of(each, plan, units=traced_here) for each in (spec, with_predictor(spec, 0.1)))
    alone, both = (border_bytes(sheet, plan) for sheet in sheets)
    assert both == 2 * alone == 2 * 16 * 32 * 4
