"""``shardwise export``: a checkpoint as a directory that transformers can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from shardwise.cli.card import push, write_card
from shardwise.cli.options import Common, misused, recipe_file
from shardwise.cli.show import print_json, say
from shardwise.data.tokens import open_directory
from shardwise.errors import MissingInputError, Problem
from shardwise.launch import rundir
from shardwise.models.resolve import resolve
from shardwise.runtime.checkpoint.locate import is_own, locate_best
from shardwise.runtime.checkpoint.manifest import candidates, train_again
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import typed


@dataclass
class Options(Common):
    """Write a checkpoint of a run as a Hugging Face model directory."""

    run: Annotated[Path, Argument(help="The run's directory.")]
    step: Annotated[
        int | None, Option("--step", min=0, help="The step of the checkpoint (default: the newest intact one).")
    ] = None
    best: Annotated[bool, Option("--best", help="The checkpoint with the lowest validation loss.")] = False
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Where to write (default: RUN/hf).")] = None
    push: Annotated[
        str | None,
        Option("--push", metavar="ORG/NAME", help="Upload it to the Hub, as a private repository if it is new."),
    ] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "float8"] | None,
        Option("--dtype", help="Of the files; float8: linear layers in 8 bits with a scale for 128 x 128."),
    ] = None
    adapter: Annotated[
        bool, Option("--adapter", help="Only the adapter, as peft reads it, into RUN/adapter; not merged.")
    ] = False


def run(options: Options) -> None:
    """Write the directory."""
    from shardwise.models.float8 import unwritable
    from shardwise.models.hf_names import written
    from shardwise.runtime.export import export_adapter_of, export_run
    from shardwise.runtime.own_model import export_own

    if options.best and options.step is not None:
        raise misused("--best and --step both name a checkpoint", "drop one")
    own = is_own(options.run)
    if own and options.dtype is not None:
        raise misused("--dtype for the model of an own loop", "`shardwise.save_pretrained(model.to(dtype), ...)`")
    recipe = None if own else load_recipe(recipe_file(options.run))
    if options.adapter:
        _check_adapter(recipe, options)
    target = options.out or options.run / ("adapter" if options.adapter else "hf")
    if options.out is not None:
        rundir.check_new(options.out)
    directory = options.run if own else options.run / "checkpoints"
    source = options.run if options.step is None else directory / f"step-{options.step:08d}"
    steps = [step for step, _ in candidates(directory)]
    if not steps or options.step not in (None, *steps):
        what = "no checkpoint" + (f" of step {options.step}" if options.step is not None else " is there yet")
        fix = f"`--step {steps[0]}`; there are {', '.join(map(str, steps))}" if steps else train_again(options.run)
        raise MissingInputError(Problem("CKPT001", what, str(options.run), fix))
    source = locate_best(options.run) if options.best else source
    if recipe is None:
        export_own(options.run, source, target)
        merged = ""
    else:
        tokenizer = open_directory(options.run / "tokenizer")
        spec = resolve(recipe)
        if options.dtype == "float8" and (why := unwritable(spec, written(spec))):
            raise misused(f"--dtype float8: {why}", "--dtype bf16")
        if options.adapter:
            export_adapter_of(source, recipe, spec, tokenizer, target)
            merged = "the adapter"
        else:
            merged = export_run(source, recipe, spec, tokenizer, target, options.dtype)
        write_card(options.run, target)
    address = None if options.push is None else push(target, options.push)
    if options.json:
        print_json({"directory": str(target), "pushed": address})
    else:
        if address:
            say(f"pushed: {address}")
        say(f"written: {target}{f' ({merged})' if merged else ''}")
        if options.adapter:
            return
        say(f"serve    vllm serve {typed(target)}")
        say(f"         python -m sglang.launch_server --model-path {typed(target)}")
        arguments = typed(f"pretrained={target},dtype=auto")
        say(f"measure  lm_eval --model hf --model_args {arguments} --tasks hellaswag --batch_size auto")


def _check_adapter(recipe: Recipe | None, options: Options) -> None:
    if recipe is None or recipe.lora.rank is None:
        fix = "leave it out, for the model" if recipe else "`shardwise.save_pretrained` in the loop"
        raise misused("--adapter, but `shardwise train` has trained no adapter here", fix)
    if options.dtype is not None:
        raise misused("--adapter and --dtype: an adapter keeps the dtype in which it was trained", "drop --dtype")
