"""What the model writes, before and after training: numbers do not show whether it learnt to write."""

from __future__ import annotations

from dataclasses import replace

from shardwise.data.store import TokenStore
from shardwise.runtime.generate import Sampling, continue_text, generate
from shardwise.runtime.job import Job
from shardwise.runtime.state import TrainState

PROMPT_TOKENS, MOST_TOKENS = 16, 256
SAMPLE = Sampling(max_new_tokens=48, temperature=0.6)
"""The likeliest token each time goes round in circles where little has been learnt."""


def sample(job: Job, state: TrainState) -> str:
    """The recipe's prompt (else one of the held-out data), a bar, and what the model writes after it."""
    prompt, tokenizer = job.recipe.evaluate.sample_prompt, job.tokenizer
    ending = replace(SAMPLE, eot_id=tokenizer.eot_id, seed=job.recipe.run.seed)
    if prompt is not None:
        return f"{prompt}|{continue_text(state.parts, tokenizer, prompt, ending, job.device)}"
    ids = first_prompt(job.prepared.validation or job.prepared.train)
    return f"{tokenizer.decode(ids)}|{tokenizer.decode(generate(state.parts, ids, ending, job.device))}"


def first_prompt(store: TokenStore) -> list[int]:
    """The beginning of a text; of samples that are asked something, all that is asked in the first."""
    asked = 0
    if store.split.packs is not None:
        begin, end, _ = store.sample(0)
        asked = int(store.read_mask(begin, end).argmax())
    return store.read(0, asked if 1 < asked <= MOST_TOKENS else PROMPT_TOKENS).tolist()


def keep_first_sample(job: Job, state: TrainState) -> None:
    """Store what the untrained model writes for the report; a run that goes on finds it there."""
    if state.step == 0:
        text = sample(job, state)
        if job.rank == 0:
            (job.directory / "sample-before.txt").write_text(text, encoding="utf-8")


def earlier_sample(job: Job) -> str:
    """What :func:`keep_first_sample` stored; empty on ranks other than 0."""
    path = job.directory / "sample-before.txt"
    return path.read_text("utf-8", "replace") if job.rank == 0 and path.exists() else ""


def shown(text: str) -> str:
    """A sample for the terminal: control characters made visible, lines indented."""
    safe = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return safe.replace("\n", "\n        ")
