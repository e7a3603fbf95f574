"""Mixtures of experts and expert parallelism: what ranks send, hold and save, to the byte, beside every setting that
they meet; and what a layer sends and multiplies, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from shardwise import techniques
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.roles import is_expert
from shardwise.planner.schedule import folded, schedule
from shardwise.planner.seconds.kernels import under_way
from shardwise.planner.sheets import sheet_of
from shardwise.planner.trace import traced_here
from shardwise.prove.drift import drift, predict
from shardwise.prove.fake_run import WorldCounter, measure
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.spec.sheet import SEND
from shardwise.techniques.events import Send
from tests.parity.mixtures import CASES, Case

BF16 = Precision(compute="bf16")


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_that_they_meet(case: Case) -> None:
    world, plan = case.plan.layout.world, replace(case.plan, precision=BF16)
    for rank in sorted({0, world // 2, world - 1}):
        assert drift(case.spec, plan, rank).differences() == []


LARGE = model_spec(
    "drift-ep-large", 4096, 1024, 2048, 4, 16, 4, 64, num_experts=16, experts_per_token=4, expert_size=1024
)
SHARED = with_fields(LARGE, shared_expert_size=2048, shared_expert_gate=True, dense_layers=(0,))
BIASED = with_fields(LARGE, expert_bias=True, router_bias=True, activation="clamped_swiglu")
SPREAD, STAGES = Layout(dp_shard=4, ep=2), Layout(dp_shard=4, pp=2, ep=2)
ZBV = replace(STAGES, v_shaped=True)
PEAKS: dict[str, tuple[ModelSpec, Layout, str, str, int]] = {
    "zero3, recomputed": (LARGE, SPREAD, "zero3", "full", 2),
    "zero3, a shared expert, recomputed": (SHARED, SPREAD, "zero3", "full", 2),
    "zero3, a shared expert, some recomputed": (SHARED, SPREAD, "zero3", "selective", 2),
    "zero2, a shared expert": (SHARED, SPREAD, "zero2", "none", 2),
    "zero2, biases": (BIASED, SPREAD, "zero2", "none", 2),
    "no rank has the same": (BIASED, Layout(dp_shard=4, ep=4), "zero3", "none", 2),
    "1f1b": (SHARED, STAGES, "zero3", "none", 4),
    "zbv": (BIASED, ZBV, "zero2", "none", 4),
}
"""A model, a layout, a strategy, recomputation, and micro-batches; of more than a GiB, from where on peaks count."""


@pytest.mark.matrix
@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_the_first_and_the_last_rank(name: str) -> None:
    """Within a hundredth, where 3 % are allowed elsewhere: when experts come and go by themselves is told."""
    spec, layout, strategy, remat, count = PEAKS[name]
    plan = Plan(layout, Batch(2 * layout.pp, count, 1024, 512), Shard(strategy), BF16, Remat(remat))  # type: ignore[arg-type]
    if layout.pp > 1:
        stages = 2 if layout.v_shaped else 1
        pipeline = Pipeline("zbv" if layout.v_shaped else "1f1b", stages, (4 // (2 * stages),) * (2 * stages))
        plan = replace(plan, pipeline=pipeline)
    large = 0
    for rank in (0, layout.world - 1):
        found = drift(spec, plan, rank)
        assert found.differences() == []
        assert abs(found.peak_error) < 0.01
        large += found.measured.peak_bytes > 2**30
    assert large


WIDTH, INNER, EXPERTS, CHOSEN = 64, 48, 16, 3
SPEC = model_spec(
    "drift-ep", 1024, WIDTH, 96, 2, 4, 2, 16, num_experts=EXPERTS, experts_per_token=CHOSEN, expert_size=INNER
)
ROWS, LENGTH = 2, 128
TOKENS = ROWS * LENGTH
"""Of a micro-batch of a rank without tp."""
MATRICES = 3 * WIDTH * INNER
"""How many numbers an expert has."""


def planned(layout: Layout, strategy: str = "zero3", count: int = 1, remat: str = "none", **more: object) -> Plan:
    batch = Batch(ROWS, count, LENGTH, loss_chunk_tokens=1024)
    made = Plan(layout, batch, Shard(strategy), BF16, Remat(remat), sequence_parallel=layout.tp > 1)  # type: ignore[arg-type]
    return replace(made, **more)  # type: ignore[arg-type]


Calls = Counter[tuple[str, int]]


def sent(plan: Plan, *axes: str) -> Calls:
    """Calls of a step over these axes, by kind and bytes."""
    found = predict(SPEC, plan, plan.layout.world - 1, units=traced_here).sent
    return Counter({(kind, size): calls for (axis, kind, size), calls in found.items() if axis in axes})


@pytest.mark.parametrize(
    ("remat", "rows", "counts"),
    [("none", 4, 1), ("selective", 4, 1), ("full", 6, 2)],
    ids=["none", "selective", "full"],
)
def test_what_tokens_send(remat: str, rows: int, counts: int) -> None:
    """Of each token as many rows as it has experts, in bf16, there and back, forward and backward; and in int64 how
    many rows each expert gets. A block that runs again in full sends there and back again, selective nothing twice.
    What is more than an even share on some rank is held there, and sent by others."""
    size, numbers, layers = TOKENS * CHOSEN * WIDTH * 2, 8 * EXPERTS, SPEC.num_hidden_layers
    expected = Counter({("all_to_all", size): layers * rows, ("all_to_all", numbers): layers * counts})
    for layout in (Layout(dp_shard=8, ep=4), Layout(dp_replicate=2, dp_shard=2, ep=2)):
        for strategy in ("zero3", "zero1"):
            for imbalance in (1.0, 2.0):
                plan = planned(layout, strategy, remat=remat, expert_imbalance=imbalance)
                assert sent(plan, "ep") == expected, plan
    twice = sent(planned(Layout(dp_shard=8, ep=4), count=2, remat=remat), "ep")
    assert twice == Counter({key: 2 * calls for key, calls in expected.items()})


@pytest.mark.prove
def test_what_ranks_of_tp_and_cp_send_of_their_tokens() -> None:
    """Each its own part of the rows, rounded up."""
    layers = SPEC.num_hidden_layers
    for layout, tokens in (
        (Layout(dp_shard=2, tp=2, ep=4), TOKENS // 2),
        (Layout(cp=2, ep=2), TOKENS // 2),
        (Layout(dp_replicate=2, cp=2, tp=2, ep=2), TOKENS // 4),
    ):
        rows = ("all_to_all", tokens * CHOSEN * WIDTH * 2)
        plan = planned(layout, "ddp" if layout.dp_shard == 1 else "zero3")
        assert sent(plan, "ep")[rows] == 4 * layers, layout
    odd = replace(planned(Layout(dp_shard=2, tp=2, ep=4)), batch=Batch(3, 1, 15, loss_chunk_tokens=1024))
    assert sent(odd, "ep")["all_to_all", 23 * CHOSEN * WIDTH * 2] == 4 * layers


def test_without_ep_no_row_travels() -> None:
    for layout in (Layout(dp_shard=8), Layout(dp_shard=2, tp=4)):
        assert not any(kind == "all_to_all" for _, kind, _ in predict(SPEC, planned(layout)).sent)


@pytest.mark.parametrize(("strategy", "gathers", "reduces"), [("zero3", 4, 2), ("zero2", 1, 2), ("zero1", 1, 1)])
def test_what_weights_of_experts_send(strategy: str, gathers: int, reduces: int) -> None:
    """Of a rank's experts over those that have the same, in two micro-batches: gathered in bf16, in zero3 forward and
    backward; their gradients scattered in fp32; between replicas the pieces of the sums, once."""
    for layout, own in ((Layout(dp_shard=8, ep=4), 4), (Layout(dp_replicate=2, dp_shard=4, ep=2), 8)):
        whole, layers = own * MATRICES, SPEC.num_hidden_layers
        found = sent(planned(layout, strategy, count=2), "expert_fsdp")
        assert found == Counter(
            {("all_gather", 2 * whole): layers * gathers, ("reduce_scatter", 4 * whole): layers * reduces}
        )
        replicas = sent(planned(layout, strategy, count=2), "dp_replicate")
        assert replicas["all_reduce", 4 * whole // 2] == (layers if layout.dp_replicate > 1 else 0)


def test_what_no_other_rank_has_is_neither_gathered_nor_summed() -> None:
    """With as many ranks of ep as a replica has; under ddp replicas add up whole gradients of their own experts."""
    alone = planned(Layout(dp_shard=4, ep=4))
    assert not sent(alone, "expert_fsdp")
    whole = EXPERTS // 2 * MATRICES * SPEC.num_hidden_layers
    plan = planned(Layout(dp_replicate=4, dp_shard=2, ep=2), "ddp", shard=Shard("ddp", bucket_bytes=1 << 30))
    assert sent(plan, "dp_replicate") == Counter({("all_reduce", 4 * whole): 1})


COMMON = with_fields(SPEC, shared_expert_size=32, shared_expert_gate=True)


@pytest.mark.prove
@pytest.mark.parametrize("spec", [SPEC, COMMON], ids=["experts", "a shared one too"])
def test_weights_of_experts_come_when_it_is_told(spec: ModelSpec) -> None:
    """With their block's, before what its attention sends, for later the host waits to hear how many rows come: the
    order of what is sent is that of the plan's events."""
    plan = planned(Layout(dp_shard=2, tp=2, ep=2), "zero2", count=2, remat="full")
    found: list[tuple[str, str, int]] = []
    count = WorldCounter._sent

    def watched(self: WorldCounter, kind: str, args: Any, out: Any) -> None:
        before = self.sent.copy()
        count(self, kind, args, out)
        found.extend(self.sent - before)

    with patch.object(WorldCounter, "_sent", watched):
        measure(spec, plan)
    events = schedule(techniques.cost(sheet_of(spec, plan, units=traced_here), plan), plan, "cpu")
    sends = [(event.axis, event.kind, event.bytes) for event in events if isinstance(event, Send)]
    told, real = ([each for each in calls if each[0] in ("tp", "ep", "expert_fsdp")] for calls in (sends, found))
    assert told == real[-len(told) :]
    kinds = [(axis, kind) for axis, kind, _ in told]
    assert kinds.index(("expert_fsdp", "all_gather")) < kinds.index(("tp", "all_gather"))


