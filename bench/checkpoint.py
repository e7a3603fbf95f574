"""How long a save keeps the training loop waiting, asynchronous against synchronous.

    python bench/checkpoint.py [--megabytes 384] [--pairs 30] [--directory DIR]

Two ranks, the state split between them, saves in interleaved pairs. The synchronous time ends at the commit (what
follows, reading back and retention, is not counted). The A/A ratio is that of two neighbouring asynchronous saves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.prove.pool import RankPool
from shardwise.runtime.checkpoint import Checkpoints
from shardwise.spec.recipe import Checkpoint

PIECES = 24


def blocked(
    rank: int, world: int, directory: str, total_bytes: int, pairs: int
) -> list[tuple[float, float, float, float]]:
    """For each pair: seconds that the loop waits for an asynchronous save, those of them that its thread really ran,
    until that save is committed, and for a synchronous one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    rows = total_bytes // world // PIECES // 4
    state = {f"model.{n}": DTensor.from_local(torch.randn(rows), mesh, [Shard(0)]) for n in range(PIECES)}
    modes = (True, False)
    kinds = {mode: Checkpoints(f"{directory}/{mode}", Checkpoint(asynchronous=mode), "bench") for mode in modes}
    for checkpoints in kinds.values():
        checkpoints.prepare(state)
    times = []
    for step in range(1, pairs + 2):
        taken, ran, committed = {}, {}, {}
        for mode in modes if step % 2 else reversed(modes):
            dist.barrier()
            begun, begun_cpu = time.monotonic(), time.thread_time()
            kinds[mode].save(state, {"step": step}, step)
            taken[mode], ran[mode] = time.monotonic() - begun, time.thread_time() - begun_cpu
            event = kinds[mode].wait()[0]
            assert event.kind == "committed", event
            committed[mode] = event.seconds
        times.append((taken[True], ran[True], committed[True], committed[False]))
    return times[1:]  # the first pair warms the disk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--directory", default=None)
    chosen = parser.parse_args()
    with RankPool(2) as pool, tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        ranks = pool.run(blocked, directory, chosen.megabytes << 20, chosen.pairs, timeout_s=1200)
    slowest = [
        max(pair) for pair in zip(*([blocks / sync for blocks, _, _, sync in times] for times in ranks), strict=True)
    ]
    waits, runs, commits, syncs = zip(*ranks[0], strict=True)
    quarters = statistics.quantiles(slowest, n=4)
    same = statistics.median(after / before for before, after in pairwise(waits))
    print(f"{chosen.megabytes} MiB on 2 ranks, {chosen.pairs} pairs, medians")
    durable = f"committed after {statistics.median(commits):.3f} s"
    busy = f"{statistics.median(runs):.4f} s of them at work"
    print(f"asynchronous save  blocks {statistics.median(waits):.4f} s, {busy}, {durable}")
    print(f"synchronous save   blocks {statistics.median(syncs):.4f} s")
    print(f"ratio (slower rank) {quarters[1]:.3f}, quartiles {quarters[0]:.3f} to {quarters[2]:.3f}; A/A {same:.3f}")


if __name__ == "__main__":
    main()
