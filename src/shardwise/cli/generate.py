"""``shardwise generate``: continue a text, or answer a question, with a trained model; or do so for a file of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli.inference import Writing
from shardwise.cli.options import misused
from shardwise.cli.out_file import write_out
from shardwise.cli.show import print_json, say, working
from shardwise.data.prompts import Question, asked_text, read_prompts
from shardwise.errors import Problem, TrainingError
from shardwise.launch.rundir import check_new
from shardwise.spec.host import gpus
from shardwise.spec.safe_path import safe_path


@dataclass
class Options(Writing):
    """Continue a text with a run's model, or with any model directory that transformers can read; --chat answers.

    --file takes prompts from JSON Lines: {"prompt": "..."}, or {"messages": [...]} (and "tools"), which is answered by
    the chat template. Each line of the result is that record with the model's words added as "text".
    """

    path: Annotated[Path, Argument(help="A run's directory, a model's, or an adapter's.")]
    words: Annotated[list[str], Argument(metavar="[PROMPT]", help="What to continue.")] = field(default_factory=list)
    prompt: Annotated[str, Option("--prompt", help="The text to continue, as an option.")] = ""
    chat: Annotated[bool, Option("--chat", help="Treat the prompt as a user message; print only the answer.")] = False
    file: Annotated[Path | None, Option("--file", help="Prompts, one JSON object a line.")] = None
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Where to write the results of --file.")] = None
    batch_size: Annotated[int, Option("--batch-size", min=1, help="Prompts of --file that are computed at once.")] = 8
    nproc: Annotated[int | None, Option("--nproc", min=1, help="Processes that share --file (default: one a GPU).")] = (
        None
    )


def run(options: Options) -> None:
    """Print the continuation, or the answer; or answer a file."""
    prompt = options.prompt or " ".join(options.words)
    if options.prompt and options.words:
        what = f"two prompts: `{options.prompt}` and `{' '.join(options.words)}`"
        raise misused(what, "leave --prompt out")
    if options.file is not None and not prompt:
        return _write_file(options, options.file)
    if options.file is not None or options.out is not None or options.nproc is not None:
        raise misused("--file, --out and --nproc go together, without a prompt", "--file PROMPTS.jsonl, or a prompt")
    if options.chat and not prompt:
        raise misused("--chat without a question", 'shardwise generate RUN --chat "What is ...?"')
    [text] = _written(options, [asked_text({}, "--prompt", prompt)])
    if options.json:
        print_json({"prompt": prompt, "text": text})
    else:
        say(text if options.chat else prompt + text)


def _written(options: Options, questions: Sequence[Question], gpu: int = 0) -> list[str]:
    """Return what the model writes after each, in their order; computed in batches of similar lengths."""
    from shardwise.runtime.generate import ask_text, ask_turns, chat_of

    answers = [options.chat or question.text is None for question in questions]
    writer = options.writer(options.path, gpu, answers=any(answers))
    chat = chat_of(writer.tokenizer.directory) if any(answers) else None
    prompts = [
        ask_turns(chat, question.turns, question.where)
        if chat is not None and answered
        else ask_text(writer.tokenizer, question.text or "")
        for question, answered in zip(questions, answers, strict=True)
    ]
    order, found = sorted(range(len(prompts)), key=lambda at: len(prompts[at].ids)), [""] * len(questions)
    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        for at, text in zip(batch, writer.write([prompts[at] for at in batch]), strict=True):
            found[at] = text.strip() if answers[at] else text
    return found


def _write_file(options: Options, file: Path) -> None:
    """Have as many processes as there are GPUs (or as asked) share the prompts of a file."""
    questions = read_prompts(file)
    if options.out is not None:
        check_new(options.out)
    nproc = max(1, min(options.nproc or len(gpus()), len(questions)))
    with working(f"writing after {len(questions):,} prompts"):
        texts = _written(options, questions) if nproc == 1 else _shared(options, questions, nproc)
    answers = zip(questions, texts, strict=True)
    lines = [json.dumps({**question.record, "text": text}, ensure_ascii=False) for question, text in answers]
    if options.out is None:
        say(*lines)
        return
    write_out(options.out, "\n".join([*lines, ""]), "--out")
    print_json({"file": str(options.out), "prompts": len(lines)}) if options.json else say(f"written: {options.out}")


def _shared(options: Options, questions: Sequence[Question], nproc: int) -> list[str]:
    """Return what :func:`_written` does, by processes of which each has the whole model on a GPU of its own."""
    from shardwise.data.shards import die_with_parent

    with safe_path(), ProcessPoolExecutor(nproc, get_context("spawn"), die_with_parent) as pool:
        shares = [pool.submit(_written, options, questions[rank::nproc], rank) for rank in range(nproc)]
        try:
            texts = [share.result() for share in shares]
        except BrokenProcessPool as error:
            what, fix = "a process was killed, most likely for its memory", "`--nproc 1`, or a smaller --batch-size"
            raise TrainingError(Problem("RUN004", what, f"{options.file}", fix)) from error
    return [texts[at % nproc][at // nproc] for at in range(len(questions))]
