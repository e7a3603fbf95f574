"""A sample of the model's text, before and after training, since numbers do not show whether it learnt to write."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from shardwise import techniques
from shardwise.data.store import TokenStore
from shardwise.runtime.checkpoint.host_group import HostGroup
from shardwise.runtime.generate import Sampling, generate, prompt_ids
from shardwise.runtime.job import Job
from shardwise.runtime.report.warn import failure, only_reports, warn
from shardwise.runtime.state import TrainState
from shardwise.spec.files import NOTE_BYTES, read_regular

PROMPT_TOKENS, MOST_TOKENS = 16, 256
SAMPLE = Sampling(max_new_tokens=48, temperature=0.6)
"""Above 0, because always taking the most likely token makes a little-trained model repeat itself."""


def sample(job: Job, state: TrainState, group: HostGroup) -> str:
    """The recipe's prompt (else one of the held-out data), a bar, and what the model writes after it. If that fails:
    empty, with a warning, because a sample must not end a run."""

    def write() -> str:
        prompt, tokenizer = job.recipe.evaluate.sample_prompt, job.tokenizer
        ending = replace(SAMPLE, eot_id=tokenizer.eot_id, seed=job.recipe.run.seed)
        given = prompt_ids(tokenizer, prompt) if prompt is not None else None
        ids = given or first_prompt(job.prepared.validation or job.prepared.train)
        begun = tokenizer.decode(ids) if prompt is None else prompt
        try:
            written = generate(state.parts, ids, ending, job.device, first=group.first)
        finally:
            techniques.after_inference(state.parts, job.plan)
        return f"{begun}|{tokenizer.decode(written)}"

    written = group.spared(write, job.recipe.run.timeout_s / 2)
    if isinstance(written, Exception):
        if job.rank == 0:
            warn(failure(f"the sample at step {state.step}", written))
        return ""
    return written


def first_prompt(store: TokenStore) -> list[int]:
    """The beginning of a text; for records with a question, the whole first question."""
    asked = 0
    if store.split.packs is not None:
        begin, end, _ = store.sample(0)
        asked = int(store.read_mask(begin, end).argmax())
    return store.read(0, asked if 1 < asked <= MOST_TOKENS else PROMPT_TOKENS).tolist()


def keep_first_sample(job: Job, state: TrainState, group: HostGroup) -> None:
    """Store a sample of the model before training, for the report; a resumed run reads it. Not of random weights: they
    write noise, and it would take up to half of the time before the first step."""
    text = sample(job, state, group)
    if job.rank == 0:
        with only_reports("keeping the first sample"):
            (job.directory / "sample-before.txt").write_text(text, encoding="utf-8")


def earlier_sample(job: Job) -> str:
    """Return what :func:`keep_first_sample` stored; empty where that is nothing, and on ranks other than 0."""
    with suppress(OSError):
        if job.rank == 0:
            return read_regular(job.directory / "sample-before.txt", NOTE_BYTES).decode(errors="replace")
    return ""


def shown(text: str) -> str:
    """A sample for the terminal: control characters made visible, lines indented."""
    safe = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return safe.replace("\n", "\n        ")
