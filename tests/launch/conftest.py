"""Nodes that a test may lose, and where their runs are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.lossy_node import Nodes, nodes_to_lose
from tests.runtime.small_run import write_text


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("nodes")
    write_text(found / "text")
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_to_lose() as nodes:
        yield nodes
