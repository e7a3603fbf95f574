"""``shardwise logs``: what a submitted run has said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli.job_kind import JobName, More, On, kind_of_job, words_of
from shardwise.cli.show import note
from shardwise.launch.jobs import client


@dataclass
class Options:
    """Show what a submitted run says (`shardwise launch --submit`); of several nodes, the first."""

    name: JobName
    on: On = None
    out: Annotated[Path, Option("-o", "--out", help="Directory for runs.")] = Path("runs")
    follow: Annotated[bool, Option("-f", "--follow", help="Go on showing what comes.")] = False
    more: More = ""
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False


def run(options: Options) -> int:
    """Hand over to the scheduler's own program, whose exit code is returned; or say why it would show nothing."""
    kind, more = kind_of_job(options.on), words_of(options.more)
    job = client.named(kind.client, options.name, options.out, more)
    nothing = client.silence(kind.client, job)
    if nothing and not (options.follow and job.log):
        note(nothing)
        return 0
    return client.show(kind.client, job, more, follow=options.follow)
