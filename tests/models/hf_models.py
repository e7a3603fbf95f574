"""Small models of families that only transformers has, in transformers and behind the decoder's interface."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.data import tokens
from shardwise.models.config import ModelSpec
from shardwise.models.hf_model import HFDecoder
from shardwise.models.hf_names import name_in_model
from shardwise.models.lookup import read_spec
from shardwise.runtime.build import allocate

SIZES: dict[str, Any] = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DEPTH: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED: dict[str, Any] = {**SIZES, **DEPTH, "intermediate_size": 64, "num_key_value_heads": 2}
LONG: dict[str, Any] = {"max_position_embeddings": 64}
WINDOWS: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": SIZES | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": SIZES | DEPTH | LONG | {"intermediate_size": 64},
    "olmo": GATED | LONG,
    "olmo3": GATED | LONG | WINDOWS,
    "starcoder2": GATED | LONG | {"sliding_window": 7},
    "cohere2": GATED | LONG | WINDOWS | {"logit_scale": 0.25},
    "exaone4": GATED | LONG | WINDOWS,
    "glm4": GATED | LONG | {"head_dim": 8, "attention_bias": True},
    "vaultgemma": GATED | LONG | WINDOWS | {"head_dim": 8, "final_logit_softcapping": 3.0},
}
"""Of each what it has that the others have not: transposed weights, learnt positions, blocks in parallel, norms
without weights, wide tables, logits that are scaled or capped, positions in some layers only."""


def config_of(kind: str) -> dict[str, Any]:
    """As its config.json has it."""
    settled: dict[str, Any] = CONFIG_MAPPING[kind](**CONFIGS[kind]).to_dict()
    return settled


@cache
def spec_of(kind: str) -> ModelSpec:
    return read_spec(config_of(kind), f"tiny-{kind}")


def theirs_of(kind: str, **sizes: int) -> PreTrainedModel:
    """transformers' model with all parameters random, in its own attention; nothing is dropped."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**CONFIGS[kind] | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model.eval()


def transposed(theirs: PreTrainedModel) -> set[str]:
    """The names of the weights that transformers has as [in, out]."""
    return {f"{name}.weight" for name, module in theirs.named_modules() if isinstance(module, Conv1D)}


def ours_of(kind: str, theirs: PreTrainedModel) -> HFDecoder:
    """The same model, made as the runtime makes it."""
    spec = spec_of(kind)
    with torch.device("meta"):
        model = HFDecoder(spec)
    allocate([model], spec, torch.device("cpu"))
    values = theirs.state_dict()
    values |= {name: values[name].T for name in transposed(theirs)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name_in_model(name, spec)])
    return model


def save(kind: str, directory: Path) -> None:
    """transformers' model and a tokenizer in ``directory``, as from the Hub."""
    theirs_of(kind, vocab_size=320).save_pretrained(directory)
    tokens.train_tokenizer(["line number of a text that says a little more " * 30], 320, directory)
