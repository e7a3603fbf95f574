"""What a block keeps under selective recomputation, by arithmetic, and a fault that is planted into it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

from shardwise.models import latent
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.planner.trace import traced_here
from shardwise.prove.drift import drift, predict
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat
from tests.parity.mixers import DEEPSEEK, PLANS

V3 = model_spec(
    "deepseek-v3, dense",
    1024,
    7168,
    18432,
    2,
    128,
    128,
    192,
    mixer="latent",
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
LITE = with_fields(V3, name="queries without a latent", q_lora_rank=None)
TOKENS = 64
PLAN = Plan(batch=Batch(2, 1, TOKENS, 8), precision=Precision("bf16"), remat=Remat("selective"))
RANK = 16


def kept(spec: ModelSpec, plan: Plan) -> float:
    """The bytes that a block keeps of a token, as the planner has them."""
    two, three = (predict(with_fields(spec, num_hidden_layers=n), plan, units=traced_here) for n in (2, 3))
    return (three.saved_bytes - two.saved_bytes) / (plan.batch.micro_batch_size * TOKENS)


def results(spec: ModelSpec, ranks: int = 1) -> dict[str, int]:
    """How many numbers of a token the products make that are kept: of heads and of the MLP a rank has its part."""
    kind, heads = spec.latent, spec.attention.num_attention_heads
    own = heads * spec.attention.head_dim if kind.q_lora_rank is None else kind.q_lora_rank
    query = {"q": own // ranks} if kind.q_lora_rank is None else {"q_a": own}
    f, d = spec.intermediate_size // ranks, spec.hidden_size
    return query | {"kv_a": kind.kv_lora_rank + kind.qk_rope_head_dim, "o": d, "gate": f, "up": f}


def of_attention(spec: ModelSpec, ranks: int = 1) -> int:
    """The bytes of a token's output in bf16, and of the sums of its scores in fp32."""
    heads = spec.attention.num_attention_heads // ranks
    return 2 * heads * spec.latent.v_head_dim + 4 * heads


@pytest.mark.parametrize("spec", [V3, LITE], ids=lambda spec: spec.name)
def test_latents_are_kept_and_not_the_heads_made_of_them(spec: ModelSpec) -> None:
    """Of DeepSeek-V3's dense layers 139,904 bytes a token; with its heads it would be 254,592."""
    assert kept(spec, PLAN) == 2 * (spec.hidden_size + sum(results(spec).values())) + of_attention(spec)


@pytest.mark.parametrize("nf4", [False, True])
def test_nor_what_adapters_add_to_heads(nf4: bool) -> None:
    """Of every other layer what both matrices make is kept, but for the last product."""
    numbers = results(V3)
    beside = sum(numbers.values()) + (len(numbers) + 1) * RANK + V3.hidden_size  # down's own, without its adapter's
    adapted = replace(PLAN, lora=Lora(RANK, frozen="bf16", nf4=nf4))
    assert kept(V3, adapted) == 2 * (V3.hidden_size + sum(numbers.values()) + beside) + of_attention(V3)


def test_a_rank_keeps_the_latents_of_its_own_tokens() -> None:
    """They are gathered again, as the residual stream is."""
    shared = replace(PLAN, layout=Layout(tp=4), sequence_parallel=True)
    numbers = results(V3, 4)
    of_tokens = numbers.pop("gate") + numbers.pop("up") + numbers.pop("o")
    assert kept(V3, shared) == 2 * ((V3.hidden_size + sum(numbers.values())) / 4 + of_tokens) + of_attention(V3, 4)


def test_a_run_that_keeps_heads_is_not_what_was_planned() -> None:
    plan = replace(PLANS["zero3"], precision=Precision("fp32"))
    assert not drift(DEEPSEEK, plan).differences()
    with patch.object(latent, "made_again", nullcontext):
        [told] = drift(DEEPSEEK, plan).differences()
    assert told.startswith("saved for backward")


@pytest.mark.parametrize("adapters", [None, Lora(RANK, frozen="bf16")], ids=["all weights", "adapters"])
@pytest.mark.parametrize("spec", [V3, LITE], ids=lambda spec: spec.name)
def test_the_peak_is_what_was_planned(spec: ModelSpec, adapters: Lora | None) -> None:
    """Of values as wide as keys, beside which attention needs no room: to the loss and the counts of a step."""
    even = with_fields(spec, v_head_dim=192)
    found = drift(even, replace(PLAN, batch=Batch(2, 1, 2048, 256), lora=adapters))
    assert not found.differences()
    assert abs(found.predicted.peak_bytes - found.measured.peak_bytes) < 64 < found.measured.peak_bytes / 2**24
