"""Adapters: what a plan sends, holds and saves with them is what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.lookup import read_spec
from shardwise.prove.drift import PEAK_FROM_BYTES, drift
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from tests.drift.test_drift import PRECISIONS, REMATS, SPEC, check, plan_of
from tests.drift.test_frozen import BIASED, SHARDINGS, TIED
from tests.models.hf_models import config_of

WIDE = model_spec("wide", 600, 64, 192, 2, 8, 2, 8)
"""Rows of whole blocks of 64."""
ADAPTERS: dict[str, tuple[ModelSpec, Lora]] = {
    "all-linear": (SPEC, Lora(4, 8.0)),
    "q and v": (SPEC, Lora(4, 8.0, ("q", "v"))),
    "down": (SPEC, Lora(5, 8.0, ("down",))),
    "gate and o": (SPEC, Lora(4, 8.0, ("gate", "o"))),
    "biases": (BIASED, Lora(4, 8.0)),
    "tied": (TIED, Lora(4, 8.0, ("k", "up"))),
    "dropout": (SPEC, Lora(4, 8.0, dropout=0.1)),
    "magnitudes": (BIASED, Lora(4, 8.0, ("q", "o", "down"), dora=True)),
    "magnitudes and dropout, nf4": (WIDE, Lora(4, 8.0, frozen="bf16", nf4=True, dropout=0.1, dora=True)),
    "ends": (BIASED, Lora(4, 8.0, frozen="bf16", modules_to_save=("embed", "head"))),
    "tied ends, nf4": (
        replace(WIDE, tie_word_embeddings=True),
        Lora(4, 8.0, frozen="bf16", nf4=True, modules_to_save=("embed", "head")),
    ),
    "one end": (BIASED, Lora(4, 8.0, ("q", "down"), frozen="bf16", modules_to_save=("head",))),
    "the other end": (BIASED, Lora(4, 8.0, ("q", "down"), frozen="bf16", modules_to_save=("embed",))),
    "bf16 base": (BIASED, Lora(4, 8.0, frozen="bf16")),
    "nf4": (WIDE, Lora(4, 8.0, frozen="bf16", nf4=True)),
    "nf4, biases": (with_fields(WIDE, attention_bias=True), Lora(4, 8.0, ("q", "down"), nf4=True)),
}
GRID = [("fp32", "none", 1), ("bf16", "none", 2), ("bf16", "selective", 1), ("bf16", "full", 2), ("fp32", "full", 1)]


def lora_plan(sharding: str, lora: Lora, precision: str, remat: str, m: int) -> Plan:
    plan = plan_of(sharding, 8, batch=Batch(2, m, 32, 40), precision=PRECISIONS[precision], remat=REMATS[remat])
    return replace(plan, lora=lora)


@pytest.mark.matrix(13)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("what", ADAPTERS)
def test_adapters(what: str, sharding: str) -> None:
    """One row of the grid for each, another for the next, so that every kind and every strategy meets every row."""
    spec, lora = ADAPTERS[what]
    precision, remat, m = GRID[(list(ADAPTERS).index(what) + SHARDINGS.index(sharding)) % len(GRID)]
    check(lora_plan(sharding, lora, precision, remat, m), spec, ranks=(7,))


@pytest.mark.parametrize("end", ["embed", "head"])
def test_one_end_of_a_model_with_a_table_of_positions(end: str) -> None:
    """The table is stored as the embedding is, which FSDP2 gathers it with."""
    spec = read_spec(config_of("gpt2") | {"tie_word_embeddings": False}, "tiny-gpt2-untied")
    lora = Lora(4, 8.0, frozen="bf16", modules_to_save=(end,))
    for sharding in ("ddp", "zero3"):
        check(lora_plan(sharding, lora, "bf16", "none", 1), spec, ranks=(7,))


@pytest.mark.big
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("what", ADAPTERS)
def test_every_row_of_the_grid(what: str, sharding: str) -> None:
    spec, lora = ADAPTERS[what]
    for precision, remat, m in GRID:
        check(lora_plan(sharding, lora, precision, remat, m), spec, ranks=(0, 7))


LARGE = {
    "lora": Lora(16, 32.0),
    "nf4": Lora(16, 32.0, frozen="bf16", nf4=True),
    "magnitudes and dropout": Lora(16, 32.0, frozen="bf16", dropout=0.1, dora=True),
}


@pytest.mark.matrix
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", LARGE)
def test_the_peak_of_a_large_model(kind: str, strategy: str, remat: str) -> None:
    """Above 1 GiB, where the peak too is among the differences when it is not within 3 %."""
    spec = model_spec("large", 32_000, 2048, 5632, 3, 16, 8, 128)
    rows = 8 if remat == "full" else 2
    plan = plan_of(strategy, 8, batch=Batch(rows, 1, 2048, 1024), precision=Precision("bf16"), remat=REMATS[remat])
    plan = replace(plan, lora=LARGE[kind], shard=Shard(strategy))  # type: ignore[arg-type]
    found = drift(spec, plan, 0)
    assert found.measured.peak_bytes >= PEAK_FROM_BYTES and not found.differences()


def test_the_peak_at_the_loss() -> None:
    """Nothing is saved of the first block's input: it is gone when the loss is computed, in which the peak is."""
    spec = model_spec("ends", 3000, 256, 64, 2, 2, 2, 16)
    adapters = Lora(2, 4.0, ("q",), frozen="bf16")
    found = drift(spec, Plan(batch=Batch(1, 1, 4096, 4096), precision=Precision("bf16"), lora=adapters), 0)
    assert abs(found.peak_error) < 1e-3
