"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.prove.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks that live through the whole test run (one pool for each pytest worker)."""
    with RankPool(4) as pool:
        yield pool
