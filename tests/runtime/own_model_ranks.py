"""What ranks do for tests/runtime/test_own_model.py: a step of training, and the model out of the loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shardwise.distributed.meshes import meshes
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.runtime import own
from tests.parity.cases import TIED
from tests.runtime.own_ranks import Model, next_token_loss, rows, started

WORDS = ["<end>", *map(str, range(63))]
IDS = torch.randint(len(WORDS), (4, 9), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "num_hidden_layers": 2}
SIZES |= {"bos_token_id": None, "eos_token_id": 0}


def gpt2() -> nn.Module:
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=4, n_positions=32, **off))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted() -> nn.Module:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=4, tie_word_embeddings=True, **SIZES)),
    "adapter": adapted,
    "decoder": lambda: Decoder(TIED),
    "module": Model,
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", clean_up_tokenization_spaces=False)


def output(kind: str, model: nn.Module) -> Tensor:
    """What the model says of the same input, before and after it was written."""
    with torch.no_grad():
        if kind == "module":
            return model(rows(0)[0].float())
        if kind == "decoder":
            return model(IDS, torch.arange(9).expand_as(IDS), MaskSpec())
        return model(input_ids=IDS).logits


def saved(rank: int, world: int, kind: str, strategy: str, directory: str, tp: int = 1) -> Tensor:
    """A step of training, a checkpoint in ``directory`` and the model in ``directory/saved``; its output."""
    torch.manual_seed(0)
    with started(world):
        plan = own.make_plan(strategy, tp=tp)  # type: ignore[arg-type]
        model = own.parallelize(MODELS[kind](), plan, meshes(plan.layout, "cpu"))
        optimizer = own.optimizer(model, learning_rate=1e-2)
        checkpoints = own.Checkpoints(directory, model, optimizer, tokenizer=tokenizer())
        if kind == "module":
            loss = model(rows(0)[0].float()).square().mean()
        elif kind == "decoder":
            loss = next_token_loss(model, IDS)
        else:
            loss = model(input_ids=IDS, labels=IDS).loss
        own.backward(model, loss)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(1, validation=float(loss))
        checkpoints.close()
        own.save_pretrained(model, f"{directory}/saved", tokenizer())
        return output(kind, model)


def full_disk(rank: int, world: int, directory: str) -> str:
    """What each rank is told where a file is in the directory's place."""
    with started(world):
        plan = own.make_plan("zero3")
        model = own.parallelize(Model(), plan, meshes(plan.layout, "cpu"))
        try:
            own.save_pretrained(model, directory)
        except Exception as error:
            return re.sub(r"\s+", " ", str(error))
        return "written"
