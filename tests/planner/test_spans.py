"""A span is what its events come to, however deep the model and however many micro-batches: the events one by one are
the reference. (The drift tests compare both for every plan of theirs too.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import builds, integers, just, lists, one_of, sampled_from

from shardwise import techniques
from shardwise.models.config import ModelSpec, model_spec
from shardwise.models.families import FULL, SLIDING
from shardwise.models.lookup import load_spec
from shardwise.planner import schedule as told
from shardwise.planner import sheets
from shardwise.planner.price import price
from shardwise.planner.schedule import folded, schedule
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import fold, joined, memory_at_marks, same
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat, Shard
from shardwise.techniques.events import TO_HOST, Compute, Copy, Event, Free, Make, Mark, Send, TensorKey, UnitName
from shardwise.techniques.shard.paper import Sharded
from shardwise.techniques.shard.replicas import blocks_of_bucket, buckets
from tests.covering import pairwise

MIB = 2**20
SEVENTY_B = load_spec("Llama-3-70B")
MIXTURE = load_spec("Qwen3-30B-A3B")
WINDOWED = model_spec("windowed", 640, 64, 128, 26, 4, 2, 32, sliding_window=8, layer_types=(SLIDING, FULL) * 13)
MODELS = {"deep": SEVENTY_B, "windowed": WINDOWED}
SHARDINGS = {
    "one rank": (Layout(), Shard("ddp")),
    "ddp": (Layout(8), Shard("ddp")),
    "ddp, small buckets": (Layout(8), Shard("ddp", bucket_bytes=MIB)),
    "ddp, large buckets": (Layout(8), Shard("ddp", bucket_bytes=2**32)),
    "zero1": (Layout(1, 8), Shard("zero1")),
    "zero2": (Layout(1, 8), Shard("zero2")),
    "zero3": (Layout(1, 64), Shard("zero3")),
    "zero3, kept by 4": (Layout(1, 64), Shard("zero3", reshard_after_forward=4)),
    "hsdp": (Layout(2, 32), Shard("zero3")),
    "tp": (Layout(1, 8, tp=8), Shard("zero3")),
}
REMATS = {"none": Remat(), "selective": Remat("selective"), "full": Remat("full"), "every 3rd": Remat("full", 3)}


def costed(spec: ModelSpec, plan: Plan) -> told.Sheet:
    return techniques.cost(sheet_of(spec, plan), plan)


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("sharding", "remat", "what", "model"), pairwise(SHARDINGS, REMATS, ("full", "five times", "adapters"), MODELS)
)
def test_spans_come_to_what_events_come_to(sharding: str, remat: str, what: str, model: str) -> None:
    """Full weights and adapters, one micro-batch to five, of a deep model and of one whose layers alternate."""
    layout, shard = SHARDINGS[sharding]
    accumulation, lora = {"full": (1, None), "five times": (5, None), "adapters": (2, Lora(16))}[what]
    ranks = layout if model == "deep" else replace(layout, tp=min(2, layout.tp))
    plan = Plan(ranks, Batch(1, accumulation, 512), shard, Precision("bf16"), REMATS[remat], lora=lora)
    sheet = costed(MODELS[model], plan)
    assert same(folded(sheet, plan), fold(schedule(sheet, plan)))


BASES = {
    "full weights": Plan(Layout(1, 8), Batch(1, 2, 512, 256), Shard("zero3"), Precision("bf16")),
    "adapters": Plan(Layout(8), Batch(1, 2, 512, 256), Shard("ddp"), Precision("bf16"), lora=Lora(8, frozen="bf16")),
    "tp": Plan(Layout(1, 4, tp=2), Batch(1, 2, 512, 256), Shard("zero3"), Precision("bf16")),
}
CHANGES: tuple[dict[str, Any], ...] = (
    *({"layout": layout, "shard": shard} for layout, shard in SHARDINGS.values() if layout.tp == 1),
    *({"remat": remat} for remat in REMATS.values()),
    *({"batch": Batch(*sizes)} for sizes in ((1, 1, 512, 256), (2, 2, 512, 256), (1, 2, 256, 256), (1, 2, 512, 512))),
    *({"precision": types} for types in (Precision("bf16", "bf16"), Precision("bf16", reduce="bf16"))),
    *({"lora": lora} for lora in (None, Lora(8), Lora(16, frozen="bf16"), Lora(8, nf4=True), Lora(8, dora=True))),
    *({"lora": None, "frozen": frozen} for frozen in (("embed.*",), ("layers.0.*",), ("*norm.weight",))),
    {"deterministic": True},
    {"sequence_parallel": True},
    {"loss": "dpo"},
)


@pytest.mark.matrix
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("model", MODELS)
def test_a_price_does_not_depend_on_what_was_priced_before(model: str, base: str) -> None:
    """Plans of one search share units, and what their passes come to: here with one that differs in one thing. Of a
    sheet that was read anew nothing is shared."""
    spec, begun, ranks = MODELS[model], BASES[base], BASES[base].layout.tp
    for changes in CHANGES:
        if ranks > 1 and "layout" in changes:
            changes = {**changes, "layout": replace(changes["layout"], tp=ranks)}
        plan = replace(begun, **changes)
        for cluster in map(parse_cluster, ("8xH100", "8xCPU")):
            price(spec, begun, cluster)
            found = price(spec, plan, cluster)
            for kept in (sheets._sheet, sheets._bound):
                kept.cache_clear()
            alone = price(spec, plan, cluster)
            assert found.estimate == alone.estimate, (changes, cluster.kind)


def test_plans_that_differ_in_the_dial_alone_share_their_units() -> None:
    plans = (
        Plan(Layout(1, 8), Batch(1, m, 512), Shard(name), Precision("bf16"), lora=Lora(16))
        for m, name in ((1, "zero2"), (1, "zero3"), (4, "zero3"))
    )
    zero2, zero3, more = (techniques.cost(sheet_of(SEVENTY_B, plan), plan) for plan in plans)
    for one, two, three in zip(zero2.units, zero3.units, more.units, strict=True):
        assert one is two is three


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_deep_model_is_told_by_a_few_of_its_blocks(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper ones by no more, so that a price does not depend on depth."""
    layout, shard = SHARDINGS[sharding]
    plan = Plan(layout, Batch(1, 2, 512), shard, Precision("bf16"))
    depths: list[int] = []
    real = told.Step

    def noted(log: told.StepLog, sheet: told.Sheet, plan: Plan, kind: told.Kind) -> told.Step:
        depths.append(len(sheet.order))
        return real(log, sheet, plan, kind)

    monkeypatch.setattr(told, "Step", noted)
    for depth in (80, 800):
        folded(costed(replace(SEVENTY_B, num_hidden_layers=depth), plan), plan)
    assert depths == [4, 4] or (sharding == "ddp, large buckets" and depths == [8, 8]), depths


