"""Adapters in PEFT's format: ``adapter_config.json`` beside ``adapter_model.safetensors``, out and in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.models import tensorfile
from shardwise.models.config import ModelSpec
from shardwise.models.hf import name_in_model
from shardwise.models.roles import is_adapter
from shardwise.models.tensorfile import Entry
from shardwise.spec.plan import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WORDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}


def to_peft_name(name: str, spec: ModelSpec) -> str:
    """``layers.3.attention.q.lora_a.weight`` -> ``base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight``."""
    layer, _, word = name.removesuffix(".weight").rpartition(".")
    theirs = name_in_model(f"{layer}.weight", spec).removesuffix(".weight")
    return f"base_model.model.{theirs}.{_WORDS[word]}"


def write_adapter(
    directory: Path,
    lora: Lora,
    spec: ModelSpec,
    model: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    fetch: Callable[[str], Tensor],
) -> None:
    """Write ``directory`` as ``PeftModel.from_pretrained`` reads it, in fp32. ``shapes`` are the global shapes of the
    adapters' parameters by canonical name; ``fetch`` gives their whole values, once each and in that order. ``model``:
    what they belong to."""
    directory.mkdir(parents=True, exist_ok=True)
    named = {to_peft_name(name, spec): shape for name, shape in shapes.items()}
    tensorfile.write(directory / WEIGHTS, named, torch.float32, (fetch(name) for name in shapes))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "target_modules": sorted({name.split(".")[-3] for name in named if name.endswith(".weight")}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_adapter(directory: Path, names: Iterable[str], lora: Lora, spec: ModelSpec) -> dict[str, Entry]:
    """The stored tensor of every adapter parameter in ``names``, from headers alone. Raises DataError (CKPT002,
    CKPT003) with all that the adapter in ``directory`` and the recipe disagree about, MissingInputError (CKPT001)."""
    where = str(directory)
    for file in (CONFIG, WEIGHTS):
        if not (directory / file).is_file():
            fix = "a directory as PEFT's save_pretrained writes it"
            raise MissingInputError(Problem("CKPT001", f"no {file} in {directory}", "lora.path", fix))
    config = tensorfile.parse_json(directory / CONFIG, (directory / CONFIG).read_bytes())
    found = tensorfile.entries(directory / WEIGHTS)
    problems = [*_unserved(config, where), *_settings_differ(config, lora, where)]
    theirs = {to_peft_name(name, spec): name for name in names}
    if odd := sorted(found.keys() ^ theirs.keys()):
        what = f"the adapter and the recipe's targets differ in {len(odd)} tensors, such as {odd[0]}"
        targets = config.get("target_modules")
        problems.append(Problem("CKPT003", what, where, f"lora.targets: {targets}"))
    if problems:
        raise DataError(*problems)
    return {ours: found[name] for name, ours in theirs.items()}


def read_adapter(
    directory: Path, parts: Mapping[str, Sequence[slice]], lora: Lora, spec: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, its slice as stored) of every adapter parameter among ``parts``; raises as find_adapter."""
    found = find_adapter(directory, filter(is_adapter, parts), lora, spec)
    for name, entry in found.items():
        yield name, entry.read(parts[name])


def _unserved(config: Mapping[str, Any], where: str) -> list[Problem]:
    """What PEFT's LoRA can do and this one does not."""
    odd = [key for key in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)]
    if config.get("peft_type") != "LORA":
        odd.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        odd.append(f"bias {config['bias']}")
    fix = "an adapter with one rank for all layers"
    return [Problem("CKPT003", f"the adapter uses {key}, which is not served", where, fix) for key in odd]


def _settings_differ(config: Mapping[str, Any], lora: Lora, where: str) -> list[Problem]:
    pairs = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "use_dora": lora.dora}
    keys = {"r": "lora.rank", "lora_alpha": "lora.alpha", "use_rslora": "lora.rslora", "use_dora": "lora.dora"}
    return [
        Problem(
            "CKPT002",
            f"the adapter has {key} {config.get(key)}, the recipe {value}",
            where,
            f"{keys[key]}: {config.get(key)}",
        )
        for key, value in pairs.items()
        if config.get(key, False) != value
    ]
