"""Answers to a recipe's tasks (data/tasks.py), written by the model as it is after a step. Every rank takes part in
writing them; rank 0 scores them and keeps them in the run's ``answers/``, a file for each task and step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise import techniques
from shardwise.data.conversations import Prompt
from shardwise.data.prompts import Question
from shardwise.data.tasks import expected, questions, scorer
from shardwise.data.whole import write_whole
from shardwise.runtime.checkpoint.host_group import HostGroup
from shardwise.runtime.generate import Sampling, answer, ask_text, ask_turns, chat_of
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.report.warn import failure
from shardwise.runtime.state import TrainState
from shardwise.spec.evaluation_task import EvaluationTask


def task_group(job: Job) -> HostGroup:
    """The ranks that answer, in a group of their own: meanwhile a save may be in flight, which uses the checkpoints'.
    Collective where there are tasks."""
    return HostGroup.of(None) if job.recipe.evaluate.tasks else HostGroup(None, job.rank, 1)


def answer_tasks(job: Job, state: TrainState, group: HostGroup, log: Log) -> None:
    """Answer and score all tasks. One that fails is a warning (REP001)."""
    for task in job.recipe.evaluate.tasks:
        done = group.spared(partial(_answer, job, state, group, task), job.recipe.run.timeout_s / 2)
        if isinstance(done, Exception):
            log.say(failure(f"the task {task.name} at step {state.step}", done))
        else:
            log.event("task", step=state.step, task=task.name, score=done)
            log.say(f"step {state.step}: {task.name} {done:.3f} ({_file(job.directory, task.name, state.step)})")


def _answer(job: Job, state: TrainState, group: HostGroup, task: EvaluationTask) -> float:
    """Returns the mean score."""
    asked = group.first(lambda: [_asked(job, one) for one in questions(task)])
    answers = []
    try:
        for number, (*_, ids, end, closing) in enumerate(asked):
            seed, prompt = job.recipe.run.seed + number, Prompt(ids, end, closing)
            sampling = Sampling(task.max_new_tokens, task.temperature, seed, job.tokenizer.eot_id)
            answers.append(answer(state.parts, job.tokenizer, prompt, sampling, job.device, group.first))
    finally:
        techniques.after_inference(state.parts, job.plan)

    def keep() -> float:
        score = scorer(task)
        lines: list[dict[str, Any]] = [
            {"prompt": one[0], "expected": one[1], "answer": text, "score": score(text, one[1])}
            for one, text in zip(asked, answers, strict=True)
        ]
        file = _file(job.directory, task.name, state.step)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        return fmean(line["score"] for line in lines)

    return group.first(keep)


Asked = tuple[str, str | None, list[int], int | None, str]
"""The text and the expected answer of a question, and its prompt: plain values, which ranks can send each other."""


def _asked(job: Job, one: Question) -> Asked:
    """Return the prompt that a question becomes. Messages are written by the run's chat template; a text is continued
    up to an end-of-text."""
    if one.text is not None:
        prompt = ask_text(job.tokenizer, one.text)
    else:
        prompt = ask_turns(chat_of(job.tokenizer.directory), one.turns, one.where)
    return one.shown, expected(one), prompt.ids, prompt.end, prompt.closing


def _file(run: Path, task: str, step: int) -> Path:
    return run / "answers" / task / f"step-{step:08d}.jsonl"
