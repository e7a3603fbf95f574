"""This reads what several systems say in the same words: batches, optimizers, schedules, precision and adapters."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from shardwise.interop.system import Import, Said, Taken, lines_of, number, pairs, show, word, words
from shardwise.spec.document import resolve

OPTIMIZERS = words("optimizer")
FLOAT8 = "products in fp8 with its own scales (`precision.products=float8` has others)"
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    line["name"]: (line["ours"], {key: resolve(value) for key, value in pairs(line["arguments"]).items()})
    for line in lines_of("schedules")
}
"""transformers' schedules by name: ours, and what its own arguments are by default (optimization.py)."""
ENDS = words("ending")
"""How a rate that was constant falls at the end of the run."""
DTYPES = words("dtype")
STRATEGIES = words("fsdp")
"""FSDP1's strategies by name and number, and FSDP2's ``reshard_after_forward``."""


def value_of(found: Import, ours: str, default: Any = None) -> Any:
    """A setting of ours that was found before."""
    return found.settings[ours].value if ours in found.settings else default


def dp(found: Import) -> int:
    """Return how many groups of ranks read different sequences."""
    degrees = prod(int(value_of(found, f"parallel.{axis}", 1)) for axis in ("tp", "pp", "cp"))
    return max(1, found.world // degrees)


def batch_of_product(found: Import, micro: str, accumulation: str, default: int, of: str) -> None:
    """The batch of a step, where it is micro-batch x accumulation x data-parallel ranks."""
    rows, times = found.count(micro, default=default), found.count(accumulation, default=1)
    assert rows is not None and times is not None
    rows, times = max(1, rows), max(1, times)
    found.set("train.micro_batch_size", rows, micro, of=of)
    found.set("train.global_batch_size", rows * times * dp(found), micro, accumulation, of=of)


def optimizer(found: Import, key: str, default: str, of: str, *own: str) -> None:
    """The optimizer by name. ``own``: of this system alone, those that are ours of the same name."""
    name = word(found.get(key, default=default)).rpartition(".")[2]
    known = OPTIMIZERS | dict(zip(own, own, strict=True))
    if name in known:
        found.set("optim.name", known[name], key, of=of)
    else:
        found.refuse(found.entries[key], f"the optimizer {show(found.get(key))} is not read from such files yet")


def schedule(found: Import, key: str, default: str, of: str) -> None:
    """transformers' schedule by name, with its arguments, and a warm-up that begins at 0."""
    name, section = word(found.get(key, default=default)), f"{key.removesuffix('_type')}_kwargs"
    if name not in SCHEDULES:
        return found.refuse(found.entries[key], f"the schedule {show(found.get(key))} is not there yet")
    ours, known = SCHEDULES[name]
    given = _arguments(found, section)
    for argument in given.keys() - known.keys():
        found.refuse(given[argument], f"the schedule {name} with an argument `{argument}` is not there")
    said = [f"{section}.{argument}" for argument in known if argument in given]
    values = known | {argument: given[argument].value for argument in known if argument in given}
    if "num_cycles" in given and number(values["num_cycles"]) != known["num_cycles"]:
        found.refuse(given["num_cycles"], f"a cosine of {show(values['num_cycles'])} waves is not there yet")
    rate = value_of(found, "optim.learning_rate")
    shares = [number(values.get(argument)) for argument in ("min_lr_rate", "min_lr_ratio")]
    low = number(values.get("min_lr", values.get("lr_end")))
    if low is None and rate is not None:
        low = next((share * rate for share in shares if share), None)
    if name == "warmup_stable_decay":
        ours = ENDS.get(word(values["decay_type"]), ours)
        found.set("optim.warmup_shape", {"1-sqrt": "sqrt"}.get(shape := word(values["warmup_type"]), shape), *said)
    found.set("optim.schedule", ours, key, of=of)
    found.set("optim.min_learning_rate", low, *said, of=of)
    found.set("optim.decay_steps", whole(number(values.get("num_decay_steps", values.get("timescale")))), *said)
    found.set("optim.power", number(values.get("power")), *said, of=of)
    begins = low or 0.0 if name == "warmup_stable_decay" else None if ours == "cosine_to_last" else 0.0
    return warmup(found, of, begins) if name != "constant" else found.set("optim.warmup_steps", 0, key, of=of)


def warmup_share(found: Import, default: float | None = 0.0) -> float | None:
    """The share of the run that warms up."""
    share = found.number("warmup_ratio", default=default)
    if share and share > 1:
        found.refuse(found.entries["warmup_ratio"], f"is a share of the run, at most 1, not {share:g}")
    return share


def warmup(found: Import, of: str, begins: float | None = 0.0) -> None:
    """transformers' warm-up: steps or a share of the run, rising from the rate at which it ``begins``."""
    steps, share = found.number("warmup_steps", default=0.0) or 0.0, warmup_share(found)
    if steps:
        found.set("optim.warmup_steps", steps if steps < 1 else int(steps), "warmup_steps")
    elif share:
        found.set("optim.warmup_steps", share, "warmup_ratio")
    else:
        found.set("optim.warmup_steps", 0, of=of)
    if steps or share:
        found.set("optim.warmup_from", begins, of=of)


def whole(steps: float | None) -> float | None:
    """Return a number of steps as an integer where it is whole."""
    return int(steps) if steps is not None and steps == int(steps) else steps


def _arguments(found: Import, section: str) -> dict[str, Said]:
    """The arguments in a section by name; on a command line they are JSON."""
    whole = found.entries.get(section)
    if whole is not None and isinstance(whole.value, str):
        try:
            written = json.loads(whole.value or "{}")
        except (ValueError, RecursionError):
            written = None
        if not isinstance(written, dict):
            found.refuse(whole, "this is no object of JSON")
            return {}
        for name, value in written.items():
            found.entries[f"{section}.{name}"] = Said(f"{section}.{name}", value, whole.where)
    keys = [key for key in found.entries if key.startswith(f"{section}.")]
    return {key.removeprefix(f"{section}."): found.entries[key] for key in keys if found.entries[key].value is not None}


def end_within_warmup(settings: dict[str, Taken]) -> str | None:
    """Keep as much of a warm-up as the run has steps, up to the rate that it has then; return what was done."""
    wanted = ("optim.warmup_steps", "train.max_steps", "optim.learning_rate")
    if not all(key in settings for key in wanted):
        return None
    warm, steps, rate = (settings[key].value for key in wanted)
    if warm <= steps or settings.get("optim.warmup_shape", Taken("linear", "")).value != "linear":
        return None
    first = settings["optim.warmup_from"].value if "optim.warmup_from" in settings else 0.0
    origin = settings["optim.warmup_steps"].origin
    settings["optim.learning_rate"] = Taken(first + (rate - first) * steps / warm, origin)
    settings["optim.warmup_steps"] = Taken(steps, origin)
    settings["optim.min_learning_rate"] = Taken(0.0, origin)
    return f"the run ends within its warm-up of {warm:g} steps: its {steps} rise to the rate that it has then"


def adamw(found: Import, of: str) -> None:
    """AdamW's numbers under transformers' names and with its defaults."""
    found.take("transformers adamw", of)
    clipping(found, found.number("max_grad_norm", default=1.0), "max_grad_norm", of)


def betas(found: Import, key: str, default: tuple[float, float] | None = None, of: str = "") -> None:
    """AdamW's two decay rates in one list."""
    pair = found.pair(key) or default
    if pair is not None:
        found.set("optim.beta1", pair[0], key, of=of)
        found.set("optim.beta2", pair[1], key, of=of)


def clipping(found: Import, norm: float | None, key: str, of: str) -> None:
    """The norm to which gradients are clipped; 0 and null: not at all."""
    if norm:
        found.set("optim.max_grad_norm", norm, key, of=of)
    else:
        found.clear("optim.max_grad_norm", key, of=of)


def length_of_run(found: Import, epochs: str, default: float, of: str) -> None:
    """Steps, where they are given, else epochs."""
    steps = found.count("max_steps", default=-1)
    if steps is not None and steps > 0:
        found.set("train.max_steps", steps, "max_steps")
    else:
        found.settings.pop("train.max_steps", None)  # a length that another file only implies
        found.set("train.num_epochs", found.number(epochs, default=default), epochs, of=of)


def compute(found: Import, of: str, default: str = "fp32") -> None:
    """The dtype of computing by transformers' two switches."""
    given = next((kind for kind in ("bf16", "fp16") if found.on(kind)), None)
    if word(found.entries["bf16"].value if "bf16" in found.entries else None) == "auto":
        given = "bf16"
    said = [key for key in ("bf16", "fp16") if key in found.entries]
    found.set("precision.compute", given or (default if not said else "fp32"), *said, of=of)


def too_long(found: Import, key: str, ways: dict[str, str], of: str) -> None:
    """Read what becomes of samples that are longer than rows: ``ways`` of ours by theirs, the first their default."""
    asked = word(found.get(key, default=next(iter(ways))))
    if asked not in ways:
        what = f"what becomes of samples that are too long: {', '.join(ways)} are there, not {show(asked)}"
        return found.refuse(found.entries[key], what)
    return found.set("data.too_long", ways[asked], key, of=of)


def adapter(
    found: Import, rank: int | None, alpha: float | None, names: dict[str, str], of: str, dropout: float = 0.0
) -> None:
    """LoRA under a system's names: ``names`` of ours by theirs."""
    keys = {ours: theirs for theirs, ours in names.items()}
    given = found.count(keys["rank"], default=rank)
    found.set("lora.rank", given, keys["rank"], of=of)
    found.set("lora.alpha", found.number(keys["alpha"], default=alpha), keys["alpha"], of=of)
    found.set("lora.dropout", found.number(keys["dropout"], default=dropout), keys["dropout"], of=of)
    targets = found.get(keys["targets"])
    if isinstance(targets, str):
        targets = "all-linear" if word(targets) in ("all", "all-linear") else [t.strip() for t in targets.split(",")]
    found.set("lora.targets", targets, keys["targets"])
    found.take("adapter")
    for key in ("lora_modules_to_save", "modules_to_save", "additional_target"):
        if whole := found.get(key):
            whole = [name.strip() for name in whole.split(",")] if isinstance(whole, str) else whole
            found.set("lora.modules_to_save", whole, key)


def added_tokens(found: Import, ordinary: tuple[str, ...], special: tuple[str, ...]) -> None:
    """Tokens that the tokenizer is to have besides its own, as lists or as texts with commas."""
    for setting, keys in (("data.add_tokens", ordinary), ("data.add_special_tokens", special)):
        for key in keys:
            if given := found.get(key):
                texts = [text.strip() for text in given.split(",")] if isinstance(given, str) else given
                found.set(setting, texts, key)


def template(found: Import) -> None:
    """Tell of a template of the system's own, whose name says how records are written."""
    if name := found.get("template"):
        said = "here the tokenizer's own chat template writes; `data.chat_template` sets another"
        found.notes.append(f"`template: {name}`: {said}")


def evaluation(found: Import) -> None:
    """Read when transformers evaluates and saves, as far as it is in steps or epochs."""
    strategy = word(found.get("eval_strategy", "evaluation_strategy", default="no"))
    steps, saved = found.number("eval_steps"), found.number("save_steps", default=500)
    if strategy == "steps" and steps and steps >= 1:
        found.set("evaluate.eval_steps", int(steps), "eval_steps")
    elif strategy == "epoch":
        found.set("evaluate.evals_per_epoch", 1, "eval_strategy", "evaluation_strategy")
    how = word(found.get("save_strategy", default="steps"))
    if how == "epoch":
        found.set("checkpoint.saves_per_epoch", 1, "save_strategy")
    elif how == "steps" and saved and saved >= 1:
        found.set("checkpoint.save_steps", int(saved), "save_steps", of="transformers")
    found.set("checkpoint.save_total_limit", found.count("save_total_limit"), "save_total_limit")
    if found.on("load_best_model_at_end") and ("evaluate.eval_steps" in found.settings or strategy == "epoch"):
        found.set("checkpoint.keep_best", True, "load_best_model_at_end")


def fsdp_words(found: Import) -> None:
    """transformers' ``fsdp``: ``full_shard auto_wrap offload``, or true."""
    said = found.get("fsdp")
    if not said:
        return
    words = word(" ".join(map(str, said)) if isinstance(said, list) else said).split()
    for name in words:
        if name in STRATEGIES:
            found.set("parallel.strategy", STRATEGIES[name], "fsdp")
        if name == "offload":
            found.set("offload.optimizer", "host", "fsdp")
            found.set("offload.weights", "host", "fsdp")


def fsdp_config(found: Import) -> None:
    """transformers' and axolotl's ``fsdp_config``, with or without the prefix ``fsdp_``."""
    version = found.count("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version", default=1)
    where = "fsdp_config."
    kind = "reshard_after_forward" if version == 2 else "sharding_strategy"
    for key in (f"{where}{kind}", f"{where}fsdp_{kind}"):
        if key in found.entries and word(found.entries[key].value) in STRATEGIES:
            found.set("parallel.strategy", STRATEGIES[word(found.entries[key].value)], key)
    if version == 2 and "parallel.strategy" not in found.settings:
        found.set("parallel.strategy", "zero3", "fsdp_version", "fsdp_config.fsdp_version")
    found.take("fsdp_config")


def named_deepspeed(found: Import, beside: bool) -> None:
    """A DeepSpeed file that another names and that was not given, or one of ms-swift's built-in names."""
    entry = found.entry("deepspeed", "deepspeed_config.deepspeed_config_file")
    if entry is not None and not beside and word(entry.value) not in ("false", "true"):
        found.notes.append(
            f"{entry.where}: `{entry.key}` names {show(entry.value)}, which was not given: name it too, since it may "
            "choose optimizer, schedule and precision; until then its sharding is left to the plan"
        )
