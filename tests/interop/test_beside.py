"""Beside the systems themselves, where they install on a CPU: the global batch, who reads which sequences, what is
sharded, the dtype and the optimizer's numbers of small files are what the system's own classes make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.interop.imports import read_files

WORLD = 8


def values(tmp_path: Path, *texts: dict[str, Any]) -> dict[str, Any]:
    """Every setting that files with these contents say on eight processes."""
    paths = []
    for index, text in enumerate(texts):
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps(text))
        paths.append(path)
    found = read_files(paths, WORLD)
    return {key: setting.value for key, setting in (found.settings | found.pins).items()}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a batch": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "recomputation": {"activation_checkpointing": True, "fp16": False},
    "an optimizer": {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "decay": {"weight_decay": 0.2, "max_grad_norm": 0.3, "optim": "adamw_torch"},
    "8 bits": {"optim": "adamw_bnb_8bit", "lr_scheduler_type": "cosine", "warmup_steps": 12},
    "steps": {"max_steps": 70, "num_train_epochs": 2, "seed": 5},
    "epochs": {"num_train_epochs": 1.5, "lr_scheduler_type": "constant", "save_strategy": "no"},
    "replicas": {"fsdp": "full_shard auto_wrap", "bf16": True},
    "gradients": {"fsdp": "shard_grad_op auto_wrap", "max_grad_norm": 0.0},
}
KINDS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw8bit"}


def recomputed(theirs: Any) -> bool:
    """The name of 5.20 and later for ``gradient_checkpointing``."""
    return bool(vars(theirs).get("activation_checkpointing"))


def compare_arguments(theirs: Any, found: dict[str, Any]) -> None:
    """Compare with transformers' class, or one that is made of it."""
    micro = theirs.per_device_train_batch_size
    assert found["train.micro_batch_size"] == micro
    assert found["train.global_batch_size"] == micro * theirs.gradient_accumulation_steps * WORLD
    numbers = ("learning_rate", theirs.learning_rate), ("beta1", theirs.adam_beta1), ("beta2", theirs.adam_beta2)
    numbers += ("eps", theirs.adam_epsilon), ("weight_decay", theirs.weight_decay)
    numbers += (("max_grad_norm", theirs.max_grad_norm or None),)
    for name, value in numbers:
        assert found[f"optim.{name}"] == value, name
    assert found["optim.name"] == KINDS[str(getattr(theirs.optim, "value", theirs.optim))]
    assert found["precision.compute"] == ("bf16" if theirs.bf16 else "fp16" if theirs.fp16 else "fp32")
    assert found["recompute.mode"] == ("full" if theirs.gradient_checkpointing or recomputed(theirs) else "none")
    kind = str(getattr(theirs.lr_scheduler_type, "value", theirs.lr_scheduler_type))
    assert found["optim.schedule"] == kind
    assert found["optim.warmup_steps"] == (0 if kind == "constant" else theirs.warmup_steps)
    if theirs.max_steps > 0:
        assert found["train.max_steps"] == theirs.max_steps and "train.num_epochs" not in found
    else:
        assert found["train.num_epochs"] == theirs.num_train_epochs


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_training_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    given = {"output_dir": str(tmp_path / "out"), "report_to": "none", **ARGUMENTS[name]}
    plain = {key: value for key, value in given.items() if not key.startswith("fsdp")}
    [theirs] = HfArgumentParser(TrainingArguments).parse_dict({**plain, "use_cpu": True})
    marks = {"per_device_train_batch_size": 8, "learning_rate": 5e-5, "num_train_epochs": 3}
    found = values(tmp_path, {**marks, "lr_scheduler_type": "linear", **given})
    compare_arguments(theirs, found)
    words = str(given.get("fsdp", ""))
    strategy = "zero3" if "full_shard" in words else "zero2" if words else None
    assert found.get("parallel.strategy") == strategy


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_trls_own_defaults(tmp_path: Path) -> None:
    """TRL's classes, where it is installed, have defaults of their own."""
    trl = pytest.importorskip("trl")
    for kind, more in ((trl.SFTConfig, {}), (trl.DPOConfig, {"beta": 0.2})):
        for name in ("nothing", "a batch", "an optimizer", "steps"):
            given = {"output_dir": str(tmp_path / "out"), "report_to": "none", **ARGUMENTS[name], **more}
            theirs = kind(**given, use_cpu=True, bf16=False)
            found = values(tmp_path, {"dataset_name": "org/data", "use_peft": False, "bf16": False, **given})
            compare_arguments(theirs, found)
            assert found["train.seq_len"] == theirs.max_length
            assert found["method.name"] == ("dpo" if more else "sft")


SPLITS: dict[str, dict[str, Any]] = {
    "replicas": {"distributed_type": "MULTI_GPU", "mixed_precision": "no"},
    "full": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
    "a number": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}},
    "none": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}},
    "hybrid": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
    "the host": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True},
    },
    "version 2": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    },
    "version 2, kept": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": "FULL_SHARD"},
    },
    "axes": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
        "parallelism_config": {
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_tp_size": 2,
            "parallelism_config_cp_size": 2,
        },
    },
    "rows and copies": {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4},
    },
    "stage 1": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1, "gradient_clipping": 0.5}},
    "stage 3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    },
    "stage 2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {}},
}
UNLOADED = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}
NAMES = {"1": "zero3", "2": "zero2", "3": "ddp", "4": "hsdp", "5": "hsdp"}
STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}


