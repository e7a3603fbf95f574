"""``run.profile_steps``: chosen steps as torch's profiler and, on a GPU, its allocator's history see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.distributed.torch_private import keep_memory_history, write_memory_history
from shardwise.runtime.metrics.measure import start_quietly
from shardwise.runtime.report.warn import only_reports


class Profile(AbstractContextManager["Profile"]):
    """Traces the ``steps`` of this rank into ``directory``; a run that ends among them keeps what it has. Changes no
    number, though it takes time."""

    def __init__(self, directory: Path, steps: range, rank: int, device: torch.device) -> None:
        self.directory = directory
        self.steps = steps
        self._rank = rank
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
        with record_function(f"step {number}"):
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
            profiler.export_chrome_trace(f"{stem}.json.gz")
            if self._cuda:
                write_memory_history(f"{stem}-memory.pickle")
                keep_memory_history(False)
