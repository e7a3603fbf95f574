"""NeMo's YAML, of four kinds: overrides of Megatron-Bridge's recipes, NeMo 1's Hydra files, Automodel's, and NeMo-RL's.
Most of it is Megatron-LM's words in sections; the table says which, and here is what is not.

Rules: Megatron-Bridge at 067f987 (training/config.py), Automodel at 004386c, NeMo-RL's loss functions."""

from __future__ import annotations

from typing import Any

from shardwise.interop import megatron, shared
from shardwise.interop.record import Import, Said, System, show, word

OF = "NeMo"
BRIDGE, HYDRA, AUTOMODEL, RL = "Megatron-Bridge", "NeMo 1", "NeMo Automodel", "NeMo-RL"
SECTIONS = ("model.optim.sched.", "model.optim.", "model.tokenizer.", "model.", "train.", "optimizer.", "scheduler.")
SECTIONS += (
    "lr_scheduler.",
    "ddp.",
    "dist.",
    "rng.",
    "policy.megatron_cfg.optimizer.",
    "policy.megatron_cfg.scheduler.",
)
SECTIONS += ("policy.megatron_cfg.distributed_data_parallel_config.", "policy.megatron_cfg.")
SWITCHES = ("policy.dtensor_cfg.", "policy.dtensor_cfg.lora_cfg.", "policy.megatron_cfg.", "policy.megatron_cfg.peft.")
SWITCHES += ("policy.megatron_cfg.fp8_cfg.",)
OTHERS = ("policy.optimizer.", "policy.scheduler")
"""What NeMo-RL's files say for torch, and which Megatron does not read."""
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo 1's optimizers whose state is sharded."""
LAYERS = {"linear_qkv": ["q", "k", "v"], "linear_proj": ["o"], "linear_fc1": ["gate", "up"], "linear_fc2": ["down"]}
ADAPTERS = {BRIDGE: ("peft.", 32, 32.0), AUTOMODEL: ("peft.", 8, 32.0), RL: ("policy.dtensor_cfg.lora_cfg.", 8, 32.0)}
"""Where adapters are described, with the defaults of rank and alpha."""


