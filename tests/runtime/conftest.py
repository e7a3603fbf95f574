from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.nursery import Ask, nursery


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Processes to kill."""
    with nursery() as asking:
        yield asking
