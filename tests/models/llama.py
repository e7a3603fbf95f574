"""Small Llamas with every feature at work, and the same model in transformers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.models.config import ModelSpec, from_hf
from shardwise.models.decoder import Decoder
from shardwise.models.hf_names import to_hf_name

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def random_config(seed: int) -> dict[str, Any]:
    """A config whose sequence of 40 reaches beyond the original rope range of 16."""
    rng = random.Random(seed)
    heads = rng.choice([2, 4, 6])
    rope: dict[str, Any] = rng.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 4.0},
            LLAMA3 | {"original_max_position_embeddings": 16},
            LLAMA3 | {"original_max_position_embeddings": 16},
        ]
    )
    return {
        "vocab_size": rng.randint(50, 120),
        "hidden_size": rng.choice([24, 48]),
        "intermediate_size": rng.randint(40, 90),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice([8, 16, 24]),
        "rms_norm_eps": 10 ** rng.uniform(-6, -4),
        "rope_parameters": rope | {"rope_theta": rng.choice([100.0, 10_000.0])},
        "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def pair(config: dict[str, Any], seed: int = 0) -> tuple[Decoder, LlamaForCausalLM]:
    """Our model and transformers' with the same random weights: no norm is one and no bias zero."""
    theirs = LlamaForCausalLM(LlamaConfig(**config))
    spec = from_hf(theirs.config.to_dict(), "test")
    ours = random_model(spec, seed)
    state = {to_hf_name(name): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    return ours, theirs


def random_model(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, 0.0, 0.15)
    return model.to(dtype)


def tokens(vocab_size: int, rows: int = 2, length: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    return ids, torch.arange(length).expand(rows, length)


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours.detach() - reference.detach()).norm() / reference.detach().norm())
