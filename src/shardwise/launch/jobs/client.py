"""The work of a scheduler's own program for a job: submit it, list it, show what it says, stop it.

An engine says in a :class:`Client` how its program is called; nothing here knows an engine. Nothing is kept of a job:
its scheduler lists it, under the run's name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.errors import MissingInputError, OutputError, Problem, UnavailableError, UsageError
from shardwise.launch.jobs.cluster_job import ClusterJob, label_of
from shardwise.spec.safe_path import SAFE_PATH

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Submitted:
    """A job as its scheduler lists it; ``state`` and ``reason`` are the scheduler's words. ``log``: where it writes, if
    that is a file here."""

    id: str
    name: str
    state: str
    reason: str = ""
    ended: bool = False
    log: str = ""


@dataclass(frozen=True)
class Client:
    """The commands of a scheduler's program. In them, ``{file}`` in ``{directory}`` is where the job is written,
    ``{id}``, ``{name}`` and ``{log}`` those of a job, ``{more}`` words of the user, ``{follow}`` one of ``follow``: to
    show what there is, or what comes as well. What ``listed`` prints, ``read`` makes jobs of. ``remove`` is for a job
    that has ended, where it keeps its name until then. ``start`` and ``found`` stand in for ``submit`` and ``listed``
    where no program does that. ``told``: the job's id in what ``submit`` says (else it is its name). ``by_label``: runs
    are listed under their labels, not under their names; ``found_by``: options that would change what a job is listed
    under. ``saves``: a job that is stopped may save first. ``fixes``: what to do when the program says so."""

    program: str
    logs: str
    stop: Sequence[str]
    remove: Sequence[str] = ()
    submit: Sequence[str] = ()
    listed: str = ""
    read: Callable[[str], list[Submitted]] = lambda said: []
    start: Callable[[ClusterJob, str, Sequence[str]], str] | None = None
    found: Callable[[Path], list[Submitted]] | None = None
    follow: tuple[str, str] = ("", "--follow")
    told: str = ""
    file: str = "job.yaml"
    by_label: bool = False
    found_by: Sequence[str] = ()
    saves: bool = True
    fixes: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, run: str) -> str:
        """Return the name under which a run is listed."""
        return label_of(run) if self.by_label else run


@dataclass(frozen=True)
class JobKind:
    """A scheduler, or what does its work: the function ``text`` writes a job for it, ``client`` is its own program."""

    name: str
    text: Callable[[ClusterJob], str]
    client: Client


def call(words: Sequence[str], fixes: Mapping[str, str]) -> str:
    """Return what a program prints. Raises UnavailableError: JOB001 where it is missing, JOB002 where it refuses."""
    try:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(words, env={**os.environ, **SAFE_PATH}, errors="replace", **streams)
    except OSError as error:
        what = f"`{words[0]}` cannot be started: {error.strerror}"
        fix = "run this where that program is, such as a login node of the cluster"
        raise UnavailableError(Problem("JOB001", what, "PATH", fix)) from None
    if done.returncode == 0:
        return COLOURS.sub("", done.stdout)
    said = COLOURS.sub("", done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
    fix = next((fix for pattern, fix in fixes.items() if re.search(pattern, said, re.IGNORECASE)), "")
    shown = "; ".join(line.strip() for line in said.splitlines() if line.strip())[-500:]
    what = f"`{' '.join(words)[:100]}` fails: {shown}"
    raise UnavailableError(Problem("JOB002", what, "--with" if "--with" in fix else words[0], fix))


def submit(client: Client, job: ClusterJob, text: str, more: Sequence[str]) -> str:
    """Submit ``text``, the job as its engine writes it, once; returns its id. Raises OutputError (JOB003) where a job
    of this name runs or waits, UsageError (JOB002) for words by which it would be listed under another,
    UnavailableError as :func:`call`."""
    if renames := next((word for word in more if _is_one_of(word, client.found_by)), None):
        what = f"`{renames}` is set by the job itself, which is found by it later (`shardwise runs`, `logs`, `stop`)"
        raise UsageError(Problem("JOB002", what, "--with", "leave it out; `--run` names the job"))
    for other in listed(client, Path(job.out), more):
        if other.name == client.name_of(job.name) and not (other.ended and not client.remove):
            what = f"there is a job {other.name} already: job {other.id}, {other.state}; nothing was submitted"
            fix = f"`shardwise stop {job.name} --on ...` {'removes' if other.ended else 'stops'} it; or another `--run`"
            raise OutputError(Problem("JOB003", what, "--run", fix))
    if client.start is not None:
        return client.start(job, text, more)
    said = ""
    with TemporaryDirectory(prefix="shardwise-") as directory:
        place = {"file": f"{directory}/{client.file}", "directory": directory, "name": job.label}
        Path(place["file"]).write_text(text, encoding="utf-8")
        for command in client.submit:
            said = call(_words(command, more, place), client.fixes)
    found = re.search(client.told, said) if client.told else None
    return found[1] if found else job.label


def listed(client: Client, directory: Path, more: Sequence[str] = ()) -> list[Submitted]:
    """Return the jobs, in the scheduler's order; ``directory`` holds the runs. Raises as :func:`call`."""
    if client.found is not None:
        return client.found(directory)
    said = call(_words(client.listed, more, {}), client.fixes)
    with suppress(ValueError, LookupError, TypeError):
        return client.read(said)
    what = f"`{client.listed.split()[0]}` lists jobs in a form that is not understood: {said.strip()[:200]}"
    raise UnavailableError(Problem("JOB002", what, client.program, "another version of it"))