def test_what_is_computed_while_rows_are_under_way() -> None:
    """The shared expert forward, on the way there; its backward, on the gradients' way home; nothing of experts."""
    for layout in (Layout(dp_shard=2, ep=2), Layout(tp=2, ep=2)):
        plan = planned(layout, "zero3" if layout.tp == 1 else "ddp")
        (block,) = sheet_of(COMMON, plan, units=traced_here).blocks
        for ops, products in ((block.forward, 4), (block.backward, 8)):
            ways = [[ops[i] for i in during] for during in under_way(ops).values()]
            assert [sum(op.kind == "matmul" for op in way) for way in ways if len(way) > 1] == [products]
            beside = next(way for way in ways if len(way) > 1)
            assert not any(is_expert(op.weight) for op in beside)
            sends = [op.name for op in beside if op.kind == SEND]
            assert sends == (["all_gather", "reduce_scatter"] if layout.tp > 1 else [])
            assert len(ways) == sum(op.name == "all_to_all" for op in ops)


def operations(spec: ModelSpec, plan: Plan) -> int:
    """Of a rank's step."""
    rank_kind = rank_kind_of(0, plan.layout, plan.stages(spec.num_hidden_layers))
    return folded(techniques.cost(sheet_of(spec, plan, rank_kind, traced_here), plan), plan).flops


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(dp_shard=8, ep=4)], ids=["whole", "spread"])
def test_what_is_multiplied(layout: Layout) -> None:
    """A token is multiplied by the matrices of its own experts, forward and twice backward, and once more where a block
    runs again; by routers with a row for each expert. How many other experts there are changes nothing else."""
    layers, each = SPEC.num_hidden_layers, TOKENS * SPEC.num_hidden_layers
    for remat, forward in (("none", 1), ("full", 2)):
        plan = planned(layout, remat=remat)
        few = operations(SPEC, plan)
        more = operations(with_fields(SPEC, experts_per_token=CHOSEN + 1), plan)
        assert more - few == each * 2 * MATRICES * (forward + 2)
        others = operations(with_fields(SPEC, num_experts=2 * EXPERTS), plan)
        assert others - few == each * 2 * WIDTH * EXPERTS * (forward + 2)
    dense = with_fields(SPEC, num_experts=0, experts_per_token=0, expert_size=0, intermediate_size=CHOSEN * INNER)
    plan = planned(Layout(dp_shard=8))
    routers = layers * TOKENS * 2 * WIDTH * EXPERTS * 3
    assert operations(SPEC, plan) - operations(dense, plan) == routers