def test_where_two_periods_differ_more_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A period that is none is found out: here every gather of the block 2 is twice as large."""
    plan = Plan(Layout(1, 8), Batch(1, 1, 512), Shard("zero3"), Precision("bf16"))
    sheet = costed(SEVENTY_B, plan)
    real = Sharded.before_forward

    def odd(self: Sharded, name: UnitName, at: TensorKey) -> None:
        real(self, name, at)
        if name == 2:
            self.log.add(Send("all_gather", "dp_shard", "weights", 1))

    monkeypatch.setattr(Sharded, "before_forward", odd)
    assert same(folded(sheet, plan), fold(schedule(sheet, plan)))


TIERS = sampled_from(("device", "host", "disk"))
SIZES = integers(1, 9)
EVENTS = lists(
    one_of(
        builds(Make, just(0), sampled_from("ab"), SIZES, TIERS),
        builds(Free, just(0), sampled_from("ab"), SIZES, TIERS),
        builds(Compute, SIZES),
        builds(Send, just("all_gather"), just("tp"), just("weights"), SIZES, sampled_from(("compute", "gather"))),
        builds(Copy, TIERS, TIERS, SIZES, just(TO_HOST)),
    )
)


@pytest.mark.prove
@given(EVENTS, integers(0), integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_a_span_is_its_events_replayed(events: list[Event], cut: int, n: int) -> None:
    """Of random events on three tiers, cut anywhere, and repeated: peaks by tier and category, and every sum."""
    cut %= len(events) + 1
    span = fold(events)
    assert same(joined([fold(events[:cut]), fold(events[cut:])]), span)
    assert same(span.times(n), fold(events * n))
    for tier in ("device", "host", "disk"):
        changes = [
            (e.category, e.bytes if isinstance(e, Make) else -e.bytes)
            for e in events
            if isinstance(e, Make | Free) and e.tier == tier
        ]
        heights = list(accumulate((size for _, size in changes), initial=0))
        at = heights.index(max(heights))
        assert (span.on(tier).net_bytes, span.on(tier).top_bytes) == (heights[-1], heights[at])
        top: Counter[str] = Counter()
        for category, size in changes[:at]:
            top[category] += size
        assert top == Counter(span.on(tier).top)
    assert span.copied == Counter(e for e in events if isinstance(e, Copy))
    assert span.sent == Counter(e for e in events if isinstance(e, Send))


def test_memory_at_a_mark_is_what_is_alive() -> None:
    events = [Make(1, "a", 5), Mark("first"), Make(2, "b", 3), Free(1, "a", 5), Mark("second"), Mark("first")]
    assert memory_at_marks(events) == {"first": {"a": 5}, "second": {"a": 0, "b": 3}}


def test_blocks_fill_buckets_alike() -> None:
    """Small ones several to a bucket, large ones several buckets each, of which the last takes the rest."""
    small = [("embed.weight", 500), *((f"layers.{i}.{w}", 4) for i in range(7) for w in "abc"), ("norm.weight", 4)]
    filled = buckets(small, 20)
    assert filled[0] == ["norm.weight", *(f"layers.{i}.{w}" for i in (6, 5) for w in "cba")]
    assert filled[1] == [f"layers.{i}.{w}" for i in (4, 3) for w in "cba"] and blocks_of_bucket(12, 20) == 2
    assert filled[3] == ["layers.0.c", "layers.0.b", "layers.0.a", "embed.weight"]
    assert [name for bucket in filled for name in bucket] == [name for name, _ in reversed(small)]
    large = [(f"layers.{i}.{w}", 20 if w in "cd" else 4) for i in range(3) for w in "abcd"]
    cut = [[[f"layers.{i}.d"], [f"layers.{i}.{w}" for w in "cba"]] for i in (2, 1, 0)]
    assert buckets(large, 20) == [bucket for block in cut for bucket in block]
    assert blocks_of_bucket(48, 20) == 1
