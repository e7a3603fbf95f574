"""A small random config of each family with every feature at work, and the same model in transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.models import hf
from shardwise.models.config import ModelSpec, from_hf, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.delta_families import RECURRENT
from shardwise.models.families import FULL, SLIDING
from shardwise.models.hf_names import locations, tensors
from shardwise.models.kinds import LatentSpec
from shardwise.models.moe import MoE, Routing
from tests.models.llama import LLAMA3, random_config

LENGTH = 40
"""Beyond every window, original range and short factor of the configs below."""

Make = Callable[[random.Random], dict[str, Any]]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def shared(rng: random.Random) -> dict[str, Any]:
    """Dimensions; three layers, so that a pattern of layers has something to alternate over."""
    heads = rng.choice([2, 4])
    return {
        "vocab_size": rng.randint(50, 120),
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.randint(40, 90),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads // 2, heads]),
        "rms_norm_eps": 10 ** rng.uniform(-6, -4),
        "max_position_embeddings": 64,
        "initializer_range": 0.02,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def rope(rng: random.Random, *kinds: dict[str, Any], theta: float = 100.0) -> dict[str, Any]:
    return {"rope_parameters": dict(rng.choice(kinds)) | {"rope_theta": theta}}


def mistral(rng: random.Random) -> dict[str, Any]:
    return (
        shared(rng) | rope(rng, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}) | {"sliding_window": 7, "head_dim": 12}
    )


def qwen2(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    return shared(rng) | rope(rng, YARN, YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}) | windows


def qwen3(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
    stretch = DYNAMIC | {"rope_theta": 100.0}
    return (
        shared(rng)
        | windows
        | {
            "head_dim": 24,
            "attention_bias": rng.random() < 0.5,
            "rope_parameters": stretch,
            "max_position_embeddings": 16,
        }
    )


def gemma2(rng: random.Random) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}
    return (
        shared(rng)
        | rope(rng, {"rope_type": "default"})
        | caps
        | {
            "head_dim": 12,
            "sliding_window": 6,
            "attention_bias": True,
        }
    )


def gemma3(rng: random.Random) -> dict[str, Any]:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}
    local = {"rope_type": "default", "rope_theta": 10.0}
    return shared(rng) | {
        "head_dim": 12,
        "sliding_window": 6,
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope_parameters": {FULL: full, SLIDING: local},
        "query_pre_attn_scalar": 5,
        "final_logit_softcapping": 3.0,
    }


def phi3(rng: random.Random) -> dict[str, Any]:
    config = shared(rng) | {"num_attention_heads": 2, "num_key_value_heads": rng.choice([1, 2]), "hidden_size": 32}
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.5, 1.7], "long_factor": [1.0, 2.0, 3.5, 5.0, 8.0, 13.0]}
    stretch = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75} | factors
    original = rng.choice([16, 48])  # the sequence is beyond it, or within
    return config | {"rope_parameters": stretch, "original_max_position_embeddings": original, "sliding_window": 11}


def smollm3(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1]}
    return shared(rng) | rope(rng, {"rope_type": "default"}) | windows | {"attention_bias": True, "mlp_bias": True}


def olmo2(rng: random.Random) -> dict[str, Any]:
    return shared(rng) | rope(rng, LLAMA3 | {"original_max_position_embeddings": 16}) | {"attention_bias": True}


def granite(rng: random.Random) -> dict[str, Any]:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.6}
    return (
        shared(rng)
        | rope(rng, {"rope_type": "linear", "factor": 4.0})
        | factors
        | {
            "logits_scaling": 1.5,
            "attention_bias": True,
            "mlp_bias": True,
        }
    )


def mixtral(rng: random.Random) -> dict[str, Any]:
    experts = {"num_local_experts": rng.choice([4, 7]), "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    return shared(rng) | rope(rng, {"rope_type": "default"}, LINEAR) | experts | {"sliding_window": 7, "head_dim": 12}


def olmoe(rng: random.Random) -> dict[str, Any]:
    experts = {"num_experts": rng.choice([5, 8]), "num_experts_per_tok": 3, "norm_topk_prob": rng.random() < 0.5}
    return shared(rng) | rope(rng, LINEAR) | experts | {"attention_bias": True}


def qwen2_moe(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([20, 24])}
    dense = rng.choice([{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
    common = {"shared_expert_intermediate_size": rng.randint(20, 40), "norm_topk_prob": False}
    return shared(rng) | rope(rng, YARN) | windows | experts | dense | common


def qwen3_moe(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 9}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": rng.choice([16, 17])}
    more = {"head_dim": 24, "attention_bias": rng.random() < 0.5, "mlp_only_layers": [0], "norm_topk_prob": True}
    return shared(rng) | rope(rng, YARN) | windows | experts | more


def gpt_oss(rng: random.Random) -> dict[str, Any]:
    """Sizes are whole blocks of MXFP4."""
    stretch = YARN | {"truncate": False}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 12, "intermediate_size": rng.choice([32, 96])}
    return shared(rng) | rope(rng, stretch) | experts | sizes | {"num_key_value_heads": rng.choice([1, 2, 4])}


def latent(rng: random.Random) -> dict[str, Any]:
    base = shared(rng)
    experts = {"n_routed_experts": rng.choice([5, 8]), "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    more = {"n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": 1, "topk_method": "greedy"}
    dims = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": rng.choice([10, 16])}
    own = {"q_lora_rank": rng.choice([None, 14]), "num_key_value_heads": base["num_attention_heads"]}
    bias = {"attention_bias": rng.random() < 0.5}
    stretch = YARN | {"mscale": 1.0, "mscale_all_dim": rng.choice([0.5, 1.0])}
    return base | rope(rng, stretch) | experts | more | dims | own | bias


def deepseek_v2(rng: random.Random) -> dict[str, Any]:
    """Among all experts, as V2-Lite, or in groups, as V2."""
    groups, kept = rng.choice([(2, 1), (4, 2)])
    grouped = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": kept, "n_routed_experts": 8}
    return latent(rng) | rng.choice([{}, grouped | {"routed_scaling_factor": 2.3}])


def deepseek_v3(rng: random.Random) -> dict[str, Any]:
    v2 = latent(rng)
    groups, kept = rng.choice([(2, 1), (4, 2)])
    routing = {"n_routed_experts": 8, "n_group": groups, "topk_group": kept, "routed_scaling_factor": 2.5}
    own = {"rope_interleave": rng.random() < 0.75, "norm_topk_prob": rng.random() < 0.75}
    return {key: value for key, value in v2.items() if key != "topk_method"} | routing | own


def glm4_moe(rng: random.Random) -> dict[str, Any]:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([16, 20])}
    groups, kept = rng.choice([(1, 1), (2, 1), (4, 2)])
    more = {"n_shared_experts": rng.choice([1, 2]), "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
    more |= {"n_group": groups, "topk_group": kept}
    own = {"head_dim": 16, "attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5}
    stretch = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return shared(rng) | experts | more | own | {"rope_parameters": stretch, "norm_topk_prob": True}


def dots1(rng: random.Random) -> dict[str, Any]:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([16, 20])}
    groups, kept = rng.choice([(1, 1), (2, 1), (4, 2)])
    more = {"n_shared_experts": rng.choice([1, 2]), "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
    more |= {"n_group": groups, "topk_group": kept, "norm_topk_prob": rng.random() < 0.75}
    own = {"attention_bias": rng.random() < 0.5, "sliding_window": 9, "max_window_layers": 2}
    return shared(rng) | rope(rng, {"rope_type": "default"}, LINEAR) | experts | more | own


def minimax_m2(rng: random.Random) -> dict[str, Any]:
    experts = {"num_local_experts": rng.choice([5, 8]), "num_experts_per_tok": 3, "intermediate_size": 20}
    stretch = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return shared(rng) | experts | {"head_dim": 16, "rope_parameters": stretch}


def qwen3_5(rng: random.Random) -> dict[str, Any]:
    """Heads so wide that a row is more than a block of chunks."""
    heads, each = rng.choice([1, 2, 3]), rng.choice([1, 2])
    own = {"linear_num_key_heads": heads, "linear_num_value_heads": heads * each, "linear_conv_kernel_dim": 3}
    dims = {"linear_key_head_dim": rng.choice([4, 6]), "linear_value_head_dim": rng.choice([3, 5])}
    stretch = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    bias = {"attention_bias": rng.random() < 0.5, "layer_types": [RECURRENT, FULL, RECURRENT]}
    return shared(rng) | own | dims | bias | {"head_dim": 12, "rope_parameters": stretch}


def qwen3_5_moe(rng: random.Random) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": rng.choice([2, 3]), "moe_intermediate_size": 20}
    return qwen3_5(rng) | experts | {"shared_expert_intermediate_size": rng.randint(20, 40)}


def qwen3_next(rng: random.Random) -> dict[str, Any]:
    dense = rng.choice([{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {}])
    return qwen3_5_moe(rng) | dense | {"norm_topk_prob": rng.random() < 0.75}


CONFIGS: dict[str, Make] = {
    "llama": lambda rng: random_config(rng.randrange(100)),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "granite": granite,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "dots1": dots1,
    "minimax_m2": minimax_m2,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
}


def config_of(family: str, seed: int = 0) -> dict[str, Any]:
    """What transformers writes into config.json."""
    return AutoConfig.for_model(family, **CONFIGS[family](random.Random(seed))).to_dict()


def spec_of(family: str, seed: int = 0) -> ModelSpec:
    return from_hf(config_of(family, seed), "test")


def random_model(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """No norm is one and no bias or sink zero. Matrices are large enough that soft caps bend the scores, and that
    clamps cut what experts make."""
    torch.manual_seed(seed)
    model = Decoder(spec)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            one = float(not spec.norm_plus_one or "head_norm" in name)
            nn.init.uniform_(parameter, one - 0.5, one + 0.5)
        elif name.endswith("decay_log"):  # or heads forget within a token, and no state would be missed
            nn.init.uniform_(parameter, -5.0, -2.0)
        elif name.endswith("correction"):  # negative ones too, and larger than what scores differ by
            nn.init.normal_(parameter, 0.0, 0.3)
        else:
            clamped = spec.activation == "clamped_swiglu" and name.endswith(("expert_gate.weight", "expert_up.weight"))
            nn.init.normal_(parameter, 0.0, 1.0 if clamped else 0.2)
    return model.to(dtype)


def theirs_of(spec: ModelSpec, config: dict[str, Any], ours: Decoder) -> PreTrainedModel:
    """transformers' model with our weights, by its plain implementation of attention."""
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    state = in_memory(spec, ours.state_dict(), theirs.state_dict())
    if spec.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return theirs.eval()


