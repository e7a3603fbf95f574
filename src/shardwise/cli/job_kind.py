"""The options that say for what a job is, and what its scheduler's program is told besides."""

from __future__ import annotations

import shlex
from typing import Annotated

from typer import Argument, Option

from shardwise.cli.options import misused
from shardwise.launch.jobs.client import JobKind
from shardwise.launch.jobs.table import KINDS
from shardwise.spec.keys import near

On = Annotated[str | None, Option("--on", metavar="|".join(KINDS), help="The scheduler of the job, or ssh.")]
JobName = Annotated[str, Argument(metavar="RUN", help="The run's name, or its job's id.")]
More = Annotated[
    str,
    Option("--with", help="More options of the scheduler's own program: --with='--partition=gpu'; for ssh the hosts."),
]


def kind_of_job(on: str | None) -> JobKind:
    """Return the kind of job that ``--on`` names. Raises UsageError (CLI001)."""
    if on in KINDS:
        return KINDS[on]
    guess = near(on or "", KINDS)
    fix = f"did you mean `{guess}`?" if guess else f"one of {', '.join(KINDS)}"
    raise misused(f"unknown scheduler `{on}`" if on else "`--on` is missing", fix, "--on")


def words_of(more: str) -> list[str]:
    """Return the words of ``--with``, as a shell reads them. Raises UsageError (CLI001)."""
    try:
        return shlex.split(more)
    except ValueError as error:
        raise misused(f"`--with` cannot be read: {error}", "quotes in pairs", "--with") from None
