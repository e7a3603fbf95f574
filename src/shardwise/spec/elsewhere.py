"""Answers for the keys of other systems that have no counterpart of the same meaning here (elsewhere.json).

    automatic   nothing to say: it is done, or chosen, in any case; the key is left out with a notice
    instead     another key says it; ``write`` is what to write
    missing     not there, and what to do about it

Values that turn a key off (``load_in_8bit: false``, ``wandb_project:``) and those of ``accepts`` ask for nothing, and
are left out too; where ``accepts`` has true (``shuffle``), turning it off asks for something.
docs/migrating.md is made of this table (tests/spec/test_elsewhere.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

OFF = (None, False, "", "no", "none", 0)


@dataclass(frozen=True)
class Answer:
    """What to do with the keys of a row. ``of``: whose they are."""

    of: str
    keys: str
    kind: Literal["automatic", "instead", "missing"]
    say: str = ""
    write: str = ""
    accepts: tuple[Any, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether leaving the key out is what ``value`` means."""
        empty = isinstance(value, list | dict) and not value
        on = any(usual is True for usual in self.accepts)
        return empty or self.kind == "automatic" or value in (OFF[:1] if on else OFF) or value in self.accepts

    @property
    def fix(self) -> str:
        """What to write, and what there is to know."""
        if self.kind == "missing":
            return f"leave it out: {self.say}"
        return ", ".join(filter(None, (f"`{self.write}`" if self.write else "", self.say)))


@cache
def answers() -> tuple[Answer, ...]:
    """Every row of the table."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return tuple(Answer(**{**row, "accepts": tuple(row.get("accepts", ()))}) for row in rows)


@cache
def _by_key() -> dict[str, Answer]:
    return {key: answer for answer in answers() for key in answer.keys.split()}


def find(dotted: str) -> Answer | None:
    """The answer for a key of another system, however deep it stands in a section of that system's."""
    sections = dotted.split(".")
    names = [".".join(sections[:depth]) for depth in range(len(sections), 0, -1)]
    return next((_by_key()[name] for name in (*names, sections[-1]) if name in _by_key()), None)


def answered_whole(name: str) -> bool:
    """Whether there is one answer for a whole section of another system (``fsdp_config``), and none for keys in it
    (torchtune's ``dataset``; LLaMA-Factory's is a name)."""
    return name in _by_key() and not any(key.startswith(f"{name}.") for key in _by_key())
