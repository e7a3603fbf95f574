"""What of a batch is a rank's that has some tokens of each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import Sample
from shardwise.spec.rows import RowShare

LENGTH = 24
DOCUMENTS = [(24,), (1, 7, 3, 13), (12, 12), (23, 1)]


def rows() -> MicroBatch:
    """Labels are ids and a hundred, so that no two values are equal."""
    samples = []
    for number, lengths in enumerate(DOCUMENTS):
        ids = np.arange(LENGTH, dtype=np.int64) + 1000 * (number + 1)
        positions = np.concatenate([np.arange(length) for length in lengths])
        samples.append(Sample(ids, ids + 100, positions, lengths, masked=True))
    return collate(samples)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (3, 1), (2, 2)])
def test_each_token_is_one_rank_s_with_all_that_is_known_of_it(ring: int, ulysses: int) -> None:
    whole = rows()
    each = [whole.cut(RowShare(ring, ulysses, rank)) for rank in range(ring * ulysses)]
    for row, lengths in enumerate(DOCUMENTS):
        of_token = [length for length in lengths for _ in range(length)]
        found = []
        for part in each:
            assert part.reached is not None and part.row_length == LENGTH
            columns = (part.ids[row], part.labels[row], part.positions[row], part.reached[row])
            found += list(zip(*(column.tolist() for column in columns), strict=True))
        right = (whole.ids[row], whole.labels[row], whole.positions[row])
        assert sorted(found) == list(zip(*(column.tolist() for column in right), of_token, strict=True))
    assert all(part.bounds is not None and torch.equal(part.bounds, whole.documents) for part in each)


def test_pairs_are_counted_by_one_of_the_ranks_that_share_their_rows() -> None:
    """Tokens by each that has them."""
    whole = replace(rows(), references=torch.zeros(3, 2, dtype=torch.float64))
    each = [whole.cut(RowShare(2, 2, rank)) for rank in range(4)]
    assert [part.terms() for part in each] == [3, 0, 0, 0] and whole.terms() == 3
    assert [part.supervised_tokens() for part in each] == [LENGTH] * 4


def test_rows_of_one_rank_are_left_as_they_are() -> None:
    whole = rows()
    assert whole.cut(RowShare()) is whole
