"""Ranks that were started with different recipes, plans or versions are refused before anything is trained."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ConfigError, Problem
from shardwise.runtime.world import process
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe


def agree(recipe: Recipe, plan: Plan) -> None:
    """Compare recipe, plan and versions with rank 0's. Raises RUN002 naming the key that differs, RUN003 naming the
    version. One small gather; the values travel only when they differ."""
    mine = {
        "versions": {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "shardwise": shardwise.__version__,
        },
        "recipe": flatten(recipe.model_dump(mode="json")),
        "plan": flatten(asdict(plan)),
    }
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"host": process().host, "digest": digest, **mine})
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    raise ConfigError(difference(everyone[0], everyone[rank], rank))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> Problem:
    """The problem that tells how rank ``rank``'s facts differ from rank 0's."""
    for name, version in first["versions"].items():
        if other["versions"][name] != version:
            return Problem(
                "RUN003",
                f"{name} {version} on rank 0 (host {first['host']}), {other['versions'][name]} on rank {rank} "
                f"(host {other['host']})",
                "the environment of each node",
                f"install the same versions everywhere: pip install {name}=={version}"
                if name != "python"
                else f"use Python {version} everywhere",
            )
    for part in ("recipe", "plan"):
        keys = sorted(key for key in {**first[part], **other[part]} if first[part].get(key) != other[part].get(key))
        if keys:
            told = "; ".join(
                f"`{key}` {first[part].get(key)} on rank 0, {other[part].get(key)} there" for key in keys[:3]
            )
            return Problem(
                "RUN002",
                f"rank {rank} (host {other['host']}) has {part} {other['digest'][:4]}, rank 0 has "
                f"{first['digest'][:4]}: {told}" + (f"; and {len(keys) - 3} more keys" if len(keys) > 3 else ""),
                f"the {part} on host {other['host']}",
                "copy the same recipe and plan to every node and start all of them again",
            )
    raise AssertionError("the digests differ, so some key does")
