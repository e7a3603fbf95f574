"""Tasks of a recipe (``evaluate.tasks``): prompts that the model answers at every evaluation, and how answers are
scored. Reads them without torch, so that what is wrong is said before any process starts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, Problem
from shardwise.spec.files import TABLE_BYTES, read_regular, regular_lines
from shardwise.spec.recipe import EvaluationTask, Recipe
from shardwise.spec.record import from_json

Score = Callable[[str, str | None], float]
"""(the model's answer, the expected one) -> a number, higher is better."""
EXACT_MATCH = "exact_match"


@dataclass(frozen=True)
class HeldOutPrompt:
    """A line of a task's file: a ``prompt`` to be continued, or ``messages`` to be answered, and the expected
    ``answer``, if there is one."""

    prompt: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer: str | None = None

    @property
    def shown(self) -> str:
        """Return what was asked, in one text."""
        last = self.messages[-1] if self.messages else {}
        return self.prompt or str(last.get("content", ""))


def check_tasks(recipe: Recipe) -> None:
    """Raises DataError (EVAL001) for a file of prompts, or a function, that is not as ``evaluate.tasks`` needs it."""
    for task in recipe.evaluate.tasks:
        questions(task)
        if task.score != EXACT_MATCH:
            _check_function(task)


def questions(task: EvaluationTask) -> list[HeldOutPrompt]:
    """The first prompts of its file."""
    found, where = [], Path(task.path)
    try:
        for number, line in enumerate(islice(regular_lines(where), task.samples), 1):
            try:
                found.append(from_json(HeldOutPrompt, line))
            except ValueError as error:
                raise _wrong(f"line {number} is no prompt: {error}", task.path) from None
            if not found[-1].shown:
                raise _wrong(f"line {number} has neither `prompt` nor `messages`", task.path)
            if found[-1].answer is None and task.score == EXACT_MATCH:
                raise _wrong(f"line {number} has no `answer`, which `score: {EXACT_MATCH}` compares with", task.path)
    except OSError as error:
        raise _wrong(f"the prompts cannot be read: {error.strerror}", task.path) from None
    if not found:
        raise _wrong("the file of prompts is empty", task.path)
    return found


def scorer(task: EvaluationTask) -> Score:
    """Return what scores an answer. The file of a user's own function is run, as any Python file is that is
    imported."""
    if task.score == EXACT_MATCH:
        return lambda answer, expected: float(answer.strip() == (expected or "").strip())
    path, _, name = task.score.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function = vars(module)[name]
    return lambda answer, expected: float(function(answer, expected))


def _check_function(task: EvaluationTask) -> None:
    """The file is only read here, not run."""
    path, _, name = task.score.rpartition(":")
    try:
        tree = ast.parse(read_regular(path, TABLE_BYTES))
    except (OSError, SyntaxError, ValueError) as error:
        raise _wrong(f"`score: {task.score}`: no Python file with `{name}` can be read: {error}", path) from None
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in defined:
        raise _wrong(f"there is no function `{name}`; there are {', '.join(defined) or 'none'}", path)


def _wrong(what: str, where: str) -> DataError:
    fix = (
        '{"prompt": "2 + 2 = ", "answer": "4"} a line, or "messages" for "prompt"; score: exact_match or mine.py:score'
    )
    return DataError(Problem("EVAL001", what, where, fix))
