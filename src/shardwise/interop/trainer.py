"""transformers' TrainingArguments, in JSON or YAML, and what other systems build on them: TRL and LLaMA-Factory.

Rules: training_args.py of transformers at 0234833, trl/trainer of TRL at f2cd577."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.interop import shared
from shardwise.interop.system import Import, System, marks, show, word

LORA = {"lora_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "lora_target_modules": "targets"}
PAIRS = ("beta", "loss_type")
PAIR_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}
"""TRL's losses of pairs by name, as its DPOTrainer has them: ours."""
OF_LLAMAFACTORY = {**PAIR_LOSSES, "orpo": "orpo", "simpo": "simpo"}
"""LLaMA-Factory's own ORPO has the mean of an answer's tokens in its first term, as here; TRL's that of all tokens."""


@dataclass(frozen=True)
class Defaults:
    """The arguments of a script that builds on transformers' where it is not told them: sequences of a device, tokens
    of a sequence, and the rest under their names."""

    learning_rate: float = 5e-5
    length: int | None = None
    precision: str = "fp32"
    rows: int = 8
    schedule: str = "linear"
    epochs: float = 3.0


def settle(found: Import) -> None:
    """TrainingArguments alone: a model, a batch, a schedule; the data and the method are the script's."""
    arguments(found, "transformers", Defaults())


def arguments(found: Import, of: str, usual: Defaults) -> None:
    """Read the arguments that every script of TrainingArguments takes."""
    shared.fsdp_words(found)
    if found.on("fsdp") or any(key.startswith("fsdp_config.") for key in found.entries):
        shared.fsdp_config(found)
    shared.named_deepspeed(found, beside="zero" in found.decided)
    shared.batch_of_product(found, "per_device_train_batch_size", "gradient_accumulation_steps", usual.rows, of)
    rate = found.number("learning_rate", default=usual.learning_rate)
    found.set("optim.learning_rate", rate, "learning_rate", of=of)
    if "optimizer" not in found.decided:
        shared.optimizer(found, "optim", "adamw_torch", of)
        shared.adamw(found, of)
    if "schedule" not in found.decided:
        shared.schedule(found, "lr_scheduler_type", usual.schedule, of)
    elif "optim.warmup_steps" not in found.settings:
        shared.warmup(found, of, shared.value_of(found, "optim.warmup_from"))
    shared.length_of_run(found, "num_train_epochs", usual.epochs, of)
    shared.compute(found, of, usual.precision)
    shared.evaluation(found)
    recompute(found)
    for key in ("max_length", "max_seq_length", "max_seq_len", "model_max_length", "block_size"):
        if (tokens := found.count(key)) is not None:
            found.set("train.seq_len", tokens, key)
    if "train.seq_len" not in found.settings:
        found.set("train.seq_len", usual.length, of=of)
    dataset(found)


def recompute(found: Import, default: bool = False) -> None:
    """``gradient_checkpointing``, which later versions name ``activation_checkpointing``."""
    keys = ("gradient_checkpointing", "activation_checkpointing")
    on = any(map(found.on, keys)) if any(key in found.entries for key in keys) else default
    found.set("recompute.mode", "full" if on else "none", *keys, of="the script")


def dataset(found: Import) -> None:
    """A data set of the Hub by name; a mixture of several is not static enough to be read."""
    entry = found.entry("dataset_name", "dataset_id_or_path", "train_file", "data_path")
    if entry is None or isinstance(entry.value, list):
        return
    name = str(entry.value)
    hub = "/" in name and not name.startswith((".", "/")) and not name.endswith((".json", ".jsonl", ".parquet"))
    found.set("data.path", f"hf://datasets/{name}" if hub else name, entry.key)


def trl(found: Import) -> None:
    """TRL's SFT or DPO: which, the script says, and here the keys that only one has."""
    method = _method(found)
    pairs = method in (*PAIR_LOSSES.values(), "simpo")
    arguments(found, "TRL", Defaults(1e-6 if pairs else 2e-5, 1024, "bf16"))
    recompute(found, default=True)
    found.set("method.name", method, *(key for key in PAIRS if key in found.entries), of="TRL: SFT")
    if method == "simpo":
        simpo(found, 0.1 if "simpo_gamma" in found.entries else 2.0, "beta", "TRL")
    elif pairs:
        found.set("method.beta", found.number("beta", default=0.1), "beta", of="TRL")
    if method == "dpo":
        found.set("method.label_smoothing", found.number("label_smoothing", default=0.0), "label_smoothing", of="TRL")
    elif not pairs and "packing" not in found.entries:
        found.set("data.packing", False, of="TRL")
    answers_only = found.on("assistant_only_loss") or found.on("completion_only_loss")
    if method == "sft" and not answers_only:
        found.set("data.train_on", "all", of="TRL: the loss is over the whole text")
    if found.on("use_peft") or found.entry("lora_r"):
        shared.adapter(found, 16, 32.0, LORA, "TRL")
        found.take("four bits")