def named(client: Client, name: str, directory: Path, more: Sequence[str] = ()) -> Submitted:
    """Return the job of the run ``name``, else that with this id, else that of a run with the same label: of several
    of one run that which has not ended, else the newest. Raises MissingInputError (JOB004) where there is none, or
    more than one may be meant."""
    jobs = listed(client, directory, more)
    ways = (
        [job for job in jobs if job.name == name],
        [job for job in jobs if job.id == name],
        [job for job in jobs if label_of(job.name) == label_of(name)],
    )
    known = next(filter(None, ways), [])
    if not known:
        names = ", ".join(sorted({job.name for job in jobs})) or "none"
        fix = f"one of these: {names}; what ended long ago is forgotten, its directory tells more: `shardwise runs`"
        raise MissingInputError(Problem("JOB004", f"no job of a run `{name}` is known to {client.program}", name, fix))
    alive = [job for job in known if not job.ended]
    meant = known if len({job.name for job in known}) > 1 else alive
    if len(meant) > 1:
        several = " or ".join(f"job {job.id} of run {job.name}" for job in meant)
        what, fix = f"`{name}` may be {several}", "the job's id, or the whole name of its run"
        raise MissingInputError(Problem("JOB004", what, name, fix))
    return max(alive or known, key=lambda job: [int(part) for part in re.findall(r"\d+", job.id)])


def silence(client: Client, job: Submitted) -> str:
    """Say why there is nothing to read in the file to which a job writes; nothing where there is, or where a program
    tells what it says."""
    if "{log}" not in client.logs:
        return ""
    if not job.log:
        return f"{client.program} does not say to which file job {job.id} ({job.state}) writes"
    if not os.path.exists(job.log):
        return f"job {job.id} ({job.state}) writes to {job.log}, which is not there yet, or cannot be seen from here"
    return "" if os.path.getsize(job.log) else f"job {job.id} ({job.state}) has said nothing yet: {job.log} is empty"


def show(client: Client, job: Submitted, more: Sequence[str], *, follow: bool) -> int:
    """Have the scheduler's program print what the job says; its exit code."""
    words = _words(client.logs, more, _place(job) | {"follow": client.follow[follow]})
    return subprocess.run(words, env={**os.environ, **SAFE_PATH}).returncode


def stop(client: Client, job: Submitted, more: Sequence[str]) -> None:
    """Ask the scheduler to stop the job, or to remove one that has ended. Raises as :func:`call`."""
    for command in client.remove if job.ended else client.stop:
        call(_words(command, more, _place(job)), client.fixes)


def _place(job: Submitted) -> dict[str, str]:
    return {"id": job.id, "name": job.name, "log": job.log}


def _is_one_of(word: str, options: Sequence[str]) -> bool:
    """Return whether a word is one of these options, with its value behind it or shortened as programs allow it."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        return len(name) > 4 and any(option.startswith(name) for option in options)
    return any(word.startswith(option) for option in options)


def _words(command: str, more: Sequence[str], place: Mapping[str, str]) -> list[str]:
    """A command as words, none of which breaks apart; what is empty is left out."""
    words = [[*more] if word == "{more}" else [word.format(**place)] for word in command.split()]
    return [word for several in words for word in several if word]
