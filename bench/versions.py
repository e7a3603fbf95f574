"""A step of this version of Shardwise against a step of another, on two gloo ranks of one thread each.

    git worktree add ../before v0.1
    python bench/step.py --against ../before [--pairs 30] [--case ddp-fp32 zero3-fp32]

Both versions plan and run the case with their own package and their own bench/step.py, each in a process group of its
own, since one process cannot hold two versions of a package. The groups take turns: while one steps, the other waits to
be told to. The figures are those of bench/step.py, and so is the demand that both compute the same loss; ``--exact``
demands the same bits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
WORLD = 2
WARMUP = 2


class Group:
    """The ranks of one version. ``step`` makes each of them take a step; one whose process ends ends the comparison."""

    def __init__(self, checkout: Path, case: str, rows: int) -> None:
        meeting = Path(tempfile.mkdtemp()) / "ranks"
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), str(checkout), case, str(rows), str(meeting)]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORLD)
        ]

    def told(self) -> list[dict[str, float]]:
        """The next line of every rank."""
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(lines):
            raise SystemExit("a rank ended; what it printed is above")
        return [json.loads(line) for line in lines]

    def step(self, number: int) -> list[dict[str, float]]:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(f"{number}\n")
            rank.stdin.flush()
        return self.told()

    def close(self) -> None:
        for rank in self.ranks:
            if rank.stdin:
                rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


@contextmanager
def group(checkout: Path, case: str, rows: int) -> Iterator[Group]:
    """The ranks of a version, once they have built their program."""
    ranks = Group(checkout, case, rows)
    try:
        ranks.told()
        yield ranks
    finally:
        ranks.close()


def compare(checkout: Path, case: str, rows: int, rounds: int, exact: bool) -> dict[str, Any]:
    """Seconds of the slower rank and processor seconds of both, by version and round, and every loss."""
    versions = {"shardwise": HERE, "before": checkout.resolve()}
    taken: dict[str, Any] = {name: {"wall": [], "cpu": [], "losses": []} for name in versions}
    with ExitStack() as stack:
        groups = {name: stack.enter_context(group(where, case, rows)) for name, where in versions.items()}
        for number in range(rounds + WARMUP):
            for name in versions if number % 2 else reversed(versions):
                ranks = groups[name].step(number)
                taken[name]["losses"].append(ranks[0]["loss"])
                if number >= WARMUP:
                    taken[name]["wall"].append(max(rank["wall"] for rank in ranks))
                    taken[name]["cpu"].append(sum(rank["cpu"] for rank in ranks))
    ours, theirs = (taken[name]["losses"] for name in versions)
    same = ours == theirs if exact else all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4), ours, theirs))
    if not same:
        raise SystemExit(f"{case}: the versions do not compute the same losses: {ours} and {theirs}")
    return taken


def main() -> None:
    """One rank: builds the program of the version it was started with, and takes a step at each line it reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("case")
    parser.add_argument("rows", type=int)
    parser.add_argument("meeting", type=Path)
    parser.add_argument("rank", type=int)
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer
    sys.path[:1] = [str(chosen.checkout / "bench")]

    import step  # type: ignore[import-not-found]
    import torch
    import torch.distributed as dist

    import shardwise

    assert Path(shardwise.__file__).is_relative_to(chosen.checkout), f"{shardwise.__file__} is of another version"
    limit = datetime.timedelta(minutes=5)
    store = dist.FileStore(str(chosen.meeting), WORLD)
    dist.init_process_group("gloo", store=store, rank=chosen.rank, world_size=WORLD, timeout=limit)
    case = step.Case(chosen.case, step.plan_of(chosen.case, chosen.rows), ("shardwise",))
    batches = step.set_up(chosen.rank, case)
    torch.set_float32_matmul_precision(case.plan.precision.matmul)
    program = step.shardwise(case.plan)
    answers.write("{}\n")
    for line in sys.stdin:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        loss = program(batches[int(line) % len(batches)])
        wall, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        answers.write(json.dumps({"wall": wall, "cpu": cpu, "loss": loss}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
