"""Well-known configurations, so that a plan can be made without a network. Keys as in ``config.json``."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

OWNERS = (
    "meta-llama",
    "nousresearch",
    "unsloth",
    "tinyllama",
    "huggingfacetb",
    "mistralai",
    "qwen",
    "google",
    "microsoft",
    "allenai",
    "ibm-granite",
)
"""Hub accounts under which these models are found unchanged."""


def _config(model_type: str, sizes: tuple[int, int, int, int, int], **other: Any) -> Config:
    """``sizes`` are of hidden states and MLP, then the numbers of layers, heads and key-value heads."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"model_type": model_type, **dict(zip(keys, sizes, strict=True)), **other}


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: Any) -> Config:
    return _config("llama", (hidden, intermediate, layers, heads, kv_heads), rms_norm_eps=1e-5, **other)


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
_MISTRAL: Config = {
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
}
_QWEN: Config = {
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
}
_QWEN_TWO: Config = _QWEN | {"max_position_embeddings": 32768, "tie_word_embeddings": True}
_QWEN_TWO_LARGE: Config = _QWEN | {"max_position_embeddings": 131_072, "vocab_size": 152_064}
_QWEN_THREE: Config = _QWEN | {"head_dim": 128, "max_position_embeddings": 40960, "eos_token_id": 151_645}
_QWEN_THREE_SMALL: Config = _QWEN_THREE | {"tie_word_embeddings": True}
_GEMMA_THREE: Config = {
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
}
_PHI_FOUR: Config = {
    "vocab_size": 100_352,
    "max_position_embeddings": 16384,
    "rope_theta": 250_000.0,
    "bos_token_id": 100_257,
    "eos_token_id": 100_265,
    "pad_token_id": 100_349,
}
_OLMO_TWO: Config = {
    "vocab_size": 100_352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": 100_257,
    "pad_token_id": 100_277,
}
_GRANITE: Config = {
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 1 / 128,
    "logits_scaling": 16.0,
}
_GRANITE_TWO_B: Config = _GRANITE | {"rope_theta": 5e6, "attention_multiplier": 1 / 64, "logits_scaling": 8.0}

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
    "Mistral-7B-v0.1": _config(
        "mistral", (4096, 14336, 32, 32, 8), **_MISTRAL | {"sliding_window": 4096, "rope_theta": 10_000.0}
    ),
    "Mistral-7B-v0.2": _config("mistral", (4096, 14336, 32, 32, 8), **_MISTRAL),
    "Mistral-7B-v0.3": _config("mistral", (4096, 14336, 32, 32, 8), **_MISTRAL | {"vocab_size": 32768}),
    "Mistral-Nemo-2407": _config(
        "mistral",
        (5120, 14336, 40, 32, 8),
        **_MISTRAL | {"vocab_size": 131_072, "head_dim": 128, "max_position_embeddings": 131_072},
    ),
    "Qwen2.5-0.5B": _config("qwen2", (896, 4864, 24, 14, 2), **_QWEN_TWO),
    "Qwen2.5-1.5B": _config("qwen2", (1536, 8960, 28, 12, 2), **_QWEN_TWO | {"max_position_embeddings": 131_072}),
    "Qwen2.5-3B": _config("qwen2", (2048, 11008, 36, 16, 2), **_QWEN_TWO),
    "Qwen2.5-7B": _config("qwen2", (3584, 18944, 28, 28, 4), **_QWEN_TWO_LARGE),
    "Qwen2.5-14B": _config("qwen2", (5120, 13824, 48, 40, 8), **_QWEN_TWO_LARGE | {"rms_norm_eps": 1e-5}),
    "Qwen2.5-32B": _config("qwen2", (5120, 27648, 64, 40, 8), **_QWEN_TWO_LARGE | {"rms_norm_eps": 1e-5}),
    "Qwen2.5-72B": _config("qwen2", (8192, 29568, 80, 64, 8), **_QWEN_TWO_LARGE | {"rms_norm_eps": 1e-5}),
    "Qwen3-0.6B": _config("qwen3", (1024, 3072, 28, 16, 8), **_QWEN_THREE_SMALL),
    "Qwen3-1.7B": _config("qwen3", (2048, 6144, 28, 16, 8), **_QWEN_THREE_SMALL),
    "Qwen3-4B": _config("qwen3", (2560, 9728, 36, 32, 8), **_QWEN_THREE_SMALL),
    "Qwen3-8B": _config("qwen3", (4096, 12288, 36, 32, 8), **_QWEN_THREE),
    "Qwen3-14B": _config("qwen3", (5120, 17408, 40, 40, 8), **_QWEN_THREE),
    "Qwen3-32B": _config("qwen3", (5120, 25600, 64, 64, 8), **_QWEN_THREE),
    "Gemma-2-2b": _config("gemma2", (2304, 9216, 26, 8, 4)),
    "Gemma-2-9b": _config("gemma2", (3584, 14336, 42, 16, 8)),
    "Gemma-2-27b": _config("gemma2", (4608, 36864, 46, 32, 16), head_dim=128, query_pre_attn_scalar=144),
    "Gemma-3-1b": _config(
        "gemma3_text",
        (1152, 6912, 26, 4, 1),
        **_GEMMA_THREE
        | {"vocab_size": 262_144, "sliding_window": 512, "max_position_embeddings": 32768, "rope_scaling": None},
    ),
    "Gemma-3-4b": _config("gemma3_text", (2560, 10240, 34, 8, 4), **_GEMMA_THREE),
    "Gemma-3-12b": _config("gemma3_text", (3840, 15360, 48, 16, 8), **_GEMMA_THREE),
    "Gemma-3-27b": _config(
        "gemma3_text", (5376, 21504, 62, 32, 16), head_dim=128, query_pre_attn_scalar=168, **_GEMMA_THREE
    ),
    "Phi-3-mini-4k": _config(
        "phi3",
        (3072, 8192, 32, 32, 32),
        vocab_size=32064,
        sliding_window=2047,
        bos_token_id=1,
        eos_token_id=32000,
    ),
    "Phi-4": _config("phi3", (5120, 17920, 40, 40, 10), **_PHI_FOUR),
    "SmolLM3-3B": _config(
        "smollm3",
        (2048, 11008, 36, 16, 4),
        vocab_size=128_256,
        rope_theta=5_000_000.0,
        max_position_embeddings=65536,
        bos_token_id=128_000,
        eos_token_id=128_012,
    ),
    "OLMo-2-1124-7B": _config("olmo2", (4096, 11008, 32, 32, 32), **_OLMO_TWO),
    "OLMo-2-1124-13B": _config("olmo2", (5120, 13824, 40, 40, 40), **_OLMO_TWO),
    "Granite-3.1-2b-base": _config("granite", (2048, 8192, 40, 32, 8), **_GRANITE_TWO_B),
    "Granite-3.1-8b-base": _config("granite", (4096, 12800, 40, 32, 8), **_GRANITE),
    "Granite-3.3-8b-instruct": _config("granite", (4096, 12800, 40, 32, 8), **_GRANITE | {"vocab_size": 49159}),
}

_MARKS = ("-hf", "-instruct", "-chat", "-v1.0", "-base", "-it", "-pt")
_UNLIKE_THEIR_CHATS = ("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
"""Models whose chat versions do not have all of their numbers."""


def find(name: str) -> tuple[str, Config] | None:
    """The built-in model meant by a short name or a Hub id, in any case: (name, config). Chat models have the
    dimensions of their base."""
    owner, _, short = name.lower().rpartition("/")
    if owner and owner not in OWNERS:
        return None
    by_name = {known.lower(): known for known in CONFIGS}
    short = short.removeprefix("meta-")
    like = "-".join(part for part in short.split("-") if f"-{part}" not in _MARKS)
    found = by_name.get(short) or (by_name.get(like) if like not in _UNLIKE_THEIR_CHATS else None)
    return None if found is None else (found, CONFIGS[found])
