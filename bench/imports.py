"""Reads and plans configuration files of other systems in a folder: by system how many are read, refused, or fail.

    python bench/imports.py FOLDER [--plan]        folders of FOLDER are named for systems

What the files leave out is given by :data:`LEFT_OUT`. A refusal names a key that asks for what is not there; anything
else than a recipe or such a refusal is a failure.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from shardwise.cli.imported import as_given
from shardwise.errors import ShardwiseError
from shardwise.interop.imports import read_files
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import read_settings

LEFT_OUT = {"model.path": "meta-llama/Llama-3.1-8B", "train.seq_len": "4096", "data.path": "data.jsonl"}
VARIABLES = {"PATH_STORAGE": "/data"}
MACHINES = "8xH100"
REFUSED = ("IMP001", "IMP002")


def outcome(path: Path, *, planned: bool) -> tuple[str, str]:
    """``read``, ``refused`` or ``failed``, and why."""
    cluster = parse_cluster(MACHINES)
    try:
        found = read_files([path], cluster.world, variables=VARIABLES)
        given = [f"{key}={LEFT_OUT[key]}" for key in found.asked]
        recipe = read_settings(as_given(found.settings), given).recipe
        if planned:
            choose(recipe, resolve(recipe), cluster)
    except ShardwiseError as error:
        refused = all(problem.code in REFUSED for problem in error.problems)
        return "refused" if refused else "failed", "; ".join(f"{p.code} {p.what}" for p in error.problems)
    return "read", ""


def main() -> None:
    """Print each file that is not read, then a table by system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", action="store_true", help="plan each, too")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for path in sorted(options.folder.glob("*/*")):
        what, why = outcome(path, planned=options.plan)
        counts.setdefault(path.parent.name, Counter())[what] += 1
        if what != "read":
            print(f"{what}: {path.parent.name}/{path.name}\n    {why[:400]}")
    print(f"{'':14}{'read':>8}{'refused':>9}{'failed':>8}")
    for system, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{system:14}{found['read']:8}{found['refused']:9}{found['failed']:8}")


if __name__ == "__main__":
    main()
