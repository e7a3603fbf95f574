"""Streamed data: the same samples for every number of ranks and after every stop, and never much on the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.data import portions, remote, store, whole
from shardwise.data.order import permute
from shardwise.data.pack import Windows
from shardwise.data.portions import Portions, lay, open_data
from shardwise.data.prepare import prepare
from shardwise.data.stream import Share, stream
from shardwise.errors import ConfigError, DataError, ShardwiseError
from shardwise.models.resolve import data_of
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Data, Recipe, TokenizerSection
from tests.data.conftest import prose
from tests.traps import set_traps, sprung

Settings = Callable[..., Data]
BATCH, BYTES = 4, 2000


class Here:
    """In place of a process: does at its start all that it would do."""

    def __init__(self, group: None, target: object, name: str, args: tuple[Path, Callable[[Path], None]], daemon: bool):
        self.name, self.args = name, args

    def start(self) -> None:
        with suppress(ShardwiseError):
            whole.once(*self.args)

    def is_alive(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def prepared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test depends on how fast a process is."""
    monkeypatch.setattr(portions, "get_context", lambda method: SimpleNamespace(Process=Here))


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


@pytest.mark.prove
def test_an_epoch_reads_every_sample_once_and_the_next_visits_the_portions_in_another_order(
    recipe: Recipe, tmp_path: Path
) -> None:
    """And the source, once exhausted, begins again."""
    run = Run(recipe, tmp_path / "stream")
    count, steps = run.leader.count, run.steps(1)
    while len(visits(tmp_path / "stream")) <= 2 * count:
        steps.append(run.step())
    told = visits(tmp_path / "stream")
    order = [[fingerprint for _, fingerprint in told[first : first + count]] for first in (0, count)]
    assert sorted(map(str, order[0])) == sorted(map(str, order[1])) and order[0] != order[1]
    samples = sum(int(str(number)) for number, _ in told[:count])
    rows = [tuple(row.tolist()) for ids, _ in steps + run.steps(2) for row in ids]
    epochs = rows[:samples], rows[samples : 2 * samples]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_every_text_is_trained_on_or_held_out_of_the_first_portion(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path / "stream")
    held = run.leader.first.validation
    names = json.loads((tmp_path / "stream" / "stream.json").read_text())["portions"]
    assert held is not None and held.split.documents == 1
    while len(visits(tmp_path / "stream")) < run.leader.count:
        run.step()
    assert isinstance(recipe.data.path, str)
    plain = recipe.data.model_copy(update={"streaming": False, "validation_share": 0.0})
    texts = prepare(plain.model_copy(update={"path": names[0]})).train
    assert run.leader.first.train.tokens + held.tokens == texts.tokens
    later = [Windows(prepare(plain.model_copy(update={"path": portion})).train, 16) for portion in names[1:]]
    told = [int(str(number)) for number, _ in visits(tmp_path / "stream")]
    assert told[1:] == [len(windows) for windows in later]
    order = permute(np.arange(told[1]), told[1], seed=3, epoch=1).tolist()
    again = Portions(recipe, recipe.data, tmp_path / "stream", leader=False)
    for k, at in enumerate(order):
        assert (again[told[0] + k].ids == later[0][at].ids).all()


