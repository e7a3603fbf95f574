"""The stream: the same global batch for every split, exact resumption, equal numbers of validation batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from shardwise.data.epochs import check_size, steps_per_epochs
from shardwise.data.order import Order
from shardwise.data.pack import Windows
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared
from shardwise.data.stream import Share, evaluation, read_step, stream
from shardwise.errors import DataError
from shardwise.spec.recipe import Data
from shardwise.spec.rows import RowShare

SPLITS = [(1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)]


@pytest.fixture
def windows(prepared: Prepared) -> Windows:
    return Windows(prepared.train, 32)


def rows_of(windows: Windows, split: tuple[int, int, int], steps: int) -> list[torch.Tensor]:
    """[8, 3, 32] ids, labels and positions of the global batch of each step, read by all ranks of a split."""
    dp, micro, accumulation = split
    order = Order(len(windows), seed=1)
    ranks = [list(islice(stream(windows, order, Share(r, dp, micro, accumulation)), steps)) for r in range(dp)]
    result = []
    for step in zip(*ranks, strict=True):
        for batch in step:
            assert len(batch.micro_batches) == accumulation
            assert all(m.ids.shape == (micro, 32) for m in batch.micro_batches)
            assert batch.terms == sum(m.supervised_tokens() for m in batch.micro_batches)
        parts = [torch.stack([m.ids, m.labels, m.positions], 1) for batch in step for m in batch.micro_batches]
        result.append(torch.cat(parts))
    return result


@pytest.mark.parametrize("split", SPLITS)
def test_a_global_batch_is_the_same_for_every_split(windows: Windows, split: tuple[int, int, int]) -> None:
    for one, other in zip(rows_of(windows, SPLITS[0], 5), rows_of(windows, split, 5), strict=True):
        assert torch.equal(one, other)


def test_an_epoch_reads_every_window_once(windows: Windows) -> None:
    order = Order(len(windows), seed=1)
    step = stream(windows, order, Share(0, 1, 1))
    assert sorted(next(step).sample_ids[0] for _ in range(len(windows))) == list(range(len(windows)))


@pytest.mark.parametrize("cursor", [0, 8, 16, 24, 8 * 1000])
def test_a_new_stream_at_a_cursor_goes_on_there(windows: Windows, cursor: int) -> None:
    order = Order(len(windows), seed=9)
    expected = order.samples(cursor, 16).tolist()
    steps = list(islice(stream(windows, order, Share(0, 1, 4, 2), cursor), 2))
    assert [sample for step in steps for sample in step.sample_ids] == expected
    assert [step.cursor for step in steps] == [cursor + 8, cursor + 16]
    other = next(stream(windows, order, Share(1, 2, 2, 2), steps[0].cursor))
    assert other.sample_ids == expected[12:16]


def test_reading_ahead_is_no_state(windows: Windows) -> None:
    order = Order(len(windows), seed=2)
    first = stream(windows, order, Share(0, 1, 2))
    cursor = [next(first) for _ in range(3)][-1].cursor
    first.close()  # one more step had been read by the thread
    assert next(stream(windows, order, Share(0, 1, 2), cursor)).sample_ids == order.samples(6, 2).tolist()


def test_an_error_of_the_reading_thread_is_the_callers(windows: Windows) -> None:
    broken = Windows(windows.store, 32)
    shard = windows.store.directory / windows.store.split.shards[0].name
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(DataError, match=r"DATA009.*tokens-00000.bin: id 65535 .* \d[\d,]* >= vocab 300"):
        list(islice(stream(broken, Order(len(broken)), Share(0, 1, 2)), 2))


@pytest.mark.parametrize(("dp", "micro", "accumulation"), [(1, 4, 2), (2, 2, 2), (4, 1, 2), (8, 1, 1)])
def test_epochs_end_at_a_sample(windows: Windows, dp: int, micro: int, accumulation: int) -> None:
    """Of three epochs each window is read three times, and the last step is filled up with padding."""
    windows = Windows(windows.store, 40)
    end = 3 * len(windows)
    assert end % 8
    order, steps = Order(len(windows), seed=4), -(-end // 8)
    ranks = [
        list(islice(stream(windows, order, Share(rank, dp, micro, accumulation), end=end), steps)) for rank in range(dp)
    ]
    read = Counter(number for rank in ranks for step in rank for number in step.sample_ids)
    assert set(read.values()) == {3} and len(read) == len(windows)
    assert {rank[-1].cursor for rank in ranks} == {end} and {rank[-2].cursor for rank in ranks} == {8 * (steps - 1)}
    labels = torch.cat([micro.labels for rank in ranks for micro in rank[-1].micro_batches])
    assert len(labels) == 8 and (labels[end - 8 * (steps - 1) :] == -100).all()
    whole = [windows[number] for number in range(len(windows))]
    assert sum(step.read for rank in ranks for step in rank) == 3 * windows.store.tokens
    supervised = 3 * sum(int((sample.labels != -100).sum()) for sample in whole)
    assert sum(step.supervised for rank in ranks for step in rank) == supervised
    assert sum(step.terms for rank in ranks for step in rank) == supervised


def test_tokens_of_rows_that_ranks_share_are_counted_once(windows: Windows) -> None:
    order, end = Order(len(windows), seed=4), len(windows)
    cursor = end - 3
    whole = read_step(windows, order, Share(0, 1, 4), cursor, end)
    assert len(whole.sample_ids) == 3
    parts = [read_step(windows, order, Share(0, 1, 4, row=RowShare(2, 2, index)), cursor, end) for index in range(4)]
    for counted in ("read", "supervised", "terms"):
        assert sum(getattr(part, counted) for part in parts) == getattr(whole, counted) > 0


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 4), (2, 3), (3, 2), (4, 16)])
def test_validation_is_the_same_for_every_split(prepared: Prepared, dp: int, micro: int, mask_documents: bool) -> None:
    assert prepared.validation is not None
    windows = Windows(prepared.validation, 16, mask_documents)
    shares = [Share(rank, dp, micro, accumulation=2) for rank in range(dp)]
    ranks = [list(evaluation(windows, share)) for share in shares]
    assert {len(batches) for batches in ranks} == {-(-len(windows) // (dp * micro))}
    together = [batch for at in zip(*ranks, strict=True) for batch in at]
    assert all(batch.micro_batch.ids.shape == (micro, 16) for batch in together)
    ids = torch.cat([batch.micro_batch.ids for batch in together])
    labels = torch.cat([batch.micro_batch.labels for batch in together])
    for k in range(len(windows)):
        assert torch.equal(ids[k], torch.from_numpy(windows[k].ids))
        assert torch.equal(labels[k], torch.from_numpy(windows[k].labels))
    assert (labels[len(windows) :] == -100).all()
    assert sum(batch.supervised_tokens for batch in together) == int((labels != -100).sum())
    expected = sum(windows.text_bytes(k) for k in range(len(windows)))
    assert sum(batch.text_bytes for batch in together) == pytest.approx(expected, rel=1e-12)


def test_validation_is_the_same_where_ranks_share_rows(prepared: Prepared) -> None:
    """Bytes of text are counted by one of them, tokens by each that has them."""
    assert prepared.validation is not None
    windows = Windows(prepared.validation, 16)
    rows = [RowShare(2, 2, index) for index in range(4)]
    together = [batch for row in rows for batch in evaluation(windows, Share(0, 1, 2, row=row))]
    whole = list(evaluation(windows, Share(0, 1, 2)))
    for counted in ("text_bytes", "supervised_tokens"):
        assert sum(getattr(each, counted) for each in together) == sum(getattr(each, counted) for each in whole)


def test_a_limit_on_validation_counts_windows(prepared: Prepared) -> None:
    assert prepared.validation is not None
    windows = Windows(prepared.validation, 16)
    counts = []
    for dp, micro in ((1, 1), (2, 1), (2, 2)):
        batches = [batch for rank in range(dp) for batch in evaluation(windows, Share(rank, dp, micro), range(5))]
        counts.append(sum(batch.supervised_tokens for batch in batches))
    assert len(set(counts)) == 1 and counts[0] > 0


def test_b51_text_smaller_than_a_batch(tmp_path: Path, settings: Callable[..., Data]) -> None:
    (tmp_path / "small.txt").write_text("alpha beta gamma\n" * 12)
    store = prepare(settings(tmp_path / "small.txt", validation_share=0.0)).train
    windows = Windows(store, 16)
    with pytest.raises(DataError) as caught:
        check_size(windows, 8, Data())
    tokens = store.tokens
    [problem] = caught.value.problems
    assert (caught.value.exit_code, problem.code, problem.where) == (65, "DATA003", "data.path")
    assert problem.what.startswith(f"{tokens} tokens, ") and "8 x 16 = 128" in problem.what
    assert problem.fix.startswith(
        f"train.global_batch_size={(tokens - 1) // 16}, or train.seq_len={(tokens - 1) // 8}, "
    )
    assert "data.repeat=true" in problem.fix
    with pytest.raises(DataError, match=r"data.streaming_bytes$"):
        check_size(windows, 8, Data(streaming=True))
    check_size(windows, 8, Data(repeat=True))
    check_size(windows, (tokens - 1) // 16, Data())
    check_size(Windows(store, (tokens - 1) // 8), 8, Data())
    repeated = next(stream(windows, Order(len(windows)), Share(0, 1, 8)))
    assert set(repeated.sample_ids) == set(range(len(windows)))


def test_epochs_in_steps(windows: Windows) -> None:
    n = len(windows)
    assert steps_per_epochs(windows, 1, 1.0) == n
    assert steps_per_epochs(windows, n, 2.0) == 2
    assert steps_per_epochs(windows, n - 1, 1.0) == 2
