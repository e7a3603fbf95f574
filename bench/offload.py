"""How fast AdamW goes through a file: beside a loop that reads and writes the same bytes and does nothing else.

    python bench/offload.py [--pairs 20] [--millions 128] [--directory .]

Rounds of both, one after the other, in turns; the first of each is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from shardwise.techniques.offload.host import PLACES, HostWeights
from shardwise.techniques.offload.scratch import aligned
from shardwise.techniques.offload.sizes import BLOCK_BYTES

SHAPE = (1024, 1024)
"""Of a weight: as large as a block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--millions", type=int, default=128, help="weights, of 24 bytes that are read and written")
    parser.add_argument("--directory", type=Path, default=Path())
    asked = parser.parse_args()
    weights = [nn.Parameter(torch.full(SHAPE, 0.5)) for _ in range(asked.millions)]
    host = HostWeights(weights, early=False, cut=False, directory=asked.directory)
    assert host.scratch is not None
    groups = [{"params": list(host.copies.values()), "weight_decay": 0.1}]
    optimizer = host.streamed(groups, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8})
    gradient = torch.full(SHAPE, 0.1)
    view, _ = aligned(BLOCK_BYTES)

    def updated() -> None:
        for copy in host.copies.values():
            copy.grad = gradient
        optimizer.step()

    def plain() -> None:
        assert host.scratch is not None
        for place in range(PLACES * len(weights)):
            host.scratch.read(place, 0, view)
            host.scratch.write(place, 0, view)

    seconds: dict[Callable[[], None], list[float]] = {updated: [], plain: []}
    for number in range(asked.pairs + 1):
        for run in [*seconds][:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            run()
            seconds[run].append(time.perf_counter() - begun)
    ours, theirs = (times[1:] for times in seconds.values())
    ratios = sorted(slow / fast for slow, fast in zip(theirs, ours, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    numbers = len(weights) * gradient.numel()
    print(f"O_DIRECT: {host.scratch.direct}; {numbers / 1e6:.0f} M weights, {24 * numbers / 1e9:.1f} GB a pass")
    for name, times in (("AdamW", ours), ("plain loop", theirs)):
        each = statistics.median(times)
        print(f"{name:10}  {each:.2f} s  {numbers / each / 1e6:.0f} M weights/s  {24 * numbers / each / 1e9:.2f} GB/s")
    quartiles = f"quartiles {low:.2f} to {high:.2f}, {asked.pairs} pairs"
    print(f"AdamW reaches {middle:.2f} of the plain loop's speed ({quartiles})")


if __name__ == "__main__":
    main()
