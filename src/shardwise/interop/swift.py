"""ms-swift's arguments, in JSON, YAML or a script: transformers' under their names, with defaults of its own.

Rules: swift/arguments at 3602360: adapters unless told otherwise, and 16 sequences a step."""

from __future__ import annotations

from math import ceil

from shardwise.interop import shared
from shardwise.interop.system import Import, Said, System, marks, show, word
from shardwise.interop.trainer import Defaults, arguments, recompute

OF = "ms-swift"
STAGES = {"zero0": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"}
LORA = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}


def settle(found: Import) -> None:
    """The tuner, the built-in name of a DeepSpeed file, and transformers' arguments."""
    kind = word(found.get("tuner_type", "train_type", default="lora"))
    stage = word(found.get("deepspeed"))
    if stage.removesuffix("_offload") in STAGES:
        found.set("parallel.strategy", STAGES[stage.removesuffix("_offload")], "deepspeed")
        if stage.endswith("_offload"):
            found.set("offload.optimizer", "host", "deepspeed")
        found.decided.add("zero")
    _accumulation(found)
    method = word(found.get("rlhf_type", default="sft"))
    rate = 1e-4 if kind == "lora" else 1e-5
    arguments(found, OF, Defaults(rate, None, "bf16", rows=1, schedule="cosine"))
    dtype = word(found.get("torch_dtype", default="bfloat16"))
    found.set("precision.compute", shared.DTYPES.get(dtype, "bf16"), "torch_dtype", of=OF)
    found.take("swift", OF)
    recompute(found, default=True)
    if method in ("sft", "dpo"):
        found.set("method.name", method, "rlhf_type", of=OF)
        shared.too_long(found, "truncation_strategy", {"delete": "drop", "right": "truncate"}, OF)
    else:
        found.refuse(found.entries["rlhf_type"], f"{method} is not read from such files yet: dpo is")
    if kind == "lora":
        shared.adapter(found, 8, 32.0, LORA, OF, dropout=0.05)
        if (bits := found.count("quant_bits")) == 4:
            found.set("lora.frozen", "nf4", "quant_bits")
        elif bits:
            found.refuse(
                found.entries["quant_bits"],
                f"frozen weights in {bits} bits: `lora.frozen` has nf4, and float8 of a byte",
            )
    elif kind != "full":
        said = "tuner_type" if "tuner_type" in found.entries else "train_type"
        found.refuse(found.entries[said], f"{show(kind)}: full and lora are there")
    shared.added_tokens(found, (), ("new_special_tokens",))
    shared.template(found)


def _accumulation(found: Import) -> None:
    if found.count("gradient_accumulation_steps") is None:
        rows = found.count("per_device_train_batch_size", default=1) or 1
        times = ceil(16 / rows / found.world)
        found.entries["gradient_accumulation_steps"] = Said("gradient_accumulation_steps", times, f"default of {OF}")


SYSTEM = System("swift", OF, marks("swift"), ("swift", "hf"), settle)