@pytest.mark.parametrize("name", SPLITS)
def test_accelerates_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Accelerate's own classes read what its launcher would set for each process."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    given = {"compute_environment": "LOCAL_MACHINE", "num_processes": WORLD, "num_machines": 1, "machine_rank": 0}
    given |= {"mixed_precision": "bf16", "use_cpu": False, **SPLITS[name]}
    if given["distributed_type"] == "FSDP":  # loading as it does by default asks for a device
        given["fsdp_config"] = {**UNLOADED, **given["fsdp_config"]}
    path = tmp_path / "accelerate.json"
    path.write_text(json.dumps(given))
    parsed = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = launch._validate_launch_command(parsed)
    found = values(tmp_path, given)
    if given["distributed_type"] == "DEEPSPEED":
        arguments.deepspeed_fields_from_accelerate_config = ",".join(given["deepspeed_config"])
        _, there = prepare_deepspeed_cmd_env(arguments)
        assert found["parallel.strategy"] == STAGES[there.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")]
        for key, ours in (("OPTIMIZER", "optimizer"), ("PARAM", "weights")):
            on_host = there.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{key}_DEVICE") == "cpu"
            assert (found.get(f"offload.{ours}") == "host") == on_host
        clip = there.get("ACCELERATE_GRADIENT_CLIPPING")
        assert found.get("optim.max_grad_norm") == (float(clip) if clip not in (None, "None", "none") else None)
    else:
        there = prepare_multi_gpu_env(arguments)
    assert found["precision.compute"] == {"no": "fp32"}.get(kind := there["ACCELERATE_MIXED_PRECISION"], kind)
    if given["distributed_type"] != "FSDP":
        return
    for key, value in there.items():
        if key.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version == 2:
        strategy = "zero3" if plugin.reshard_after_forward else "zero2"
    else:
        strategy = NAMES[str(plugin.sharding_strategy.value)]
    assert found["parallel.strategy"] == strategy
    assert (found.get("recompute.mode") == "full") == bool(plugin.activation_checkpointing)
    on_host = plugin.cpu_offload if isinstance(plugin.cpu_offload, bool) else bool(vars(plugin.cpu_offload))
    assert (found.get("offload.weights") == "host") == (on_host and "fsdp_offload_params" in given["fsdp_config"])
    if "parallelism_config" in given:
        axes = ParallelismConfig()
        sizes = {"dp_replicate": axes.dp_replicate_size, "dp_shard": axes.dp_shard_size}
        sizes |= {"tp": axes.tp_size, "cp": axes.cp_size}
        assert {axis: found.get(f"parallel.{axis}", 1) for axis in sizes} == sizes


SIZES: dict[str, dict[str, Any]] = {
    "all three": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    },
    "no accumulation": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2},
    "no micro-batch": {"train_batch_size": 64, "gradient_accumulation_steps": 4},
    "no whole": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    "whole alone": {"train_batch_size": 64},
    "micro alone": {"train_micro_batch_size_per_gpu": 3},
    "bf16": {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "fp16": {"train_batch_size": 8, "fp16": {"enabled": True}, "gradient_clipping": 0.5},
    "the host": {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            "offload_param": {"device": "cpu"},
        },
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_deepspeeds_config_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """DeepSpeed, where it is installed, has the same sizes of a batch, stage, offload and clipping."""
    runtime = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    monkeypatch.setattr(runtime.dist, "get_world_size", lambda *_, **__: WORLD)
    monkeypatch.setattr(runtime.dist, "get_rank", lambda *_, **__: 0)
    config = SIZES[name]
    theirs = runtime.DeepSpeedConfig(dict(config))
    found = values(tmp_path, {"zero_optimization": {"stage": 0}, **config})
    assert found["train.global_batch_size"] == theirs.train_batch_size
    assert found["train.micro_batch_size"] == theirs.train_micro_batch_size_per_gpu
    assert found["parallel.strategy"] == STAGES[str(int(theirs.zero_config.stage))]
    assert found["optim.max_grad_norm"] == (theirs.gradient_clipping or None)
    moved = theirs.zero_config.offload_optimizer
    assert (found.get("offload.optimizer") == "host") == (moved is not None and moved.device == "cpu")


def test_deepspeeds_sizes_by_its_rule(tmp_path: Path) -> None:
    """runtime/config.py of DeepSpeed at edaa722: whole = micro x accumulation x ranks; of what is missing, accumulation
    is 1 before the micro-batch is what is left."""
    wanted = {
        "all three": (64, 2),
        "no accumulation": (64, 2),
        "no micro-batch": (64, 2),
        "no whole": (64, 2),
        "whole alone": (64, 8),
        "micro alone": (24, 3),
    }
    for name, (whole, micro) in wanted.items():
        found = values(tmp_path, {"zero_optimization": {"stage": 0}, **SIZES[name]})
        assert (found["train.global_batch_size"], found["train.micro_batch_size"]) == (whole, micro), name
