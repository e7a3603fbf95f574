"""``shardwise.certify``: modules of one's own, sharded on ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.prove.module import ModuleProof, OwnLoop, Widened, certify_on
from shardwise.prove.pool import RankFailure, RankPool
from tests.parity.test_tp import EVEN
from tests.said import refusal

ROWS = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(67, (5, 8, 12), generator=torch.Generator().manual_seed(2))
SIZES: dict[str, Any] = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 12}


class Stack(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width)) for _ in "123")
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x * self.scale).square().mean()


class Normed(Stack):
    """With statistics of this rank's rows, as a BatchNorm that is not synchronised."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.std())


def rows(step: int, index: int, count: int) -> tuple[Tensor]:
    return (ROWS[step].chunk(count)[index],)


def tokens(step: int, index: int, count: int) -> tuple[Any, ...]:
    ids = IDS[step].chunk(count)[index]
    return ids, torch.arange(12).expand_as(ids), MaskSpec()


def decoder() -> Decoder:
    return Decoder(EVEN)


def next_token(logits: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[0][:, 1:].flatten())


def proof(ranks: RankPool, strategy: Any, model_fn: Callable[[], nn.Module], batch_fn: Any) -> ModuleProof:
    plan = shardwise.make_plan(strategy, processes=2, recompute="full")
    return certify_on(ranks, plan, OwnLoop(model_fn, batch_fn, None, 2, {}))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [("zero3", {"processes": 2}), ("ddp", {"processes": 2}), ("zero1", {"processes": 2}), ("hsdp", {"processes": 4})],
)
def test_a_module_that_can_be_sharded(strategy: Any, degrees: dict[str, int]) -> None:
    found = shardwise.certify(Stack, shardwise.make_plan(strategy, recompute="full", **degrees), rows)  # type: ignore[arg-type]
    assert found, found
    assert f"over {degrees['processes']} ranks: holds" in str(found)


@pytest.mark.prove
def test_the_decoder_over_tensor_parallel_ranks() -> None:
    found = shardwise.certify(decoder, shardwise.make_plan("zero3", tp=2, processes=4), tokens, next_token)
    assert found, found


def test_statistics_of_a_rank_are_found(ranks: RankPool) -> None:
    found = proof(ranks, "ddp", Normed, rows)
    assert not found
    assert any("first gradient of" in line and "expected" in line for line in found.problems)
    assert "does not hold" in str(found)


def test_functions_that_ranks_cannot_import() -> None:
    with pytest.raises(UsageError, match=refusal("CLI001", fix="top of a")):
        shardwise.certify(lambda: Stack(), shardwise.make_plan("ddp", processes=2), rows)


@pytest.mark.prove
def test_a_rank_that_raises() -> None:
    with pytest.raises(RankFailure, match="narrow"):
        shardwise.certify(Narrow, shardwise.make_plan("ddp", processes=2), rows)


class Narrow(Stack):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("narrow")


def test_a_plan_for_other_processes() -> None:
    assert shardwise.make_plan("zero3", processes=8, tp=2).layout.world == 8
    with pytest.raises(ConfigError, match=refusal("PLAN001", "tp 3", "8 processes")):
        shardwise.make_plan("zero3", processes=8, tp=3)


class Off(Stack):
    """Wrong by 1e-6 on the ranks, and right in one process."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * dist.is_initialized())


class Dropped(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


def named(step: int, index: int, count: int) -> dict[str, Tensor]:
    ids = IDS[step].chunk(count)[index]
    return {"input_ids": ids, "labels": ids}


def gpt2() -> nn.Module:
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=4, n_positions=12, **off))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, head_dim=4, **SIZES))


def llama_that_is_off() -> nn.Module:
    """Wrong by 1e-6 on the ranks: of what transformers casts to fp32 itself, eight roundings."""
    model = llama()
    model.model.norm.register_forward_hook(lambda _, __, out: out * (1 + 1e-6 * dist.is_initialized()))
    return model


@pytest.mark.matrix(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("model_fn", [gpt2, llama, qwen3])
def test_models_of_transformers_which_cast_to_fp32_themselves(
    ranks: RankPool, model_fn: Callable[[], nn.Module], strategy: Any
) -> None:
    found = proof(ranks, strategy, model_fn, named)
    assert found, found


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(("model_fn", "batch_fn"), [(Off, rows), (llama_that_is_off, named)])
def test_an_error_of_a_millionth_is_found(
    ranks: RankPool, model_fn: Callable[[], nn.Module], batch_fn: Any, strategy: Any
) -> None:
    found = proof(ranks, strategy, model_fn, batch_fn)
    assert not found
    assert not found.random
    assert 1e-8 < found.found.gradient.error < 1e-5


def test_what_a_module_casts_to_fp32_stays_float64() -> None:
    """The mean of two halves of the rows is that of the whole to the fifteenth digit; its own, in fp32, is not."""
    torch.manual_seed(0)
    model, parts = llama().double(), ((0, 1), (0, 2), (1, 2))
    with torch.no_grad():
        own = [model(**named(0, *part)).loss for part in parts]
        with Widened():
            wide = [model(**named(0, *part)).loss for part in parts]
    assert (own[0].dtype, wide[0].dtype) == (torch.float32, torch.float64)
    assert float(wide[0]) == pytest.approx(float(own[0]), rel=1e-6)
    assert float(wide[0]) == pytest.approx(float(wide[1] + wide[2]) / 2, rel=1e-14)


def test_dropout_is_named_as_the_cause(ranks: RankPool) -> None:
    """What fails since its module draws at random says so, and not only that numbers differ."""
    found = proof(ranks, "ddp", Dropped, rows)
    assert not found
    assert "dropout" in found.problems[0]