def settle(found: Import) -> None:
    """Megatron-LM's words, and what a kind of file says or takes for granted beside them."""
    kind = _kind(found)
    _in_megatrons_words(found)
    if kind == HYDRA:
        _hydra(found)
    before = set(found.settings)
    for settles in (megatron.split, megatron.batch, megatron.optimizer, megatron.precision, megatron.model):
        settles(found)
    found.set("train.seq_len", found.count("seq_length", "encoder_seq_length"), "seq_length", "encoder_seq_length")
    found.set("run.seed", found.count("seed"), "seed")
    for key in [key for key in found.settings if key not in before]:
        if kind == BRIDGE and found.settings[key].origin.startswith("default of"):
            del found.settings[key]  # the recipe that the file changes says it
    betas = found.entry("model.optim.betas", "optimizer.betas", "policy.optimizer.kwargs.betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        found.set("optim.beta1", float(betas.value[0]), betas.key)
        found.set("optim.beta2", float(betas.value[1]), betas.key)
    _precision(found, kind)
    _adapter(found, kind)
    {BRIDGE: _bridge, HYDRA: _pretrain, AUTOMODEL: _automodel, RL: _rl}[kind](found)
    if "train.seq_len" not in found.settings:
        found.ask("train.seq_len", "the length of sequences")


def _kind(found: Import) -> str:
    """Which of the four kinds of file it is."""
    marks = {"policy.": RL, "step_scheduler.": AUTOMODEL, "distributed.": AUTOMODEL, "trainer.": HYDRA}
    return next((kind for mark, kind in marks.items() if any(key.startswith(mark) for key in found.entries)), BRIDGE)


def _in_megatrons_words(found: Import) -> None:
    """Give each key that Megatron-LM has a word for the word, too, but for what counts without it only."""
    megatrons = found.on("policy.megatron_cfg.enabled")
    for key, entry in list(found.entries.items()):
        row = SYSTEM.row(key)
        if row is None or row.fate != "read" or entry.value is None or (megatrons and key.startswith(OTHERS)):
            continue
        bare = next((key.removeprefix(part) for part in SECTIONS if key.startswith(part)), key)
        try:
            said = Said(key, row.value(entry.value) if row.ours else entry.value, entry.where)
        except KeyError:
            found.refuse(entry, f"{show(entry.value)} is none of {', '.join(row.values)}")
            continue
        other = found.entries.setdefault(row.ours or bare, said)
        if other.value != said.value and (row.ours or bare) == "seq_length":
            found.refuse(entry, f"`{other.key}` says {show(other.value)}")


def _hydra(found: Import) -> None:
    """NeMo 1's optimizer by name, and its cosine, which ends ``constant_steps`` before the run does."""
    if word(found.get("model.optim.name")) in SHARDED:
        found.entries["use_distributed_optimizer"] = Said(
            "model.optim.name", True, found.entries["model.optim.name"].where
        )
    found.entries["optimizer"] = Said("model.optim.name", "adam", "")
    if found.get("num_query_groups"):
        found.entries["group_query_attention"] = found.entries["num_query_groups"]
    steps, constant = found.count("train_iters"), found.count("model.optim.sched.constant_steps", default=0)
    if steps and constant:
        decay = max(1 + (found.count("lr_warmup_iters", default=0) or 0), steps - constant)
        said = found.entries["model.optim.sched.constant_steps"]
        found.entries["lr_decay_iters"] = Said(said.key, decay, said.where)


def _pretrain(found: Import) -> None:
    found.set("method.name", "pretrain", of=HYDRA)
    if found.on("model.fsdp"):
        kinds = {"full": "zero3", "grad": "zero2", "hybrid": "hsdp"}
        found.set("parallel.strategy", kinds.get(word(found.get("model.fsdp_sharding_strategy"))), "model.fsdp")
    if "optim.schedule" in found.settings and found.entry("model.optim.sched.name") is None:
        found.set("optim.schedule", "constant", of=f"{HYDRA}: no schedule")
    if found.entry("clip_grad") is None:
        found.clear("optim.max_grad_norm", of=HYDRA)


def _bridge(found: Import) -> None:
    found.notes.append(
        f"the files of {BRIDGE} change a recipe of it that is named on its command line: what they leave out, the model "
        "and the optimizer's other numbers among it, is not read"
    )
    tuned = [key for key in ("peft.dim", "dataset.dataset_root", "optimizer.finetune_lr") if key in found.entries]
    found.set("method.name", "sft" if tuned else None, *tuned)


def _automodel(found: Import) -> None:
    target = word(found.get("dataset._target_"))
    kind = "pretrain" if "megatron" in target or "nanogpt" in target else "sft"
    found.set("method.name", kind, "dataset._target_", of=AUTOMODEL)
    found.set("model.path", found.get("model.pretrained_model_name_or_path"), "model.pretrained_model_name_or_path")
    name = found.get("dataset.path_or_dataset")
    found.set("data.path", name and f"hf://datasets/{name}", "dataset.path_or_dataset")
    length = found.count("packed_sequence.packed_sequence_size", default=0)
    found.set(
        "data.packing", bool(length) if kind == "sft" else None, "packed_sequence.packed_sequence_size", of=AUTOMODEL
    )
    if length:
        found.set("train.seq_len", length, "packed_sequence.packed_sequence_size")
    strategy = word(found.get("distributed.strategy", default="fsdp2"))
    found.set("parallel.strategy", "ddp" if strategy == "ddp" else "zero3", "distributed.strategy", of=AUTOMODEL)
    if found.on("distributed.activation_checkpointing"):
        found.set("recompute.mode", "full", "distributed.activation_checkpointing")
    found.set("parallel.dp_replicate", found.count("distributed.dp_replicate_size"), "distributed.dp_replicate_size")
    if found.entry("lr_decay_style") is None:
        found.set("optim.schedule", "constant", of=f"{AUTOMODEL}: no schedule")
    elif found.entry("lr_warmup_iters") is None:
        found.set("optim.warmup_steps", 0.1, of=f"{AUTOMODEL}: a tenth of the steps")
    _epochs(found, "step_scheduler.num_epochs", 10.0 if "train.max_steps" not in found.settings else None)


def _rl(found: Import) -> None:
    name = "dpo" if any(key.startswith("dpo.") for key in found.entries) else "sft"
    found.set("method.name", name, of=RL)
    found.set("model.path", found.get("policy.model_name"), "policy.model_name")
    if not found.on("policy.megatron_cfg.enabled"):
        found.set("parallel.strategy", "zero3", "policy.dtensor_cfg.enabled", of=RL)
        for ours in ("optimizer", "weights") * found.on("policy.dtensor_cfg.cpu_offload"):
            found.set(f"offload.{ours}", "host", "policy.dtensor_cfg.cpu_offload")
        if found.on("policy.dtensor_cfg.activation_checkpointing"):
            found.set("recompute.mode", "full", "policy.dtensor_cfg.activation_checkpointing")
        _torch_schedule(found)
    if name == "sft":
        found.set("data.packing", found.on("policy.sequence_packing.enabled"), "policy.sequence_packing.enabled", of=RL)
    _epochs(found, f"{name}.max_num_epochs", None)


def _torch_schedule(found: Import) -> None:
    """torch's schedules, one after another: but for a rate that stays, none is there."""
    found.set("optim.schedule", "constant", of=f"{RL}: no schedule")
    entry = found.entry("policy.scheduler", "policy.scheduler.name")
    if entry is None:
        return
    for part in entry.value if isinstance(entry.value, list) else [{"name": entry.value}]:
        name = str(part.get("name", "")) if isinstance(part, dict) else ""
        if name.endswith("LinearLR"):
            found.refuse(entry, "a warm-up that begins above 0 (LinearLR) is not there yet")
        elif name and not name.endswith("ConstantLR"):
            found.refuse(entry, f"the schedule {name} is not there yet")


def _epochs(found: Import, key: str, default: float | None) -> None:
    """Passes over the data, where no steps are given."""
    if "train.max_steps" not in found.settings:
        found.set("train.num_epochs", found.number(key, default=default), key, of=AUTOMODEL)


def _precision(found: Import, kind: str) -> None:
    """The dtype of computing by name, as ``bf16_mixed``, ``bf16-mixed``, 16 or ``torch.bfloat16``."""
    keys = ("trainer.precision", "mixed_precision", "policy.precision", "model.torch_dtype", "model.precision")
    entry = found.entry(*keys)
    name = word(entry.value).removeprefix("torch.") if entry is not None else ""
    if entry is not None and ("fp8" in name or "fp4" in name):
        return found.refuse(entry, "products in fp8 are not there yet")
    named = {
        "bf": "bf16",
        "16": "fp16",
        "fp16": "fp16",
        "float16": "fp16",
        "fp32": "fp32",
        "float32": "fp32",
        "32": "fp32",
    }
    compute = next((ours for begin, ours in named.items() if name.startswith(begin)), None)
    if entry is not None and compute:
        found.set("precision.compute", compute, entry.key)
    elif kind == AUTOMODEL:
        compute = "bf16"
        found.set("precision.compute", compute, of=f"{AUTOMODEL}: that of the weights")
    if kind == AUTOMODEL and compute == "bf16":
        found.set("precision.weights", "bf16", "model.torch_dtype", of=f"{AUTOMODEL}: the checkpoint's")
    return None


def _adapter(found: Import, kind: str) -> None:
    """LoRA, with Megatron-Core's fused layers as the roles that they hold."""
    section, rank, alpha = ADAPTERS.get(kind, ("peft.", 8, 32.0))
    enabled = found.on(f"{section}enabled") if kind == RL else any(key.startswith(section) for key in found.entries)
    if found.on("policy.megatron_cfg.peft.enabled"):
        section, enabled = "policy.megatron_cfg.peft.", True
    if not enabled:
        return
    words = {"rank": "dim", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
    shared.adapter(found, rank, alpha, {f"{section}{theirs}": ours for ours, theirs in words.items()}, kind)
    targets: Any = found.get(f"{section}target_modules")
    if not targets or found.on(f"{section}match_all_linear"):
        found.set("lora.targets", "all-linear", f"{section}target_modules", of=kind)
    elif isinstance(targets, list):
        roles = [role for name in targets for role in LAYERS.get(str(name), [str(name).lstrip("*.")])]
        found.set("lora.targets", roles, f"{section}target_modules")


SYSTEM = System(
    "nemo",
    "NeMo",
    {
        "trainer.*": 2,
        "exp_manager.*": 3,
        "model.*model_parallel_size": 3,
        "model.seq_length": 2,
        "train.*": 1,
        "scheduler.*": 1,
        "train.train_iters": 3,
        "step_scheduler.*": 5,
        "policy.*": 4,
        "distributed.*": 2,
        "dpo.*": 2,
        "grpo.*": 2,
        "policy.megatron_cfg.*": 2,
    },
    ("nemo", "megatron"),
    settle,
    SECTIONS,
    SWITCHES,
)
