"""Where a model is cut into stages, and which of them train."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.config import model_spec, with_fields
from shardwise.models.lookup import load_spec
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Pipeline, Plan
from shardwise.techniques.pp.split import split, work
from shardwise.techniques.states import trained_stages

SMALL = model_spec("small", 96, 32, 48, 8, 4, 2, 8)


def test_work_by_hand() -> None:
    """A token: q and o 32 x 32, k and v 32 x 16, three of 32 x 48 in the MLP, twice each; scores and sums over half of
    64 tokens for 32 numbers; and 32 x 96 of the output layer."""
    each, head = work(SMALL, 64)
    products = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert each == (products + 4 * 32 * 32,) * 8 and head == 2 * 32 * 96
    windowed = with_fields(SMALL, sliding_window=8, layer_types=("sliding_attention", "full_attention") * 4)
    sliding, full = work(windowed, 64)[0][:2]
    assert (sliding, full) == (products + 4 * 8 * 32, products + 4 * 32 * 32)


def loads(blocks: list[int], head: int, counts: tuple[int, ...]) -> list[int]:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    found = [sum(blocks[start:stop]) for start, stop in pairwise(ends)]
    found[-1] += head
    return found


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 400), st.integers(8, 64), st.data())
def test_the_slowest_stage_does_as_little_as_any_cut_allows(
    blocks: int, stages: int, vocabulary: int, width: int, data: st.DataObject
) -> None:
    """Beside all cuts: the largest stage, and of those that are as small the most even."""
    stages = min(stages, blocks)
    sizes = tuple(data.draw(st.lists(st.integers(1, 300), min_size=blocks, max_size=blocks)))
    spec = replace(SMALL, vocab_size=vocabulary, num_hidden_layers=blocks, intermediate_sizes=sizes)
    each, head = work(spec, 16)
    found = split(spec, 16, stages)
    assert sum(found) == blocks and len(found) == stages and min(found) >= 1
    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    every = [loads(list(each), head, tuple(b - a for a, b in pairwise(cut))) for cut in cuts]
    mine = loads(list(each), head, found)
    least = min(map(max, every))
    assert max(mine) == least
    assert sum(x * x for x in mine) == min(sum(x * x for x in other) for other in every if max(other) == least)


def test_uneven_counts_are_normal() -> None:
    """405B: the output layer is two thirds of a block, so the last of 16 stages has one less, of 126 blocks."""
    spec = load_spec("Llama-3.1-405B")
    counts = split(spec, 8192, 16)
    assert sum(counts) == 126 and set(counts) == {7, 8} and counts[-1] == 7
    each, head = work(spec, 8192)
    assert 0.5 < head / each[0] < 0.8
    with pytest.raises(ValueError, match=r"8 blocks .*9 stages"):
        split(SMALL, 64, 9)


@pytest.mark.parametrize(
    ("settings", "tied", "expected"),
    [
        ({}, False, (True, True, True, True)),
        ({"frozen": ("embed.*", "layers.0.*", "layers.1.*")}, False, (False, True, True, True)),
        ({"frozen": ("layers.*",)}, False, (True, False, False, True)),
        ({"frozen": ("layers.*", "norm.*", "head.*")}, False, (True, False, False, False)),
        ({"frozen": ("layers.*", "norm.*", "head.*")}, True, (True, False, False, True)),
        ({"frozen": ("*",)}, True, (False, False, False, False)),
        ({"lora": Lora(4, 8.0)}, False, (True, True, True, True)),
    ],
    ids=["all", "first blocks held", "ends alone", "embedding", "embedding, tied", "nothing", "adapters"],
)
def test_which_stages_train(settings: dict[str, Any], tied: bool, expected: tuple[bool, ...]) -> None:
    """A tied embedding is in the last stage as well."""
    spec = replace(SMALL, tie_word_embeddings=tied)
    plan = Plan(Layout(pp=4), pipeline=Pipeline("1f1b", 1, (2, 2, 2, 2)), **settings)
    assert trained_stages(spec, plan) == expected
