"""How long a save keeps the training loop waiting, asynchronous against synchronous.

    python bench/checkpoint.py [--megabytes 384] [--pairs 30] [--directory DIR]

Two ranks, the state split between them, saves in interleaved pairs. After an asynchronous save the loop goes on with
work like a forward and backward (products of matrices, half a second), then waits for what is left of the copy, as it
does before the optimizer changes the weights: it is blocked for the call and that wait. Writing beside the work also
takes cores from it where they are all in use, and that is printed too: the work's time over that of the same work
alone. The synchronous time ends at the commit (what follows, reading back and retention, is not counted). The A/A ratio
is that of two neighbouring asynchronous saves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.prove.pool import RankPool
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.spec.recipe import Checkpoint

PIECES = 24


@dataclass(frozen=True)
class Pair:
    """Seconds: the loop waits for an asynchronous save, that save is committed after, work beside it, work alone, the
    loop waits for a synchronous one."""

    waits: float
    committed: float
    beside: float
    alone: float
    synchronous: float


def work(matrix: torch.Tensor, seconds: float = 0.0, rounds: int = 0) -> int:
    """Products of matrices for so many seconds or rounds; the rounds."""
    done, begun = 0, time.monotonic()
    while done < rounds or time.monotonic() - begun < seconds:
        torch.mm(matrix, matrix)
        done += 1
    return done


def blocked(rank: int, world: int, directory: str, total_bytes: int, pairs: int) -> list[Pair]:
    """Every pair as this rank saw it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    rows = total_bytes // world // PIECES // 4
    state = {f"model.{n}": DTensor.from_local(torch.randn(rows), mesh, [Shard(0)]) for n in range(PIECES)}
    modes = (True, False)
    kinds = {mode: RunCheckpoints(f"{directory}/{mode}", Checkpoint(asynchronous=mode), "bench") for mode in modes}
    for checkpoints in kinds.values():
        checkpoints.prepare(state)
    matrix = torch.randn(512, 512)
    rounds = work(matrix, seconds=0.5)
    times = []
    for step in range(1, pairs + 2):
        took = dict.fromkeys(("waits", "committed", "beside", "alone", "synchronous"), 0.0)
        for mode in modes if step % 2 else reversed(modes):
            dist.barrier()
            before = time.monotonic()
            work(matrix, rounds=rounds)
            took["alone"] = time.monotonic() - before
            dist.barrier()
            begun = time.monotonic()
            kinds[mode].save(state, {"step": step}, step)
            saved = time.monotonic()
            if mode:
                work(matrix, rounds=rounds)
                worked = time.monotonic()
                kinds[mode].copied()
                took["waits"] = saved - begun + time.monotonic() - worked
                took["beside"] = worked - saved
            event = kinds[mode].wait()[0]
            assert event.kind == "committed", event
            took["committed" if mode else "synchronous"] = event.seconds
        times.append(Pair(**took))
    return times[1:]  # the first pair warms the disk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--directory", default=None)
    chosen = parser.parse_args()
    with RankPool(2) as pool, tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        ranks = pool.run(blocked, directory, chosen.megabytes << 20, chosen.pairs, timeout_s=1200)
    slowest = [max(pair.waits / pair.synchronous for pair in both) for both in zip(*ranks, strict=True)]
    first = ranks[0]
    quarters = statistics.quantiles(slowest, n=4)
    same = statistics.median(after.waits / before.waits for before, after in pairwise(first))
    slower = statistics.median(pair.beside / pair.alone for pair in first)

    def median(name: str) -> str:
        return f"{statistics.median(getattr(pair, name) for pair in first):.4f} s"

    print(f"{chosen.megabytes} MiB on 2 ranks, {chosen.pairs} pairs, medians")
    print(f"asynchronous save  blocks {median('waits')}, committed after {median('committed')}")
    print(f"work of {median('alone')} beside it takes {slower:.3f} times as long")
    print(f"synchronous save   blocks {median('synchronous')}")
    print(f"ratio (slower rank) {quarters[1]:.3f}, quartiles {quarters[0]:.3f} to {quarters[2]:.3f}; A/A {same:.3f}")


if __name__ == "__main__":
    main()
