"""``shardwise stop``: stop a submitted run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli.job_kind import JobName, More, On, kind_of_job, words_of
from shardwise.cli.options import Common
from shardwise.cli.show import print_json, say
from shardwise.launch.jobs import client


@dataclass
class Options(Common):
    """Stop a submitted run. It saves first, except on Ray.

    A run is submitted by `shardwise launch --submit`.

    Where a job keeps its name after its end (Kubernetes, Ray), one that has ended is removed.
    """

    name: JobName
    on: On = None
    out: Annotated[Path, Option("-o", "--out", help="Directory for runs.")] = Path("runs")
    more: More = ""


def run(options: Options) -> None:
    """Find the job, and have it stopped."""
    kind, more = kind_of_job(options.on), words_of(options.more)
    job = client.named(kind.client, options.name, options.out, more)
    if job.ended and not kind.client.remove:
        done = "has ended"
    else:
        client.stop(kind.client, job, more)
        done = "removed" if job.ended else "asked to stop" if kind.client.saves else "stopped without saving"
    if options.json:
        return print_json({**asdict(job), "done": done})
    return say(f"{done}: {job.name}, job {job.id}" + f", {job.state}" * (done == "has ended"))
