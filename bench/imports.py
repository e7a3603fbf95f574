"""Reads and plans configuration files of other systems in a folder: by system how many are read, refused, or fail.

    python bench/imports.py FOLDER [--plan]        folders of FOLDER are named for systems
    python bench/imports.py --time FILE            processor time of planning a file, and the recipe that it becomes

What the files leave out is given by :data:`LEFT_OUT`. A refusal names a key that asks for what is not there; anything
else than a recipe or such a refusal is a failure.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from shardwise.cli.app import main as shardwise
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


def timed(path: Path, rounds: int = 7) -> str:
    """Seconds of this process for the page of a file and for that of its recipe, one after the other, several times:
    what else the machine does falls on both. The first of each, which loads what is shared, is left out."""

    def page(words: list[str]) -> float:
        began = time.process_time()
        with redirect_stdout(StringIO()):
            assert shardwise(words) == 0, words
        return time.process_time() - began

    with TemporaryDirectory() as directory:
        recipe = str(Path(directory) / "recipe.yaml")
        page(["import", str(path), "--cluster", MACHINES, "-o", recipe])
        pages = [["plan", each, "--cluster", MACHINES] for each in (str(path), recipe)]
        theirs, ours = zip(*([page(words) for words in pages] for _ in range(rounds + 1)), strict=True)
    file, own = median(theirs[1:]), median(ours[1:])
    return f"{path.name}: {file:.2f} s, its recipe {own:.2f} s: {file / own:.2f} times"


def main() -> None:
    """Print each file that is not read, then a table by system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--time", type=Path, metavar="FILE", help="time the page of this file, and of its recipe")
    parser.add_argument("--plan", action="store_true", help="plan each, too")
    options = parser.parse_args()
    if options.time:
        print(timed(options.time))
        return
    if options.folder is None:
        parser.error("name a folder")
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