def in_memory(spec: ModelSpec, values: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Values of our parameters as transformers' model of these names holds them."""
    held = tensors(locations(spec, names))
    with torch.no_grad():
        return {name: hf.assembled(parts, values.__getitem__) for name, parts in held.items()}


def pair(family: str, seed: int = 0) -> tuple[Decoder, PreTrainedModel]:
    config = config_of(family, seed)
    spec = from_hf(config, "test")
    ours = random_model(spec, seed)
    return ours, theirs_of(spec, config, ours)


def mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def routed(model: nn.Module, chosen: list[Routing] | None = None) -> list[Routing]:
    """Where the tokens of each mixture of experts go in the next forward passes. Given ``chosen``, they go where they
    went there, with the weights that the routers now give."""
    found: list[Routing] = []
    for number, moe in enumerate(mixtures(model)):

        def route(x: Tensor, moe: MoE = moe, number: int = number) -> Routing:
            routing = MoE.route(moe, x)
            if chosen is not None:
                ids = chosen[number].ids
                scores = moe.router(x)
                weights = (scores.softmax(-1) if moe.sigmoid is None else scores.sigmoid()).gather(1, ids)
                weights = weights / weights.sum(-1, keepdim=True) if moe.normalised else weights
                weights = weights if moe.sigmoid is None else weights * moe.sigmoid.scale
                routing = routing._replace(ids=ids, weights=weights, counts=chosen[number].counts)
            found.append(routing)
            return routing

        moe.route = route  # type: ignore[method-assign]
    return found


def corrections(model: nn.Module) -> dict[str, Tensor]:
    """What transformers holds as buffers, of no gradient."""
    return {name: value for name, value in model.state_dict().items() if "correction" in name}


def without(spec: ModelSpec, feature: str) -> ModelSpec:
    """``spec`` with one feature as if it were not there."""
    if feature == "partial_rotary_factor" and spec.positions.rope_scaling is not None:
        longer = {
            key: asdict(spec.positions.rope_scaling)[key] + (14.0, 15.0) for key in ("short_factor", "long_factor")
        }
        spec = with_fields(spec, rope_scaling=replace(spec.positions.rope_scaling, **longer))
    if feature == "mixer":
        return with_fields(spec, mixer="softmax", head_dim=spec.value_dim, **asdict(LatentSpec()))
    more = {"shared_expert_gate": False} if feature == "shared_expert_size" else {}
    return with_fields(spec, **{feature: NEUTRAL[feature]} | more)


NEUTRAL: dict[str, Any] = {
    "mixer": "softmax",
    "rope_scaling": None,
    "sliding_window": None,
    "layer_types": (),
    "local_rope_theta": None,
    "nope_layers": (),
    "attention_scale": None,
    "attention_soft_cap": None,
    "final_soft_cap": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "norm_plus_one": False,
    "activation": "silu",
    "partial_rotary_factor": 1.0,
    "norm_placement": "before",
    "qk_norm": None,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_sinks": False,
    "experts_per_token": 1,
    "expert_bias": False,
    "router_bias": False,
    "normalised_top_k": True,
    "shared_expert_size": 0,
    "shared_expert_gate": False,
    "dense_layers": (),
    "attention_gate": False,
    "sigmoid": None,
    "softmax_groups": None,
}
"""Features, and what a model without them has."""
