"""Families of mixtures of experts: rows of ``families.FAMILIES``. Imports no torch.

The files have each expert's matrices one by one (Mixtral, OLMoE, Qwen), or a layer's as one tensor (gpt-oss). What
transformers 5 holds in memory, and saves when it is asked to, is read of all of them.
"""

from __future__ import annotations

from shardwise.errors import ConfigError, Problem
from shardwise.models import family
from shardwise.models.family import PLAIN, QK_NORM, Config, Family, Fields, Names, Stack
from shardwise.models.rope import number, unsupported

_EXPERTS, _MLP = "layers.{}.mlp.experts.expert_", "model.layers.{}.mlp."
_MATRICES = ("gate", "up", "down")
_ROUTER: Names = {"layers.{}.mlp.router": f"{_MLP}gate"}
ONE_BY_ONE = _ROUTER | {f"{_EXPERTS}{x}": f"{_MLP}experts.{{}}.{x}_proj" for x in _MATRICES}
MIXTRAL: Names = {
    "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
    f"{_EXPERTS}gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    f"{_EXPERTS}up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    f"{_EXPERTS}down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
SHARED_GATE: Names = {
    **{f"layers.{{}}.mlp.shared.{x}": f"{_MLP}shared_expert.{x}_proj" for x in _MATRICES},
    "layers.{}.mlp.shared_gate": f"{_MLP}shared_expert_gate",
}


def _stacks(word: str, suffix: str = "", *, interleaved: bool = False, transposed: bool = False) -> Names:
    """The matrices (``word`` is weight) or biases of all experts of a layer as two tensors."""
    wide, narrow = f"{_MLP}experts.gate_up_proj{suffix}", f"{_MLP}experts.down_proj{suffix}"
    packed = word == "weight" and interleaved and not transposed
    return {
        f"{_EXPERTS}gate.{word}": Stack(wide, 0, 2, interleaved, transposed, packed),
        f"{_EXPERTS}up.{word}": Stack(wide, 1, 2, interleaved, transposed, packed),
        f"{_EXPERTS}down.{word}": Stack(narrow, transposed=transposed, packed=packed),
    }


IN_MEMORY = _ROUTER | _stacks("weight")
_GPT_OSS: Names = {
    "layers.{}.attention.sinks": "model.layers.{}.self_attn.sinks",
    "layers.{}.mlp.router": f"{_MLP}router",
    **_stacks("weight", interleaved=True, transposed=True),
    **_stacks("bias", "_bias", interleaved=True),
}
_MXFP4 = _stacks("weight", interleaved=True)
"""As the files of gpt-oss have the experts: rows of gate and up in turn, none of them transposed."""


def read_experts(config: Config, name: str, count: str = "num_experts", width: str = "moe_intermediate_size") -> Fields:
    """Read the fields of a model's experts, their number under the key ``count`` and their width under ``width``;
    ``num_experts`` and ``num_local_experts`` are two names of one number, and the families differ in which they
    write."""
    other = "num_local_experts" if count == "num_experts" else "num_experts"
    count = count if config.get(other) is None else other
    if (experts := family.whole(config, count, name)) < 1:
        what = f"{count} is {experts}"
        raise ConfigError(Problem("PLAN008", what, f"config of {name}", f"{count}: 1 or more"))
    return {
        "num_experts": experts,
        "experts_per_token": family.whole(config, "num_experts_per_tok", name),
        "expert_size": family.whole(config, width, name),
        "router_aux_loss_coef": number(config, "router_aux_loss_coef", None, name),
        "output_router_logits": bool(config.get("output_router_logits")),
        "normalised_top_k": bool(config.get("norm_topk_prob")),
    }


def write_experts(fields: Fields, count: str = "num_experts") -> Config:
    """The inverse of :func:`read_experts`, but for width and normalisation, which families write in their own ways."""
    return {
        count: fields["num_experts"],
        "num_experts_per_tok": fields["experts_per_token"],
        "router_aux_loss_coef": fields["router_aux_loss_coef"],
        "output_router_logits": fields["output_router_logits"],
    }


def _mixtral(config: Config, name: str) -> Fields:
    family.refuse(config, "router_jitter_noise", name)
    own = read_experts(config, name, "num_local_experts", "intermediate_size")
    return family.all_sliding(config, name) | own | {"normalised_top_k": True}


def _write_mixtral(fields: Fields) -> Config:
    return family.window(fields) | write_experts(fields, "num_local_experts")


def _olmoe(config: Config, name: str) -> Fields:
    if config.get("clip_qkv") is not None:
        raise unsupported(f"`clip_qkv: {config['clip_qkv']}` is not supported", name, "clip_qkv: null")
    return read_experts(config, name, width="intermediate_size")


def _write_olmoe(fields: Fields) -> Config:
    return write_experts(fields) | {"norm_topk_prob": fields["normalised_top_k"]}


def read_sparse(config: Config, name: str) -> Fields:
    """Read the fields of experts that each ``decoder_sparse_step``-th layer has but ``mlp_only_layers``."""
    step, dense = family.whole(config, "decoder_sparse_step", name), config.get("mlp_only_layers") or []
    count = config["num_hidden_layers"]
    without = tuple(layer for layer in range(count) if layer in dense or (layer + 1) % step)
    if without and len(without) == count:
        what = f"none of the {count} layers has experts"
        fix = "decoder_sparse_step: 1, mlp_only_layers: []; or a dense model's model_type"
        raise ConfigError(Problem("PLAN008", what, f"config of {name}", fix))
    return read_experts(config, name) | {"dense_layers": without}


def write_sparse(fields: Fields) -> Config:
    """The inverse of :func:`read_sparse`."""
    return _write_olmoe(fields) | {
        "moe_intermediate_size": fields["expert_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(fields["dense_layers"]),
    }


def _qwen2_moe(config: Config, name: str) -> Fields:
    shared, until = "shared_expert_intermediate_size", family.whole(config, "max_window_layers", name)
    if (size := family.whole(config, shared, name)) < 1:
        raise ConfigError(Problem("PLAN008", f"{shared} is {size}", f"config of {name}", f"{shared}: 1 or more"))
    own = {"shared_expert_size": size, "attention_bias": bool(config["qkv_bias"])}
    # Unlike Qwen2's, every other layer slides, and those before the number, not from it on.
    slides = family.switched(config, name, lambda layer: layer % 2 == 0 and layer < until)
    return slides | read_sparse(config, name) | own


def _write_qwen2_moe(fields: Fields) -> Config:
    own = {
        "shared_expert_intermediate_size": fields["shared_expert_size"],
        "qkv_bias": fields["attention_bias"],
        "max_window_layers": fields["num_hidden_layers"],
    }
    return family.write_switched(fields) | write_sparse(fields) | own


def _qwen3_moe(config: Config, name: str) -> Fields:
    alike = {**config, "layer_types": None}
    return family.switched(alike, name, lambda layer: True) | read_sparse(config, name)


def _write_qwen3_moe(fields: Fields) -> Config:
    switch = fields["sliding_window"] is not None
    return family.window(fields) | write_sparse(fields) | {"use_sliding_window": switch}


_SWIGLU: Config = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""What ``clamped_swiglu`` computes with."""


def _gpt_oss(config: Config, name: str) -> Fields:
    for key, value in _SWIGLU.items():
        if number(config, key, None, name) != value:
            raise unsupported(f"`{key}: {config[key]}` is not supported", name, f"{key}: {value}")
    own = read_experts(config, name, "num_local_experts", "intermediate_size")
    # The softmax of the chosen logits alone is that of all, of which the chosen are divided by their sum.
    return family.layers(config, name, lambda layer: layer % 2 == 0) | own | {"normalised_top_k": True}


def _write_gpt_oss(fields: Fields) -> Config:
    types = {"layer_types": family.layer_types(fields)}
    return family.window(fields) | types | write_experts(fields, "num_local_experts") | _SWIGLU


EXPERT_FAMILIES: dict[str, Family] = {
    "mixtral": family.row("mixtral", PLAIN | MIXTRAL, read=_mixtral, write=_write_mixtral, read_too=(IN_MEMORY,)),
    "olmoe": family.row("olmoe", PLAIN | QK_NORM | ONE_BY_ONE, read=_olmoe, write=_write_olmoe, read_too=(IN_MEMORY,)),
    "qwen2_moe": family.row(
        "qwen2_moe",
        PLAIN | ONE_BY_ONE | SHARED_GATE,
        read=_qwen2_moe,
        write=_write_qwen2_moe,
        read_too=(IN_MEMORY,),
    ),
    "qwen3_moe": family.row(
        "qwen3_moe",
        PLAIN | QK_NORM | ONE_BY_ONE,
        read=_qwen3_moe,
        write=_write_qwen3_moe,
        read_too=(IN_MEMORY,),
    ),
    "gpt_oss": family.row("gpt_oss", PLAIN | _GPT_OSS, read=_gpt_oss, write=_write_gpt_oss, read_too=(_MXFP4,)),
}

TAKEN_FOR_EXPERTS = (
    "qwen3_moe",
    "glm4_moe",
    "dots1",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_moe_text",
)
"""Families of which PEFT takes adapters of a dense layer's MLP, or of one beside experts, for those of experts, where
its config names them as modules: seen with peft 0.21."""
