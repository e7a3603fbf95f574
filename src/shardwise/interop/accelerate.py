"""Accelerate's YAML: how many processes, and how the model is split over them. It has no batch, model or optimizer.

Rules: utils/dataclasses.py, utils/constants.py and parallelism_config.py of accelerate at 16cb6eb."""

from __future__ import annotations

from shardwise.interop.deepspeed import DEVICES, STAGES
from shardwise.interop.shared import DTYPES, FLOAT8, fsdp_config, named_deepspeed
from shardwise.interop.system import Import, System, word


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
        _megatron(found)
    elif kind in ("multi_gpu", "no"):
        found.set("parallel.strategy", "ddp", "distributed_type", of="Accelerate")
    elif kind not in ("multi_cpu",):
        found.refuse(found.entries["distributed_type"], f"{kind} is none of FSDP, DEEPSPEED, MEGATRON_LM and MULTI_GPU")
    _parallelism(found)
    _precision(found)


def _deepspeed(found: Import) -> None:
    section = "deepspeed_config."
    named_deepspeed(found, beside=False)
    stage = found.count(f"{section}zero_stage")
    if stage is None and found.entry(f"{section}deepspeed_config_file"):
        return
    strategy = STAGES.get(str(2 if stage is None else stage))
    found.set("parallel.strategy", strategy, f"{section}zero_stage", of="Accelerate: stage 2")
    for theirs, ours in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "weights")):
        device = word(found.get(f"{section}{theirs}"))
        if device in DEVICES:
            found.set(f"offload.{ours}", DEVICES[device], f"{section}{theirs}")


def _megatron(found: Import) -> None:
    section = "megatron_lm_config.megatron_lm_"
    for theirs, ours in (("tp_degree", "tp"), ("pp_degree", "pp")):
        found.set(f"parallel.{ours}", found.count(f"{section}{theirs}"), f"{section}{theirs}")
    if found.on(f"{section}use_distributed_optimizer"):
        found.set("parallel.strategy", "zero1", f"{section}use_distributed_optimizer")
    if found.on(f"{section}recompute_activations"):
        found.set("recompute.mode", "selective", f"{section}recompute_activations")
    found.set("optim.max_grad_norm", found.number(f"{section}gradient_clipping"), f"{section}gradient_clipping")


def _parallelism(found: Import) -> None:
    section = "parallelism_config.parallelism_config_"
    names = {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard", "tp": "tp", "cp": "cp", "sp": "cp"}
    for theirs, ours in names.items():
        key = f"{section}{theirs}_size"
        degree = found.count(key)
        if degree and degree > 1:
            found.set(f"parallel.{ours}", degree, key)
            if theirs == "sp":
                found.set("parallel.cp_kind", "ulysses", key)


def _precision(found: Import) -> None:
    entry = found.entry("mixed_precision")
    name = word(entry.value if entry else "no")
    if entry is not None and name == "fp8":
        found.refuse(entry, FLOAT8)
    elif name in DTYPES or name == "false":
        found.set("precision.compute", DTYPES.get(name, "fp32"), "mixed_precision", of="Accelerate: no")
    elif entry is not None:
        found.refuse(entry, f"{name} is none of no, fp16 and bf16")


SYSTEM = System(
    "accelerate",
    "Accelerate",
    {
        "distributed_type": 4,
        "compute_environment": 2,
        "num_processes": 1,
        "main_training_function": 1,
        "rdzv_backend": 1,
    },
    ("accelerate",),
    settle,
)
