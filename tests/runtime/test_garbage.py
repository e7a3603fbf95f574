"""Python's garbage collector runs when the loop lets it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from shardwise.runtime import garbage
from tests.runtime.small_run import recipe, train_here


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """The generation of every collection from here on."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_it_runs_at_its_steps_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, collected: list[int]) -> None:
    monkeypatch.setattr(garbage, "EVERY", 3)
    with garbage.collecting() as collect:
        assert collected == [2] and gc.get_freeze_count() > 10_000
        kept = ref(Cycle())
        many = [[] for _ in range(100_000)]
        assert many and collected == [2] and kept() is not None
        for step in range(1, 6):
            collect(step)
            assert (kept() is None) == (step >= 3)
        assert collected == [2, 2]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_one_that_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), garbage.collecting():
            raise ZeroDivisionError
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.prove
def test_a_run_collects_between_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collected: list[int]) -> None:
    monkeypatch.setattr(garbage, "EVERY", 3)
    counts: list[int] = []

    def after(state: Any, stats: Any) -> None:
        counts.append(len(collected))

    train_here(recipe(tmp_path, train={"max_steps": 7}), (after,))
    assert [count - counts[0] for count in counts] == [0, 0, 0, 1, 1, 1, 2]
