"""The answers to a run's tasks, from its files, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.spec.files import regular_lines
from shardwise.spec.record import from_json

SHOWN_PROMPTS, SHOWN_CHARACTERS = 3, 200
"""How much of a task's answers a report shows."""


@dataclass(frozen=True)
class TaskTable:
    """Of a task the scores by step, and beside them the answers to its first prompts."""

    task: str
    heads: list[str]
    rows: list[list[str]]


def answer_tables(run: Path) -> list[TaskTable]:
    """Return a table for each task that the run in this directory has answered, with the prompts that it was asked
    last: a resumed run may ask others than before. A step that answered nothing has no row."""
    tables = []
    for folder in sorted((run / "answers").glob("*/")):
        files = {int(file.stem[5:]): file for file in sorted(folder.glob("step-*.jsonl"))}
        read = {step: [from_json(dict[str, Any], line) for line in regular_lines(file)] for step, file in files.items()}
        answered = {step: lines for step, lines in read.items() if lines}
        if not answered:
            continue
        asked = [(one["prompt"], one["expected"]) for one in answered[max(answered)][:SHOWN_PROMPTS]]
        rows = []
        for step, lines in answered.items():
            answers = {(one["prompt"], one["expected"]): _cell(one["answer"]) for one in lines}
            score = fmean(one["score"] for one in lines)
            rows.append([str(step), f"{score:.3f}", *(answers.get(prompt, "") for prompt in asked)])
        heads = ["step", "score", *(_cell(f"{prompt} ({wanted})") for prompt, wanted in asked)]
        tables.append(TaskTable(folder.name, heads, rows))
    return tables


def side_by_side(tables: Iterable[TaskTable]) -> list[str]:
    """Return the tables as lines of report.md."""
    lines = []
    for table in tables:
        heads, *rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.heads, *table.rows))
        lines += ["", f"## {table.task}", "", f"| {heads} |", "|---:|---:|" + "---|" * (len(table.heads) - 2)]
        lines += [f"| {row} |" for row in rows]
    return lines


def _cell(text: str) -> str:
    """A text in one cell of a table, cut short."""
    plain = " ".join(text.split())
    return plain if len(plain) <= SHOWN_CHARACTERS else f"{plain[:SHOWN_CHARACTERS]}..."
