"""NeMo's YAML, of four kinds: overrides of Megatron-Bridge's recipes, NeMo 1's Hydra files, Automodel's, and NeMo-RL's.
Most of it is Megatron-LM's words in sections: of a row of the table that is ``read``, ``ours`` is Megatron-LM's word.

Rules: Megatron-Bridge at 067f987 (training/config.py), Automodel at 004386c, NeMo-RL's loss functions."""

from __future__ import annotations

from typing import Any

from shardwise.interop import megatron, shared
from shardwise.interop.system import Import, Said, System, marks, number, show, word

BRIDGE = "Megatron-Bridge"
HYDRA = "NeMo 1"
AUTOMODEL = "NeMo Automodel"
RL = "NeMo-RL"
KINDS = {"policy.": RL, "step_scheduler.": AUTOMODEL, "distributed.": AUTOMODEL, "trainer.": HYDRA}
"""Which kind of file a section is of."""
CORE = "policy.megatron_cfg."
SECTIONS: tuple[str, ...] = ("model.optim.sched.", "model.optim.", "model.", "train.", "optimizer.", "scheduler.")
SECTIONS += ("lr_scheduler.", "ddp.", "dist.", "rng.", f"{CORE}optimizer.", f"{CORE}scheduler.")
SECTIONS += (f"{CORE}distributed_data_parallel_config.", CORE)
ADAPTERS = ("policy.dtensor_cfg.lora_cfg.", f"{CORE}peft.")
LAYERS = {"linear_qkv": ["q", "k", "v"], "linear_proj": ["o"], "linear_fc1": ["gate", "up"], "linear_fc2": ["down"]}

USUAL: dict[str, dict[str, Any]] = {
    "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5},
    "ConstantLR": {"factor": 1 / 3},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
}
"""What torch's schedules take for granted."""


def settle(found: Import) -> None:
    """Megatron-LM's words, and what a kind of file says or takes for granted beside them."""
    kind = next((kind for at, kind in KINDS.items() if any(key.startswith(at) for key in found.entries)), BRIDGE)
    _in_megatrons_words(found)
    before = set(found.settings)
    for settles in (megatron.split, megatron.batch, megatron.optimizer, megatron.model):
        settles(found)
    for key in [key for key in found.settings if key not in before]:
        if kind == BRIDGE and found.settings[key].origin.startswith("default of"):
            del found.settings[key]  # the recipe that the file changes says it
    found.take("megatron")
    for key in ("model.optim.betas", "optimizer.betas", "policy.optimizer.kwargs.betas"):
        shared.betas(found, key)
    _adapter(found, kind)
    if kind == BRIDGE:
        return _bridge(found)
    _method(found, kind)
    if found.entry("lr_decay_style") is None:
        found.set("optim.schedule", "constant", of=f"{kind}: no schedule")
        _torchs_schedules(found)
    elif kind == HYDRA and not found.get("model.optim.sched.constant_steps"):
        _annealing(found)
    if "train.max_steps" not in found.settings:
        key = next((key for key in found.entries if key.endswith("num_epochs")), "")
        found.set("train.num_epochs", found.number(key), key)
    if "train.seq_len" not in found.settings:
        found.ask("train.seq_len", "the length of sequences")
    return None


def _in_megatrons_words(found: Import) -> None:
    """Give each key that Megatron-LM has a word for the word, too."""
    others = ("policy.optimizer.", "policy.scheduler") if found.on(f"{CORE}enabled") else ()
    for key, entry in list(found.entries.items()):
        row = SYSTEM.row(key)
        if row is None or row.fate != "read" or entry.value is None or key.startswith(others):
            continue
        name = row.ours or next((key.removeprefix(part) for part in SECTIONS if key.startswith(part)), key)
        value = row.values.get(word(entry.value))
        if row.values and value is None:
            found.refuse(entry, f"{show(entry.value)} is none of {', '.join(row.values)}")
            continue
        other = found.entries.setdefault(name, Said(key, row.value(entry.value), entry.where))
        if name == "seq_length" and other.value != entry.value:
            found.refuse(entry, f"`{other.key}` says {show(other.value)}")
    if found.get("num_query_groups"):
        found.entries["group_query_attention"] = found.entries["num_query_groups"]
    steps, held = found.count("train_iters"), found.entry("model.optim.sched.constant_steps")
    if steps and held is not None:  # the cosine ends so long before the run does
        decay = steps - (found.count(held.key) or 0)
        decay = max(1 + (found.count("lr_warmup_iters") or 0), decay)
        found.entries["lr_decay_iters"] = Said(held.key, decay, held.where)


def _annealing(found: Import) -> None:
    """NeMo 1's own schedules where no constant steps follow (core/optim/lr_scheduler.py): the warm-up ends a step later
    than it says, above 0 from the first step, and the fall is counted from where it says."""
    said, warm = found.settings.pop("optim.warmup_from", None), shared.value_of(found, "optim.warmup_steps", 0)
    steps, ours = shared.value_of(found, "train.max_steps"), shared.value_of(found, "optim.schedule")
    if said is None or steps is None:
        return
    found.set("optim.warmup_steps", warm + 1, "lr_warmup_iters", of=HYDRA)
    if ours in ("linear", "cosine"):
        found.set("optim.schedule", f"{ours}_to_last", "lr_decay_style")
        found.set("optim.decay_steps", max(1, steps - warm), "lr_warmup_iters", of=HYDRA)