def test_a_run_that_was_stopped_in_the_third_portion_goes_on_with_the_same_samples(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Also under another number of ranks, also when what was on the disk is gone; what was read is not prepared
    again."""
    whole = Run(recipe, tmp_path / "whole").steps(70)
    run = Run(recipe, tmp_path / "stopped")
    done = 0
    while len(visits(tmp_path / "stopped")) < 3 or done < 3:
        run.step()
        done += 1
    told = visits(tmp_path / "stopped")
    begin = sum(int(str(number)) for number, _ in told[:2])
    done = -(-begin // BATCH) + 2
    again = Run(recipe, tmp_path / "stopped", 2, cursor=done * BATCH)
    assert same(again.steps(70 - done), whole[done:])
    for path in (tmp_path / "stopped").glob("portion-0000[1-9]"):
        shutil.rmtree(path)
    again = Run(recipe, tmp_path / "stopped", cursor=done * BATCH)
    assert again.portions() == ["portion-00000"]
    assert same([again.step()], whole[done : done + 1])
    assert again.waited == 1 and "portion-00001" not in again.portions() and "portion-00002" in again.portions()


def test_three_portions_at_most_are_on_the_disk(recipe: Recipe, tmp_path: Path) -> None:
    """The first, the present one and the next."""
    run = Run(recipe, tmp_path / "stream", 2)
    seen = []
    for _ in range(90):
        run.step()
        seen.append(run.portions())
    assert max(map(len, seen)) == 3 and all("portion-00000" in names for names in seen)
    assert len({name for names in seen for name in names}) == run.leader.count
    assert run.waited == 0
    assert {path.name for path in (tmp_path / "stream" / "portion-00000").iterdir() if path.is_dir()} == {"data"}


def test_what_a_slower_rank_still_reads_is_not_deleted(recipe: Recipe, tmp_path: Path) -> None:
    """It may be a step behind the rank that deletes."""
    leader, slow = (Portions(recipe, recipe.data, tmp_path / "stream", leader=first) for first in (True, False))
    for cursor in range(0, 60 * BATCH, BATCH):
        leader.advance(cursor, BATCH)
        before = max(cursor - BATCH, 0)
        slow.advance(before, BATCH)
        assert leader.ready(cursor, BATCH) and slow.ready(before, BATCH)
        for k in range(BATCH):
            assert (slow[before + k].ids == leader[before + k].ids).all()
    assert len(visits(tmp_path / "stream")) > 3


def test_a_process_of_its_own_prepares_ahead(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    source = Portions(recipe, recipe.data, tmp_path / "stream", leader=True)
    monkeypatch.chdir(set_traps(tmp_path / "traps"))
    source.advance(0, BATCH)
    assert source.ready(0, BATCH) and source._ahead is not None
    source._ahead.join(60)
    assert sprung(tmp_path / "traps") == [], "code of the working directory was run"
    assert source._ahead.exitcode == 0 and (tmp_path / "stream" / "portion-00001").is_dir()
    assert len(visits(tmp_path / "stream")) == 1


def test_a_portion_that_nobody_prepared_is_prepared_when_it_is_wanted_and_that_is_said(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run(recipe, tmp_path / "stream")
    run.leader.leader = False
    whole = Run(recipe, tmp_path / "whole").steps(30)
    assert same(run.steps(30), whole) and run.waited > 0


def test_what_is_wrong_with_a_later_portion_is_told_when_it_is_wanted(
    recipe: Recipe, files: Path, tmp_path: Path
) -> None:
    last = Path(lay(recipe.data, 3, records=False)[-1][-1])
    last.write_bytes(b"\xff\xff")
    run = Run(recipe, tmp_path / "stream")
    with pytest.raises(DataError, match=f"{last.name}:1 byte 1: not UTF-8"):
        run.steps(200)
    assert len(visits(tmp_path / "stream")) == run.leader.count - 1


def test_a_file_that_changed_since_it_was_read_is_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    root = tmp_path / "stream"
    run = Run(recipe, root)
    while len(visits(root)) < 2:
        run.step()
    shutil.rmtree(root / "portion-00001")
    changed = Path(lay(recipe.data, 3, records=False)[1][0])
    was = changed.read_text()
    changed.write_text(prose(100, seed=99))
    cursor = int(str(visits(root)[0][0]))
    with pytest.raises(DataError, match="portion 1 has changed"):
        Run(recipe, root, cursor=cursor).step()
    assert not (root / "portion-00001").exists()
    changed.write_text(was)
    Run(recipe, root, cursor=cursor).step()
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seq_len": 8})})
    with pytest.raises(DataError, match="other data"):
        Run(other, root)


def test_a_file_that_changed_is_told_in_the_next_epoch_too(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path / "stream")
    while len(visits(tmp_path / "stream")) < run.leader.count:
        run.step()
    for portion in lay(recipe.data, 3, records=False)[1:-1]:
        Path(portion[0]).write_text(prose(100, seed=99))
    with pytest.raises(DataError, match="has changed"):
        run.steps(200)


def test_records_for_fine_tuning_are_streamed_too(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "talks").mkdir()
    for number in range(8):
        lines = [{"prompt": f"{number} and {n}?", "completion": f" is {number + n}"} for n in range(40)]
        (tmp_path / "talks" / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = settings(tmp_path / "talks", streaming=True, streaming_bytes=3000)
    facts = {"data": data, "train": {"seq_len": 64, "max_steps": 10}, "method": {"name": "sft"}}
    recipe = Recipe.model_validate(facts)
    one, several = Run(recipe, tmp_path / "one").steps(30), Run(recipe, tmp_path / "two", 2).steps(30)
    assert same(one, several) and len(visits(tmp_path / "one")) > 3
    assert all((labels == -100).any() and (labels != -100).any() for _, labels in one)


def test_a_tokenizer_is_trained_on_the_first_portion(recipe: Recipe, tmp_path: Path) -> None:
    data = recipe.data.model_copy(update={"tokenizer": TokenizerSection(vocab_size=300)})
    run = Run(recipe.model_copy(update={"data": data}), tmp_path / "stream")
    run.steps(40)
    opened = [store.load(path / "data").manifest for path in (tmp_path / "stream").glob("portion-*")]
    assert len(opened) == 3 and len({manifest.tokenizer_hash for manifest in opened}) == 1


def test_files_of_a_store_are_fetched_portion_by_portion(tmp_path: Path, settings: Settings) -> None:
    bucket = fsspec.filesystem("memory")
    for index in range(12):
        bucket.pipe(f"/corpus/{index}.txt", prose(100, seed=index).encode())
    try:
        data = settings("memory://corpus/*.txt", streaming=True, streaming_bytes=BYTES)
        recipe = Recipe.model_validate({"data": data, "train": {"seq_len": 16, "max_steps": 10}})
        sizes = remote.listed("memory://corpus/*.txt", 1)
        assert (
            sorted(sizes) == sorted(f"memory:///corpus/{index}.txt" for index in range(12)) and min(sizes.values()) > 9
        )
        run = Run(recipe, tmp_path / "stream")
        run.steps(32)
        assert len(visits(tmp_path / "stream")) > 2
        assert not list(tmp_path.rglob("*.txt")) and not (tmp_path / "cache" / "fetched").exists()
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    with pytest.raises(ConfigError, match="is a dataset"):
        remote.listed("hf://datasets/org/name", 1)


def test_what_does_not_go_with_streaming_is_told(recipe: Recipe) -> None:
    def said(*overrides: str) -> str:
        with pytest.raises(ShardwiseError) as caught:
            load_recipe(None, ["data.streaming=true", *overrides])
        return str(caught.value)

    assert said().startswith("error[CFG004]: `train.max_steps` ")
    assert "`train.num_epochs` cannot" in said("train.max_steps=5", "train.num_epochs=1")
    assert "`data.mixture_weights` cannot" in said("max_steps=5", "data.path=[a, b]", "data.mixture_weights=[1, 2]")
    assert "`method.name` cannot" in said("train.max_steps=5", "method=dpo")
    assert (
        load_recipe(None, ["data.streaming=true", "max_steps=5", "streaming_bytes=3M"]).data.streaming_bytes == 3 << 20
    )
    with pytest.raises(ConfigError, match="during training"):
        prepare(recipe.data)


def test_ranks_go_on_streaming_once_the_launcher_has_prepared_the_first_portion(recipe: Recipe, tmp_path: Path) -> None:
    run = recipe.model_copy(update={"run": recipe.run.model_copy(update={"out": str(tmp_path), "name": "run"})})
    root = tmp_path / "run" / "stream"
    opened = [open_data(run, data_of(run), root, first=first) for first in (True, False)]  # the launcher, then a rank
    counts = [streamed and streamed.count for _, streamed in opened]
    assert counts[0] is not None and counts[0] > 2 and counts[1] == counts[0]
    assert opened[0][0].manifest.fingerprint == opened[1][0].manifest.fingerprint
