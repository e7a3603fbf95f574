"""TorchTitan's TOML, of its three generations by key. Rules: torchtitan/config at the parent of 9810191.

``local_batch_size`` is that of a data-parallel rank; the rate rises linearly, holds, and falls over the last
``decay_ratio`` of the steps, or over all that is left."""

from __future__ import annotations

from shardwise.interop import shared
from shardwise.interop.record import Import, System, hub_names, show, word

OF = "TorchTitan"
SECTIONS = ("parallelism.", "training.", "experimental.")
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}


def settle(found: Import) -> None:
    """The model by name and flavor, the split, the batch, the optimizer."""
    _model(found)
    _split(found)
    _batch(found)
    _optimizer(found)
    _schedule(found)
    found.set("method.name", "pretrain", of=OF)
    found.set("model.init", "random", of=f"{OF}: weights are new unless a checkpoint is loaded")
    found.set(
        "train.seq_len",
        found.count("training.seq_len", "training.context_len", default=2048),
        "training.seq_len",
        of=OF,
    )
    found.set("train.max_steps", found.count("training.steps", default=10_000), "training.steps", of=OF)
    _precision(found)
    modes = {"none": "none", "selective": "selective", "full": "full"}
    mode = word(found.get("activation_checkpoint.mode", default="selective"))
    found.set("recompute.mode", modes.get(mode), "activation_checkpoint.mode", of=OF)
    found.ask("data.path", "the data: TorchTitan's names are of its own registry")


def _model(found: Import) -> None:
    name, flavor = word(found.get("model.name", default="llama3")), word(found.get("model.flavor", default=""))
    known = hub_names("torchtitan").get(f"{name} {flavor}")
    if name in ("flux", "llama3_vlm"):
        return found.refuse(found.entries["model.name"], f"{name} makes or reads images, which is not there")
    found.set("model.path", known, "model.name", "model.flavor")
    return found.ask("model.path", f"the model: {name} of flavor {flavor or 'unknown'}")


def _degree(found: Import, name: str) -> tuple[int | None, str]:
    key = next((f"{section}{name}" for section in SECTIONS if f"{section}{name}" in found.entries), "")
    return (found.count(key) if key else None), key


