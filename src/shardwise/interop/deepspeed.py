"""DeepSpeed's JSON. ``auto`` is not DeepSpeed's word but that of transformers' Trainer, which fills it from its own
arguments: here too, it says nothing.

Rules: runtime/config.py and zero/config.py of DeepSpeed at edaa722."""

from __future__ import annotations

from shardwise.interop.shared import betas, clipping, dp, optimizer, value_of
from shardwise.interop.system import Import, System, Taken, marks, show, word

STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
SWITCHES = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bf16": "bf16"}


def settle(found: Import) -> None:
    """The stage, the batch whose three numbers must agree, the optimizer, the schedule and the precision."""
    _sharding(found)
    _batch(found)
    _precision(found)
    _optimizer(found)
    _schedule(found)
    entry = found.entries.get("gradient_clipping")
    if entry is None or word(entry.value) != "auto":
        clipping(found, found.number("gradient_clipping", default=1.0), "gradient_clipping", "DeepSpeed")
    if entry is None:
        found.notes.append("without `gradient_clipping` DeepSpeed clips at 1.0 since 0.19, and did not before; so here")
    kinds = {"zero": "zero_optimization.stage", "optimizer": "optimizer.type", "schedule": "scheduler.type"}
    found.decided |= {"zero", *(what for what, key in kinds.items() if found.entry(key))}


