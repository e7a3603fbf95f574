"""Windows: every step from token to token once, labels masked between documents, the same by a slow reading."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.data.micro_batch import collate
from shardwise.data.pack import IGNORE, Windows
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared, TokenStore
from shardwise.data.tokens import Tokenizer, open_directory
from shardwise.spec.recipe import Data


def documents(corpus: Path, tokenizer: Tokenizer) -> list[list[int]]:
    texts = [path.read_text() for path in sorted(corpus.rglob("*.*"), key=lambda p: (len(p.parts), str(p)))]
    return [[*ids, tokenizer.eot_id] for ids in tokenizer.encode(texts)]


@pytest.fixture
def store(corpus: Path, settings: Callable[..., Data]) -> TokenStore:
    return prepare(settings(corpus, validation_share=0.0)).train


@pytest.fixture
def flat(corpus: Path, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """(document, place in it, token) of every token, from the files."""
    return [(d, i, t) for d, ids in enumerate(documents(corpus, tokenizer)) for i, t in enumerate(ids)]


@pytest.mark.parametrize("seq_len", [2, 7, 64, 1000, 10**6])
def test_masked_windows_equal_a_slow_reading(
    store: TokenStore, flat: list[tuple[int, int, int]], tokenizer: Tokenizer, seq_len: int
) -> None:
    windows = Windows(store, seq_len)
    for k in range(len(windows)):
        sample = windows[k]
        boundaries = np.cumsum(sample.segments).tolist()
        assert boundaries[-1] == seq_len
        here = flat[k * seq_len : (k + 1) * seq_len + 1]
        position, expected_boundaries = 0, []
        for i in range(seq_len):
            is_text = i < len(here)
            other = i > 0 and (i == len(here) or (is_text and here[i][0] != here[i - 1][0]))
            if other:
                position = 0
                expected_boundaries.append(i)
            assert sample.ids[i] == (here[i][2] if is_text else tokenizer.eot_id)
            learnt = i + 1 < len(here) and here[i + 1][0] == here[i][0]
            assert sample.labels[i] == (here[i + 1][2] if learnt else IGNORE)
            assert sample.positions[i] == position
            position += 1
        assert boundaries[:-1] == expected_boundaries


@pytest.mark.parametrize("seq_len", [2, 33, 500])
def test_unmasked_windows_cover_every_step_once(
    store: TokenStore, flat: list[tuple[int, int, int]], seq_len: int
) -> None:
    windows = Windows(store, seq_len, mask_documents=False)
    steps = []
    for k in range(len(windows)):
        sample = windows[k]
        assert sample.positions.tolist() == list(range(seq_len))
        assert sample.segments == (seq_len,)
        learnt = sample.labels != IGNORE
        steps += list(zip(sample.ids[learnt].tolist(), sample.labels[learnt].tolist(), strict=True))
    tokens = [token for _, _, token in flat]
    assert steps == list(pairwise(tokens))


@pytest.mark.parametrize("tokens", [0, 1, 2, 100, 101, 102])
def test_the_number_of_windows(store: TokenStore, tokens: int) -> None:
    from dataclasses import replace

    short = replace(store, split=replace(store.split, tokens=tokens))
    assert len(Windows(short, 100)) == -(-(tokens - 1) // 100 if tokens else 0)


def test_windows_outside_are_refused(store: TokenStore) -> None:
    windows = Windows(store, 64)
    for k in (-1, len(windows)):
        with pytest.raises(IndexError, match=f"window {k} of {len(windows)}"):
            windows[k]


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("seq_len", [5, 64, 10**5])
def test_bytes_of_text_add_up(store: TokenStore, seq_len: int, mask_documents: bool) -> None:
    windows = Windows(store, seq_len, mask_documents)
    counted = sum(windows.text_bytes(k) for k in range(len(windows)))
    ends = store.document_ends(0, store.tokens)
    lengths = np.diff(ends, prepend=0) - 1
    sizes = np.diff(store._documents[:, 1].astype(np.int64), prepend=0)
    unseen = (sizes / lengths).sum() if mask_documents else sizes[0] / lengths[0]
    assert counted == pytest.approx(store.split.text_bytes - unseen, rel=1e-12)


@pytest.mark.parametrize("mask_documents", [True, False])
def test_a_begin_of_text_stands_for_no_byte(
    corpus: Path, settings: Callable[..., Data], tokenizer: Tokenizer, tmp_path: Path, mask_documents: bool
) -> None:
    """Each document's text is learnt from its begin-of-text on, so every byte counts, once."""
    from tokenizers import processors

    directory = tmp_path / "begins"
    directory.mkdir()
    tokenizer.copy_to(directory)
    backend = open_directory(directory).backend
    eot = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(single=f"{eot} $A", special_tokens=[(eot, 299)])
    backend.save(str(directory / "tokenizer.json"))
    again = {"tokenizer": {"path": str(directory)}, "validation_share": 0.0}
    made = prepare(settings(corpus, **again)).train
    assert made.tokens == prepare(settings(corpus, validation_share=0.0)).train.tokens + made.split.documents
    for seq_len in (5, 64):
        windows = Windows(made, seq_len, mask_documents)
        counted = sum(windows.text_bytes(k) for k in range(len(windows)))
        assert counted == pytest.approx(made.split.text_bytes, rel=1e-12)


def test_batches_lay_windows_under_each_other(prepared: Prepared) -> None:
    windows = Windows(prepared.train, 50)
    samples = [windows[k] for k in range(3)]
    batch = collate(samples)
    assert batch.ids.shape == batch.labels.shape == batch.positions.shape == (3, 50)
    assert batch.ids.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
    assert batch.documents is not None and batch.documents.dtype == torch.int32
    boundaries = batch.documents.tolist()
    assert boundaries[0] == 0 and {50, 100, 150} <= set(boundaries) and boundaries == sorted(set(boundaries))
    assert batch.longest == max(np.diff(boundaries))
    starts = (batch.positions.flatten() == 0).nonzero().flatten().tolist()
    assert starts == boundaries[:-1]
    assert batch.supervised_tokens() == sum(int((s.labels != IGNORE).sum()) for s in samples)
    whole = collate([Windows(prepared.train, 50, mask_documents=False)[0]])
    assert whole.documents is None and whole.longest == 50
    moved = batch.to("meta")
    assert moved.ids.is_meta and moved.documents is not None and moved.documents.is_meta
