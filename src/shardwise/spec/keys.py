"""The keys of a recipe or a plan, taken from its JSON schema, and the other names users know them by."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Schema = dict[str, Any]

SHORT = {
    "model": "path",
    "data": "path",
    "method": "name",
    "optim": "name",
    "parallel": "strategy",
    "precision": "compute",
    "recompute": "mode",
    "lora": "rank",
}
"""A section written as one value means this key of it: ``recompute: full``."""

ALIASES = {
    "train.seq_len": "sequence_len seq_length max_length max_seq_len sequence_length max_context_length",
    "train.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size micro_batch",
    "train.gradient_accumulation_steps": "accumulation grad_accum accumulation_steps",
    "train.global_batch_size": "global_batch train_batch_size",
    "train.max_steps": "steps train_iters max_train_steps",
    "train.num_epochs": "epochs num_train_epochs",
    "model.path": "base_model model_name_or_path pretrained_model_name_or_path hf_assets_path",
    "optim.learning_rate": "lr",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "max_norm gradient_clipping grad_clip clip_grad",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_decay_style decay_type",
    "optim.min_learning_rate": "min_lr",
    "optim.name": "optimizer",
    "optim.moments": "optimizer_state_dtype exp_avg_dtype",
    "parallel.dp_shard": "dp_shard_size data_parallel_shard_degree",
    "parallel.dp_replicate": "dp_replicate_size data_parallel_replicate_degree",
    "precision.compute": "dtype torch_dtype bf16 fp16",
    "recompute.mode": "gradient_checkpointing activation_checkpointing recompute_granularity",
    "compile": "torch_compile",
    "checkpoint.save_steps": "save_interval ckpt_every_steps",
    "checkpoint.save_total_limit": "keep_latest_k max_recent_checkpoints",
    "checkpoint.keep_best": "load_best_model_at_end keep_best_checkpoint",
    "run.log_steps": "logging_steps log_freq log_interval",
    "run.out": "output_dir dump_folder",
    "run.name": "run_name",
    "run.nproc": "nproc_per_node",
    "run.trackers": "report_to log_with loggers",
    "run.profile_steps": "profile",
    "data.validation_share": "val_set_size",
    "data.num_proc": "dataset_num_proc dataset_processes",
    "data.path": "data_path",
    "data.packing": "sample_packing packed_sequence",
    "data.too_long": "excess_length_strategy",
    "data.train_on_eot": "train_on_eos",
    "data.mixture_weights": "dataset_weights interleave_probs probabilities",
    "method.name": "task rl",
    "method.beta": "dpo_beta rl_beta",
    "method.label_smoothing": "dpo_label_smoothing",
    "lora.rank": "lora_r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules lora_modules",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.dora": "use_dora peft_use_dora",
    "lora.dropout": "lora_dropout",
    "lora.frozen": "load_in_4bit",
    "lora.path": "lora_model_dir adapter_name_or_path",
}
"""What other systems call the same notion (axolotl, transformers, torchtitan, Megatron, DeepSpeed, Automodel)."""

_BY_ALIAS = {alias: key for key, names in ALIASES.items() for alias in names.split()}

_NUMBERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "no": "fp32"}
_VALUES: dict[str, dict[str, Any]] = {
    "recompute.mode": {"true": "full", "false": "none", "uniform": "full"},
    "optim.name": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw8bit",
        "adamw_torch_8bit": "adamw8bit",
    },
    "optim.moments": {"bfloat16": "bf16", "float32": "fp32"},
    "optim.schedule": {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
    "lora.frozen": {"true": "nf4"},
    "run.trackers": {"none": []},
    "precision.compute": _NUMBERS | {f"torch.{name}": number for name, number in _NUMBERS.items()},
}
DROP = object()


def translate(key: str, alias: str, value: Any) -> Any:
    """The value of an alias in our words: ``gradient_checkpointing: true`` is ``full``. DROP: it says nothing (``bf16:
    false``)."""
    if alias == "load_in_4bit" and str(value).lower() == "false":
        return DROP
    if alias in ("bf16", "fp16"):
        return {"true": alias, "false": DROP, "auto": "auto"}.get(str(value).lower(), value)
    return _VALUES.get(key, {}).get(str(value).lower(), value)


def resolve_reference(schema: Schema, root: Schema) -> Schema:
    """Follow ``$ref`` into the definitions of ``root``."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def alias_leaf(name: str) -> str:
    """``lr`` -> ``learning_rate``; a name that is no alias as it is."""
    return _BY_ALIAS.get(name, name).rpartition(".")[2]


@dataclass(frozen=True)
class Keys:
    """``leaves`` maps every dotted key to the schema of its value; ``sections`` are the prefixes that hold keys."""

    leaves: dict[str, Schema]
    sections: frozenset[str]

    def canonical(self, dotted: str) -> str | None:
        """The key meant by ``dotted``: itself, an alias, or a leaf name that only one section has; None if unknown."""
        if dotted in self.leaves:
            return dotted
        section, _, leaf = dotted.rpartition(".")
        homes = [key for key in self.leaves if key.rpartition(".")[2] == leaf]
        if leaf in _BY_ALIAS and _BY_ALIAS[leaf] in self.leaves:
            homes = [_BY_ALIAS[leaf]]
        if len(homes) == 1 and section in ("", homes[0].rpartition(".")[0]):
            return homes[0]
        return None

    def nearest(self, dotted: str) -> str | None:
        """What ``dotted`` may have been meant to be."""
        section, _, leaf = dotted.rpartition(".")
        if leaf in _BY_ALIAS and _BY_ALIAS[leaf] in self.leaves:
            return _BY_ALIAS[leaf]
        names: dict[str, str] = {}
        for key in self.leaves:
            names.setdefault(key.rpartition(".")[2], key)
        names.update({alias: key for alias, key in _BY_ALIAS.items() if key in self.leaves})
        names.update({key: key for key in self.leaves})
        if section:
            sections = get_close_matches(section, sorted(self.sections), 1, 0.6)
            if sections and f"{sections[0]}.{leaf}" in self.leaves:
                return f"{sections[0]}.{leaf}"
        for candidate in (dotted, leaf):
            found = get_close_matches(candidate, sorted(names), 1, 0.72)
            if found:
                return names[found[0]]
        return None


def keys_of(root: Schema) -> Keys:
    """All keys of a JSON schema whose nested objects are sections."""
    leaves: dict[str, Schema] = {}
    sections: set[str] = set()

    def walk(schema: Schema, prefix: str) -> None:
        for name, child in schema.get("properties", {}).items():
            resolved = resolve_reference(child, root)
            if "properties" in resolved:
                sections.add(prefix + name)
                walk(resolved, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = resolved

    walk(root, "")
    return Keys(leaves, frozenset(sections))


def describe(schema: Schema, root: Schema) -> str:
    """What a value must be, in words: ``a whole number ≥ 1, or null``."""
    schema = resolve_reference(schema, root)
    if "anyOf" in schema:
        words = [describe(option, root) for option in schema["anyOf"]]
        return ", or ".join(dict.fromkeys(words))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{'a whole number' if kind == 'integer' else 'a number'} {_bounds(schema)}".rstrip()
    if kind == "array":
        return f"a list of {describe(schema['items'], root)}" if "items" in schema else "a list"
    simple = {"string": "text", "boolean": "true or false", "null": "null", "object": "a mapping"}
    return simple.get(str(kind), "a value")


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " and ".join(f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema)
