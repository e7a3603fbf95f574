from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwise.runtime.report import sample
from tests.runtime.nursery import Ask, nursery


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Processes to kill."""
    with nursery() as asking:
        yield asking


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests look at does not depend on them, and they take a quarter of a small run."""
    monkeypatch.setattr(sample, "SAMPLE", replace(sample.SAMPLE, max_new_tokens=2))
