"""axolotl's YAML. Rules: utils/config/__init__.py and core/builders of axolotl at 067b021."""

from __future__ import annotations

from shardwise.interop import shared
from shardwise.interop.system import Import, System, marks, show, word
from shardwise.interop.trainer import recompute, simpo

LORA = {"lora_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "lora_target_modules": "targets"}
OF = "axolotl"
TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
WARMUP, MOST_WARMUP = 0.03, 100
"""The share of the run that warms up where neither steps nor a share are given, and its most steps."""


def settle(found: Import) -> None:
    """The split, the batch, the optimizer, adapters, the method and the data."""
    found.take("axolotl", OF)
    _split(found)
    _batch(found)
    shared.optimizer(found, "optimizer", "adamw_torch_fused", OF)
    shared.adamw(found, OF)
    shared.schedule(found, "lr_scheduler", "cosine", OF)
    _schedule(found)
    shared.length_of_run(found, "num_epochs", 1.0, OF)
    shared.compute(found, OF, "bf16")
    if found.on("fp16"):  # which turns off what is else the default
        found.set("precision.compute", "fp16", "fp16")
    found.take("axolotl dtypes")
    recompute(found)
    _adapters(found)
    _method(found)
    _data(found)
    if not shared.value_of(found, "data.validation_share", 0.05):
        for key in [key for key in found.settings if key.startswith("evaluate.")]:
            del found.settings[key]


def _split(found: Import) -> None:
    if found.on("fsdp") or any(key.startswith("fsdp_config.") for key in found.entries):
        shared.fsdp_words(found)
        shared.fsdp_config(found)
    shared.named_deepspeed(found, beside="zero" in found.decided)


def _batch(found: Import) -> None:
    """``batch_size`` is micro-batch x accumulation, where accumulation is not given."""
    whole, micro = found.count("batch_size"), found.count("micro_batch_size")
    if whole and micro and found.count("gradient_accumulation_steps") is None:
        found.set("train.micro_batch_size", micro, "micro_batch_size")
        found.set("train.global_batch_size", max(1, whole // micro) * micro * shared.dp(found), "batch_size")
        return
    shared.batch_of_product(found, "micro_batch_size", "gradient_accumulation_steps", 1, OF)


def _schedule(found: Import) -> None:
    """axolotl's own cosine (utils/schedulers.py), and its warm-up, which is no single step, and as a share of known
    steps is rounded down."""
    share, rate = found.number("cosine_min_lr_ratio"), shared.value_of(found, "optim.learning_rate")
    cosine = shared.value_of(found, "optim.schedule") == "cosine"
    if share and rate and cosine:
        found.set("optim.min_learning_rate", share * rate, "cosine_min_lr_ratio")
    total = found.count("max_steps", default=-1) or -1
    given = shared.warmup_share(found, None if found.entry("warmup_steps") else WARMUP)
    key = "warmup_ratio" if found.entry("warmup_ratio") else ""
    if given is not None and found.entry("warmup_steps") is None:
        steps: float = given
        if total > 0:
            steps = int(given * total) if key else min(int(given * total), MOST_WARMUP)
        found.set("optim.warmup_steps", steps, key, of=OF if total > 0 else f"{OF} (at most {MOST_WARMUP} steps there)")
    if shared.value_of(found, "optim.warmup_steps") == 1:
        found.set("optim.warmup_steps", 2, "warmup_steps", key, of=OF)
    if shared.value_of(found, "optim.warmup_steps"):
        found.set("optim.warmup_from", 0.0, of=OF)
    if found.on("lr_quadratic_warmup") and cosine:
        found.set("optim.warmup_shape", "quadratic", "lr_quadratic_warmup")
    constant = found.number("cosine_constant_lr_ratio")
    if constant and share and cosine:
        if total <= 0:
            said = "a cosine that becomes constant, where the length of the run is not in the file"
            return found.refuse(found.entries["cosine_constant_lr_ratio"], said)
        warm = shared.value_of(found, "optim.warmup_steps", 0)
        found.set("optim.decay_steps", max(1, int(total * constant) - warm), "cosine_constant_lr_ratio")
    return None


def _adapters(found: Import) -> None:
    kind = word(found.get("adapter", default="no"))
    if kind in ("lora", "qlora"):
        if found.on("lora_target_linear") and found.entry("lora_target_modules") is None:
            found.set("lora.targets", "all-linear", "lora_target_linear")
        shared.adapter(found, None, None, LORA, OF)
        if kind == "qlora":
            found.set("lora.frozen", "nf4", "adapter")
        found.take("four bits")
        found.set("lora.path", found.get("lora_model_dir"), "lora_model_dir")
    elif kind not in ("no", "none", "null"):
        found.refuse(found.entries["adapter"], f"the adapter {show(kind)} is not there: lora and qlora are")
    if found.get("unfrozen_parameters"):
        found.refuse(found.entries["unfrozen_parameters"], "names what is trained; `model.frozen` names what is not")


def _method(found: Import) -> None:
    kind = word(found.get("rl", default="no"))
    if found.on("reward_model") or found.on("process_reward_model"):
        key = "reward_model" if found.on("reward_model") else "process_reward_model"
        return found.refuse(found.entries[key], "reward models are not there")
    if kind in ("dpo", "ipo"):
        _template(found)
        found.set("method.name", kind, "rl")
        beta = found.number("rl_beta", "dpo_beta", "beta", default=0.1)
        found.set("method.beta", beta, "rl_beta", "dpo_beta", "beta", of=OF)
        shared.too_long(found, "excess_length_strategy", TOO_LONG, OF)
        if kind == "dpo":
            found.set("method.label_smoothing", found.number("dpo_label_smoothing"), "dpo_label_smoothing")
        return None
    if kind == "orpo":
        said = "TRL's ORPO, whose first term is over prompts and answers; `method: orpo` has it over answers alone"
        return found.refuse(found.entries["rl"], said)
    if kind == "simpo":
        _template(found)
        shared.too_long(found, "excess_length_strategy", TOO_LONG, OF)
        found.set("method.name", kind, "rl")
        return simpo(found, 0.1, "trl.beta" if "trl.beta" in found.entries else "rl_beta", OF)
    if kind not in ("no", "none", "null", "false"):
        said = f"{kind} is not read from such files yet: dpo, ipo and simpo are"
        return found.refuse(found.entries["rl"], said)
    plain = ("pretraining_dataset", "pretraining_dataset.path")
    kinds = word(found.get("datasets.type", default="")).split(".")[0]
    pretrain = found.entry(*plain) is not None or kinds in ("completion", "pretrain")
    found.set("method.name", "pretrain" if pretrain else "sft", *plain, "datasets.type", of=OF)
    if not pretrain:
        shared.too_long(found, "excess_length_strategy", TOO_LONG, OF)
        _template(found)
        found.set("data.packing", found.on("sample_packing"), "sample_packing", of=OF)
        if found.on("train_on_inputs"):
            found.set("data.train_on", "all", "train_on_inputs")
    return None


def _template(found: Import) -> None:
    """Read what writes a record, and which of its turns are trained on. A data set's own keys go before the file's."""
    key, name = "datasets.chat_template", found.get("datasets.chat_template")
    if name is None:
        key, name = "chat_template", found.get("chat_template")
    if word(name or "tokenizer_default") == "jinja":
        key = "datasets.chat_template_jinja" if found.get("datasets.chat_template_jinja") else "chat_template_jinja"
        name = found.get(key)
    own, _, other = str(name or "tokenizer_default").partition("_fallback_")
    if own != "tokenizer_default":
        found.set("data.chat_template", name, key)
    elif other:
        found.notes.append(f"`{key}: {name}`: give `data.chat_template: {other}` if the tokenizer has no template")
    fields = {
        "data.messages_key": ("datasets.field_messages",),
        "data.role_key": ("datasets.message_property_mappings.role", "datasets.message_field_role"),
        "data.content_key": ("datasets.message_property_mappings.content", "datasets.message_field_content"),
    }
    named = {ours: found.get(*theirs, default=ours[5:-4]) for ours, theirs in fields.items()}
    if [*named.values()] != ["conversations", "from", "value"]:  # which is known without being told
        for ours, field in named.items():
            if field not in ("messages", "role", "content"):
                found.set(ours, field, *fields[ours])
    for theirs in ("datasets.roles_to_train", "roles_to_train"):
        if found.get(theirs, default=["assistant"]) not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
            found.notes.append(f"`{theirs}`: what the assistant says is trained on here")


def _data(found: Import) -> None:
    entry = found.entry("datasets.path", "pretraining_dataset.path")
    if entry is None:
        found.ask("data.path", "the data: those of several data sets are not read from here")
    else:
        name = str(entry.value)
        local = name.startswith((".", "/")) or name.endswith((".json", ".jsonl", ".parquet", ".txt")) or "/" not in name
        found.set("data.path", name if local else f"hf://datasets/{name}", entry.key)
    if isinstance(found.get("datasets.type"), dict) or any(key.startswith("datasets.type.") for key in found.entries):
        found.notes.append("`datasets.type` writes records by a format of its own; here a chat template writes them")
    shared.added_tokens(found, ("tokens",), ("special_tokens.additional_special_tokens",))
    if end := found.get("special_tokens.eos_token"):
        found.notes.append(f"`special_tokens.eos_token: {end}`: here a text ends with the tokenizer's own `eos_token`")
    share = found.number("val_set_size", default=0.0) or 0.0
    if share >= 1:
        found.notes.append(f"`val_set_size: {share:g}` holds out so many records; here give `data.validation_share`")
    else:
        found.set("data.validation_share", share, "val_set_size", of=OF)


SYSTEM = System("axolotl", OF, marks("axolotl"), ("axolotl",), settle)
