"""``shardwise generate``: continue a text, or answer a question, with a trained model; or do so for a file of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli.inference import Writing
from shardwise.cli.options import misused
from shardwise.cli.show import output_to_stderr, print_error, print_json, say, working, write_out
from shardwise.data.prompts import Question, asked_text, read_prompts
from shardwise.errors import OutputError, Problem, TrainingError
from shardwise.launch import local
from shardwise.launch.worker import is_worker, rank, started
from shardwise.spec.host import gpus


@dataclass
class Options(Writing):
    """Continue a text with a run's model, or with any model directory that transformers can read; --chat answers.

    --file takes prompts from JSON Lines: {"prompt": "..."}, or {"messages": [...]} (and "tools"), which is answered by
    the chat template. Each line of the result is that record with the model's words added as "text".
    """

    path: Annotated[Path, Argument(help="A run's directory, a model's, or an adapter's.")]
    words: Annotated[list[str], Argument(metavar="[PROMPT]", help="The text to continue.")] = field(
        default_factory=list
    )
    prompt: Annotated[str, Option("--prompt", help="The text to continue, as an option.")] = ""
    chat: Annotated[bool, Option("--chat", help="Treat the prompt as a user message and print only the answer.")] = (
        False
    )
    file: Annotated[Path | None, Option("--file", help="Prompts, one JSON object a line.")] = None
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Where to write the results of --file.")] = None
    batch_size: Annotated[int, Option("--batch-size", min=1, help="Prompts of --file that are computed at once.")] = 8
    nproc: Annotated[
        int | None, Option("--nproc", min=1, help="Processes that share --file, each with the model (default: GPUs).")
    ] = None


def run(options: Options) -> int:
    """Print the continuation, or the answer; or answer a file."""
    prompt = options.prompt or " ".join(options.words)
    if options.prompt and options.words:
        what = f"two prompts: `{options.prompt}` and `{' '.join(options.words)}`"
        raise misused(what, "leave --prompt out")
    if options.file is not None:
        if prompt:
            raise misused("a prompt beside --file", "one of them")
        return _write_share(options, options.file) if is_worker() else _write_file(options, options.file)
    if options.out is not None or options.nproc is not None:
        raise misused("--out and --nproc are for --file", "leave them out, or --file PROMPTS.jsonl")
    if options.chat and not prompt:
        raise misused("--chat without a question", 'shardwise generate RUN --chat "What is ...?"')
    [text] = _written(options, [asked_text({}, "--prompt", prompt)])
    if options.json:
        print_json({"prompt": prompt, "text": text})
    else:
        say(text if options.chat else prompt + text)
    return 0


def _written(options: Options, questions: Sequence[Question]) -> list[str]:
    """What the model writes after each, in their order; computed in batches of similar lengths."""
    from shardwise.runtime.generate import ask_text, ask_turns

    answers = [options.chat or question.text is None for question in questions]
    writer = options.writer(options.path, answers=any(answers))
    chat = writer.chat() if any(answers) else None
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


def _write_file(options: Options, file: Path) -> int:
    """Have as many processes as there are GPUs (or as asked) share the prompts of a file; the exit code."""
    questions = read_prompts(file)
    if options.out is not None and options.out.exists():
        what = f"{options.out} exists; nothing is overwritten"
        raise OutputError(Problem("OUT001", what, "--out", "another --out"))
    nproc = max(1, min(options.nproc or len(gpus()), len(questions)))
    with working(f"writing after {len(questions):,} prompts"):
        if nproc == 1:
            texts = _written(options, questions)
        else:
            with tempfile.TemporaryDirectory(prefix="shardwise-") as kept:
                ended = _start(options, Path(kept), nproc)
                if ended.exit_code:
                    return _failed(ended, options)
                shares = [json.loads(Path(kept, f"{number}").read_text("utf-8")) for number in range(nproc)]
            texts = [shares[at % nproc][at // nproc] for at in range(len(questions))]
    lines = [
        json.dumps({**question.record, "text": text}, ensure_ascii=False)
        for question, text in zip(questions, texts, strict=True)
    ]
    if options.out is None:
        say(*lines)
        return 0
    write_out(options.out, "\n".join([*lines, ""]), "--out")
    print_json({"file": str(options.out), "prompts": len(lines)}) if options.json else say(f"written: {options.out}")
    return 0


def _start(options: Options, kept: Path, nproc: int) -> local.Ended:
    """Run this command as ranks, which leave their share in the directory ``kept``."""
    words = ["generate", f"{options.path}", "--file", f"{options.file}", "--out", f"{kept}"]
    words += ["--chat"] * options.chat + ["--best"] * options.best + ["--debug"] * options.debug
    words += [] if options.tokens is None else ["--tokens", f"{options.tokens}"]
    for name in ("temperature", "top_k", "top_p", "seed", "batch_size"):
        words += [f"--{name.replace('_', '-')}", f"{vars(options)[name]}"]
    with output_to_stderr() if options.json else nullcontext():
        return local.run_ranks(words, nproc, kept, saves=False)


def _write_share(options: Options, file: Path) -> int:
    """In a rank: every prompt of the file whose turn it is."""
    assert options.out is not None
    mine = read_prompts(file)[rank() :: started()[0]]
    (options.out / f"{rank()}").write_text(json.dumps(_written(options, mine)), encoding="utf-8")
    return 0


def _failed(ended: local.Ended, options: Options) -> int:
    if ended.problem is not None:
        fix = "what the rank printed says why; `--nproc 1` takes the memory of one model"
        problem = replace(ended.problem, where=f"{options.file}", fix=fix)
        print_error(TrainingError(problem), as_json=options.json)
    return ended.exit_code
