"""Answers for the keys of other systems that have no counterpart of the same meaning here (elsewhere.json).

    automatic   nothing to say: it is done, or chosen, in any case; the key is left out with a notice
    instead     another key says it; ``write`` is what to write
    missing     not there, and what to do about it

Values that turn a key off (``load_in_8bit: false``, ``wandb_project:``) ask for nothing, and are left out too; where
``accepts`` has true (``shuffle``), turning it off asks for something. ``accepts`` says of other values what they mean:

    ""           that is done in any case
    "=words"     the words say why it is left out
    "key key"    the same as one of these keys of ours, which must be given (``adapter: lora``: ``lora.rank``)
    "-key"       this key of ours must not be given
    "key: value" this setting of ours
docs/migrating.md is made of this table (tests/spec/test_elsewhere.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

OFF = (False, "", "no", "none", 0)


def word(value: Any) -> str:
    """A value as it is written in a recipe, nearly."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Answer:
    """An answer to the keys of a row: what to do with them. ``of``: whose they are."""

    of: str
    keys: str
    kind: Literal["automatic", "instead", "missing"]
    say: str = ""
    write: str = ""
    accepts: Mapping[str, str] = field(default_factory=dict)

    def meaning(self, value: Any) -> str | None:
        """Return what ``value`` means, as ``accepts`` says it; None where something else must be written."""
        if self.kind == "automatic":
            return f"={self.say}"
        if word(value).lower() in self.accepts:
            return self.accepts[word(value).lower()]
        if value is None or (isinstance(value, list | dict) and not value):
            return "=it is empty"
        return "=it is turned off" if value in OFF and self.accepts.get("true") != "" else None

    @property
    def fix(self) -> str:
        """The text that says what to write, and what there is to know."""
        if self.kind == "missing":
            return f"leave it out: {self.say}"
        return ", ".join(filter(None, (f"`{self.write}`" if self.write else "", self.say)))


@cache
def answers() -> tuple[Answer, ...]:
    """Every row of the table."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return tuple(Answer(**row) for row in rows)


@cache
def _by_key() -> dict[str, Answer]:
    return {key: answer for answer in answers() for key in answer.keys.split()}


def find(dotted: str) -> Answer | None:
    """The answer for a key of another system, however deep it stands in a section of that system's."""
    sections = dotted.split(".")
    names = [".".join(sections[:depth]) for depth in range(len(sections), 0, -1)]
    return next((_by_key()[name] for name in (*names, sections[-1]) if name in _by_key()), None)


def answered_whole(name: str) -> bool:
    """Say whether there is one answer for a whole section of another system (``fsdp_config``), and none for keys in it
    (torchtune's ``dataset``; LLaMA-Factory's is a name)."""
    return name in _by_key() and not any(key.startswith(f"{name}.") for key in _by_key())
