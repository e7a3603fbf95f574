"""Adapters over frozen weights in float8: a plan's training is the plain loop's, whose weights another rule has
rounded (prove/plain_linear.py), in float64. Blocks are of 24 x 24 there, of which most sizes are no multiple, so that
strategies and tensor parallelism cut within them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.roles import is_adapter
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.regimes import STORED_BLOCK
from shardwise.prove.workload import Setting, random_everywhere
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.share import MatrixPiece
from tests.parity import float8s
from tests.parity.cases import FP64, ROWS, SEQ_LEN
from tests.parity.test_expert_adapters import MIX
from tests.parity.test_fp64 import holds
from tests.parity.test_tp_adapters import BIASED

LORA = Lora(4, 8.0, frozen="fp64", float8=True)
DORA = replace(LORA, dora=True)
WIDE = with_fields(BIASED, name="tiny-blocks", hidden_size=52, intermediate_size=124)
"""Of several blocks, at whose edges are smaller ones."""


def plan(layout: Layout, strategy: str = "ddp", remat: str = "none", lora: Lora = LORA, accumulation: int = 1) -> Plan:
    batch = Batch(ROWS // layout.dp // accumulation, accumulation, SEQ_LEN)
    shard, kept = Shard(strategy), Remat(remat)  # type: ignore[arg-type]
    return Plan(layout, batch, shard, FP64, kept, sequence_parallel=layout.tp > 1, lora=lora)


PIPED = replace(plan(Layout(pp=2), accumulation=4), pipeline=Pipeline("1f1b", split=(2, 1)))
TWO: dict[str, tuple[ModelSpec, Plan]] = {
    "ddp": (WIDE, plan(Layout(dp_replicate=2), "ddp", "selective")),
    "zero1": (WIDE, plan(Layout(dp_shard=2), "zero1", "full", accumulation=2)),
    "zero3": (WIDE, plan(Layout(dp_shard=2), "zero3", "full", DORA)),
    "tp": (WIDE, plan(Layout(tp=2), "ddp", "full", DORA)),
    "cp": (WIDE, plan(Layout(cp=2), "zero3")),
    "pp": (WIDE, PIPED),
    "experts": (MIX, plan(Layout(dp_shard=2), "zero2")),
    "products in float8": (float8s.SPEC, float8s.plan_of("tp", "ddp", "full", lora=LORA)),
    "products of experts in float8": (float8s.EXPERTS, float8s.plan_of("ep", "zero3", lora=LORA)),
    "ep": (MIX, plan(Layout(dp_shard=2, ep=2), "zero3", "full")),
}
FOUR: dict[str, tuple[ModelSpec, Plan]] = {
    "hsdp": (WIDE, plan(Layout(dp_replicate=2, dp_shard=2), "zero3", "selective")),
    "tp and zero3": (WIDE, plan(Layout(tp=2, dp_shard=2), "zero3", "selective", DORA)),
    "ranks that share a key head": (WIDE, plan(Layout(tp=4), "ddp", lora=DORA)),
    "ep and tp": (MIX, plan(Layout(dp_shard=2, tp=2, ep=2), "zero3", "selective")),
}


def uneven(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    """First weights of which neighbouring blocks have other scales."""
    begun = random_everywhere(name, shape, part, seed, spec)
    if begun.ndim < 2 or is_adapter(name):
        return begun
    rows, columns = (torch.arange(each.start, each.stop) // STORED_BLOCK for each in part)
    return begun * 2.0 ** -((rows.unsqueeze(1) + 2 * columns) % 3)


UNEVEN = Setting(draw=uneven)


@pytest.mark.prove
@pytest.mark.parametrize("case", TWO | FOUR)
def test_layouts(ranks: RankPool, case: str) -> None:
    spec, of = (TWO | FOUR)[case]
    holds(parity.prove(ranks, spec, [of], 2, UNEVEN), [of])


restored, placed = eightbit.restore, eightbit._place


def of_the_neighbour(kept: Sequence[Tensor], *more: Any) -> Tensor:
    """With the scale of the block beside each."""
    codes, scales = kept
    return restored([codes, scales.roll(1, 0)], *more)


def of_another_shard(piece: MatrixPiece | None) -> list[int] | None:
    """With the scales of the first rank's rows and columns, whichever rank's they are."""
    place = placed(piece)
    return place and [0, 0, place[2]]


def with_the_neighbour(rank: int, world: int, spec: ModelSpec, of: Plan) -> parity.Trace:
    with patch.object(eightbit, "restore", of_the_neighbour):
        return parity.take_steps(rank, spec, of, 1, setting=UNEVEN)


def with_another_shard(rank: int, world: int, spec: ModelSpec, of: Plan) -> parity.Trace:
    with patch.object(eightbit, "_place", of_another_shard):
        return parity.take_steps(rank, spec, of, 1, setting=UNEVEN)


@pytest.mark.prove
@pytest.mark.parametrize(("fault", "case"), [(with_the_neighbour, "zero1"), (with_another_shard, "tp")])
def test_scales_of_others_are_seen(ranks: RankPool, fault: Callable[..., parity.Trace], case: str) -> None:
    spec, of = TWO[case]
    plain = parity.plain(replace(parity.job_of(spec, of, 1), setting=UNEVEN))
    found = parity.compare(plain, ranks.run(fault, spec, of, world=2))
    assert found.loss.error > 1e-4 and found.gradient.error > 1e-2
