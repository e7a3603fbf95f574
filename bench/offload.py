"""How fast AdamW goes through a file: beside a loop that reads and writes the same bytes and does nothing else.

    python bench/offload.py [--pairs 20] [--millions 128] [--directory .] [--deepspeed]

Rounds of both, one after the other, in turns; the first of each is not counted. ``--deepspeed``: the step of its
optimizer on NVMe too, of as many weights in one process (``pip install deepspeed``, and libaio with a compiler, with
which it builds what it needs); its backward, which writes gradients to the file, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.techniques.offload.host_copies import PLACES, HostWeights
from shardwise.techniques.offload.scratch import aligned
from shardwise.techniques.offload.sizes import BLOCK_BYTES

SHAPE = (1024, 1024)
"""Of a weight: as large as a block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--millions", type=int, default=128, help="weights, of 24 bytes that are read and written")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--deepspeed", action="store_true")
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
    before: dict[Callable[[], None], Callable[[], None]] = {}
    if asked.deepspeed:
        backward, step = deepspeed(asked.millions, asked.directory)
        seconds[step], before[step] = [], backward
    for number in range(asked.pairs + 1):
        for run in [*seconds][:: 1 if number % 2 else -1]:
            before.get(run, lambda: None)()
            begun = time.perf_counter()
            run()
            seconds[run].append(time.perf_counter() - begun)
    ours, theirs, *others = (times[1:] for times in seconds.values())
    ratios = sorted(slow / fast for slow, fast in zip(theirs, ours, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    numbers = len(weights) * gradient.numel()
    print(f"O_DIRECT: {host.scratch.direct}; {numbers / 1e6:.0f} M weights, {24 * numbers / 1e9:.1f} GB a pass")
    for name, times in (("AdamW", ours), ("plain loop", theirs)):
        each = statistics.median(times)
        print(f"{name:10}  {each:.2f} s  {numbers / each / 1e6:.0f} M weights/s  {24 * numbers / each / 1e9:.2f} GB/s")
    quartiles = f"quartiles {low:.2f} to {high:.2f}, {asked.pairs} pairs"
    print(f"AdamW reaches {middle:.2f} of the plain loop's speed ({quartiles})")
    for times in others:
        ratios = [slow / fast for slow, fast in zip(times, ours, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"DeepSpeed   {statistics.median(times):.2f} s  {middle:.2f} times as long ({low:.2f} to {high:.2f})")


def deepspeed(millions: int, directory: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Backward and step of its ZeRO-3 with AdamW on NVMe, of one rank on the CPU."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777")
    library: Any = __import__("deepspeed")
    library.init_distributed("gloo", verbose=False)
    model = nn.Sequential(*(nn.Linear(*SHAPE, bias=False) for _ in range(millions)))
    where = {"device": "nvme", "nvme_path": str(directory.resolve()), "buffer_count": 12, "pin_memory": False}
    zero = {"stage": 3, "sub_group_size": 16 * 2**20, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}},
        "steps_per_print": 10**9,
        "zero_optimization": {**zero, "offload_optimizer": {**where, "pipeline_read": True, "pipeline_write": True}},
        "aio": {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 4, "overlap_events": True},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward() -> None:
        engine.backward(engine(torch.randn(1, SHAPE[0], dtype=torch.bfloat16)).float().square().mean())

    return backward, engine.step


if __name__ == "__main__":
    main()
