"""The proof of what ranks read: right for texts, samples and pairs under any layout; faults planted into the reader, or
the rows, are seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from shardwise.data import stream
from shardwise.data.micro_batch import MicroBatch
from shardwise.data.order import Order
from shardwise.data.pack import IGNORE, Packs, Sample, Windows
from shardwise.data.stream import Share
from shardwise.prove import reading
from shardwise.prove.reading import Read
from shardwise.prove.workload import read_of
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.rows import RowShare
from tests.runtime.small_run import recipe

RING = Plan(Layout(dp_replicate=2, cp=2, tp=2), Batch(2, 2, 64), Shard("ddp"))
NESTED = Plan(Layout(dp_shard=3, cp=4, ulysses=2), Batch(1, 2, 64), Shard("zero3"), cp_kind="nested")
STAGES = Plan(Layout(dp_shard=4, pp=2), Batch(1, 2, 64), Shard("zero1"))


def chats(root: Path) -> Path:
    path = root / "chats.jsonl"
    words = (("so " * (i % 9), "yes " * (1 + i % 7)) for i in range(90))
    lines = ({"prompt": f"{i} {asked}", "completion": f"{i} {said}"} for i, (asked, said) in enumerate(words))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    root = tmp_path_factory.mktemp("read")
    pairs = root / "pairs.jsonl"
    told = ({"prompt": f"is {i} odd? ", "chosen": "who knows", "rejected": f"{i % 2}"} for i in range(90))
    pairs.write_text("".join(json.dumps(line) + "\n" for line in told))
    data = {"tokenizer": {"vocab_size": 300}, "validation_share": 0.0, "text_key": "prompt"}
    made = {
        "text": recipe(root, data={"path": str(root / "text" / "0.txt")}, train={"seq_len": 64}),
        "samples": recipe(
            root,
            data={**data, "path": str(chats(root))},
            method={"name": "sft"},
            train={"seq_len": 64, "max_steps": None, "num_epochs": 1.5},
        ),
        "pairs": recipe(root, data={**data, "path": str(pairs)}, method={"name": "dpo"}, train={"seq_len": 64}),
    }
    found = {name: read_of(one, Plan(batch=Batch(8, 1, 64))) for name, one in made.items()}
    return {name: read for name, read in found.items() if isinstance(read, Read)}


@pytest.mark.parametrize("plan", [RING, NESTED, STAGES, Plan()], ids=["ring", "nested", "stages", "one rank"])
def test_what_is_right_is_not_told_of(reads: dict[str, Read], plan: Plan) -> None:
    assert isinstance(reads["text"].windows, Windows) and isinstance(reads["pairs"].windows, Packs)
    assert reads["samples"].end is not None and len(reads) == 3
    for read in reads.values():
        figures: dict[str, float] = {}
        assert not list(reading.prove(read, replace(plan, batch=replace(plan.batch, seq_len=64)), figures))
        assert figures["rows"] == len(read.windows) and figures["tokens"] > 64


samples, runs, window, pack = Order.samples, RowShare.runs, Windows.__getitem__, Packs.__getitem__
share_of, put = reading.share_of, stream.collate


def of_odd_numbers(self: Order, first: int, count: int) -> Any:
    return samples(self, first, count) // 2 * 2


def all_read_the_first_rows(layout: Layout, batch: Batch, rank: int) -> Share:
    return replace(share_of(layout, batch, rank), dp_rank=0)


def replicas_apart(layout: Layout, batch: Batch, rank: int) -> Share:
    """As if ranks of tp read rows of their own."""
    share = share_of(layout, batch, rank)
    return replace(share, dp_rank=rank % share.dp)


def a_token_twice(self: RowShare, rows: Any, row: int) -> Any:
    *rest, last = runs(self, rows, row)
    return [*rest, last.moved(-1)] if self.index else [*rest, last]


def over_the_border(self: Packs, k: int) -> Sample:
    sample = pack(self, k)
    labels, last = sample.labels.copy(), sample.segments[0]
    labels[last - 1] = sample.ids[last]
    return replace(sample, labels=labels)


def unshifted(self: Windows, k: int) -> Sample:
    sample = window(self, k)
    return replace(sample, labels=np.where(sample.labels < 0, sample.labels, sample.ids))


def nothing_learnt(self: Windows, k: int) -> Sample:
    sample = window(self, k)
    return replace(sample, labels=np.full_like(sample.labels, IGNORE))


def another_last_label(self: Windows, k: int) -> Sample:
    sample = window(self, k)
    return replace(sample, labels=np.append(sample.labels[:-1], 1))


def of_the_row(self: Packs, k: int) -> Sample:
    sample = pack(self, k)
    return replace(sample, positions=np.arange(len(sample.ids)))


def prompts_too(self: Packs, k: int) -> Sample:
    """As if all tokens of a sample were learnt."""
    sample, labels = pack(self, k), np.full(self.seq_len, IGNORE)
    end = sample.segments[0]
    labels[: end - 1] = sample.ids[1:end]
    return replace(sample, labels=labels)


def backwards(rows: Sequence[Sample], *, ahead: bool = False) -> MicroBatch:
    found = put(rows)
    return replace(found, ids=found.ids.flip(1), labels=found.labels.flip(1), positions=found.positions.flip(1))


def as_one_document(rows: Sequence[Sample], *, ahead: bool = False) -> MicroBatch:
    return replace(put(rows), documents=None)


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, Plan, str]] = {
    "rows come again": (lambda: patch.object(Order, "samples", of_odd_numbers), "text", STAGES, "different ones"),
    "ranks read the same rows": (
        lambda: patch.object(reading, "share_of", all_read_the_first_rows),
        "text",
        STAGES,
        "part 0 of 4",
    ),
    "ranks that share rows read other ones": (
        lambda: patch.object(reading, "share_of", replicas_apart),
        "text",
        RING,
        "rank 1 reads part 1 of 2",
    ),
    "every row is the first": (
        lambda: patch.object(Windows, "__getitem__", lambda self, k: window(self, 0)),
        "text",
        STAGES,
        "not those that are stored",
    ),
    "a token of a row is read twice": (
        lambda: patch.object(RowShare, "runs", a_token_twice),
        "text",
        RING,
        "not those that are stored",
    ),
    "rows are read backwards": (
        lambda: patch.object(stream, "collate", backwards),
        "text",
        STAGES,
        "not those that are stored",
    ),
    "the last token of a sample learns the next one's first": (
        lambda: patch.object(Packs, "__getitem__", over_the_border),
        "samples",
        STAGES,
        "a label is not the token that follows",
    ),
    "labels are not shifted": (
        lambda: patch.object(Windows, "__getitem__", unshifted),
        "text",
        STAGES,
        "a label is not the token that follows",
    ),
    "nothing is learnt": (
        lambda: patch.object(Windows, "__getitem__", nothing_learnt),
        "text",
        STAGES,
        "or is missing",
    ),
    "the last label is another": (
        lambda: patch.object(Windows, "__getitem__", another_last_label),
        "text",
        STAGES,
        "a label is not the token that follows",
    ),
    "prompts are learnt too": (
        lambda: patch.object(Packs, "__getitem__", prompts_too),
        "samples",
        STAGES,
        "the loss is a mean over",
    ),
    "positions go on behind a sample": (
        lambda: patch.object(Packs, "__getitem__", of_the_row),
        "samples",
        STAGES,
        "do not begin where",
    ),
    "documents are not told": (
        lambda: patch.object(stream, "collate", as_one_document),
        "samples",
        STAGES,
        "do not begin where",
    ),
}
"""What plants it, what is read under which plan, and what is said of it."""


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(reads: dict[str, Read], name: str) -> None:
    planted, read, plan, said = FAULTS[name]
    with planted():
        found = list(reading.prove(reads[read], plan, {}))
    assert any(said in line for line in found), found


def test_a_resumed_run_that_reads_other_rows_is_seen(reads: dict[str, Read]) -> None:
    """Its cursor is a step behind."""
    first = reading.stream

    def behind(windows: Any, order: Any, share: Share, cursor: int = 0, end: int | None = None) -> Any:
        return first(windows, order, share, 0, end=end)

    with patch.object(reading, "stream", behind):
        found = list(reading.prove(reads["text"], STAGES, {}))
    assert any("resumed" in line for line in found), found


def test_the_last_step_of_a_run_is_read(reads: dict[str, Read]) -> None:
    """One and a half epochs of samples end within a step; text is read for so many steps."""
    read, seen = reads["samples"], list[int]()

    def noted(windows: Any, order: Any, share: Share, cursor: int, end: int | None = None) -> Any:
        seen.append(cursor)
        return stream.read_step(windows, order, share, cursor, end)

    size, count = STAGES.batch.global_batch_size(STAGES.layout.dp), len(read.windows)
    assert read.end == round(1.5 * count)
    with patch.object(reading, "read_step", noted):
        assert not list(reading.prove(read, STAGES, {}))
    assert {*seen} == {0, (count - 1) // size * size, (read.end - 1) // size * size}


def test_why_nothing_is_known_of_the_rows(tmp_path: Path) -> None:
    few = recipe(tmp_path, data={"path": str(tmp_path / "text" / "0.txt")}, train={"seq_len": 64})
    assert "global batch needs" in str(read_of(few, Plan(batch=Batch(4096, 1, 64))))
    assert "not prepared" in str(read_of(recipe(tmp_path), Plan()))
    streamed = {"streaming": True, "path": str(tmp_path / "text")}
    assert "streamed" in str(read_of(recipe(tmp_path, data=streamed, train={"max_steps": 8}), Plan()))
