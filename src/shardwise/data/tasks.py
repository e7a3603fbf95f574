"""Tasks of a recipe (``evaluate.tasks``): prompts that the model answers at every evaluation, and how answers are
scored. Reads them without torch, so that what is wrong is said before any process starts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from shardwise.data.prompts import Question, read_prompts
from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.spec.evaluation_task import EvaluationTask
from shardwise.spec.files import TABLE_BYTES, read_regular
from shardwise.spec.recipe import Recipe

Score = Callable[[str, str | None], float]
"""(the model's answer, the expected one) -> a number, higher is better."""
EXACT_MATCH = "exact_match"


def check_tasks(recipe: Recipe) -> None:
    """Raises DataError (EVAL001) for a file of prompts, or a function, that is not as ``evaluate.tasks`` needs it."""
    for task in recipe.evaluate.tasks:
        questions(task)
        if task.score != EXACT_MATCH:
            _check_function(task)


def questions(task: EvaluationTask) -> list[Question]:
    """Read the first prompts of its file, whose ``record`` has the expected ``answer``."""
    try:
        found = read_prompts(Path(task.path), task.samples)
    except (DataError, MissingInputError) as error:
        raise _wrong(error.problems[0].what, error.problems[0].where) from None
    for one in found:
        answer = expected(one)
        if not isinstance(answer, str | None):
            raise _wrong("the `answer` is no text", one.where)
        if answer is None and task.score == EXACT_MATCH:
            raise _wrong(f"there is no `answer`, which `score: {EXACT_MATCH}` compares with", one.where)
    if not found:
        raise _wrong("the file of prompts is empty", task.path)
    return found


def expected(one: Question) -> Any:
    """Return the answer that a line expects, if it has any."""
    return one.record.get("answer")


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
    """Refuse a task whose function is not in its file, which is only read here, not run."""
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
