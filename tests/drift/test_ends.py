"""What is before the blocks and after them is gathered and reduced by itself: when, on the real run and on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shardwise.models.blocks import ends
from shardwise.models.config import ModelSpec, model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.lookup import read_spec
from shardwise.planner.sheets import sheet_of
from shardwise.planner.trace import traced_here
from shardwise.prove import fake_run
from shardwise.prove.drift import drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard
from shardwise.techniques import precision, shard
from shardwise.techniques.shard.unit_bytes import groups
from tests.drift.test_drift import PRECISIONS, SHARDINGS, SPEC, check, plan_of
from tests.models.hf_models import config_of

TIED = replace(SPEC, tie_word_embeddings=True)
V, D = SPEC.vocab_size, SPEC.hidden_size


def order(spec: ModelSpec, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The collectives of a measured step one after another, kind and elements: fp32."""
    sent: list[tuple[str, int]] = []

    class Ordered(fake_run.WorldCounter):
        def _sent(self, kind: str, args: Any, out: Any) -> None:
            before = self.sent.copy()
            super()._sent(kind, args, out)
            sent.extend((kind, size // 4) for axis, kind, size in self.sent - before if axis == "dp_shard")

    monkeypatch.setattr(fake_run, "WorldCounter", Ordered)
    measured = fake_run.measure(spec, plan, 0)
    return sent[-sum(calls for (axis, *_), calls in measured.sent.items() if axis == "dp_shard") :]


def test_only_the_embedding_is_gathered_before_the_first_block_and_reduced_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 ranks divide both vocabulary and hidden size: no padding in the ends."""
    block = sum(parameter.numel() for parameter in Decoder(SPEC).layers[0].parameters())
    plan = plan_of("zero3", 8)
    sent = order(SPEC, plan, monkeypatch)
    found = [(kind, elements if elements in (V * D, V * D + D) else block) for kind, elements in sent]
    gathers = [elements for kind, elements in found if kind == "all_gather"]
    assert gathers == [V * D, block, block, V * D + D, block, block]
    assert found.index(("reduce_scatter", V * D + D)) < len(found) - 3, "while blocks run backward"
    assert found[-1] == ("reduce_scatter", V * D)


def test_tied_ends_are_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = order(TIED, plan_of("zero3", 8), monkeypatch)
    assert sent[0] == ("all_gather", V * D + D) and sent[-1] == ("reduce_scatter", V * D + D)
    assert len(sent) == 2 + 2 * 3


def test_what_backward_reads_before_the_blocks_stays_with_the_root() -> None:
    """A lookup's backward reads no table; that of a norm reads its weight."""
    plan = plan_of("zero3", 8)
    model, paper = Decoder(SPEC), precision.cost(sheet_of(SPEC, plan, units=traced_here), plan)
    assert ends(model) == ([model.embed], [model.norm, model.head])
    assert shard.units(model) == [
        [model.embed],
        [model.layers[0]],
        [model.layers[1]],
        [model.norm, model.head],
        [model],
    ]
    assert {"embedding", "head"} <= groups(paper, plan).keys()
    normed = replace(
        paper.embedding, forward=(*paper.embedding.forward, replace(paper.head.forward[0], weight="norm.weight"))
    )
    assert "embedding" not in groups(replace(paper, embedding=normed), plan)
    model.embed = nn.Sequential(model.embed, nn.LayerNorm(D))  # type: ignore[assignment]
    assert ends(model) == ([], []) and shard.units(model) == [[model.layers[0]], [model.layers[1]], [model]]


def test_ends_of_other_models_are_the_roots() -> None:
    assert ends(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))) == ([], [])


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", SHARDINGS[1:])
def test_the_peak_with_wide_ends(sharding: str) -> None:
    """Half of the weights are in the ends: what is kept of them decides the peak."""
    spec = model_spec("wide-ends", 64_000, 1024, 2816, 4, 8, 4, 128)
    for compute, accumulation in (("bf16", 1), ("fp32", 2)):
        plan = plan_of(sharding, 8, batch=Batch(1, accumulation, 512, 256), precision=PRECISIONS[compute])
        found = drift(spec, replace(plan, shard=Shard(plan.shard.strategy)), 0)
        assert found.measured.peak_bytes > 2**29
        assert not found.differences()
        assert abs(found.peak_error) < 0.005


@pytest.mark.prove
def test_an_embedding_of_two_tables_is_one_unit() -> None:
    """GPT-2's words and positions, its output layer not tied to the first."""
    spec = read_spec(config_of("gpt2") | {"tie_word_embeddings": False}, "tiny-gpt2-untied")
    assert spec.hf_model is not None and [name for name, _ in spec.hf_model.places][:2] == ["embed", "wpe"]
    for types, m in ((Precision("bf16"), 3), (Precision(), 1)):
        plan = Plan(Layout(dp_shard=8), Batch(2, m, 32, 24), Shard("zero3"), types)
        assert not drift(spec, plan, 7).differences()


@pytest.mark.parametrize(
    "precision", [Precision("bf16"), Precision("bf16", modules=(("embed", "fp32"), ("norm", "fp32")))]
)
def test_several_micro_batches_gather_nothing_for_nothing(precision: Precision) -> None:
    for sharding in ("zero1", "zero3"):
        check(plan_of(sharding, 8, batch=Batch(2, 3, 32, 64), precision=precision))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_nobody_holds_what_an_fp32_norm_read_while_the_loss_runs(strategy: str) -> None:
    """The last norm saves its input as it was cast, and what it was cast from, 4 x 512 x 512 numbers in bf16, is freed
    before the logits, at whose peak the step's is."""
    spec = model_spec("wide", 8192, 512, 64, 1, 4, 4, 128)
    types = Precision("bf16", "bf16" if strategy == "ddp" else "fp32", modules=(("*norm", "fp32"),))
    layout = Layout(2) if strategy == "ddp" else Layout(1, 2)
    plan = Plan(layout, Batch(4, 1, 512, 1024), Shard(strategy), types, Remat("full"))  # type: ignore[arg-type]
    found = drift(spec, plan)
    assert abs(found.predicted.peak_bytes - found.measured.peak_bytes) < 2**14
