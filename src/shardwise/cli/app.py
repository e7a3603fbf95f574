"""The command line: one small file a command. Every error is shown once, with its exit code, and no traceback unless
asked."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from shardwise import __version__
from shardwise.cli import interrupt
from shardwise.cli.show import explained, print_error
from shardwise.errors import Problem, ShardwiseError, UsageError
from shardwise.launch.worker import is_worker, speak_in_turn

Refused: type[Any] = typer.BadParameter.__mro__[2]
"""ClickException: click's, or that of the copy of click in newer versions of typer."""

COMMANDS = {
    "train": "Train a model.",
    "launch": "Print or submit the job that trains a recipe on several machines: Slurm, Kubernetes, Ray and others.",
    "plan": "Show how a training run would be split, what it needs, and whether it fits.",
    "prove": "Prove a recipe and its layout on this machine, without GPUs, and write a certificate.",
    "import": "Write a recipe from the files of other systems: axolotl, TRL, DeepSpeed, Accelerate and others.",
    "doctor": "Describe and measure this machine, and say what is below what it should give.",
    "generate": "Continue a text with a run's model, or with any model directory.",
    "chat": "Talk with a run's model, any model directory, or an adapter.",
    "export": "Write a checkpoint of a run as a Hugging Face model directory.",
    "runs": "List the runs of a directory, the newest first: state, step, loss, age and size.",
    "board": "Show the runs of a directory in a browser on this machine, live.",
    "logs": "Show what a submitted run says.",
    "stop": "Stop a submitted run. It saves first, except on Ray.",
    "compare": "Compare runs, finished or not: two side by side, or a sweep in a table.",
    "schema": "Print the JSON schema of a recipe.",
    "data": "Prepare text for training.",
}


ALIASES = {"verify": "prove"}
MODULES = {"import": "import_files"}
"""Where a command's module has another name, since Python keeps this one."""
LOOSE = ("train", "launch", "plan", "prove", "doctor", "import")
"""Commands that take any key of the recipe as a flag."""


class Commands(TyperGroup):
    """The commands; each is imported only when it is called, so that ``--help`` and a mistyped name are quick."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        name = MODULES.get(cmd_name, cmd_name)
        module = import_module(f"shardwise.cli.{name}")
        if cmd_name == "data":
            return typer.main.get_command(module.app)
        from shardwise.cli.options import add_command

        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        add_command(alone, module.Options, module.run, cmd_name, loose=cmd_name in LOOSE)
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # of which newer typers make a silent exit code
            interrupt.say()
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="shardwise",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Say what to train and on which machines; Shardwise splits the work, shows that it fits, trains, and reports.",
)


def _version(value: bool) -> None:
    if value:
        print(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["data"]):  # groups of commands, which do nothing by themselves
        words.append("--help")
    as_json, debug = "--json" in words, "--debug" in words
    if arguments is None and not is_worker():
        interrupt.watch()
    try:
        if words[0] == "train" and not is_worker():
            node = import_module("shardwise.launch.node")  # not for every command: --help is quick
            if (place := node.this_node(words)) is not None:
                return int(import_module("shardwise.cli.on_loss").run_node(words, place))
        result = app(args=words, prog_name="shardwise", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except ShardwiseError as error:
        if debug:
            traceback.print_exc()
        speak_in_turn()
        print_error(error, as_json=as_json)
        return error.exit_code
    except Refused as error:
        named = f"{words[0]} " if words and words[0] in COMMANDS else ""
        fix = f"`shardwise {named}--help`"
        print_error(UsageError(Problem("CLI001", error.format_message(), "the command line", fix)), as_json=as_json)
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        interrupt.say()
        return interrupt.EXIT_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        shown = explained(error)
        print_error(shown, as_json=as_json)
        return shown.exit_code
