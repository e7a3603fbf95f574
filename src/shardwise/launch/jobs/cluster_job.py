"""A run as a job: what every scheduler is asked for, whatever it calls that."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.node import PLACE

CARRIED = "/etc/shardwise"
"""Where a container finds the files that its job carries."""
SHARED = "/shared"
"""Where a container finds the volume that all nodes share, and works."""
KEYS = ("HF_TOKEN", "WANDB_API_KEY")


@dataclass(frozen=True)
class ClusterJob:
    """The run ``name``: ``shardwise train`` with ``words`` on each of ``nodes`` machines with ``nproc`` devices.
    ``title`` says what is run on what. ``files``, by name, are the recipe and a plan that is given, for machines that
    do not see the user's. ``out``: the directory of runs; ``directory``: where the user stands. ``image``: a
    container's. ``stays``: nodes that are left go on when one is lost (``run.on_loss``), so that the job must let
    them."""

    name: str
    title: str
    words: Sequence[str]
    out: str
    files: Mapping[str, str]
    nodes: int
    nproc: int
    device: str
    gpus: bool
    directory: Path
    port: int
    image: str
    stays: bool = False

    @property
    def settings(self) -> list[str]:
        """The options beside the recipe: the run's place."""
        return [f"--run={self.name}", f"--out={self.out}"]

    @property
    def label(self) -> str:
        """The name as every scheduler takes it."""
        return label_of(self.name)

    def carried(self, directory: str = CARRIED) -> list[str]:
        """The words of ``shardwise`` where the files of this job lie in ``directory``."""
        plan = ["--plan", f"{directory}/plan.yaml"] if "plan.yaml" in self.files else []
        return ["train", f"{directory}/recipe.yaml", *self.settings, *plan]

    def place(self, node: str, first: str, start: str) -> dict[str, str]:
        """The variables by which ``shardwise train`` knows that it is the ``node`` of several."""
        told = {"nodes": self.nodes, "node": node, "nproc": self.nproc, "first": first, "port": self.port}
        return {PLACE[name]: str(value) for name, value in {**told, "start": start}.items()}


def label_of(name: str) -> str:
    """Return ``name`` in lower case letters, digits and hyphens, a letter first."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return found if found[:1].isalpha() else f"run-{found}".strip("-")


def remarks(job: ClusterJob, *lines: str) -> list[str]:
    """The head of a job: what it runs, and what must be known to start it."""
    return [f"# {''.join(c if c.isprintable() else ' ' for c in line)}" for line in (job.title, *lines)]


def here_document(path: str, text: str) -> list[str]:
    """Lines of a shell script that write ``text`` into a file, whatever it holds."""
    end = f"END-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return [f"cat > {shlex.quote(path)} <<'{end}'", *text.removesuffix("\n").split("\n"), end]
