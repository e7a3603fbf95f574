"""A launcher's question and answer. Its row is in spec/launchers.py, its program ``launch`` in a module of
its name beside this one, or in another package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from shardwise.errors import Problem
from shardwise.spec.records import LauncherSpec

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ended:
    """The end of a launch's ranks. ``problem`` is the cause of the first that failed. ``ran_out``: whose memory was too
    small for what they train, a device's, or the host's, where the kernel killed one for it; empty: no one's."""

    exit_code: int
    problem: Problem | None = None
    ran_out: Literal["", "device", "host"] = ""


@dataclass(frozen=True)
class Launch:
    """The ranks to be started: ``python -m shardwise`` with these ``words``, ``nproc`` times on each of ``nodes``
    machines, all of which see ``directory``, the run's. ``port``: of the first node, where ranks of several meet.
    ``gpus``: each of these has one. ``saves``: asked to stop, ranks may save first."""

    words: Sequence[str]
    nodes: int
    nproc: int
    directory: Path
    port: int = DEFAULT_PORT
    gpus: bool = False
    saves: bool = True


def launch(spec: LauncherSpec, asked: Launch) -> Ended | list[str]:
    """Start the ranks, and return how they ended; or the lines that tell the user how to."""
    found: Ended | list[str] = import_module(spec.module or f"shardwise.launch.{spec.name}").launch(asked)
    return found
