"""Megatron-LM's flags, in a script or in the YAML of its tests. The model is flags too, with GPT-2's defaults: biases,
LayerNorm, learned positions and a tied head unless flags say otherwise.

Rules: megatron/training/arguments.py at d98e8a6."""

from __future__ import annotations

from typing import Any

from shardwise.interop import shared
from shardwise.interop.shared import FLOAT8
from shardwise.interop.system import Import, System, marks, show, word

OF = "Megatron-LM"
VOCABULARY = {"gpt2bpetokenizer": 50257, "llama2tokenizer": 32000, "nulltokenizer": None}
SCHEDULES = {name: name for name in ("constant", "linear", "cosine", *set(shared.ENDS.values()))}
SCHEDULES["inverse-square-root"] = "inverse_sqrt"
RENAMED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "kv_channels": "head_dim",
}


def settle(found: Import) -> None:
    """The split, the batch, the optimizer, the schedule and the model."""
    split(found)
    batch(found)
    found.set("method.name", "pretrain", of=OF)
    found.take("megatron")
    optimizer(found)
    precision(found)
    model(found)


def split(found: Import) -> None:
    """Degrees, what is sharded over data-parallel ranks, recomputation and offload."""
    found.take("megatron split")
    if (stages := shared.value_of(found, "parallel.pp", 1)) > 1:
        each = found.count("num_virtual_stages_per_pipeline_rank")
        if blocks := found.count("num_layers_per_virtual_pipeline_stage"):
            each = (found.count("num_layers", default=0) or 0) // (stages * blocks)
        keys = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
        found.set("parallel.schedule", "interleaved" if (each or 1) > 1 else "1f1b", *keys, of=OF)
        found.set("parallel.stages_per_rank", each if (each or 1) > 1 else None, *keys)
    if shared.value_of(found, "parallel.tp", 1) > 1:
        found.set("parallel.sequence_parallel", found.on("sequence_parallel"), "sequence_parallel", of=OF)
    sharded = word(found.get("data_parallel_sharding_strategy", default="optim_grads_params"))
    if found.on("use_megatron_fsdp") or found.on("use_torch_fsdp2") or found.on("use_custom_fsdp"):
        kinds = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
        keys = ("use_megatron_fsdp", "data_parallel_sharding_strategy")
        found.set("parallel.strategy", kinds.get(sharded), *keys, of=OF)
    else:
        kind = "zero1" if found.on("use_distributed_optimizer") else "ddp"
        found.set("parallel.strategy", kind, "use_distributed_optimizer", of=OF)
        copies, ranks = found.count(key := "num_distributed_optimizer_instances", default=1) or 1, shared.dp(found)
        if kind == "zero1" and 1 < copies < ranks and ranks % copies == 0:
            found.set("parallel.dp_replicate", copies, key)
            found.set("parallel.dp_shard", ranks // copies, key)
    mode = word(found.get("recompute_granularity", default="none"))
    mode = "selective" if found.on("recompute_activations") else mode
    if mode in ("full", "selective", "none"):
        found.set("recompute.mode", mode, "recompute_granularity", "recompute_activations", of=OF)
    if found.on("optimizer_cpu_offload"):
        found.set("offload.optimizer", "host", "optimizer_cpu_offload")
        share = found.number("optimizer_offload_fraction", default=1.0) or None
        found.set("offload.optimizer_fraction", share, "optimizer_offload_fraction", of=OF)


def batch(found: Import) -> None:
    """The batch of a step is given, and how often micro-batches are added up follows."""
    micro = found.count("micro_batch_size", default=1) or 1
    whole = found.count("global_batch_size") or micro * shared.dp(found)
    found.set("train.micro_batch_size", micro, "micro_batch_size", of=OF)
    found.set("train.global_batch_size", whole, "global_batch_size", "micro_batch_size")
    steps, samples = found.count("train_iters"), found.count("train_samples")
    if steps or samples:
        found.set("train.max_steps", steps or max(1, (samples or 0) // whole), "train_iters", "train_samples")


def optimizer(found: Import) -> None:
    """The optimizer and its schedule, in steps or samples."""
    shared.optimizer(found, "optimizer", "adam", OF)
    found.take("megatron optimizer")
    shared.clipping(found, found.number("clip_grad", default=1.0), "clip_grad", OF)
    schedule(found)


def schedule(found: Import) -> None:
    """The schedule (core/optimizer_param_scheduler.py), which counts sequences: a warm-up may end within a step."""
    style = word(found.get("lr_decay_style", default="linear"))
    ours = shared.ENDS.get(word(found.get("lr_wsd_decay_style", default="exponential"))) if style == "wsd" else style
    if ours not in SCHEDULES:
        return found.refuse(found.entries["lr_decay_style"], f"a rate that falls as {style} is not there yet")
    found.set("optim.schedule", ours := SCHEDULES[ours], "lr_decay_style", "lr_wsd_decay_style", of=OF)
    run, steps = _steps(found, "train"), shared.value_of(found, "train.max_steps")
    decay = _steps(found, "lr_decay") or run or 0.0
    warmup, share = _steps(found, "lr_warmup") or 0.0, found.number("lr_warmup_fraction")
    keys = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    warmup = warmup if share is None else share * decay
    if 0 < warmup < 1:
        found.notes.append("the warm-up ends within the first step there, and with it here")
        warmup = 1.0
    found.set("optim.warmup_steps", shared.whole(warmup), *keys, of=OF)
    if warmup:
        found.set("optim.warmup_from", found.number("lr_warmup_init", default=0.0), "lr_warmup_init", *keys, of=OF)
    ends = ("lr_decay_iters", "lr_decay_samples")
    if style in ("wsd", "inverse-square-root") and steps and decay and decay < steps:
        entry = found.entry(*ends) or found.entries["lr_decay_style"]
        return found.refuse(entry, f"a rate that falls as {style} and is constant before the run ends")
    if style == "inverse-square-root" and not warmup:
        said = "an inverse square root without a warm-up, which falls from the first sequence"
        return found.refuse(found.entries["lr_decay_style"], said)
    if style == "wsd":
        wsd = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        found.set("optim.decay_steps", shared.whole(_steps(found, "lr_wsd_decay")), *wsd)
        if steps and decay != steps:
            found.refuse(found.entries["lr_decay_style"], f"a run of {steps} steps of a schedule of {decay:g}")
    elif decay and decay != steps and style in ("linear", "cosine"):
        found.set("optim.decay_steps", shared.whole(max(1.0, decay - warmup)), *ends, of=f"{OF}: train_samples")
    return None


def _steps(found: Import, what: str) -> float | None:
    """A length that is given in steps (``_iters``) or in sequences (``_samples``), in steps."""
    samples = found.number(f"{what}_samples", default=0.0) or 0.0
    return found.number(f"{what}_iters") or samples / shared.value_of(found, "train.global_batch_size", 1) or None


def precision(found: Import) -> None:
    """The dtype of computing; no flag is fp32."""
    given = next((kind for kind in ("bf16", "fp16") if found.on(kind)), None)
    found.set("precision.compute", given or "fp32", *([given] if given else []), of=f"{OF}: no flag is fp32")
    if key := next((key for key in ("fp8_format", "fp8") if found.on(key)), None):
        found.refuse(found.entries[key], FLOAT8)


def model(found: Import) -> None:
    """The model's dimensions as a config of transformers."""
    if found.count("num_layers") is None:
        return
    if found.on("multi_latent_attention"):
        return found.refuse(found.entries["multi_latent_attention"], "latent attention is not read from them yet")
    config: dict[str, Any] = {ours: found.count(key) for key, ours in RENAMED.items() if found.count(key)}
    vocabulary = found.count("vocab_size") or VOCABULARY.get(word(found.get("tokenizer_type")))
    if vocabulary is None:
        return found.ask("model.config", "the vocabulary, which the tokenizer has")
    unit = (found.count("make_vocab_size_divisible_by", default=128) or 1) * shared.value_of(found, "parallel.tp", 1)
    config["vocab_size"] = -(-vocabulary // unit) * unit
    config["tie_word_embeddings"] = not found.on("untie_embeddings_and_output_weights")
    rope = word(found.get("position_embedding_type", default="learned_absolute")) == "rope"
    norm = word(found.get("normalization", default="layernorm"))
    if not found.on("swiglu") and not rope and norm == "layernorm":
        config = _gpt2(found, config)
    elif found.on("swiglu") and (rope or found.on("use_rotary_position_embeddings")) and norm == "rmsnorm":
        config |= _llama(found, config)
    else:
        made = f"{'rotary' if rope else 'learned'} positions and {'SwiGLU' if found.on('swiglu') else 'GELU'}"
        what = f"blocks of {norm}, {made} together are no model that is known"
        return found.refuse(found.entries["num_layers"], what)
    said = [key for key in (*RENAMED, "vocab_size") if key in found.entries]
    config = {key: value for key, value in config.items() if value is not None}
    found.set("model.config", config, *said, of=OF)
    return None


def _gpt2(found: Import, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_embd": config.get("hidden_size"),
        "n_layer": config.get("num_hidden_layers"),
        "n_head": config.get("num_attention_heads"),
        "n_inner": found.count("ffn_hidden_size"),
        "n_positions": config.get("max_position_embeddings", 1024),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _llama(found: Import, config: dict[str, Any]) -> dict[str, Any]:
    """SwiGLU's width, where no flag gives it, is two thirds of four times the model's, in steps of 64."""
    hidden = config.get("hidden_size", 0)
    width = found.count("ffn_hidden_size") or int(4 * hidden * 2 / 3 / 64) * 64
    groups = found.count("num_query_groups", default=1) if found.on("group_query_attention") else None
    more: dict[str, Any] = {
        "model_type": "llama",
        "intermediate_size": width,
        "num_key_value_heads": groups or config.get("num_attention_heads"),
        "rope_theta": found.number("rotary_base", default=10_000.0),
        "rms_norm_eps": found.number("norm_epsilon", default=1e-5),
        "attention_bias": not found.on("disable_bias_linear"),
        "mlp_bias": not found.on("disable_bias_linear"),
    }
    if found.on("qk_layernorm"):
        more["model_type"] = "qwen3"
    if experts := found.count("num_experts"):
        more |= {"model_type": "mixtral", "num_local_experts": experts}
        more["num_experts_per_tok"] = found.count("moe_router_topk", default=2)
        more["intermediate_size"] = found.count("moe_ffn_hidden_size") or width
        share = found.number("moe_aux_loss_coeff", default=0.0)
        found.set("model.router_aux_loss", share, "moe_aux_loss_coeff", of=OF)
        if found.on("moe_shared_expert_intermediate_size"):
            key = "moe_shared_expert_intermediate_size"
            found.refuse(found.entries[key], f"a shared expert of {show(found.get(key))} beside Mixtral's")
        for biased in ("attention_bias", "mlp_bias"):
            del more[biased]
    return more


SYSTEM = System("megatron", OF, marks("megatron"), ("megatron",), settle)
