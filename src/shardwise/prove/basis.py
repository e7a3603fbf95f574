"""The parts that a certificate rests on: where any of it is another one, other numbers were proved. No torch is
imported, so that a run can ask before it starts."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shardwise
from shardwise.data.remote import all_shown
from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import data_of
from shardwise.spec.keys import dotted
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

Basis = dict[str, dict[str, Any]]
"""Of each part ("recipe", "model", "plan", "data", "versions", "code") its values by name, as JSON has them."""
ELSEWHERE = ("run", "checkpoint", "evaluate", "parallel", "precision", "recompute", "compile", "offload")
"""Sections of a recipe that say where it runs, and what is kept and told of it, or what the plan has too."""
OF_RUN = ("run.seed", "run.deterministic")
FOR_THE_READER = ("estimate", "why", "cluster")
"""Of a plan: the same one has others on another day, as more runs of this machine are known."""
NOT_HERE = "not there"
"""In the place of a value that one of two parts does not have."""
Change = tuple[Any, Any]


def basis_of(recipe: Recipe, spec: ModelSpec, plan: Plan) -> Basis:
    """All parts as they are here and now. Of data that are not prepared nothing is known."""
    settings = all_shown(dotted(recipe.model_dump(mode="json")))
    model = asdict(spec)
    if spec.hf_model is not None:
        model["hf_model"] = json.loads(spec.hf_model.config)
    parts: Basis = {
        "recipe": {key: settings[key] for key in settings if key in OF_RUN or key.partition(".")[0] not in ELSEWHERE},
        "model": dotted(model),
        "plan": _planned(plan),
        "data": _data(recipe),
        "versions": versions(),
        "code": dict(_code()),
    }
    return dict(json.loads(json.dumps(parts)))


def digests(basis: Basis) -> dict[str, str]:
    """The SHA-256 of each part, and of all of them."""
    found = {part: digest(values) for part, values in basis.items()}
    return found | {"all": digest(found)}


def digest(value: Any) -> str:
    """The SHA-256 of a value that JSON can hold; keys may come in any order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plan_digest(plan: Plan) -> str:
    """The digest of the part "plan" alone."""
    return digest(_planned(plan))


def changed(then: Basis, now: Basis) -> dict[str, dict[str, Change]]:
    """Return what differs, by part and name, as (then, now). Data that were not prepared then are no part of what
    was proved."""
    found: dict[str, dict[str, Change]] = {}
    for part in [part for part in now if part != "data" or then.get("data")]:
        old, new = then.get(part, {}), now[part]
        names = sorted(name for name in old.keys() | new.keys() if old.get(name, NOT_HERE) != new.get(name, NOT_HERE))
        if names:
            found[part] = {name: (old.get(name, NOT_HERE), new.get(name, NOT_HERE)) for name in names}
    return found


def versions() -> dict[str, str]:
    """Return what the proofs are run with."""
    own = {"shardwise": shardwise.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in ("torch", "transformers")}


def _planned(plan: Plan) -> dict[str, Any]:
    return dotted({key: value for key, value in asdict(plan).items() if key not in FOR_THE_READER})


def _data(recipe: Recipe) -> dict[str, str]:
    """The fingerprints of prepared data and of their tokenizer."""
    from shardwise.data.prepare import already_prepared

    with suppress(ShardwiseError, OSError, ValueError):  # a run says what is wrong with the data
        if (prepared := already_prepared(data_of(recipe), recipe.sample_tokens)) is not None:
            return {"fingerprint": prepared.manifest.fingerprint, "tokenizer": prepared.manifest.tokenizer_hash}
    return {}


def _code() -> Iterator[tuple[str, str]]:
    """The package's source files, each with the first digits of its SHA-256."""
    root = Path(shardwise.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
