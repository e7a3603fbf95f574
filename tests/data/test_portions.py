"""Streamed data: the same samples for every number of ranks and after every stop, and never much on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.data import portions, remote
from shardwise.data.order import Order
from shardwise.data.pack import Windows
from shardwise.data.portions import Portions, lay
from shardwise.data.prepare import prepare
from shardwise.data.stream import Share, stream
from shardwise.errors import ConfigError, DataError, ShardwiseError
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Data, Recipe
from tests.data.conftest import prose

Settings = Callable[..., Data]
BATCH, BYTES = 4, 2000


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """18 text files of about 500 bytes."""
    (tmp_path / "files").mkdir()
    for index in range(18):
        (tmp_path / "files" / f"{index}.txt").write_text(prose(90 + 3 * index, seed=index), encoding="utf-8")
    return tmp_path / "files"


@pytest.fixture
def recipe(files: Path, settings: Settings) -> Recipe:
    data = settings(files, streaming=True, streaming_bytes=BYTES)
    return Recipe.model_validate({"data": data, "train": {"seq_len": 16, "max_steps": 10}, "run": {"seed": 3}})


class Run:
    """``ranks`` that read the stream in step, as the loop of a run does; the first prepares ahead."""

    def __init__(self, recipe: Recipe, root: Path, ranks: int = 1, cursor: int = 0) -> None:
        self.root, self.waited = root, 0
        opened = [Portions(recipe, recipe.data, root, leader=rank == 0) for rank in range(ranks)]
        self.leader = opened[0]
        micro = BATCH // ranks
        self.streams = [
            stream(source, source, Share(rank, ranks, micro), cursor, [self.wait]) for rank, source in enumerate(opened)
        ]

    def wait(self) -> None:
        self.waited += 1

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of one global batch."""
        micro = [batch for step in map(next, self.streams) for batch in step.micro_batches]
        return torch.cat([batch.ids for batch in micro]), torch.cat([batch.labels for batch in micro])

    def steps(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.step() for _ in range(count)]

    def portions(self) -> list[str]:
        """What is on the disk, in preparation too."""
        return sorted(path.name for path in self.root.iterdir() if "portion" in path.name and path.is_dir())


def same(one: list[tuple[torch.Tensor, torch.Tensor]], other: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def visits(root: Path) -> list[list[object]]:
    found: list[list[object]] = json.loads((root / "stream.json").read_text())["visits"]
    return found


def test_each_file_is_in_one_portion_and_portions_are_about_as_long_as_asked_for(recipe: Recipe, files: Path) -> None:
    laid = lay(recipe.data, 3, records=False)
    assert sorted(name for portion in laid for name in portion) == sorted(map(str, files.iterdir()))
    sizes = [sum(Path(name).stat().st_size for name in portion) for portion in laid]
    assert len(laid) > 4 and all(BYTES / 2 < size < 1.5 * BYTES for size in sizes[:-1])
    assert laid == lay(recipe.data, 3, records=False) != lay(recipe.data, 4, records=False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_does_not_depend_on_the_ranks(recipe: Recipe, tmp_path: Path, ranks: int) -> None:
    assert same(Run(recipe, tmp_path / "one").steps(70), Run(recipe, tmp_path / "several", ranks).steps(70))
    assert len(visits(tmp_path / "one")) > 4


def test_an_epoch_reads_every_sample_once_and_the_next_reads_the_portions_in_another_order(
    recipe: Recipe, tmp_path: Path
) -> None:
    """What is held out is held out in all epochs."""
    source = Portions(recipe, recipe.data, tmp_path / "stream", leader=True)
    assert source.first.validation is not None

    def epoch(number: int) -> list[tuple[int, ...]]:
        first = source._find_start(number * source.count)
        return [tuple(source[k].ids.tolist()) for k in range(first, source._find_start((number + 1) * source.count))]
