"""Well-known Llama configurations, so that a plan can be made without a network. Keys as in ``config.json``."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

OWNERS = ("meta-llama", "nousresearch", "unsloth", "tinyllama", "huggingfacetb")
"""Hub accounts under which these models are found unchanged."""


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        **other,
    }


def _rope(factor: float) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_TWO: Config = {"vocab_size": 32000, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
_TINY: Config = _TWO | {"max_position_embeddings": 2048}
_THREE: Config = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_THREE_ONE: Config = _THREE | {"max_position_embeddings": 131072, "rope_scaling": _rope(8.0)}
_THREE_TWO: Config = _THREE_ONE | {"rope_scaling": _rope(32.0), "tie_word_embeddings": True}
_SMOL: Config = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, Config] = {
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32, **_TWO),
    "Llama-2-13b": _llama(5120, 13824, 40, 40, 40, **_TWO),
    "Llama-2-70b": _llama(8192, 28672, 80, 64, 8, **_TWO),
    "Llama-3-8B": _llama(4096, 14336, 32, 32, 8, **_THREE),
    "Llama-3-70B": _llama(8192, 28672, 80, 64, 8, **_THREE),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, **_THREE_ONE),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8, **_THREE_ONE),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128, 8, **_THREE_ONE),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, head_dim=64, **_THREE_TWO),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, head_dim=128, **_THREE_TWO),
    "Llama-3.3-70B": _llama(8192, 28672, 80, 64, 8, **_THREE_ONE),
    "TinyLlama-1.1B": _llama(2048, 5632, 22, 32, 4, **_TINY),
    "SmolLM2-135M": _llama(576, 1536, 30, 9, 3, initializer_range=1 / 24, **_SMOL),
    "SmolLM2-360M": _llama(960, 2560, 32, 15, 5, **_SMOL),
    "SmolLM2-1.7B": _llama(2048, 8192, 24, 32, 32, **_SMOL | {"rope_theta": 130_000.0}),
}

_SUFFIXES = ("-hf", "-instruct", "-chat", "-v1.0", "-base")


def find(name: str) -> tuple[str, Config] | None:
    """The built-in model meant by a short name or a Hub id, in any case: (name, config). Chat models have the
    dimensions of their base."""
    owner, _, short = name.lower().rpartition("/")
    if owner and owner not in OWNERS:
        return None
    short = short.removeprefix("meta-")
    while any(short.endswith(suffix) for suffix in _SUFFIXES):
        short = next(short.removesuffix(suffix) for suffix in _SUFFIXES if short.endswith(suffix))
    for known, config in CONFIGS.items():
        if short == known.lower():
            return known, config
    return None
