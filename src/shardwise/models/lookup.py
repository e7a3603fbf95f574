"""The way from a directory, a name or a ``config.json`` to a ModelSpec. Imports no torch for our own families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError, MissingInputError, Problem
from shardwise.models import known
from shardwise.models.config import ModelSpec, from_hf
from shardwise.models.families import family_of
from shardwise.models.family import FULL
from shardwise.models.hf_spec import check_supported
from shardwise.models.numbers import check_numbers
from shardwise.models.quantization import without_float8
from shardwise.models.unserved import refuse_config, refuse_name
from shardwise.spec.complaints import show_value
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.hub import fetch
from shardwise.spec.keys import near
from shardwise.spec.units import typed


def read_spec(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of what a Hugging Face ``config.json`` describes: of our decoder, or of transformers' own modules.

    Raises DataError (MOD005) for numbers that no model computes with, ConfigError for what is not supported.
    """
    check_numbers(config, name)
    config, stored = without_float8(config)
    spec = _read(config, name)
    return replace(spec, stored=stored) if stored else spec


def _read(config: dict[str, Any], name: str) -> ModelSpec:
    try:
        if family_of(config, name) is not None:
            refuse_config(config, name, ours=True)
            return from_hf(config, name)
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        # a list where a word belongs, a word where settings do
        what = f"a value in the config has the wrong type: {str(error)[:200]}"
        fix = "take the values from the model's own config.json"
        raise ConfigError(Problem("CFG004", what, f"config of {name}", fix)) from error
    refuse_config(config, name)
    if isinstance(config.get("model_type"), str):
        check_supported(config, name)
    from shardwise.models import hf_model

    return hf_model.read(config, name)


def load_spec(source: str, revision: str | None = None, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a directory with a ``config.json``, of a built-in model, or of a Hub id, tried in that order, with
    these ``changes`` of its config."""
    path = Path(source).expanduser()
    if path.exists():
        return read_spec(_turned(_read_json(path / "config.json" if path.is_dir() else path), changes), path.name)
    if (match := known.find(source)) is not None:
        return read_spec(_turned(match[1], changes), match[0])
    refuse_name(source)
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        directory = fetch(source, revision, ["config.json"], "model.path")
        return read_spec(_turned(_read_json(directory / "config.json"), changes), source.rpartition("/")[2])
    raise MissingInputError(Problem("MOD002", f"no model {source!r}", "model.path", _nearest(source)))


def _turned(config: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config with another number of rows, or another theta or scaling of its rotations, in the one place where
    transformers 5 has both; of layers that turn in several ways, those with full attention."""
    changes = dict(changes or {})
    if "vocab_size" in changes:
        theirs, rows = config.get("text_config"), {"vocab_size": changes.pop("vocab_size")}
        config = config | rows if theirs is None else config | {"text_config": theirs | rows}
    if not changes:
        return config
    held = config.get("rope_parameters") or {}
    known = held.get(FULL, held) or (config.get("rope_scaling") or {})
    theta = changes.get("rope_theta", known.get("rope_theta", config.get("rope_theta")))
    values = {**changes.get("rope_scaling", known), **({} if theta is None else {"rope_theta": theta})}
    others = {key: value for key, value in changes.items() if key == "max_position_embeddings"}
    return config | others | {"rope_parameters": held | {FULL: values} if FULL in held else values}


def _nearest(source: str) -> str:
    names = {name.lower(): name for name in known.configs()}
    asked = source.rpartition("/")[2].lower()
    hint = "a directory with config.json, a Hub id such as meta-llama/Llama-3.1-8B, or a built-in name"
    if Path(source).name == "hf":
        run = Path(source).parent
        return f"the run {run} writes it when it ends; `shardwise train` alone makes the quickstart's"
    if (close := near(asked, names)) is not None:
        return f"did you mean {names[close]}? ({hint})"
    family = asked.partition("-")[0]
    alike = [names[name] for name in names if name.startswith(family)] if family else []
    return f"{hint}, such as {', '.join(alike or list(known.configs())[5:50:10])}"


def _instead(directory: Path) -> str:
    """Return what to write for a directory that is no model: of a run its export, of an adapter what goes on from
    one."""
    if (directory / "adapter_config.json").is_file():
        return f"`lora.path: {directory}`, with the `model.path` that it was trained on"
    if not (directory / "recipe.yaml").is_file():
        return "a directory that holds config.json as transformers' save_pretrained writes it"
    there = (directory / "hf" / "config.json").is_file()
    export = "" if there else f"`shardwise export {typed(directory)}` writes its model; then "
    return f"{export}`model.path: {directory / 'hf'}`"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = f"no {path.name} in {path.parent}"
        raise MissingInputError(Problem("MOD002", what, "model.path", _instead(path.parent)))
    try:
        config = json.loads(read_regular(path, NOTE_BYTES))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {show_value(config)}, not an object")
        return config
    except (ValueError, OSError, RecursionError) as error:
        what = f"{path} is not JSON, or cannot be read: {str(error)[:200]}"
        raise DataError(Problem("MOD004", what, str(path), "fetch the file again")) from error