def _sharding(found: Import) -> None:
    zero = "zero_optimization."
    stage = word(found.get(f"{zero}stage", default="0"))
    if stage in STAGES:
        found.set("parallel.strategy", STAGES[stage], f"{zero}stage", of="DeepSpeed: stage 0")
    elif f"{zero}stage" in found.entries:
        found.refuse(found.entries[f"{zero}stage"], f"stage {show(stage)} is none of 0 to 3")
    found.take("deepspeed")
    for part in ("optimizer", "param"):
        path = f"{zero}offload_{part}.nvme_path"
        if word(found.get(f"{zero}offload_{part}.device")) == "nvme":
            found.set("offload.directory", found.get(path), path)
    ratio = found.number(f"{zero}offload_optimizer.ratio")
    if ratio is not None and 0 < ratio < 1:
        found.set("offload.optimizer_fraction", ratio, f"{zero}offload_optimizer.ratio")
    if (found.count(key := "sequence_parallel_size", default=1) or 1) > 1:
        found.set("parallel.cp_kind", "ulysses", key)
    size, ranks = found.count(key := f"{zero}mics_shard_size", default=-1) or -1, dp(found)
    if 1 < size < ranks and ranks % size == 0:
        found.set("parallel.dp_shard", size, key)
        found.set("parallel.dp_replicate", ranks // size, key)


def _batch(found: Import) -> None:
    """Read the three sizes of a batch; one that is missing follows from the others."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, times = (found.count(key) for key in keys)
    ranks = dp(found)
    if whole and micro and times and whole != micro * times * ranks:
        product = f"micro-batch {micro} x accumulation {times} x {ranks} data-parallel ranks"
        found.refuse(found.entries[keys[0]], f"train_batch_size {whole} is not {product}")
    if whole is None and micro:
        whole = micro * (times or 1) * ranks
    if whole and not micro:
        micro = whole // ((times or 1) * ranks) or None
    if whole and micro and not times and whole % (micro * ranks):
        said = f"train_batch_size {whole} is no multiple of micro-batch {micro} x {ranks} data-parallel ranks"
        found.refuse(found.entries[keys[0]], said)
    found.set("train.global_batch_size", whole, *keys)
    if whole:
        found.set("train.micro_batch_size", micro, *keys)


def _precision(found: Import) -> None:
    said = {key: word(found.entries[key].value) for key in SWITCHES if key in found.entries}
    chosen = next((key for key, value in said.items() if value == "true"), None)
    if chosen is not None:
        found.set("precision.compute", SWITCHES[chosen], chosen)
    elif "auto" not in said.values():
        found.set("precision.compute", "fp32", of="DeepSpeed: fp16 and bf16 off")


def _optimizer(found: Import) -> None:
    if found.entry("optimizer.type") is None:
        return
    optimizer(found, "optimizer.type", "AdamW", "DeepSpeed", "muon")
    found.take("deepspeed optimizer", "DeepSpeed")
    name, plain = word(found.get("optimizer.type")), "optimizer.params."
    decoupled = word(found.get(f"{plain}adam_w_mode", default=True)) != "false"
    if name == "adam" and value_of(found, "optim.weight_decay") and not decoupled:
        found.refuse(found.entries["optimizer.type"], "Adam whose weight decay goes through the moments")
    betas(found, f"{plain}betas")
    if name == "muon":
        _muon(found, plain)


def _muon(found: Import, plain: str) -> None:
    """Muon's own numbers (runtime/zero/muon/original_muon.py at 15e3bf4), which scales as the original does."""
    found.take("deepspeed muon")
    if found.number(f"{plain}muon_lr") is not None and found.number(f"{plain}adam_lr") is None:
        found.set("optim.adam_learning_rate", found.number(f"{plain}lr"), f"{plain}lr")
    if found.entry(f"{plain}eps") is None:
        found.set("optim.eps", 1e-10, of="DeepSpeed")


def _schedule(found: Import) -> None:
    """DeepSpeed's schedules (runtime/lr_schedules.py at 22779f2), a step late: the first two steps have one rate. What
    is ``auto`` is the trainer's to say."""
    kinds = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_to_last"}
    entry, plain = found.entry("scheduler.type"), "scheduler.params."
    if entry is None:
        return
    name = word(entry.value)
    if name not in kinds:
        return found.refuse(entry, f"the schedule {show(entry.value)} is not there yet")
    found.set("optim.schedule", kinds[name], "scheduler.type")
    if name != "warmupcosinelr":
        found.set("optim.learning_rate", found.number(f"{plain}warmup_max_lr"), f"{plain}warmup_max_lr")
    if name == "warmupdecaylr" and f"{plain}warmup_max_lr" not in found.entries:
        found.settings["optim.learning_rate"] = Taken(1e-3, f"{entry.where} {entry.key}: no warmup_max_lr")
    low = found.number(f"{plain}warmup_min_lr", default=0.0) or 0.0
    found.set("optim.warmup_from", low, f"{plain}warmup_min_lr", of="DeepSpeed")
    found.set("optim.warmup_delay", 1, of="DeepSpeed: the schedule is a step late")
    found.set("optim.warmup_shape", word(found.get(f"{plain}warmup_type", default="log")), f"{plain}warmup_type")
    steps = None
    if word(found.entries[key].value if (key := f"{plain}warmup_num_steps") in found.entries else None) != "auto":
        steps = max(2, found.count(key, default=1000) or 0)
        found.set("optim.warmup_steps", steps, key, of="DeepSpeed")
    if (total := found.count(f"{plain}total_num_steps")) and name != "warmuplr":
        found.set("train.max_steps", total, of=f"DeepSpeed: {plain}total_num_steps")
        if steps is not None:
            found.set("optim.decay_steps", max(1, total - steps), f"{plain}total_num_steps", key)
    if name == "warmupdecaylr":
        found.set("optim.min_learning_rate", low, f"{plain}warmup_min_lr", of="DeepSpeed")
    if name == "warmupcosinelr":
        share = found.number(f"{plain}cos_min_ratio", default=1e-4) or 0.0
        rate = value_of(found, "optim.learning_rate", 1e-3)
        found.set("optim.min_learning_rate", share * rate, f"{plain}cos_min_ratio", of="DeepSpeed")
        if found.number(f"{plain}warmup_min_ratio"):
            said = "a first step whose rate is 0, and a warm-up that begins above it"
            found.refuse(found.entries[f"{plain}warmup_min_ratio"], said)
    return None


SYSTEM = System("deepspeed", "DeepSpeed", marks("deepspeed"), ("deepspeed",), settle)