def _split(found: Import) -> None:
    sizes = {
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "cp": "context_parallel_degree",
        "ep": "expert_parallel_degree",
        "dp_replicate": "data_parallel_replicate_degree",
        "dp_shard": "data_parallel_shard_degree",
    }
    shard = 1
    for axis, name in sizes.items():
        degree, key = _degree(found, name)
        if axis == "dp_shard":
            shard = -1 if degree is None else degree
        if degree is not None and degree > 1:
            found.set(f"parallel.{axis}", degree, key)
    if shard == 1:  # replicas alone, which the strategy says
        found.settings.pop("parallel.dp_replicate", None)
    resharded = word(found.get("parallelism.fsdp_reshard_after_forward", default="default"))
    piped = shared.value_of(found, "parallel.pp", 1) > 1
    kept = resharded == "never" or (resharded == "default" and piped)
    _, key = _degree(found, sizes["dp_shard"])
    found.set("parallel.strategy", "ddp" if shard == 1 else "zero2" if kept else "zero3", key, of=OF)
    entry = found.entry("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    if piped and entry is not None:
        if word(entry.value) in SCHEDULES:
            found.set("parallel.schedule", SCHEDULES[word(entry.value)], entry.key)
        else:
            found.refuse(entry, f"the schedule {show(entry.value)} of a pipeline is not there")
    if found.on("training.enable_cpu_offload"):
        found.set("offload.optimizer", "host", "training.enable_cpu_offload")
        found.set("offload.weights", "host", "training.enable_cpu_offload")


def _batch(found: Import) -> None:
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
    found.set("train.global_batch_size", ours, "training.global_batch_size", *said, of=OF)


def _optimizer(found: Import) -> None:
    shared.optimizer(found, "optimizer.name", "AdamW", OF)
    rate = found.number("optimizer.lr", default=8e-4)
    found.set("optim.learning_rate", rate, "optimizer.lr", of=OF)
    for ours, theirs, default in (
        ("beta1", "beta1", 0.9),
        ("beta2", "beta2", 0.95),
        ("eps", "eps", 1e-8),
        ("weight_decay", "weight_decay", 0.1),
    ):
        found.set(f"optim.{ours}", found.number(f"optimizer.{theirs}", default=default), f"optimizer.{theirs}", of=OF)
    found.set("optim.max_grad_norm", found.number("training.max_norm", default=1.0), "training.max_norm", of=OF)
    if found.on("optimizer.early_step_in_backward"):
        said = "the optimizer steps during backward, without clipping"
        found.refuse(found.entries["optimizer.early_step_in_backward"], said)


def _schedule(found: Import) -> None:
    steps = found.count("training.steps", default=10_000) or 10_000
    warmup = found.count("lr_scheduler.warmup_steps", "training.warmup_steps", default=200) or 0
    share = found.number("lr_scheduler.decay_ratio")
    kind = word(found.get("lr_scheduler.decay_type", default="linear"))
    low = found.number("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min", default=0.0) or 0.0
    rate = shared.value_of(found, "optim.learning_rate", 8e-4)
    found.set("optim.warmup_steps", min(warmup, steps), "lr_scheduler.warmup_steps", "training.warmup_steps", of=OF)
    if share == 0.0:
        return found.set("optim.schedule", "constant", "lr_scheduler.decay_ratio")
    if share is not None and round(share * steps) < steps - warmup:
        found.set("optim.decay_steps", max(1, round(share * steps)), "lr_scheduler.decay_ratio")
        kinds = {"linear": "wsd"}
        if kind not in kinds:
            said = f"a stable rate that then falls as a {kind} is not there yet: `optim.schedule: wsd` falls linearly"
            return found.refuse(found.entries["lr_scheduler.decay_type"], said)
        found.set("optim.schedule", "wsd", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
    elif kind in ("linear", "cosine"):
        found.set("optim.schedule", kind, "lr_scheduler.decay_type", of=OF)
    else:
        found.refuse(found.entries["lr_scheduler.decay_type"], f"a rate that falls as {kind} is not there yet")
    if low:
        found.set("optim.min_learning_rate", low * rate, "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
    return None


def _precision(found: Import) -> None:
    weights = word(found.get("training.dtype", default="float32"))
    compute = word(found.get("training.mixed_precision_param", default="bfloat16"))
    reduced = word(found.get("training.mixed_precision_reduce", default="float32"))
    found.set("precision.weights", shared.DTYPES.get(weights), "training.dtype", of=OF)
    found.set(
        "precision.compute",
        "bf16" if weights == "bfloat16" else shared.DTYPES.get(compute),
        "training.mixed_precision_param",
        of=OF,
    )
    found.set(
        "precision.reduce",
        {"float32": "fp32", "bfloat16": "bf16"}.get(reduced),
        "training.mixed_precision_reduce",
        of=OF,
    )
    converters = found.get("model.converters", default=[])
    for name in converters if isinstance(converters, list) else [converters]:
        if "float8" in str(name) or "mx" in str(name):
            found.refuse(found.entries["model.converters"], "products in fp8 are not there yet")
    if found.on("float8.enable_float8_linear"):
        found.refuse(found.entries["float8.enable_float8_linear"], "products in fp8 are not there yet")


SYSTEM = System(
    "torchtitan",
    "TorchTitan",
    {
        "job.*": 2,
        "model.flavor": 3,
        "training.local_batch_size": 2,
        "training.seq_len": 1,
        "parallelism.*": 2,
        "activation_checkpoint.*": 2,
        "metrics.log_freq": 1,
    },
    ("torchtitan",),
    settle,
)
