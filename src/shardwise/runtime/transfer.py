"""Copies between host and device that neither waits for: batches on their way to it, figures on their way back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch


class Upload:
    """Copies micro-batches to ``device``: to a GPU from pinned memory on a stream of its own, while the step before is
    still computed. ``streams`` has ``Stream``, ``stream`` and ``current_stream``, as ``torch.cuda`` has."""

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self._streams = streams or (torch.cuda if device.type == "cuda" else None)
        self._own = self._streams.Stream(device) if self._streams else None

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        if self._streams is None:
            return [batch.to(self.device) for batch in batches]
        with self._streams.stream(self._own):
            moved = [batch.pinned().to(self.device) for batch in batches]
        computing = self._streams.current_stream(self.device)
        computing.wait_stream(self._own)
        for batch in moved:
            for tensor in batch.tensors().values():
                tensor.record_stream(computing)  # or its memory would be given away once the host lets go of it
        return moved


class Figures:
    """A few numbers of the device, copied to the host as soon as they are made. ``arrival_s``: when that was, as far as
    the host knows (``time.perf_counter``)."""

    def __init__(self, numbers: Tensor) -> None:
        self.arrival_s = time.perf_counter()
        self._numbers, self._copied = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def arrived(self) -> bool:
        """Return whether :meth:`read` would not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> list[float]:
        """The numbers, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
            self.arrival_s = time.perf_counter()
        return self._numbers.tolist()
