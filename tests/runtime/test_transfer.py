"""Batches go to a device on a stream of its own, figures come back; of streams a stand-in shows the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.runtime.transfer import Figures, Upload
from tests.runtime.rank_work import rows


class Streams:
    """Notes what is done on which stream."""

    def __init__(self) -> None:
        self.now = "computing"
        self.seen: list[str] = []

    def Stream(self, device: torch.device) -> str:
        return "copying"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_stream(self, device: torch.device) -> Streams:
        return self

    def wait_stream(self, stream: str) -> None:
        self.seen.append(f"{self.now} waits for {stream}")


def test_a_batch_is_copied_from_pinned_memory_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its memory is kept until the computing stream is done with it."""
    streams, to = Streams(), Tensor.to

    def pin(tensor: Tensor) -> Tensor:
        streams.seen.append("pinned")
        return tensor

    def copy(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        streams.seen.append(f"copied, {streams.now}, {non_blocking}")
        return to(tensor, device)

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: streams.seen.append(f"kept for {stream.now}"))
    batch = rows(0)
    [moved] = Upload(torch.device("meta"), streams)([batch])
    assert streams.seen == [
        *["pinned"] * 3,
        *["copied, copying, True"] * 3,
        "computing waits for copying",
        *["kept for computing"] * 3,
    ]
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert (moved.longest, moved.documents) == (batch.longest, None)


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    batch = rows(0)
    [moved] = Upload(torch.device("cpu"))([batch])
    assert isinstance(moved, MicroBatch) and moved.ids is batch.ids


def test_figures_of_a_cpu_are_there_at_once() -> None:
    figures = Figures(torch.tensor([1.5, torch.nan], dtype=torch.float64))
    assert figures.arrived()
    first, second = figures.read()
    assert first == 1.5 and second != second
