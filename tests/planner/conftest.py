"""For tests that compute by hand what the table says of a device."""

from __future__ import annotations

import pytest

from shardwise.planner.seconds import rates


@pytest.fixture
def by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been measured on any device."""
    monkeypatch.setattr(rates, "measured_on", lambda name: None)
