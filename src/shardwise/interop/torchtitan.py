"""TorchTitan's TOML, of its three generations by key, and the literal keywords of its configurations in Python. Rules:
torchtitan/config at the parent of 9810191, and of TorchTitan 0.3; since 73aed7f batches are tokens.

``local_batch_size`` is that of a data-parallel rank; the rate rises linearly, holds, and falls over the last
``decay_ratio`` of the steps, or over all that is left."""

from __future__ import annotations

import re
from typing import Any

from shardwise.interop import shared
from shardwise.interop.programs import CHOICE
from shardwise.interop.shared import FLOAT8
from shardwise.interop.system import Import, Said, System, hub_names, marks, show, word, words

OF = "TorchTitan"
TOKENS = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step")
LOSSES = ("ChunkedLossWrapper.Config", "CrossEntropyLoss.Config", "ChunkedCELoss.Config")
SCHEDULES = words("torchtitan pipeline")
SHARD = [f"{section}.data_parallel_shard_degree" for section in ("parallelism", "training", "experimental")]


def settle(found: Import) -> None:
    """The model by name and flavor, the split, the batch, the optimizer."""
    if "_called_" in found.entries:
        _in_the_words_of_files(found)
    found.take("torchtitan", OF)
    _model(found)
    _split(found)
    _batch(found)
    _optimizer(found)
    _schedule(found)
    chats = "Chat" in str(found.get("dataloader._called_", default=""))
    found.set("method.name", "sft" if chats else "pretrain", *["dataloader._called_"] * chats, of=OF)
    found.set("model.init", "random", of=f"{OF}: weights are new unless a checkpoint is loaded")
    _precision(found)
    found.ask("data.path", "the data: TorchTitan's names are of its own registry")


def _in_the_words_of_files(found: Import) -> None:
    """Give what calls say in Python the keys that it has in TOML."""

    def say(key: str, value: Any, said: str) -> None:
        found.entries[key] = Said(said, value, found.entries[said].where)

    flavor, name = found.entry("model_spec._0_"), word(found.get(CHOICE))
    if flavor is not None:
        say("model.flavor", flavor.value, "model_spec._0_")
        known = (key.partition(" ")[0] for key in hub_names("torchtitan"))
        family = next((one for one in known if name.startswith(f"{one}_") or f"_{one}_" in name), None)
        say("model.name", family or "one", "model_spec._0_")
    if "activation_checkpoint._called_" in found.entries:
        kind = "full" if found.get("activation_checkpoint._called_") == "FullAC.Config" else "selective"
        say("activation_checkpoint.mode", kind, "activation_checkpoint._called_")
    elif "activation_checkpoint" in found.entries:
        say("activation_checkpoint.mode", "none", "activation_checkpoint")
    for place, beta in enumerate(found.pair("optimizer.betas") or (), 1):
        say(f"optimizer.beta{place}", beta, "optimizer.betas")
    for key, entry in list(found.entries.items()):
        if key.endswith("._called_") and re.search(r"Float8|MX|NVFP4", str(entry.value)):
            found.refuse(entry, FLOAT8)
        if re.fullmatch(r"loss(\.loss_fn)?\._called_", key) and str(entry.value) not in LOSSES:
            found.refuse(entry, "another loss")


def _model(found: Import) -> None:
    name, flavor = word(found.get("model.name", default="llama3")), word(found.get("model.flavor", default=""))
    known = hub_names("torchtitan").get(f"{name} {flavor}")
    if name in ("flux", "llama3_vlm"):
        return found.refuse(found.entries["model.name"], f"{name} makes or reads images, which is not there")
    found.set("model.path", known, "model.name", "model.flavor")
    return found.ask("model.path", f"the model: {name} of flavor {flavor or 'unknown'}")


