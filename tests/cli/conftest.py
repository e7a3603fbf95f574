"""Runs of the command line start quickly, but for those marked ``launched``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.launch import local
from tests.cli.ready_ranks import ReadyRanks, ready_ranks


@pytest.fixture(scope="session")
def ready() -> Iterator[ReadyRanks]:
    with ready_ranks() as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _start_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that ranks are forked from is started by the first test that has any."""

    def launch(*given: object, **named: object) -> local.Ended:
        ranks: ReadyRanks = request.getfixturevalue("ready")
        return ranks.launch(*given, **named)  # type: ignore[arg-type]

    if request.node.get_closest_marker("launched") is None:
        monkeypatch.setattr(local, "run_ranks", launch)
