"""What the nodes of a run must have in common, compared before any rank claims the run's directory: one report, of all
differences, with nodes and values. Ranks meet in the store through which they find one another later."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from shardwise.data.prepare import already_prepared
from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.models.resolve import data_of
from shardwise.runtime.agree import REPAIRS, versions
from shardwise.runtime.world import TOLD_S, process, told_by_nodes
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes

LEAST_BYTES = 2**30
"""Free on every node: for prepared data, compiled kernels and logs. What checkpoints take is checked when they are
written."""
APPEARS_S = 30.0
"""How long a file may take to be seen by another node, whose client keeps what it has looked up."""
WRITABLE = "let it write there, or give an `--out` that every node can write"
NAMED = 8
"""So many nodes are named for a value."""
Facts = Mapping[str, Any]


def check_nodes(recipe: Recipe, directory: Path) -> None:
    """Compare the nodes of a run of several. On rank 0 raises ConfigError with every difference: RUN003 of versions,
    RUN008 of data, disk and directory. The first ranks of other nodes say where to read it, and all of these end."""
    me = process()
    if not directory.is_mount():
        directory = directory.parent  # of the run's own, some nodes may not see yet that it is there
    while not directory.exists():
        directory = directory.parent
    mark = directory / f".node-{token_hex(8)}"
    try:
        said = told_by_nodes(
            lambda: json.dumps(_facts(recipe, mark)),
            lambda told: json.dumps([vars(each) for each in _found(told, directory)]),
        )
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)
    problems = [Problem(**each) for each in json.loads(said)]
    if problems and me.rank:
        if me.local_rank == 0:
            print(f"this node, {me.host}, or another differs: the log of rank 0 lists the differences", flush=True)
        raise SystemExit(ConfigError.exit_code)
    if problems:
        raise ConfigError(*problems)


def _facts(recipe: Recipe, mark: Path) -> dict[str, Any]:
    """Those of this node, which leaves a mark beside or in the run's directory."""
    facts: dict[str, Any] = {"host": process().host, "versions": versions(), "mark": mark.name}
    facts |= {"data": "", "unwritable": ""}
    try:
        mark.touch()
        facts["free"] = shutil.disk_usage(mark.parent).free
    except OSError as error:
        facts["unwritable"] = f"{mark.parent}: {error.strerror}"
    with suppress(ShardwiseError, OSError):  # what is wrong with the data is said where they are read
        if (prepared := already_prepared(data_of(recipe), recipe.sample_tokens)) is not None:
            facts["data"] = prepared.manifest.fingerprint[:12]
    return facts


def _found(told: Sequence[str], directory: Path) -> list[Problem]:
    """The differences, as rank 0 sees them."""
    if silent := [f"node {number}" for number, each in enumerate(told) if not each]:
        what = f"{_some(silent)} did not come to the comparison of nodes in {TOLD_S:.0f} s"
        return [Problem("RUN008", what, "the first node", "read the logs of these nodes")]
    nodes = [json.loads(each) for each in told]
    end = monotonic() + APPEARS_S
    while True:
        there = set(os.listdir(directory))
        seen = [node["mark"] in there or bool(node["unwritable"]) for node in nodes]
        if all(seen) or monotonic() > end:
            return differences(nodes, seen, directory)
        sleep(0.2)


def differences(nodes: Sequence[Facts], seen: Sequence[bool], directory: Path) -> list[Problem]:
    """Return what nodes differ in. ``seen``: the first node sees the mark that each has left in ``directory``."""
    names = [f"node {number} ({node['host']})" for number, node in enumerate(nodes)]
    found = []
    for name in nodes[0]["versions"]:
        values = [str(node["versions"].get(name)) for node in nodes]
        if len(set(values)) > 1:
            fix = REPAIRS.get(name, f"pip install {name}=={values[0]}") + " on every node"
            found.append(Problem("RUN003", f"{name}: {_by_value(names, values)}", "the environment of each node", fix))
    data = [(name, node["data"]) for name, node in zip(names, nodes, strict=True) if node["data"]]
    if len({value for _, value in data}) > 1:
        what = f"prepared data: {_by_value(*zip(*data, strict=True))}"
        found.append(Problem("RUN008", what, "data", "the same files on every node, in one place or copied"))
    hidden = [name for name, visible in zip(names, seen, strict=True) if not visible]
    if hidden:
        what = f"the run's directory is not shared: {names[0]} does not see a file that {_some(hidden)} wrote"
        fix = "`--out` on a file system that all nodes see (NFS, Lustre, a ReadWriteMany volume)"
        found.append(Problem("RUN008", what, str(directory), fix))
    for name, node in zip(names, nodes, strict=True):
        if node["unwritable"]:
            found.append(Problem("RUN008", f"{name} cannot write {node['unwritable']}", str(directory), WRITABLE))
        elif node["free"] < LEAST_BYTES:
            what = f"{name} has {show_bytes(node['free'])} free, less than {show_bytes(LEAST_BYTES)}"
            found.append(Problem("RUN008", what, str(directory), "make room there"))
    return found


def _by_value(names: Sequence[str], values: Sequence[str]) -> str:
    groups = {value: [name for name, own in zip(names, values, strict=True) if own == value] for value in values}
    return "; ".join(f"{value} on {_some(those)}" for value, those in groups.items())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
