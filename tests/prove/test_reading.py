"""The proof of what ranks read: right for texts, samples and pairs under any layout; faults planted into the reader, or
the rows, are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from shardwise.data.batch import MicroBatch
from shardwise.data.order import Order
from shardwise.data.pack import Packs, Sample, Windows
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
    found = {name: read_of(one) for name, one in made.items()}
    return {name: read for name, read in found.items() if read is not None}


@pytest.mark.parametrize("plan", [RING, NESTED, STAGES, Plan()], ids=["ring", "nested", "stages", "one rank"])
def test_what_is_right_is_not_told_of(reads: dict[str, Read], plan: Plan) -> None:
    assert isinstance(reads["text"].windows, Windows) and isinstance(reads["pairs"].windows, Packs)
    assert reads["samples"].end is not None and len(reads) == 3
    for read in reads.values():
        figures: dict[str, float] = {}
        assert not list(reading.prove(read, replace(plan, batch=replace(plan.batch, seq_len=64)), figures))
        assert figures["rows"] == len(read.windows) and figures["tokens"] > 64


samples, runs, window, pack, cut = Order.samples, RowShare.runs, Windows.__getitem__, Packs.__getitem__, MicroBatch.cut
share_of = reading.share_of


def of_odd_numbers(self: Order, first: int, count: int) -> Any:
    return samples(self, first, count) // 2 * 2


def all_read_the_first_rows(layout: Layout, batch: Batch, rank: int) -> Share:
    return replace(share_of(layout, batch, rank), dp_rank=0)


def replicas_apart(layout: Layout, batch: Batch, rank: int) -> Share:
    """As if ranks of tp read rows of their own."""
    share = share_of(layout, batch, rank)
    return replace(share, dp_rank=rank % share.dp)


def a_token_less(self: RowShare, rows: Any, row: int) -> Any:
    found = runs(self, rows, row)
    return [*found[:-1], replace_run(found[-1])] if self.index else found


def replace_run(run: Any) -> Any:
    return type(run)(run.start - 1, run.stop - 1)


def over_the_border(self: Packs, k: int) -> Sample:
    sample = pack(self, k)
    labels, last = sample.labels.copy(), sample.segments[0]
    labels[last - 1] = sample.ids[last]
    return replace(sample, labels=labels)


def unshifted(self: Windows, k: int) -> Sample:
    sample = window(self, k)
    return replace(sample, labels=np.where(sample.labels < 0, sample.labels, sample.ids))


def of_the_row(self: Packs, k: int) -> Sample:
    sample = pack(self, k)
    return replace(sample, positions=np.arange(len(sample.ids)))


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, Plan, str]] = {
    "rows come again": (lambda: patch.object(Order, "samples", of_odd_numbers), "text", STAGES, "come again"),
    "ranks read the same rows": (
        lambda: patch.object(reading, "share_of", all_read_the_first_rows),
        "text",
        STAGES,
        "of 4 parts",
    ),
    "ranks that share rows read other ones": (
        lambda: patch.object(reading, "share_of", replicas_apart),
        "text",
        RING,
        "of 2 parts",
    ),
    "a token of a row is read twice": (
        lambda: patch.object(RowShare, "runs", a_token_less),
        "text",
        RING,
        "tokens of row 0",
    ),
    "the last token of a sample learns the next one's first": (
        lambda: patch.object(Packs, "__getitem__", over_the_border),
        "samples",
        STAGES,
        "of another document",
    ),
    "labels are not shifted": (
        lambda: patch.object(Windows, "__getitem__", unshifted),
        "text",
        STAGES,
        "not the token that follows",
    ),
    "positions go on behind a sample": (
        lambda: patch.object(Packs, "__getitem__", of_the_row),
        "samples",
        STAGES,
        "positions do not begin again",
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

    def behind(windows: Any, order: Any, share: Share, cursor: int, end: int | None) -> Any:
        return step(windows, order, share, 0, end) if cursor else step(windows, order, share, cursor, end)

    step, first = reading.read_step, reading.stream

    def stream(windows: Any, order: Any, share: Share, cursor: int = 0, end: int | None = None) -> Any:
        return first(windows, order, share, 0, end=end)

    with patch.object(reading, "stream", stream):
        found = list(reading.prove(reads["text"], STAGES, {}))
    assert any("resumed" in line for line in found), found
    with patch.object(reading, "read_step", behind):
        assert any("expected" in line for line in reading.prove(reads["text"], STAGES, {}))
