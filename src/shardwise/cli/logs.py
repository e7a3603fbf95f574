"""``shardwise logs``: what a submitted run has said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli.job_kind import JobName, More, On, kind_of_job, words_of
from shardwise.cli.options import Common
from shardwise.launch.jobs import client


@dataclass
class Options(Common):
    """Show what a submitted run says (`shardwise launch --submit`); of several nodes, the first."""

    name: JobName
    on: On = None
    out: Annotated[Path, Option("-o", "--out", help="Directory for runs.")] = Path("runs")
    follow: Annotated[bool, Option("-f", "--follow", help="Go on showing what comes.")] = False
    more: More = ""


def run(options: Options) -> int:
    """Hand over to the scheduler's own program; its exit code."""
    kind, more = kind_of_job(options.on), words_of(options.more)
    job = client.named(kind.client, options.name, options.out, more)
    return client.show(kind.client, job, more, follow=options.follow)
