"""Accelerate's YAML: how many processes, and how the model is split over them. It has no batch, model or optimizer.

Rules: utils/dataclasses.py, utils/constants.py and parallelism_config.py of accelerate at 16cb6eb."""

from __future__ import annotations

from shardwise.interop.deepspeed import STAGES
from shardwise.interop.shared import DTYPES, FLOAT8, fsdp_config, named_deepspeed
from shardwise.interop.system import Import, System, marks, word


def settle(found: Import) -> None:
    """The split that ``distributed_type`` chooses, and the dtype."""
    kind = word(found.get("distributed_type", default="no"))
    if kind == "fsdp":
        fsdp_config(found)
        if "parallel.strategy" not in found.settings:
            found.set("parallel.strategy", "zero3", of="Accelerate: FULL_SHARD")
    elif kind == "deepspeed":
        _deepspeed(found)
    elif kind == "megatron_lm":
        found.take("accelerate megatron_lm")
    elif kind in ("multi_gpu", "no"):
        found.set("parallel.strategy", "ddp", "distributed_type", of="Accelerate")
    elif kind not in ("multi_cpu",):
        found.refuse(found.entries["distributed_type"], f"{kind} is none of FSDP, DEEPSPEED, MEGATRON_LM and MULTI_GPU")
    found.take("accelerate")
    sequences = "parallelism_config.parallelism_config_sp_size"
    if (degree := found.count(sequences, default=1) or 1) > 1:
        found.set("parallel.cp", degree, sequences)
        found.set("parallel.cp_kind", "ulysses", sequences)
    _precision(found)


def _deepspeed(found: Import) -> None:
    section = "deepspeed_config."
    named_deepspeed(found, beside=False)
    stage = found.count(f"{section}zero_stage")
    if stage is None and found.entry(f"{section}deepspeed_config_file"):
        return
    strategy = STAGES.get(str(2 if stage is None else stage))
    found.set("parallel.strategy", strategy, f"{section}zero_stage", of="Accelerate: stage 2")
    found.take("accelerate deepspeed")


def _precision(found: Import) -> None:
    entry = found.entry("mixed_precision")
    name = word(entry.value if entry else "no")
    if entry is not None and name == "fp8":
        found.refuse(entry, FLOAT8)
    elif name in DTYPES or name == "false":
        found.set("precision.compute", DTYPES.get(name, "fp32"), "mixed_precision", of="Accelerate: no")
    elif entry is not None:
        found.refuse(entry, f"{name} is none of no, fp16 and bf16")


SYSTEM = System("accelerate", "Accelerate", marks("accelerate"), ("accelerate",), settle)
