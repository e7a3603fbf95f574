"""Prompts from a file of JSON Lines: texts to continue, or conversations to answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.data.faults import Fault
from shardwise.data.formats import Conversation, parse
from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.spec.files import regular_lines

_FORM = '{"prompt": "..."}, or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Question:
    """One line: its ``record`` as it stands there, at ``where``, and the ``turns`` to answer, which of a prompt are its
    ``text``."""

    record: dict[str, Any]
    where: str
    turns: Conversation
    text: str | None = None

    @property
    def shown(self) -> str:
        """Return what is asked, in one text."""
        return self.text or str(self.turns.messages[-1]["content"])


def asked_text(record: dict[str, Any], where: str, text: str) -> Question:
    """The question of a text, which is continued, or answered as the turn of a user."""
    return Question(record, where, Conversation([{"role": "user", "content": text}], None), text)


def read_prompts(file: Path, most: int | None = None) -> list[Question]:
    """Read every line of ``file``, or the first ``most``. Raises MissingInputError (DATA001); DataError (DATA004,
    DATA005) for the first line that asks nothing."""
    try:
        return [_question(line, f"{file}:{number}") for number, line in enumerate(islice(regular_lines(file), most), 1)]
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror or error}"
        raise MissingInputError(Problem("DATA001", what, "--file", f"a file of lines such as {_FORM}")) from error


def _question(line: bytes, where: str) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(Problem("DATA004", f"the line is not JSON: {error}", where, _FORM)) from error
    given = record if isinstance(record, dict) else {}
    text = given.get("prompt")
    if isinstance(text, str) and text:
        return asked_text(given, where, text)
    try:
        turns = parse({**given, "messages": text or given.get("messages")}, "messages", "all")
    except Fault as fault:
        raise DataError(Problem(fault.code, f"the record asks nothing: {fault.what}", where, _FORM)) from fault
    assert isinstance(turns, Conversation)
    if not turns.messages or turns.messages[-1]["role"] == "assistant":
        what = "its last message is not a user's or a tool's: nothing is left to answer"
        raise DataError(Problem("DATA005", what, where, "end with a message of the user, or of a tool"))
    return Question(given, where, turns)
