"""The ranks of this machine, where it is one of several.

Whoever starts ``shardwise train`` on each of them says which it is in the variables that torchrun reads as well, and
that Kubeflow's trainer sets: PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT, and
PET_RDZV_ID for a name of this start. Unlike torchrun this ends with the ranks' own exit code, by which a scheduler
knows whether to start them again, and gives them time to save.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError, PreemptedError, Problem, TrainingError, UnavailableError
from shardwise.launch.launchers import DEFAULT_PORT
from shardwise.launch.local import Failure, Requests, environment, first_of, together
from shardwise.runtime.faults.signals import ASKING, received

PLACE = {
    "nodes": "PET_NNODES",
    "node": "PET_NODE_RANK",
    "nproc": "PET_NPROC_PER_NODE",
    "first": "PET_MASTER_ADDR",
    "port": "PET_MASTER_PORT",
    "start": "PET_RDZV_ID",
}
"""The variables, by what :class:`Node` calls them."""
FIRST_ANSWERS_S = 600.0
"""How long the first node may take until its first rank listens: a pod must be placed, and its image be fetched."""
ANSWER_S = 5.0
LOOK_S = 1.0
_ONLY_TELLS = ("--help", "--dry-run", "--print-config")


@dataclass(frozen=True)
class Node:
    """A machine of ``nodes``, the first of which is ``first`` and listens on ``port``. ``start``: a name that the
    nodes of one start share, if whoever started them gave any. ``least``: so many of them are enough; 0: all."""

    nodes: int
    node: int
    nproc: int
    first: str
    port: int = DEFAULT_PORT
    start: str = ""
    least: int = 0

    def places(self, local: int) -> dict[str, object]:
        """Return what one of this machine's ranks is told of its place."""
        found = {"RANK": self.node * self.nproc + local, "LOCAL_RANK": local}
        found |= {"WORLD_SIZE": self.nodes * self.nproc, "LOCAL_WORLD_SIZE": self.nproc}
        named = {"TORCHELASTIC_RUN_ID": self.start} if self.start else {}
        return {**found, "MASTER_ADDR": self.first, "MASTER_PORT": self.port, **named}


def this_node(words: Sequence[str]) -> Node | None:
    """Return which of several machines this is; None if it is the only one, or if `train` is only to tell something.
    Raises ConfigError (RUN007) where the variables do not say it."""
    known = {name: os.environ.get(variable, "") for name, variable in PLACE.items()}
    if known["nodes"] in ("", "1") or set(words) & {*_ONLY_TELLS}:
        return None
    asked = known["nodes"]
    known["least"], _, most = asked.rpartition(":")  # MIN:MAX, as torchrun reads it
    known["nodes"], known["least"] = most, known["least"] or most
    counts = {"nodes": (2, 2**20), "least": (1, 2**20), "node": (0, 2**20), "nproc": (1, 2**10), "port": (1, 65535)}
    known["port"] = known["port"] or str(DEFAULT_PORT)
    problems = [
        _unclear(name, asked if name == "least" else known[name], f"a whole number from {least} to {most}")
        for name, (least, most) in counts.items()
        if not (known[name].isdecimal() and known[name].isascii() and least <= int(known[name]) <= most)
    ]
    if not known["first"]:
        problems.append(_unclear("first", "", "the first node's name or address"))
    if problems:
        raise ConfigError(*problems)
    nodes, least, node, nproc, port = (int(known[name]) for name in ("nodes", "least", "node", "nproc", "port"))
    if node >= nodes:
        raise ConfigError(_unclear("node", str(node), f"below {nodes}, which is {PLACE['nodes']}"))
    if least > nodes:
        raise ConfigError(_unclear("nodes", f"{least}:{nodes}", "MIN:MAX, the least and the most nodes"))
    return Node(nodes, node, nproc, known["first"], port, known["start"], 0 if least == nodes else least)


def _unclear(name: str, value: str, wanted: str) -> Problem:
    name = "nodes" if name == "least" else name
    what = f"`{PLACE[name]}` is {value or 'not set'}, and {PLACE['nodes']} says that this is one of several nodes"
    fix = f"{PLACE[name]}: {wanted}; without {PLACE['nodes']} the ranks of this machine train alone"
    return Problem("RUN007", what, "the environment", fix)


def run(words: Sequence[str], node: Node, module: str = "shardwise") -> int:
    """Run the ranks of this machine and wait for them; the exit code of the first that failed, 75 where all have saved
    and are to be started again. Raises UnavailableError (NET002), and TrainingError for a rank that said nothing."""
    await_first(node)
    asked = Requests(True)
    with received(asked.receive):
        places = [environment(node.nproc, node.places(local)) for local in range(node.nproc)]
        failures = together([sys.executable, "-u", "-m", module, *words], places, asked)
    if asked.again:
        return 128 + signal.SIGINT
    return code_of(failures, node) if failures else 0


def await_first(node: Node, most_s: float = FIRST_ANSWERS_S, vain: Callable[[], object] = lambda: False) -> None:
    """Wait until the first node answers, or it is in ``vain``: its ranks would be waited for far less long. Raises
    UnavailableError (NET002) after ``most_s`` seconds."""
    end_s = time.monotonic() + most_s
    while not vain():
        try:
            if node.node == 0:  # its own name must be known to its ranks
                socket.getaddrinfo(node.first, node.port)
            else:
                socket.create_connection((node.first, node.port), timeout=ANSWER_S).close()
            return
        except (OSError, UnicodeError) as error:
            if isinstance(error, UnicodeError) or time.monotonic() >= end_s:
                what = (
                    f"the first node, {node.first}, does not answer on port {node.port} after {most_s:.0f} s: {error}"
                )
                fix = f"{PLACE['first']}: its name or address in the network between the nodes; read its log"
                raise UnavailableError(Problem("NET002", what, "the environment", fix)) from None
        time.sleep(LOOK_S)


def code_of(failures: dict[int, Failure], node: Node) -> int:
    """Return the exit code of a node whose ranks failed so. Raises TrainingError (RUN004) for one that was killed."""
    codes = {failure.exit_code for failure in failures.values()}
    if codes == {PreemptedError.exit_code}:
        return PreemptedError.exit_code
    others = {local: each for local, each in failures.items() if each.exit_code != PreemptedError.exit_code}
    local, first = first_of(others)
    if first.exit_code > 0:
        return first.exit_code
    if -first.exit_code in ASKING:  # asked to stop before it could save
        return 128 - first.exit_code
    name = signal.Signals(-first.exit_code).name
    what = f"rank {node.node * node.nproc + local} (pid {first.pid}) was killed by {name}"
    fix = "start the job again: it goes on from its newest checkpoint, if there is one"
    raise TrainingError(Problem("RUN004", what, socket.gethostname(), fix))
