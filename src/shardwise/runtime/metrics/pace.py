"""A rank that is slower than the others is named: by the time of what it computes alone.

All ranks wait for the slowest, wherever they next meet, so that a step takes as long on each of them. What tells them
apart is the forward of a block, in which ranks that divide the batch wait for nobody: weights are gathered before it
begins, and gradients are summed later. It is timed on this rank's last block, where the device computes it; every few
steps all ranks exchange the mean, and how certain it is. (A median would not see a rank that another program on its
core holds up in some passes and not in others.)

Not watched are ranks that exchange something within a block (tp, cp, ep), and those of a pipeline that nobody else has
the same stage as: there, waiting for another rank is part of that time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import nn

from shardwise.models.blocks import blocks
from shardwise.runtime.faults.heartbeat import read_pages
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.metrics.measure import Meter
from shardwise.runtime.report.run_files import SLOW_RANK
from shardwise.runtime.world import process

WINDOW = 7
"""Steps between two exchanges: three of them, and what is left of one before, are less than 30."""
IN_A_ROW = 3
"""So many exchanges in a row must show a rank slow before it is named."""
LEAST_EXCESS, ERRORS = 0.1, 6.0
"""A rank is slow that takes longer than the others by more than this share, and by more than so many times the
standard error of their means. Of synthetic times (a twentieth of them doubled by pauses, the rest spread by 1 to 30 %)
no rank of 2 or of 8 was named in 224,000 steps; with 4 times the error, five were."""


def mean_and_error(taken: Sequence[float]) -> tuple[float, float]:
    """Return the mean of times and its standard error, without the longest quarter, which may be pauses of anything;
    NaN where there are fewer than three."""
    kept = sorted(taken)[: len(taken) * 3 // 4]
    return (fmean(kept), stdev(kept) / math.sqrt(len(kept))) if len(kept) > 1 else (math.nan, math.nan)


class BlockClock:
    """Times the forward passes of a ``block`` in training, where ``device`` computes them. ``events`` has ``Event``, as
    ``torch.cuda`` has; a CPU has a clock instead."""

    def __init__(self, block: nn.Module, device: torch.device, events: Any = None) -> None:
        self._events = events or (torch.cuda if device.type == "cuda" else None)
        self._begun: Any = None
        self._taken: list[tuple[Any, Any]] = []
        block.register_forward_pre_hook(self._begin)
        block.register_forward_hook(self._end)

    def _begin(self, *unused: object) -> None:
        self._begun = self._now() if torch.is_grad_enabled() else None

    def _end(self, *unused: object) -> None:
        if self._begun is not None:
            self._taken.append((self._begun, self._now()))
            self._begun = None

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[float]:
        """Return the seconds of the passes since the last call, but for those that the device has not done yet."""
        taken, self._taken = self._taken, []
        if self._events is None:
            return [end - begun for begun, end in taken]
        return [begun.elapsed_time(end) / 1e3 for begun, end in taken if end.query()]


@dataclass(frozen=True)
class SlowRank:
    """A ``rank`` that has been slower than the others ``since`` a step: its seconds, and theirs."""

    rank: int
    since: int
    own_s: float
    others_s: float


@dataclass
class PaceWatch:
    """Compares the ranks of each of ``groups``, which do the same. A rank is named once, until it has kept up again."""

    groups: Sequence[Sequence[int]]
    _slow: dict[int, list[int]] = field(default_factory=dict)

    def add(self, first: int, means: Sequence[float], errors: Sequence[float]) -> list[SlowRank]:
        """Count what ranks took in the steps from ``first`` on, NaN where nothing is known; returns those to be named
        now."""
        found = []
        for group in self.groups:
            if not all(math.isfinite(means[each]) for each in group):
                for rank in group:
                    self._slow.pop(rank, None)
                continue
            for rank in group:
                others = [each for each in group if each != rank]
                usual = median(means[each] for each in others)
                error = median(errors[each] for each in others)
                if means[rank] - usual <= max(LEAST_EXCESS * usual, ERRORS * error):
                    self._slow.pop(rank, None)
                    continue
                since = self._slow.setdefault(rank, [])
                since.append(first)
                if len(since) == IN_A_ROW:
                    found.append(SlowRank(rank, since[0], means[rank], usual))
        return found


class RankPace:
    """The watch of one rank: ``after`` is called with each step, by every rank alike."""

    def __init__(self, job: Job, parts: Sequence[nn.Module], log: Log) -> None:
        layout, last = job.plan.layout, [block for part in parts for block in blocks(part)][-1:]
        stages: dict[int, list[int]] = {}
        for rank in range(layout.world):
            stages.setdefault(layout.index(rank, "pp"), []).append(rank)
        within = layout.tp * layout.cp * layout.ep > 1
        self.watch = PaceWatch([] if within else [ranks for ranks in stages.values() if len(ranks) > 1])
        self.clock = BlockClock(last[0], job.device) if last and self.watch.groups else None
        self.begin = log.first_step + Meter.MEMORY_STEP  # what comes once, and what is measured, is over by then
        self._job, self._log = job, log

    def after(self, number: int) -> None:
        """Step ``number`` is launched: once in ``WINDOW`` steps, 16 bytes a rank are exchanged between the hosts."""
        if self.clock is None or number < self.begin or (number - self.begin) % WINDOW:
            return
        taken, world = self.clock.read(), self._job.plan.layout.world
        if number == self.begin:
            return
        numbers = torch.zeros(2, world, dtype=torch.float64)
        numbers[:, self._job.rank] = torch.tensor(mean_and_error(taken))
        self._job.meshes.sum(numbers, "world")
        for slow in self.watch.add(number - WINDOW + 1, *numbers.tolist()):
            self._tell(slow, number)

    def _tell(self, slow: SlowRank, number: int) -> None:
        """Log the rank with its node and device."""
        more = slow.own_s / slow.others_s - 1
        node, place = divmod(slow.rank, process().local_world_size)
        host = next((f", host {page.host}" for page in read_pages(self._job.directory, [slow.rank])), "")
        device = f"cuda:{place}" if self._job.device.type == "cuda" else "cpu"
        what = f"rank {slow.rank} (node {node}{host}, {device}) is slower than the others since step {slow.since:,}: "
        own_ms, others_ms = 1e3 * slow.own_s, 1e3 * slow.others_s
        what += f"a block's forward takes {own_ms:.3g} ms, {more:.0%} more than the {others_ms:.3g} of the others"
        fix = "all wait for it: look for other programs, heat or a low clock there (top, nvidia-smi -q -d PERFORMANCE)"
        self._log.say(f"warning[SLOW001]: {what}\nfix:   {fix}")
        self._log.event(SLOW_RANK, step=number, what=what)