def _split(found: Import) -> None:
    found.take("torchtitan split")
    shard = found.count(*SHARD, default=-1)
    if shard == 1:  # replicas alone, which the strategy says
        found.settings.pop("parallel.dp_replicate", None)
    resharded = word(found.get("parallelism.fsdp_reshard_after_forward", default="default"))
    piped = shared.value_of(found, "parallel.pp", 1) > 1
    kept = resharded == "never" or (resharded == "default" and piped)
    found.set("parallel.strategy", "ddp" if shard == 1 else "zero2" if kept else "zero3", *SHARD, of=OF)
    entry = found.entry("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    if piped and entry is not None:
        if word(entry.value) in SCHEDULES:
            found.set("parallel.schedule", SCHEDULES[word(entry.value)], entry.key)
        else:
            found.refuse(entry, f"the schedule {show(entry.value)} of a pipeline is not there")


def _batch(found: Import) -> None:
    tokens = found.count("training.max_context_length", default=2048) or 2048
    if f"training.{TOKENS[0]}" in found.entries:
        return _batch_of_tokens(found, tokens)
    rows = found.count("training.local_batch_size", "training.batch_size", default=8) or 8
    whole = found.count("training.global_batch_size", default=-1) or -1
    times = found.count("training.gradient_accumulation_steps", default=1) or 1
    said = ("training.local_batch_size", "training.batch_size", "training.gradient_accumulation_steps")
    if shared.value_of(found, "parallel.pp", 1) == 1:
        found.set("train.micro_batch_size", rows, *said[:2], of=OF)
    else:
        key = "parallelism.pipeline_parallel_microbatch_size"
        found.set("train.micro_batch_size", found.count(key, default=1), key, of=OF)
    ours = whole if whole > 0 else rows * times * shared.dp(found)
    return found.set("train.global_batch_size", ours, "training.global_batch_size", *said, of=OF)


def _batch_of_tokens(found: Import, length: int) -> None:
    """A batch in tokens: those of a micro-batch of a data-parallel rank, and of a step, in sequences of ``length``."""
    micro, step = (f"training.{name}" for name in TOKENS)
    count = found.count(micro, default=length) or length
    if count % length:
        return found.refuse(found.entries[micro], f"{count} tokens are no multiple of {length}, a sequence's")
    times = found.count(key := "parallelism.num_pp_microbatches", default=1) or 1
    times = times if shared.value_of(found, "parallel.pp", 1) > 1 else 1
    whole = found.count(step, default=-1) or -1
    whole = whole if whole > 0 else count * times * shared.dp(found)
    found.set("train.micro_batch_size", count // length, micro)
    return found.set("train.global_batch_size", max(1, whole // length), step, micro, key)


def _optimizer(found: Import) -> None:
    shared.optimizer(found, "optimizer.name", "AdamW", OF)


def _schedule(found: Import) -> None:
    """A linear warm-up, a stable rate, and a fall to ``min_lr_factor`` of it (components/optimizer/lr_scheduler.py)."""
    steps = found.count("training.steps", default=10_000) or 10_000
    planned = found.count("lr_scheduler.total_steps", default=steps) or steps
    if planned != steps:
        said = f"a schedule of {planned} steps in a run of {steps}"
        return found.refuse(found.entries["lr_scheduler.total_steps"], said)
    warmup = found.count("lr_scheduler.warmup_steps", "training.warmup_steps", default=200) or 0
    share = found.number("lr_scheduler.decay_ratio")
    kind = word(found.get("lr_scheduler.decay_type", default="linear"))
    low = found.number("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min", default=0.0) or 0.0
    rate = shared.value_of(found, "optim.learning_rate", 8e-4)
    found.set("optim.warmup_steps", min(warmup, steps), "lr_scheduler.warmup_steps", "training.warmup_steps", of=OF)
    if share == 0.0:
        return found.set("optim.schedule", "constant", "lr_scheduler.decay_ratio")
    left = steps - min(warmup, steps)
    length = left if share is None else min(left, round(share * steps))
    if kind not in ("linear", "cosine", "sqrt"):
        return found.refuse(found.entries["lr_scheduler.decay_type"], f"a rate that falls as {kind} is not there yet")
    keys = ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
    stable = length < left or kind == "sqrt"
    found.set("optim.schedule", shared.ENDS[kind] if stable else kind, *keys, of=OF)
    if stable:
        found.set("optim.decay_steps", max(1, length), "lr_scheduler.decay_ratio", of=OF)
    if low:
        found.set("optim.min_learning_rate", low * rate, "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
    return None


def _precision(found: Import) -> None:
    weights = word(found.get("training.dtype", default="float32"))
    compute = word(found.get("training.mixed_precision_param", default="bfloat16"))
    found.set("precision.weights", shared.DTYPES.get(weights), "training.dtype", of=OF)
    ours = "bf16" if weights == "bfloat16" else shared.DTYPES.get(compute)
    found.set("precision.compute", ours, "training.mixed_precision_param", of=OF)
    converters = found.get("model.converters", default=[])
    for name in converters if isinstance(converters, list) else [converters]:
        if "float8" in str(name) or "mx" in str(name):
            found.refuse(found.entries["model.converters"], FLOAT8)


SYSTEM = System("torchtitan", OF, marks("torchtitan"), ("torchtitan",), settle)
