from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.job import STEPS, Job, write_text
from tests.faults.ranks import Ranks, ranks_to_kill

Make = Callable[..., Job]


@pytest.fixture(scope="session")
def killable() -> Iterator[Ranks]:
    with ranks_to_kill() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    write_text(directory / "text")
    return directory


@pytest.fixture(scope="session")
def make(root: Path, killable: Ranks) -> Make:
    """A job of this name (and strategy, and world), not yet started."""
    return lambda name, **shape: Job(root, name, killable, **shape)


@pytest.fixture(scope="session")
def whole(make: Make) -> Job:
    """The job that nothing disturbed: what every other run must equal."""
    job = make("whole")
    assert job.train(job.write()) == [0, 0], job.log.read_text()[-3000:]
    assert job.saved() == [10, STEPS]
    return job
