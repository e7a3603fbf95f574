"""Tensor and sequence parallelism: what ranks send, hold and save, to the byte, beside every setting that it meets."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.planner import unit_passes
from shardwise.prove.drift import PEAK_TOLERANCE, drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Optim, Plan, Precision, Remat, Shard
from shardwise.spec.sheet import SEND, Op, Unit
from tests.covering import pairwise
from tests.drift.test_drift import PRECISIONS, REMATS

SPEC = model_spec("drift-tp", 601, 48, 104, 2, 8, 4, 8)
"""The vocabulary is odd, so the last rank has fewer rows of it; of 8 ranks two share a key head."""
WIDE = with_fields(
    SPEC, name="drift-tp-wide", hidden_size=128, intermediate_size=1024, num_attention_heads=8, head_dim=64
)
"""Of whose rows eight ranks have whole blocks of 64."""
LONG = with_fields(SPEC, name="drift-tp-long", intermediate_size=2048, head_dim=256)
"""Of whose rows eight ranks have whole blocks of 256."""
SEQUENCE = {"whole": False, "sequence": True}
RANKS = ("first", "last")
SHARDINGS = {
    "ddp over 1": ("ddp", Layout(tp=2)),
    "ddp over 2": ("ddp", Layout(dp_replicate=2, tp=4)),
    "zero1 over 2": ("zero1", Layout(dp_shard=2, tp=8)),
    "zero2 over 2 x 2": ("zero2", Layout(dp_replicate=2, dp_shard=2, tp=4)),
    "zero3 over 4": ("zero3", Layout(dp_shard=4, tp=2)),
}
MODELS = {
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "norms before and after, capped": {"norm_placement": "both", "qk_norm": "head", "final_soft_cap": 30.0},
    "norms after": {"norm_placement": "after", "qk_norm": "head"},
    "multipliers": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "norms over whole projections": {"norm_placement": "after", "qk_norm": "projection", "num_key_value_heads": 8},
    "one key head": {"num_key_value_heads": 1, "partial_rotary_factor": 0.5},
    "windows": {"sliding_window": 16, "layer_types": ("sliding_attention", "full_attention")},
    "gemma": {
        "activation": "gelu_tanh",
        "norm_placement": "both",
        "norm_plus_one": True,
        "tie_word_embeddings": True,
        "attention_soft_cap": 2.0,
        "final_soft_cap": 3.0,
        "embedding_multiplier": 4.0,
        "sliding_window": 5,
        "layer_types": ("full_attention", "sliding_attention"),
        "local_rope_theta": 10.0,
    },
}
MODULES = (("*norm", "fp32"), ("layers.0.mlp.*", "fp32"), ("*.q", "fp32"), ("*.o", "fp32"))
OTHERS: dict[str, dict[str, object]] = {
    "adapters": {"lora": Lora(4, 8.0)},
    "adapters of row products": {"lora": Lora(4, 8.0, ("o", "down"))},
    "adapters of biased layers": {"lora": Lora(4, 8.0, ("q", "v", "down"))},
    "magnitudes": {"lora": Lora(4, 8.0, dora=True)},
    "magnitudes of biased layers, and dropout": {"lora": Lora(4, 8.0, dora=True, dropout=0.1)},
    "dropout": {"lora": Lora(4, 8.0, dropout=0.1)},
    "nf4": {"lora": Lora(4, 8.0, frozen="bf16", nf4=True)},
    "nf4 of biased layers, and magnitudes": {"lora": Lora(4, 8.0, frozen="bf16", nf4=True, dora=True)},
    "moments in 8 bits": {"optim": Optim("adamw8bit")},
    "moments in 8 bits of adapters": {"optim": Optim("adamw8bit"), "lora": Lora(8, 8.0)},
    "moments in bf16": {"optim": Optim(moments="bf16")},
    "modules": {"precision": Precision("bf16", modules=MODULES)},
    "modules of biased layers": {"precision": Precision("bf16", modules=MODULES)},
    "frozen embedding and block": {"frozen": ("embed.*", "layers.0.*")},
    "pairs": {"loss": "dpo", "batch": Batch(2, 1, 32, 64)},
    "tokens that ranks do not divide": {"batch": Batch(1, 3, 31, 16)},
    "fp16": {"precision": Precision("fp16")},
    "fp64": {"precision": Precision("fp64", "fp64", "fp64")},
    "bf16 weights": {"precision": Precision("bf16", "bf16")},
}


def plan_of(sharding: str, sequence: str, **settings: object) -> Plan:
    strategy, layout = SHARDINGS[sharding]
    plan = Plan(layout, Batch(2, 2, 32, 64), Shard(strategy, bucket_bytes=100_000), PRECISIONS["bf16"])  # type: ignore[arg-type]
    return replace(plan, sequence_parallel=SEQUENCE[sequence], **settings)  # type: ignore[arg-type]


def check(spec: ModelSpec, plan: Plan, which: str) -> None:
    rank = 0 if which == "first" else plan.layout.world - 1
    assert not drift(spec, plan, rank).differences(), f"rank {rank} of {plan}"


@pytest.mark.matrix(10)
@pytest.mark.parametrize(
    ("sharding", "precision", "remat", "sequence", "rank"), pairwise(SHARDINGS, PRECISIONS, REMATS, SEQUENCE, RANKS)
)
def test_every_strategy_type_and_recomputation(
    sharding: str, precision: str, remat: str, sequence: str, rank: str
) -> None:
    check(SPEC, plan_of(sharding, sequence, precision=PRECISIONS[precision], remat=REMATS[remat]), rank)


def of_model(model: str, sharding: str, sequence: str, remat: str, rank: str) -> None:
    spec = with_fields(SPEC, **MODELS[model])
    check(spec, plan_of(sharding, sequence, remat=REMATS[remat]), rank)


@pytest.mark.matrix(20)
@pytest.mark.parametrize(
    ("model", "sharding", "sequence", "remat", "rank"),
    pairwise(MODELS, SHARDINGS, SEQUENCE, ("none", "selective"), RANKS),
)
def test_models(model: str, sharding: str, sequence: str, remat: str, rank: str) -> None:
    of_model(model, sharding, sequence, remat, rank)


def beside(other: str, sharding: str, sequence: str, remat: str, rank: str) -> None:
    spec = WIDE if "nf4" in other else LONG if "8 bits" in other else SPEC
    if "biased" in other:
        spec = with_fields(spec, attention_bias=True, mlp_bias=True)
    check(spec, plan_of(sharding, sequence, remat=REMATS[remat], **OTHERS[other]), rank)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("other", "sharding", "sequence", "remat", "rank"), pairwise(OTHERS, SHARDINGS, SEQUENCE, ("none", "full"), RANKS)
)
def test_beside_other_techniques(other: str, sharding: str, sequence: str, remat: str, rank: str) -> None:
    beside(other, sharding, sequence, remat, rank)


@pytest.mark.big
@pytest.mark.parametrize("sequence", SEQUENCE)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_combination(sharding: str, sequence: str) -> None:
    """What the coverings above are of."""
    for rank in RANKS:
        for precision, remat in product(PRECISIONS, REMATS):
            check(SPEC, plan_of(sharding, sequence, precision=PRECISIONS[precision], remat=REMATS[remat]), rank)
        for model, remat in product(MODELS, ("none", "selective")):
            of_model(model, sharding, sequence, remat, rank)
        for other, remat in product(OTHERS, ("none", "full")):
            beside(other, sharding, sequence, remat, rank)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", SEQUENCE)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_peak_of_a_gigabyte(remat: str, sequence: str) -> None:
    spec = model_spec("drift-tp-large", 32_000, 2048, 5632, 3, 16, 4, 128)
    for strategy, layout in (("ddp", Layout(tp=4)), ("zero3", Layout(dp_shard=4, tp=2))):
        plan = Plan(layout, Batch(8, 2, 1024, 1024), Shard(strategy), PRECISIONS["bf16"], Remat(remat))  # type: ignore[arg-type]
        found = drift(spec, replace(plan, sequence_parallel=SEQUENCE[sequence]))
        assert found.measured.peak_bytes > 2**30
        assert not found.differences()
        assert abs(found.peak_error) < PEAK_TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize("sequence", SEQUENCE)
def test_peak_of_a_tied_model(sequence: str) -> None:
    """Where the two gradients of the tied weight are added the peak is, and the loss's is not far from it."""
    spec = model_spec("drift-tied", 4096, 352, 960, 3, 4, 2, 64, tie_word_embeddings=True)
    plan = Plan(Layout(tp=2), Batch(4, 1, 256, 1024), sequence_parallel=SEQUENCE[sequence])
    assert abs(drift(spec, plan).peak_error) < 0.001


def test_gathers_that_recomputation_repeats_are_counted() -> None:
    """The proof sees a price without them."""
    plan = plan_of("ddp over 1", "sequence", remat=REMATS["full"])
    real = unit_passes.recomputed

    def unsent(unit: Unit) -> tuple[Op, ...]:
        return tuple(replace(op, kind="view") if op.kind == SEND else op for op in real(unit))

    with patch.object(unit_passes, "recomputed", unsent):
        assert any("all_gather" in line for line in drift(SPEC, plan).differences())
