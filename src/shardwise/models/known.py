"""Well-known configurations, so that a plan can be made without a network. Keys as in ``config.json``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Config = dict[str, Any]

OWNERS = (
    "meta-llama",
    "nousresearch",
    "unsloth",
    "tinyllama",
    "huggingfacetb",
    "mistralai",
    "qwen",
    "google",
    "microsoft",
    "allenai",
    "ibm-granite",
    "openai",
    "deepseek-ai",
    "zai-org",
)
"""Hub accounts under which these models are found unchanged."""


@cache
def configs() -> dict[str, Config]:
    """Return what each model's ``config.json`` says, by the model's name: the lines of ``known.jsonl``."""
    lines = (json.loads(line) for line in Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines())
    return {config.pop("name"): config for config in lines}


_MARKS = ("-hf", "-instruct", "-thinking", "-chat", "-v1.0", "-base", "-it", "-pt")
_UNLIKE_THEIR_CHATS = ("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "mixtral-8x22b-v0.1")
"""Models whose chat versions have other dimensions."""


def find(name: str) -> tuple[str, Config] | None:
    """The built-in model meant by a short name or a Hub id, in any case: (name, config). Chat models have the
    dimensions of their base."""
    owner, _, short = name.lower().rpartition("/")
    if owner and owner not in OWNERS:
        return None
    by_name = {known.lower(): known for known in configs()}
    short = short.removeprefix("meta-")
    like = "-".join(part for part in short.split("-") if f"-{part}" not in _MARKS)
    found = by_name.get(short) or (by_name.get(like) if like not in _UNLIKE_THEIR_CHATS else None)
    return None if found is None else (found, configs()[found])
