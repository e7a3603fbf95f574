"""``run.profile_steps``: chosen steps as torch's profiler and, on a GPU, its allocator's history see them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.distributed.torch_private import keep_memory_history, write_memory_history
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.measure import start_quietly
from shardwise.runtime.metrics.ranges import StepRanges, renamed
from shardwise.runtime.passes import StepRules
from shardwise.runtime.report.warn import only_reports


class Profile(AbstractContextManager["Profile"]):
    """Traces the ``steps`` of this rank into ``directory``, with ``ranges`` for what runs; a run that ends among them
    keeps what it has. Changes no number, though it takes time."""

    def __init__(self, directory: Path, steps: range, rank: int, device: torch.device, ranges: StepRanges) -> None:
        self.directory = directory
        self.steps = steps
        self._rank = rank
        self._ranges = ranges
        self._cuda = device.type == "cuda"
        self._profiler: Any = None
        self._seen: list[int] = []

    def __exit__(self, *unused: object) -> None:
        self._write()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Optimizer step ``number`` runs inside."""
        if self._profiler is None:
            with only_reports("the profile"):
                self._start()
        self._seen.append(number)
        with record_function(f"step {number}"), self._ranges.recorded() if self._profiler else nullcontext():
            yield
        if number == self.steps[-1]:
            self._write()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
        profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        if self._cuda:
            keep_memory_history(True)
        start_quietly(profiler)
        self._profiler = profiler

    def _write(self) -> None:
        """Write what was traced into files that are named by rank and steps: ``rank-0-steps-10-12.json.gz``, for
        chrome://tracing or Perfetto."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._cuda:
            torch.cuda.synchronize()
        with only_reports("the profile"):
            profiler.stop()
            self.directory.mkdir(parents=True, exist_ok=True)
            stem = self.directory / f"rank-{self._rank}-steps-{self._seen[0]}-{self._seen[-1]}"
            written = Path(f"{stem}.json")
            profiler.export_chrome_trace(str(written))
            with gzip.open(f"{stem}.json.gz", "wb", compresslevel=6) as file:
                file.write(renamed(written.read_bytes()))
            written.unlink()
            if self._cuda:
                write_memory_history(f"{stem}-memory.pickle")
                keep_memory_history(False)


def profiled(job: Job, parts: Sequence[nn.Module], rules: StepRules) -> tuple[Profile, StepRules]:
    """The profile that a recipe asks for, and the rules of steps with which it hears of their phases."""
    ranges, enter = StepRanges(parts), rules.enter

    def both(phase: str) -> None:
        ranges.enter(phase)
        enter(phase)

    profile = Profile(job.directory / "profile", job.recipe.run.profiled, job.rank, job.device, ranges)
    return profile, replace(rules, enter=both)
