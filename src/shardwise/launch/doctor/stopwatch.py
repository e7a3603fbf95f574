"""The time of something that all ranks do at once, as in a training step: they share memory, cores and links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

Work = Callable[[], object]
SAMPLE_S = {"cpu": 2e-4, "cuda": 2e-3}
"""What is shorter is repeated within a sample: on a GPU a sample ends when the host has waited for it."""
FEW, LEAST, MOST = 3, 5, 101
"""Samples of which the median is taken. Two ranks that wait for each other are sometimes held up for a time slice of
the scheduler, ten times as long as a small message takes; among few samples the median can be one of those."""


@dataclass
class Clock:
    """Measures on ``device``. Each measurement takes about ``budget_s`` after its warm-up; longer where five
    repetitions do, or three of what takes longer itself. Of this rank alone: ``own_s`` is the sum of its medians; it
    was on a core for ``cpu_s`` of the ``wall_s`` of all samples."""

    device: torch.device
    budget_s: float
    own_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def seconds(self, work: Work, share: float = 1.0) -> float:
        """The median time of ``work`` on the slowest rank, found in a ``share`` of the budget. Every rank must call
        this alike."""
        budget_s = share * self.budget_s
        self._sample(work, 1)  # what is loaded, allocated or chosen the first time
        once_s = self.slowest(self._sample(work, 1))
        within = max(1, min(10_000, ceil(SAMPLE_S[self.device.type] / once_s)))
        if within > 1:
            once_s = self.slowest(self._sample(work, within))
        least = LEAST if once_s < budget_s else FEW
        count = max(least, min(MOST, int(budget_s / (once_s * within))))
        for _ in range(count // 5):  # until caches, clocks and connections are as they stay
            self._sample(work, within)
        self.slowest(0.0)
        own_s = median(self._sample(work, within) for _ in range(count))
        self.own_s += own_s
        return self.slowest(own_s)

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values. None goes on before all have come here."""
        told = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def _sample(self, work: Work, times: int) -> float:
        """Seconds of one of several in a row."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(times):
            work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        taken_s = time.perf_counter() - began_s
        self.cpu_s += time.process_time() - cpu_s
        self.wall_s += taken_s
        return taken_s / times
