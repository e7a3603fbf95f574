"""Pipelines: what the ranks of each send, hold and save, to the byte, on the first, a middle and the last rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.models.config import ModelSpec, flat, model_spec, with_fields
from shardwise.prove.drift import PEAK_TOLERANCE, drift, predict
from shardwise.prove.fake_run import measure
from shardwise.spec.layout import Axis, Layout
from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Plan, Precision, Shard
from shardwise.techniques.pp.actions import SCHEDULES
from tests.covering import pairwise
from tests.drift.test_drift import PRECISIONS, REMATS
from tests.parity.pipes import layout_of, stages_per_rank

SPEC = model_spec("drift-pp", 601, 48, 100, 6, 6, 2, 8)
"""Sizes that ranks do not divide."""
LARGE = model_spec("drift-pp-large", 32_000, 1024, 2816, 6, 16, 4, 64)
RANKS, MIDDLE = 3, 1
OTHER_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "tp")
POSITIONS = {"first": 0, "middle": MIDDLE, "last": RANKS - 1}
SHARDINGS: dict[str, tuple[str, dict[str, int]]] = {
    "ddp over 2": ("ddp", {"dp_replicate": 2}),
    "zero1 over 2": ("zero1", {"dp_shard": 2}),
    "zero2 over 4": ("zero2", {"dp_shard": 4}),
    "zero3 over 4": ("zero3", {"dp_shard": 4}),
    "zero3 over 2 x 2": ("zero3", {"dp_replicate": 2, "dp_shard": 2}),
    "zero1 over 2 x 2": ("zero1", {"dp_replicate": 2, "dp_shard": 2}),
    "ddp over 1": ("ddp", {}),
}
TENSOR: dict[str, dict[str, object]] = {
    "tp 1": {},
    "tp 2": {"tp": 2},
    "tp 2 with sp": {"tp": 2, "sequence_parallel": True},
}
MODELS: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "uneven": {},
    "adapters": {"lora": Lora(4, 8.0)},
    "adapters in nf4": {"lora": Lora(4, 8.0, frozen="bf16", nf4=True)},
    "frozen first blocks": {"frozen": ("embed.*", "layers.0.*", "layers.1.*")},
    "frozen middle blocks": {"frozen": ("layers.2.*", "layers.3.*")},
    "tied and frozen": {"tie_word_embeddings": True, "frozen": ("embed.*",)},
    "pairs": {"loss": "dpo"},
    "fp16": {"precision": Precision("fp16")},
    "dtypes of modules": {"precision": Precision("bf16", modules=(("*norm", "fp32"), ("*.q", "fp32")))},
    "moments in bf16": {"optim": Optim(moments="bf16")},
    "windows": {
        "sliding_window": 16,
        "layer_types": ("sliding_attention", "full_attention", "full_attention") * 2,
    },
}


def plan_of(schedule: str, sharding: str, tensor: str = "tp 1", *, micro: int = 6, **settings: object) -> Plan:
    """Three ranks of two blocks each, in one stage or two."""
    strategy, degrees = SHARDINGS[sharding]
    given = {**TENSOR[tensor], **settings}
    layout = layout_of(schedule, RANKS, tp=int(given.pop("tp", 1)), **degrees)  # type: ignore[call-overload]
    each = stages_per_rank(schedule)
    plan = Plan(
        layout,
        Batch(1, micro, 32, 16),
        Shard(strategy, bucket_bytes=20_000),  # type: ignore[arg-type]
        PRECISIONS["bf16"],
        pipeline=Pipeline(schedule, each, (2 // each,) * (RANKS * each)),  # type: ignore[arg-type]
    )
    return replace(plan, **given)  # type: ignore[arg-type]


def check(spec: ModelSpec, plan: Plan, position: str) -> None:
    """On the rank at the other end of the other axes, but of the first."""
    ends = {axis: plan.layout.degree(axis) - 1 for axis in OTHER_AXES if position != "first"}
    rank = plan.layout.rank({"pp": POSITIONS[position], **ends})
    assert not drift(spec, plan, rank).differences(), f"rank {rank} of {plan}"


def graded(cases: list[tuple[str, ...]], few: int, many: int) -> list[Any]:
    """The first ``few`` for `make test`, as far as ``many`` for `make prove`, the rest for `make prove-big`: each next
    case of a covering meets fewer pairs."""

    def marks(position: int) -> tuple[pytest.MarkDecorator, ...]:
        return () if position < few else (pytest.mark.prove,) if position < many else (pytest.mark.big,)

    return [pytest.param(*case, marks=marks(position), id="-".join(case)) for position, case in enumerate(cases)]


GRADED = 3 * len(SCHEDULES)
SETTINGS = pairwise(SCHEDULES, POSITIONS, list(SHARDINGS)[:5], TENSOR, REMATS)


@pytest.mark.parametrize(("schedule", "position", "sharding", "tensor", "remat"), graded(SETTINGS, 2, GRADED))
def test_settings(schedule: str, position: str, sharding: str, tensor: str, remat: str) -> None:
    precision = list(PRECISIONS.values())[len(schedule + position + sharding) % len(PRECISIONS)]
    check(SPEC, plan_of(schedule, sharding, tensor, remat=REMATS[remat], precision=precision), position)


SCHEDULED = pairwise(MODELS, SCHEDULES, POSITIONS)


@pytest.mark.parametrize(("model", "schedule", "position"), graded(SCHEDULED, 1, 5))
def test_models(model: str, schedule: str, position: str) -> None:
    turn = list(MODELS).index(model) + list(SCHEDULES).index(schedule)
    sharding, tensor = list(SHARDINGS)[turn % len(SHARDINGS)], list(TENSOR)[turn % len(TENSOR)]
    settings = dict(MODELS[model])
    features = {key: settings.pop(key) for key in list(settings) if key in flat(SPEC)}
    spec = with_fields(SPEC, **features)
    if "nf4" in model:
        spec = with_fields(spec, hidden_size=128, intermediate_size=256, head_dim=64)
    plan = plan_of(schedule, sharding, tensor, **settings)
    if model == "uneven":
        spec = replace(spec, num_hidden_layers=7)
        first, *others = plan.pipeline.split
        plan = replace(plan, pipeline=replace(plan.pipeline, split=(first + 1, *others)))
    check(spec, plan, position)


def test_every_schedule_is_seen_on_every_rank() -> None:
    """Within what `make prove` runs."""
    assert {case[:2] for case in SETTINGS[:GRADED]} == set(product(SCHEDULES, POSITIONS))


@pytest.mark.prove
def test_fake_tensors_show_what_real_ones_show() -> None:
    """The peak too; large models are measured on fake tensors alone."""
    plan = plan_of("zbv", "zero3 over 4", remat=REMATS["every 2"])
    assert measure(SPEC, plan, 5, fake=True) == measure(SPEC, plan, 5, fake=False)


LARGE_CASES = pairwise(
    SCHEDULES, POSITIONS, ("ddp over 1", "zero1 over 2", "zero3 over 4"), ("none", "selective", "full")
)


@pytest.mark.parametrize(("schedule", "position", "sharding", "remat"), graded(LARGE_CASES, 0, 1))
def test_peak_of_a_gigabyte(schedule: str, position: str, sharding: str, remat: str) -> None:
    plan = replace(plan_of(schedule, sharding, remat=REMATS[remat]), batch=Batch(8, 6, 2048, 1024))
    found = drift(LARGE, plan, plan.layout.rank({"pp": POSITIONS[position]}))
    assert found.measured.peak_bytes > 2**30
    assert not found.differences()
    assert abs(found.peak_error) < PEAK_TOLERANCE


def test_what_each_rank_sends_of_tied_ends() -> None:
    """Once a step the gradient of the embedding between the two ends, whoever holds which; of shards their slices."""
    spec = replace(SPEC, tie_word_embeddings=True)
    rows = spec.vocab_size * spec.hidden_size * 4
    padded = -(-spec.vocab_size // 4) * spec.hidden_size * 4
    for sharding, size in (("ddp over 1", rows), ("zero3 over 4", padded)):
        plan = plan_of("1f1b", sharding)
        sent = [predict(spec, plan, plan.layout.rank({"pp": position})).sent for position in range(RANKS)]
        assert [each["pp", "all_reduce", size] for each in sent] == [1, 0, 1]
        plan = plan_of("zbv", sharding)
        for position in range(RANKS):
            found = predict(spec, plan, plan.layout.rank({"pp": position})).sent
            assert not [key for key in found if key[:2] == ("pp", "all_reduce")]


@pytest.mark.prove
def test_the_peak_where_the_gradient_of_the_vocabulary_is_summed() -> None:
    """FSDP2 still has the last gradient of a unit in hand when the reduced shard arrives, which becomes the gradient
    or is added to it. Where the vocabulary is large and the blocks are few, that is 8 % of the peak."""
    spec = model_spec("drift-vocabulary", 65_536, 1024, 2048, 2, 16, 4, 64)
    batch, pipeline = Batch(1, 2, 64, 64), Pipeline("1f1b", 1, (1, 1))
    for strategy, stage in product(("zero1", "zero2"), (0, 1)):
        plan = Plan(Layout(dp_shard=4, pp=2), batch, Shard(strategy), PRECISIONS["bf16"], pipeline=pipeline)  # type: ignore[arg-type]
        found = drift(spec, plan, plan.layout.rank({"pp": stage}))
        assert abs(found.peak_error) < 1e-3, f"{strategy}, stage {stage}: {found.peak_error:+.4f}"