def _torchs_schedules(found: Import) -> None:
    """NeMo-RL's list of torch's schedules, one after another: a linear warm-up, then a constant rate or a cosine."""
    entry = found.entry("policy.scheduler", "policy.scheduler.name")
    if entry is None:
        return
    prefix = "policy.scheduler.kwargs."
    kwargs = {key.removeprefix(prefix): one.value for key, one in found.entries.items() if key.startswith(prefix)}
    rows = entry.value if isinstance(entry.value, list) else [{"name": entry.value, "kwargs": kwargs}]
    rows = [row for row in rows if isinstance(row, dict)]
    rate = shared.value_of(found, "optim.learning_rate", 0.0)
    ends: Any = next((row["milestones"] for row in rows if "milestones" in row), [])
    named = [row for row in rows if "name" in row]
    for place, row in enumerate(named):
        name, given = str(row["name"]).rpartition(".")[2], row.get("kwargs")
        given = USUAL.get(name, {}) | (given if isinstance(given, dict) else {})
        numbers = {key: number(value) for key, value in given.items()}
        length, last = numbers.get("total_iters"), place == len(named) - 1
        if name == "LinearLR" and not last and place == 0 and numbers["end_factor"] == 1 and ends == [length]:
            found.set("optim.warmup_steps", shared.whole(length), entry.key)
            found.set("optim.warmup_from", (numbers["start_factor"] or 0.0) * rate, entry.key)
        elif name == "CosineAnnealingLR" and last and _falls_only(found, numbers["T_max"]):
            found.set("optim.schedule", "cosine", entry.key)
            found.set("optim.decay_steps", shared.whole(numbers["T_max"]), entry.key)
            found.set("optim.min_learning_rate", numbers["eta_min"], entry.key)
        elif name != "ConstantLR" or numbers["factor"] != 1:
            found.refuse(entry, f"this schedule ({name}) is not there yet")


def _falls_only(found: Import, length: float | None) -> bool:
    """Return whether the run ends before torch's cosine, which is a whole wave, rises again."""
    warm, steps = shared.value_of(found, "optim.warmup_steps", 0), shared.value_of(found, "train.max_steps")
    return length is not None and (steps is None or steps <= warm + length + 1)


def _bridge(found: Import) -> None:
    found.notes.append(
        f"the files of {BRIDGE} change a recipe of it that is named on its command line: what they leave out, the "
        "model and the optimizer's other numbers among it, is not read"
    )
    tuned = [key for key in ("peft.dim", "dataset.dataset_root", "optimizer.finetune_lr") if key in found.entries]
    found.set("method.name", "sft" if tuned else None, *tuned)


def _method(found: Import, kind: str) -> None:
    """Read what is trained, and what a kind of file takes for granted of precision, packing and clipping."""
    pairs = any(key.startswith("dpo.") for key in found.entries)
    data = word(found.get("dataset._target_"))
    texts = kind == HYDRA or "megatron" in data or "nanogpt" in data
    found.set("method.name", "dpo" if pairs else "pretrain" if texts else "sft", "dataset._target_", of=kind)
    if found.entry("clip_grad") is None and kind == HYDRA:
        found.clear("optim.max_grad_norm", of=kind)
    if found.on("policy.dtensor_cfg.cpu_offload"):
        found.set("offload.weights", "host", "policy.dtensor_cfg.cpu_offload")
    packed = ("packed_sequence.packed_sequence_size", "policy.sequence_packing.enabled")
    if not texts and not pairs:
        found.set("data.packing", any(map(found.on, packed)), *packed, of=kind)
    if kind == AUTOMODEL:
        if found.on(packed[0]):
            found.set("train.seq_len", found.count(packed[0]), packed[0])
        name = found.get("dataset.path_or_dataset")
        found.set("data.path", name and f"hf://datasets/{name}", "dataset.path_or_dataset")
        found.set("precision.compute", "bf16", of=kind)
        if "precision.weights" not in found.settings:
            found.set("precision.weights", "bf16", of=f"{kind}: the checkpoint's")
        if found.entry("lr_decay_style"):
            _automodel(found)


def _automodel(found: Import) -> None:
    """Automodel's defaults (components/optim/optimizer.py): the warm-up is a tenth of the steps and at most 1,000, and
    begins at a tenth of the rate; the rate falls to a hundredth."""
    rate, steps = shared.value_of(found, "optim.learning_rate", 0.0), shared.value_of(found, "train.max_steps")
    if found.entry("lr_warmup_iters") is None:
        share = 0.1 if steps is None else min(1000, steps // 10)
        found.set("optim.warmup_steps", share, of=f"{AUTOMODEL}: a tenth of the steps, at most 1,000")
    if found.entry("min_lr") is None:
        found.set("optim.min_learning_rate", 0.01 * rate, of=AUTOMODEL)
    first = found.number("lr_scheduler.init_lr", default=0.1 * rate)
    if shared.value_of(found, "optim.warmup_steps"):
        found.set("optim.warmup_from", first, "lr_scheduler.init_lr", of=AUTOMODEL)


def _adapter(found: Import, kind: str) -> None:
    """LoRA, with Megatron-Core's fused layers as the roles that they hold."""
    section = next((part for part in ADAPTERS if found.on(f"{part}enabled")), "peft.")
    if not any(key.startswith(section) for key in found.entries):
        return
    theirs = {"dim": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}
    names = {f"{section}{key}": ours for key, ours in theirs.items()}
    shared.adapter(found, 32 if kind == BRIDGE else 8, 32.0, names, kind)
    targets = found.get(f"{section}target_modules") or []
    roles = [role for name in targets for role in LAYERS.get(str(name), [str(name).lstrip("*.")])]
    every = not roles or found.on(f"{section}match_all_linear")
    found.set("lora.targets", "all-linear" if every else roles, f"{section}target_modules", of=kind)


SYSTEM = System(
    "nemo",
    "NeMo",
    marks("nemo"),
    ("nemo", "megatron"),
    settle,
    SECTIONS,
    (*ADAPTERS, "policy.dtensor_cfg.", CORE, f"{CORE}fp8_cfg."),
)
