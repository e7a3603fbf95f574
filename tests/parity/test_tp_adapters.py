"""Tensor parallelism beside what computes over whole layers: DoRA's sizes of rows, norms over whole projections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import with_fields
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora
from tests.parity import drawn
from tests.parity.test_fp64 import holds
from tests.parity.test_tp import EVEN, plan

BIASED = with_fields(EVEN, name="tiny-biased", attention_bias=True, mlp_bias=True)
OLMO = with_fields(EVEN, name="tiny-olmo", norm_placement="after", qk_norm="projection")
ADAPTERS = Lora(4, 8.0, frozen="fp64")
DORA = replace(ADAPTERS, dora=True)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_norms_over_whole_projections(ranks: RankPool, sequence: bool) -> None:
    plans = [
        plan("ddp", 1, 2, sequence=sequence, remat="selective"),
        plan("zero3", 2, 2, sequence=sequence, remat="full"),
    ]
    holds(drawn.prove(ranks, OLMO, plans), plans)


@pytest.mark.prove
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_sizes_of_rows(ranks: RankPool, sequence: bool) -> None:
    """Of layers whose outputs are cut, and of those whose inputs are, whose norms are joined; with biases."""
    plans = [
        replace(plan("ddp", 1, 2, sequence=sequence), lora=DORA),
        replace(plan("zero3", 2, 2, sequence=sequence, remat="selective", accumulation=2), lora=DORA),
    ]
    holds(drawn.prove(ranks, BIASED, plans), plans)


@pytest.mark.prove
def test_sizes_of_rows_with_fewer_key_heads_than_ranks(ranks: RankPool) -> None:
    plans = [replace(plan("ddp", 1, 4, sequence=True, remat="full"), lora=DORA)]
    holds(drawn.prove(ranks, BIASED, plans), plans)


WIDE = with_fields(BIASED, name="tiny-wide", hidden_size=64, intermediate_size=256, num_attention_heads=8, head_dim=32)
"""Of whose rows two ranks have whole blocks of 64, and four too."""


@pytest.mark.prove
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["whole", "sequence"])
def test_weights_in_four_bits(ranks: RankPool, sequence: bool) -> None:
    """They are quantised whole, then cut, by rows and by columns."""
    small = replace(ADAPTERS, nf4=True)
    plans = [
        replace(plan("ddp", 1, 2, sequence=sequence), lora=small),
        replace(plan("zero3", 2, 2, sequence=sequence, remat="selective"), lora=small),
    ]
    holds(drawn.prove(ranks, WIDE, plans), plans)


@pytest.mark.prove
def test_weights_in_four_bits_and_sizes_of_rows_with_fewer_key_heads_than_ranks(ranks: RankPool) -> None:
    plans = [replace(plan("ddp", 1, 4, sequence=True, remat="full"), lora=replace(DORA, nf4=True))]
    holds(drawn.prove(ranks, WIDE, plans), plans)
