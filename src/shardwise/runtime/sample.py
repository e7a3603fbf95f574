"""What the model writes, before and after training: numbers do not show whether it learnt to write."""

from __future__ import annotations

from dataclasses import replace

from shardwise.runtime.generate import Sampling, continue_text
from shardwise.runtime.job import Job
from shardwise.runtime.state import TrainState

PROMPT_TOKENS = 16
SAMPLE = Sampling(max_new_tokens=48)


def sample(job: Job, state: TrainState) -> str:
    """The recipe's prompt (else the beginning of the held-out text), a bar, and what the model writes after it."""
    prompt = job.recipe.evaluate.sample_prompt
    if prompt is None:
        store = job.prepared.validation or job.prepared.train
        prompt = job.tokenizer.decode(store.read(0, PROMPT_TOKENS).tolist())
    ending = replace(SAMPLE, eot_id=job.tokenizer.eot_id, seed=job.recipe.run.seed)
    return f"{prompt}|{continue_text(state.parts, job.tokenizer, prompt, ending, job.device)}"


def keep_first_sample(job: Job, state: TrainState) -> None:
    """Store what the untrained model writes for the report; a run that goes on finds it there."""
    if state.step == 0:
        text = sample(job, state)
        if job.rank == 0:
            (job.directory / "sample-before.txt").write_text(text, encoding="utf-8")


def earlier_sample(job: Job) -> str:
    """What :func:`keep_first_sample` stored; empty on ranks other than 0."""
    path = job.directory / "sample-before.txt"
    return path.read_text(encoding="utf-8") if job.rank == 0 and path.exists() else ""


def shown(text: str) -> str:
    """A sample for the terminal: control characters made visible, lines indented."""
    safe = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return safe.replace("\n", "\n        ")
