"""The mixers that there are, by name: softmax attention, latent attention and gated delta nets, then those of installed
packages. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.models.delta_sizes import kept, passed, products
from shardwise.models.mixer import Matrices, Mixer, Numbers
from shardwise.spec.outside import with_others

if TYPE_CHECKING:
    from shardwise.models.config import ModelSpec


def _softmax_matrices(spec: ModelSpec) -> Matrices:
    own, d = spec.attention, spec.hidden_size
    q, kv = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
    sizes = {"q": q} | ({"q_gate": q} if own.attention_gate else {}) | {"k": kv, "v": kv}
    inner = {name: ((size, d), own.attention_bias) for name, size in sizes.items()}
    return inner | {"o": ((d, q), own.output_bias)}


def _softmax_norms(spec: ModelSpec) -> dict[str, int]:
    own = spec.attention
    if own.qk_norm is None:
        return {}
    heads = {"q": own.num_attention_heads, "k": own.num_key_value_heads}
    return {f"{x}_norm": own.head_dim * (heads[x] if own.qk_norm == "projection" else 1) for x in heads}


def _softmax_template(spec: ModelSpec, numbers: Numbers) -> dict[str, Any]:
    own = spec.attention
    return {
        "attention_bias": own.attention_bias,
        "attention_output_bias": None if own.output_bias == own.attention_bias else own.output_bias,
        "qk_norm": own.qk_norm,
        "attention_sinks": own.attention_sinks,
        "attention_gate": own.attention_gate,
    }


SOFTMAX = Mixer(
    "softmax",
    "shardwise.models.attention:Attention",
    _softmax_matrices,
    _softmax_norms,
    lambda spec: {"sinks": (spec.attention.num_attention_heads,)} if spec.attention.attention_sinks else {},
    columns="q q_gate k v",
    cut="sinks",
    rows="o",
    rotated=True,
    sequence=True,
    scores=lambda spec: 2 * spec.attention.num_attention_heads * spec.attention.head_dim,
    template=_softmax_template,
)
"""Heads of queries, which share those of keys and values (Ainslie et al., "GQA", arXiv 2305.13245)."""


def _latent_matrices(spec: ModelSpec) -> Matrices:
    own = spec.attention
    kind = spec.latent
    d = spec.hidden_size
    heads, bias = own.num_attention_heads, own.attention_bias
    found: Matrices = {"q": ((heads * own.head_dim, d), False)}
    if kind.q_lora_rank is not None:
        found = {"q_a": ((kind.q_lora_rank, d), bias), "q_b": ((heads * own.head_dim, kind.q_lora_rank), False)}
    found["kv_a"] = ((kind.kv_lora_rank + kind.qk_rope_head_dim, d), bias)
    found["kv_b"] = ((heads * (kind.qk_nope_head_dim + kind.v_head_dim), kind.kv_lora_rank), False)
    return found | {"o": ((d, heads * kind.v_head_dim), own.output_bias)}


def _latent_norms(spec: ModelSpec) -> dict[str, int]:
    queries = {} if spec.latent.q_lora_rank is None else {"q_a_norm": spec.latent.q_lora_rank}
    return queries | {"kv_a_norm": spec.latent.kv_lora_rank}


def _latent_template(spec: ModelSpec, numbers: Numbers) -> dict[str, Any]:
    rotated = 2 * numbers["p"]
    return _softmax_template(spec, numbers) | {
        "kv_lora_rank": numbers["l"],
        "q_lora_rank": None if spec.latent.q_lora_rank is None else numbers["a"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": numbers["e"] - rotated,
        "v_head_dim": numbers["v"],
        "rope_interleave": spec.latent.rope_interleave,
    }


def _latent_wrong(spec: ModelSpec) -> list[tuple[str, str]]:
    own, kind = spec.attention, spec.latent
    sizes = {key: value for key, value in vars(kind).items() if key != "rope_interleave" and value is not None}
    found = [(f"{key} is {value}", f"{key}: 1 or more") for key, value in sizes.items() if value < 1]
    if own.num_key_value_heads != own.num_attention_heads:
        what = f"{own.num_key_value_heads} key-value heads of {own.num_attention_heads}, which latents make one by one"
        found.append((what, f"num_key_value_heads: {own.num_attention_heads}"))
    if kind.v_head_dim > own.head_dim:
        what = f"values of {kind.v_head_dim} are wider than heads of {own.head_dim}"
        found.append((what, f"v_head_dim: at most {own.head_dim}"))
    return found


def _latent_small(spec: ModelSpec, sizes: Numbers) -> dict[str, Any]:
    """Half a head is rotated; values stay narrower than keys where they are."""
    head_dim = sizes["head_dim"]
    kind = spec.latent
    latent = sizes["hidden_size"] // 2
    return {
        "kv_lora_rank": latent,
        "q_lora_rank": None if kind.q_lora_rank is None else latent,
        "qk_rope_head_dim": head_dim // 2,
        "qk_nope_head_dim": head_dim - head_dim // 2,
        "v_head_dim": head_dim if kind.v_head_dim == spec.attention.head_dim else head_dim - head_dim // 4,
    }


def _latent_sums(numbers: Numbers) -> Numbers:
    """Latents beside the key of all heads, and beside those of queries; keys beside values, and how wide the products
    of attention are."""
    e, p, latent, value = (numbers[symbol] for symbol in "eplv")
    return {
        "l+2p": latent + 2 * p,
        "a+l+2p": numbers["a"] + latent + 2 * p,
        "e-2p": e - 2 * p,
        "e-2p+v": e - 2 * p + value,
        "e+v": e + value,
        "3e+2v": 3 * e + 2 * value,
    }


LATENT = Mixer(
    "latent",
    "shardwise.models.latent:LatentAttention",
    _latent_matrices,
    _latent_norms,
    columns="q q_b kv_b",
    rows="o",
    narrow="q_a kv_a q_a_norm kv_a_norm",
    narrows=lambda spec: spec.latent.q_lora_rank is not None,
    rotated=True,
    sequence=True,
    scores=lambda spec: spec.attention.num_attention_heads * (spec.attention.head_dim + spec.latent.v_head_dim),
    template=_latent_template,
    wrong=_latent_wrong,
    small=_latent_small,
    symbols="alv",
    sizes=lambda spec: {
        "a": spec.latent.q_lora_rank or 1,
        "l": spec.latent.kv_lora_rank,
        "v": spec.latent.v_head_dim,
    },
    ones="G",
    sums=_latent_sums,
)
"""Keys and values of all heads made of one narrow vector for each token (DeepSeek-V2, arXiv 2405.04434)."""


def _delta_matrices(spec: ModelSpec) -> Matrices:
    own, d = spec.delta, spec.hidden_size
    heads = own.linear_num_value_heads
    keys, values = own.linear_num_key_heads * own.linear_key_head_dim, heads * own.linear_value_head_dim
    sizes = {"in_q": keys, "in_k": keys, "in_v": values, "in_z": values, "in_b": heads, "in_a": heads}
    return {name: ((size, d), False) for name, size in sizes.items()} | {"out": ((d, values), False)}


def _delta_others(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    rows, heads = _delta_matrices(spec), (spec.delta.linear_num_value_heads,)
    convolved = {f"conv_{x}": (rows[f"in_{x}"][0][0], 1, spec.delta.linear_conv_kernel_dim) for x in "qkv"}
    return convolved | {"decay_log": heads, "dt_bias": heads}


def _delta_template(spec: ModelSpec, numbers: Numbers) -> dict[str, Any]:
    return {
        "linear_num_key_heads": numbers["k"],
        "linear_num_value_heads": numbers["k"] * numbers["g"],
        "linear_key_head_dim": numbers["q"],
        "linear_value_head_dim": numbers["y"],
        "linear_conv_kernel_dim": spec.delta.linear_conv_kernel_dim,
    }


def _delta_wrong(spec: ModelSpec) -> list[tuple[str, str]]:
    own = spec.delta
    found = [(f"{key} is {value}", f"{key}: 1 or more") for key, value in vars(own).items() if value < 1]
    if not found and own.linear_num_value_heads % own.linear_num_key_heads:
        what = f"{own.linear_num_key_heads} key heads do not divide {own.linear_num_value_heads} value heads"
        found.append((what, f"linear_num_value_heads: a multiple of {own.linear_num_key_heads}"))
    return found


def _delta_small(spec: ModelSpec, sizes: Numbers) -> dict[str, Any]:
    """Heads so narrow that a row is several chunks, and as many as ranks can share."""
    heads, several = sizes["num_attention_heads"], spec.delta.linear_num_value_heads > spec.delta.linear_num_key_heads
    own = {"linear_num_key_heads": heads, "linear_num_value_heads": heads * (2 if several else 1)}
    return own | {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3}


def _delta_sums(numbers: Numbers) -> Numbers:
    """What is kept of states, how wide a piece's map is, and the products of the rule: forward, backward, and those of
    both where states pass between pieces."""
    each, key, value = (numbers[symbol] for symbol in "gqy")
    rule = {f"rule{'+' * n}": products(key, value, each, backward=n > 1) for n in (1, 2)}
    over = {f"rule{'+' * n}": rule[f"rule{'+' * (n - 2)}"] + passed(key, value, each, backward=n > 3) for n in (3, 4)}
    return {"state+": kept(key, value), **rule, **over}


def _delta_state(spec: ModelSpec) -> int:
    own = spec.delta
    each = own.linear_num_value_heads // own.linear_num_key_heads
    return own.linear_num_key_heads * products(own.linear_key_head_dim, own.linear_value_head_dim, each)


DELTA = Mixer(
    "linear_attention",
    "shardwise.models.delta:GatedDeltaNet",
    _delta_matrices,
    lambda spec: {"head_norm": spec.delta.linear_value_head_dim},
    _delta_others,
    columns="in_q in_k in_v in_z in_b in_a",
    rows="out",
    whole="head_norm",
    cut="conv_q conv_k conv_v decay_log dt_bias",
    heads="linear_num_key_heads linear_num_value_heads",
    share="k",
    sequence=True,
    state=_delta_state,
    template=_delta_template,
    wrong=_delta_wrong,
    small=_delta_small,
    symbols="kgqy",
    sizes=lambda spec: {
        "k": spec.delta.linear_num_key_heads,
        "g": spec.delta.linear_num_value_heads // spec.delta.linear_num_key_heads,
        "q": spec.delta.linear_key_head_dim,
        "y": spec.delta.linear_value_head_dim,
    },
    sums=_delta_sums,
)
"""A state of each head that each token changes by what it lacks (Yang et al., arXiv 2412.06464), of which a token has
as much to compute in a row of any length. Its name is the one that ``layer_types`` of Hugging Face has."""

MIXERS = with_others("shardwise.mixers", Mixer, {row.name: row for row in (SOFTMAX, LATENT, DELTA)})


def mixer_of(spec: ModelSpec, layer: int) -> Mixer:
    """The mixer of a layer: the one that ``layer_types`` names, else that of the model."""
    named = spec.attention.layer_types[layer : layer + 1]  # empty, too, of a list that is too short
    return MIXERS[named[0] if named and named[0] in MIXERS else spec.attention.mixer]


@lru_cache(maxsize=64)
def mixers_of(spec: ModelSpec) -> tuple[Mixer, ...]:
    """Return the mixers of all layers, each once."""
    return tuple(dict.fromkeys(mixer_of(spec, layer) for layer in range(spec.num_hidden_layers)))


def narrows(spec: ModelSpec) -> bool:
    """Return whether layers with latents make each token narrow before its heads are computed."""
    return any(mixer.narrows(spec) for mixer in mixers_of(spec))
