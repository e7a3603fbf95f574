"""From a directory, a name or a ``config.json`` to a ModelSpec. Imports no torch for the families that are our own."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError, MissingInputError, Problem
from shardwise.models import known
from shardwise.models.config import ModelSpec, family_of, from_hf
from shardwise.models.numbers import check_numbers
from shardwise.spec.complaints import show_value
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.hub import fetch


def read_spec(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of what a Hugging Face ``config.json`` describes: of our decoder, or of transformers' own modules.

    Raises DataError (MOD005) for numbers that no model computes with, ConfigError for what is not supported.
    """
    check_numbers(config, name)
    try:
        if family_of(config, name) is not None:
            return from_hf(config, name)
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        # a list where a word belongs, a word where settings do
        what = f"a value in the config has the wrong type: {str(error)[:200]}"
        fix = "take the values from the model's own config.json"
        raise ConfigError(Problem("CFG004", what, f"config of {name}", fix)) from error
    from shardwise.models import hf_model

    return hf_model.read(config, name)


def load_spec(source: str, revision: str | None = None) -> ModelSpec:
    """The spec of a directory with a ``config.json``, of a built-in model, or of a Hub id, tried in that order."""
    path = Path(source).expanduser()
    if path.exists():
        return read_spec(_read_json(path / "config.json" if path.is_dir() else path), path.name)
    if (match := known.find(source)) is not None:
        return read_spec(match[1], match[0])
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        directory = fetch(source, revision, ["config.json"], "model.path")
        return read_spec(_read_json(directory / "config.json"), source.rpartition("/")[2])
    raise MissingInputError(Problem("MOD002", f"no model {source!r}", "model.path", _nearest(source)))


def _nearest(source: str) -> str:
    names = {name.lower(): name for name in known.configs()}
    close = difflib.get_close_matches(source.rpartition("/")[2].lower(), names, n=3, cutoff=0.5)
    hint = "a directory with config.json, a Hub id such as meta-llama/Llama-3.1-8B, or a built-in name"
    if Path(source).name == "hf":
        run = Path(source).parent
        return f"the run {run} writes it when it ends; `shardwise train` alone makes the quickstart's"
    if not close:
        return f"{hint}, such as {', '.join(list(known.configs())[5:50:10])}"
    return f"did you mean {' or '.join(names[name] for name in close)}? ({hint})"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        fix = "a directory that holds config.json as transformers' save_pretrained writes it"
        raise MissingInputError(Problem("MOD002", f"no {path.name} in {path.parent}", "model.path", fix))
    try:
        config = json.loads(read_regular(path, NOTE_BYTES))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {show_value(config)}, not an object")
        return config
    except (ValueError, OSError, RecursionError) as error:
        what = f"{path} is not JSON, or cannot be read: {str(error)[:200]}"
        raise DataError(Problem("MOD004", what, str(path), "fetch the file again")) from error
