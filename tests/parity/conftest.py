from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.prove.pool import RankPool
from tests.parity import test_dpo


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    """Ranks for layouts that take more than the four of ``ranks``."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared pairs of answers."""
    return test_dpo.prepared(tmp_path_factory.mktemp("pairs"))