def simpo(found: Import, beta: float, key: str, of: str) -> None:
    """SimPO's margin: as such, or in units of ``beta`` in its authors' own trainer. TRL's CPOTrainer has a loss over
    tokens beside it unless ``cpo_alpha`` is 0."""
    beta = found.number(key, default=beta) or beta
    found.set("method.beta", beta, key, of=of)
    if ratio := found.entry("gamma_beta_ratio"):
        found.set("method.gamma", beta * (found.number("gamma_beta_ratio") or 0.0), ratio.key)
        return
    found.set("method.gamma", found.number("simpo_gamma", default=0.5), "simpo_gamma", of=of)
    if of != "LLaMA-Factory" and found.number("cpo_alpha", default=1.0) != 0:
        what = "a loss over tokens beside SimPO's, which is there by default: `cpo_alpha: 0` is SimPO"
        found.refuse(found.entries.get("cpo_alpha") or found.entries["simpo_gamma"], what)


def _method(found: Import) -> str:
    """``sft``, or a loss of pairs, by what the file holds; others are refused by name."""

    def about(*keys: str, what: str) -> bool:
        entry = next((found.entries[key] for key in keys if key in found.entries), None)
        if entry is not None:
            found.refuse(entry, what)
        return entry is not None

    if about("num_generations", "reward_funcs", what="training on answers that the model writes itself (GRPO)"):
        return "grpo"
    if found.entry("gamma_beta_ratio", "simpo_gamma"):
        return "simpo"
    if (kind := found.entry("loss_type")) is not None:
        loss = word(kind.value).strip("[]'\"")
        if loss not in (*PAIR_LOSSES, "nll"):
            what = f"the loss {show(kind.value)} is not read from such files yet: {', '.join(PAIR_LOSSES)} are"
            found.refuse(kind, what)
        return PAIR_LOSSES.get(loss, "sft")
    pairs = ("beta", "max_prompt_length", "precompute_ref_log_probs")
    return "dpo" if any(key in found.entries for key in pairs) else "sft"


def llamafactory(found: Import) -> None:
    """LLaMA-Factory: TrainingArguments, a stage, a kind of tuning. Rules: hparams/ at ff6d4d1."""
    stages = {"sft": "sft", "pt": "pretrain", "dpo": "dpo"}
    stage = word(found.get("stage", default="sft"))
    loss = word(found.get("pref_loss", default="sigmoid"))
    if stage not in stages:
        found.refuse(found.entries["stage"], f"the stage {stage} is not read yet: sft, dpo and pt are")
    elif stage == "dpo" and loss not in OF_LLAMAFACTORY:
        what = f"the loss {loss} is not read from such files yet: {', '.join(OF_LLAMAFACTORY)} are"
        found.refuse(found.entries["pref_loss"], what)
    method = OF_LLAMAFACTORY.get(loss, "dpo") if stage == "dpo" else stages.get(stage, "sft")
    found.set("method.name", method, "stage", "pref_loss", of="LLaMA-Factory")
    arguments(found, "LLaMA-Factory", Defaults(length=2048))
    found.take("llamafactory", "LLaMA-Factory")  # its Muon is Moonlight's (third_party/muon at 2f0a9f7)
    mode = "none" if found.on(key := "disable_gradient_checkpointing") else "full"
    found.set("recompute.mode", mode, key, of="LLaMA-Factory")
    if method == "simpo":
        simpo(found, 0.1, "pref_beta", "LLaMA-Factory")
    elif stage == "dpo":
        found.set("method.beta", found.number("pref_beta", default=0.1), "pref_beta", of="LLaMA-Factory")
    if method != "pretrain":
        packing = found.on("packing") or found.on("neat_packing")
        found.set("data.packing", packing, "packing", "neat_packing", of="LLaMA-Factory")
    kind = word(found.get("finetuning_type", default="lora"))
    if kind == "lora":
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "lora_target": "targets"}
        rank = found.count("lora_rank", default=8)
        shared.adapter(found, 8, 2.0 * (rank or 8), names, "LLaMA-Factory")
        if (bits := found.count("quantization_bit")) == 4:
            found.set("lora.frozen", "nf4", "quantization_bit")
        elif bits:
            found.refuse(
                found.entries["quantization_bit"],
                f"frozen weights in {bits} bits: `lora.frozen` has nf4, and float8 of a byte",
            )
    elif kind != "full":
        found.refuse(found.entries["finetuning_type"], f"{kind}: full and lora are there")
    shared.added_tokens(found, ("add_tokens",), ("add_special_tokens", "new_special_tokens"))
    if stage != "pt":
        shared.template(found)
    share = found.number("val_size")
    if share:
        found.set("data.validation_share", share, "val_size")


SYSTEM = System("hf", "TrainingArguments", marks("hf"), ("hf",), settle)
TRL = System("trl", "TRL", marks("trl"), ("trl", "hf"), trl)
LLAMAFACTORY = System("llamafactory", "LLaMA-Factory", marks("llamafactory"), ("llamafactory", "hf"), llamafactory)


def fsdp_file(found: Import) -> None:
    """The JSON that ``--fsdp_config`` names: keys without a section, of which ``--fsdp`` chose the strategy."""
    for key, entry in list(found.entries.items()):
        found.entries[f"fsdp_config.{key.removeprefix('fsdp_')}"] = entry
    shared.fsdp_config(found)
    if "parallel.strategy" not in found.settings:
        found.set("parallel.strategy", "zero3", of="transformers: --fsdp full_shard")


FSDP = System("fsdp", "transformers' fsdp_config", marks("fsdp"), ("fsdp",), fsdp_file)
