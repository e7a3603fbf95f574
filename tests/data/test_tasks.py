"""Tasks of a recipe: what is wrong with prompts or a function is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.tasks import check_tasks, expected, questions, scorer
from shardwise.errors import DataError
from shardwise.spec.evaluation_task import EvaluationTask
from shardwise.spec.recipe import Recipe

LINES = [{"prompt": "2 + 2 = ", "answer": "4"}, {"messages": [{"role": "user", "content": "hi"}], "answer": "hello"}]


def recipe(**settings: Any) -> Recipe:
    task = {"name": "sums", "path": "prompts.jsonl", **settings}
    return Recipe.model_validate({"evaluate": {"tasks": [task]}})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    Path("mine.py").write_text("raise SystemExit('run too early')\n\n\ndef score(answer, expected):\n    return 0\n")


def test_what_is_read() -> None:
    check_tasks(recipe())
    check_tasks(recipe(score="mine.py:score"))  # which does not run it
    first, second = questions(recipe().evaluate.tasks[0])
    assert (first.shown, expected(first), second.shown, expected(second)) == ("2 + 2 = ", "4", "hi", "hello")
    assert len(questions(recipe(samples=1).evaluate.tasks[0])) == 1


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        (None, {"path": "nowhere.jsonl"}, "cannot be read"),
        ("", {}, "empty"),
        ('{"prompt": 5}\n', {}, "asks nothing"),
        ('{"answer": "4"}\n', {}, "asks nothing"),
        ('{"messages": [{"role": "assistant", "content": "4"}], "answer": "4"}\n', {}, "nothing is left"),
        ('{"prompt": "2 + 2 = ", "answer": 4}\n', {}, "no text"),
        ("{\n", {}, "not JSON"),
        ('{"prompt": "2 + 2 = "}\n', {}, "no `answer`"),
        (None, {"score": "bleu"}, "no Python file"),
        (None, {"score": "nowhere.py:score"}, "no Python file"),
        (None, {"score": "mine.py:scores"}, "there are score"),
        (None, {"score": "prompts.py:score"}, "invalid syntax"),
    ],
)
def test_what_is_refused(text: str | None, settings: dict[str, str], said: str) -> None:
    Path("prompts.py").write_text("def score(:\n")
    if text is not None:
        Path("prompts.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        check_tasks(recipe(**settings))
    [problem] = caught.value.problems
    assert problem.code == "EVAL001" and said in problem.what and problem.fix
    assert text in (None, "") or problem.where == "prompts.jsonl:1"


def test_two_tasks_of_one_name_are_refused() -> None:
    task = EvaluationTask(name="sums", path="prompts.jsonl")
    [problem] = Recipe().evaluate.model_copy(update={"tasks": [task, task]}).contradictions()
    assert (problem.code, problem.where) == ("CFG008", "evaluate.tasks") and "one name" in problem.what


def test_how_answers_are_scored() -> None:
    exact = scorer(EvaluationTask(name="a", path="a"))
    assert [exact(" 4\n", "4"), exact("4.", "4")] == [1.0, 0.0]
    Path("mine.py").write_text("def score(answer, expected):\n    return len(answer) / len(expected)\n")
    own = scorer(EvaluationTask(name="a", path="a", score="mine.py:score"))
    assert own("ab", "abcd") == 0.5
