"""Ranks that were started with different recipes, plans or versions are refused before anything is trained."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

import shardwise
from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.runtime.objects import all_gather
from shardwise.runtime.world import process
from shardwise.spec.keys import dotted
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

T = TypeVar("T")


REPAIRS = {
    "python": "the same Python",
    "shardwise's code": "the same Shardwise",
    "nccl": "the same torch, for the same CUDA",
}
"""By version: what to install where pip does not say it."""


def versions() -> dict[str, str]:
    """Return what every rank must have in the same version, the code of this package among it."""
    digest, here = hashlib.sha256(), Path(shardwise.__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\0".encode() + path.read_bytes())
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "shardwise": shardwise.__version__,
        "shardwise's code": digest.hexdigest()[:12],
        "transformers": metadata.version("transformers"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
    }


def agree(recipe: Recipe, plan: Plan, data: str = "") -> None:
    """Compare recipe, plan, versions and the fingerprint of ``data`` with rank 0's. Raises RUN002 naming the key that
    differs, RUN003 naming the version. One small gather; the values travel only when they differ."""
    mine = {
        "versions": versions(),
        "recipe": dotted(recipe.model_dump(mode="json")),
        "plan": dotted(asdict(plan)),
        "data": {"fingerprint": data},
    }
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    digests = all_gather(digest)
    if len(set(digests)) == 1:
        return
    everyone = all_gather({"host": process().host, "digest": digest, **mine})
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    raise ConfigError(difference(everyone[0], everyone[rank], rank))


def together(work: Callable[[], T]) -> T:
    """Do ``work``, as every rank does, and return this rank's result. If it raises ShardwiseError on any rank, every
    rank raises that of the lowest one, so that none goes on without another."""
    made, error = None, None
    try:
        made = work()
    except ShardwiseError as found:
        error = found
    if first := next(filter(None, all_gather(error)), None):
        raise first from error
    return cast(T, made)


def difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> Problem:
    """The problem that tells how rank ``rank``'s facts differ from rank 0's."""
    for name, version in first["versions"].items():
        if (theirs := other["versions"][name]) != version:
            what = f"{name} {version} on rank 0 (host {first['host']}), {theirs} on rank {rank} (host {other['host']})"
            fix = f"install the same versions everywhere: {REPAIRS.get(name, f'pip install {name}=={version}')}"
            return Problem("RUN003", what, "the environment of each node", fix)
    for part in ("recipe", "plan", "data"):
        ours, theirs = first[part], other[part]
        keys = sorted(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        if keys:
            told = "; ".join(f"`{key}` {ours.get(key)} on rank 0, {theirs.get(key)} there" for key in keys[:3])
            told += f"; and {len(keys) - 3} more keys" if len(keys) > 3 else ""
            both = f"has {part} {other['digest'][:4]}, rank 0 has {first['digest'][:4]}"
            what = f"rank {rank} (host {other['host']}) {both}: {told}"
            fix = "copy the same recipe, plan and data to every node and start all of them again"
            return Problem("RUN002", what, f"the {part} on host {other['host']}", fix)
    raise AssertionError("the digests differ, so some key does")
