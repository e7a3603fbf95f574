"""torchtune's YAML, whose ``_component_`` names the builder of each part. Rules: recipes/ of torchtune at bd2a0fc.

``dtype: bf16`` there makes the weights themselves bf16: there is no fp32 copy."""

from __future__ import annotations

import re

from shardwise.interop import shared
from shardwise.interop.system import Import, System, hub_names, marks, number, show, word, words

OF = "torchtune"
LOSSES = words("torchtune loss")


def settle(found: Import) -> None:
    """The model behind the builder's name, the split, the batch, the optimizer."""
    _model(found)
    _split(found)
    shared.batch_of_product(found, "batch_size", "gradient_accumulation_steps", 1, OF)
    _length(found)
    _optimizer(found)
    dtype = word(found.get("dtype", default="fp32"))
    if dtype in shared.DTYPES:
        found.set("precision.compute", shared.DTYPES[dtype], "dtype", of=OF)
        found.set("precision.weights", shared.DTYPES[dtype], "dtype", of=OF)
    on = found.on("enable_activation_checkpointing")
    found.set("recompute.mode", "full" if on else "none", "enable_activation_checkpointing", of=OF)
    _method(found)


def _model(found: Import) -> None:
    entry = found.entry("model._component_")
    if entry is None:
        return
    name = str(entry.value).rpartition(".")[2]
    tuned = re.match(r"(qlora|lora|dora)_", name)
    plain = name.removeprefix(tuned.group()) if tuned else name
    if "vision" in plain or "llama4" in plain:
        found.refuse(entry, f"{plain} reads images, which is not there: text models are")
    elif plain in (known := hub_names("torchtune")):
        found.set("model.path", known[plain], entry.key)
    else:
        found.ask("model.path", f"the model: torchtune's builder {show(plain)} is not known")
    if tuned:
        attention = list(found.get("model.lora_attn_modules", default=[]))
        linear = ["gate_proj", "up_proj", "down_proj"] if found.on("model.apply_lora_to_mlp") else []
        names = [{"output_proj": "o_proj"}.get(str(one), str(one)) for one in attention]
        found.take("torchtune adapter", OF)
        found.set("lora.targets", names + linear or None, "model.lora_attn_modules", "model.apply_lora_to_mlp")
        if found.on("model.use_dora") or "dora" in tuned.group():
            found.set("lora.dora", True, "model.use_dora", entry.key)
        if tuned.group() == "qlora_" or found.on("model.quantize_base"):
            found.set("lora.frozen", "nf4", entry.key)


def _split(found: Import) -> None:
    found.take("torchtune", OF)
    if found.world > 1:
        whole = found.entries.get(key := "fsdp_reshard_after_forward")
        strategy = "zero2" if whole and not whole.value else "zero3"
        found.set("parallel.strategy", strategy, key, of="torchtune: fully_shard")


def _length(found: Import) -> None:
    steps = found.count("max_steps_per_epoch")
    epochs = found.number("epochs", default=1.0) or 1.0
    if steps:
        found.set("train.max_steps", int(steps * epochs), "max_steps_per_epoch", "epochs")
    else:
        found.set("train.num_epochs", epochs, "epochs", of=OF)
    tokens = found.count("tokenizer.max_seq_len", "dataset.max_seq_len")
    if tokens is None:
        found.ask("train.seq_len", "the length of sequences: null there means that of the longest sample")
    found.set("train.seq_len", tokens, "tokenizer.max_seq_len", "dataset.max_seq_len")


def _optimizer(found: Import) -> None:
    shared.optimizer(found, "optimizer._component_", "AdamW", OF)
    shared.betas(found, "optimizer.betas", (0.9, 0.999), "torch")
    shared.clipping(found, found.number("clip_grad_norm"), "clip_grad_norm", OF)
    schedule = str(found.get("lr_scheduler._component_", default="")).rpartition(".")[2]
    if schedule in ("", "get_cosine_schedule_with_warmup"):
        found.set("optim.schedule", "cosine" if schedule else "constant", "lr_scheduler._component_", of=OF)
        steps = found.count("lr_scheduler.num_warmup_steps", default=0)
        found.set("optim.warmup_steps", steps, "lr_scheduler.num_warmup_steps", of=OF)
        if steps:
            found.set("optim.warmup_from", 0.0, of=OF)
        waves = found.entry("lr_scheduler.num_cycles")
        if waves is not None and number(waves.value) != 0.5:
            found.refuse(waves, f"a cosine of {show(waves.value)} waves is not there yet")
    else:
        found.refuse(found.entries["lr_scheduler._component_"], f"the schedule {show(schedule)} is not there yet")


def _method(found: Import) -> None:
    entry = found.entry("loss._component_")
    name = str(entry.value).rpartition(".")[2].lower() if entry else "crossentropyloss"
    if name not in LOSSES:
        assert entry is not None
        return found.refuse(entry, f"the loss {show(entry.value)} is not there yet")
    found.set("method.name", LOSSES[name], "loss._component_", of=OF)
    found.set("data.packing", found.on("dataset.packed"), "dataset.packed", of=OF)
    if LOSSES[name] == "dpo":
        found.take("torchtune dpo", OF)
    found.ask("data.path", "the data, which torchtune's builders name")
    return None


SYSTEM = System("torchtune", OF, marks("torchtune"), ("torchtune",), settle)
