"""Faults of products in float8, planted into the ranks' code: parity must see each, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from shardwise import techniques
from shardwise.models.config import with_fields
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.techniques.float8 import codes, scaled
from tests.parity import drawn, planted
from tests.parity.float8s import EXPERTS, FLOAT8, ROW, SPEC, plan_of
from tests.parity.planted import Fault

coded, greatest, values = codes.coded, scaled._greatest, codes.CodedMatrix.values


def of_neighbours(self: codes.CodedMatrix, dtype: Any) -> Tensor:
    """What the codes stand for with the scales of the blocks beside theirs."""
    return values(replace(self, scales=self.scales.roll(1, 1)), dtype)


def of_the_expert_before(self: codes.CodedMatrix, dtype: Any) -> Tensor:
    """Of weights the scales of the blocks above, which for its first rows are another expert's."""
    return values(replace(self, scales=self.scales.roll(int(self.rows > 1), 0)), dtype)


def of_the_weight_alone(exponents: list[Tensor], group: str) -> list[Tensor]:
    return [exponents[0], greatest(exponents, group)[1]]


def cut_anywhere(matrix: Tensor, rows: int, columns: int, **more: Any) -> codes.CodedMatrix:
    """Parts of blocks in place of whole ones."""
    m, k = matrix.shape
    return coded(matrix, gcd(m, rows), gcd(k, columns), **more)


FAULTS: dict[str, Fault] = {
    "codes are read with the scales of the blocks beside theirs": (
        lambda: patch.object(codes.CodedMatrix, "values", of_neighbours),
        SPEC,
        plan_of("tp"),
    ),
    "experts are read with the scales of the rows before": (
        lambda: patch.object(codes.CodedMatrix, "values", of_the_expert_before),
        EXPERTS,
        plan_of("ep", "zero3", precision=replace(FLOAT8, exclude=("*.attention.*", "*.gate", "*.up", "*.down"))),
    ),
    "ranks take the maxima of their parts of rows": (
        lambda: patch.object(scaled, "_greatest", lambda exponents, group: exponents),
        SPEC,
        plan_of("tp", precision=ROW),
    ),
    "ranks tell each other the maxima of the weight alone": (
        lambda: patch.object(scaled, "_greatest", of_the_weight_alone),
        SPEC,
        plan_of("tp", precision=ROW),
    ),
}


def train_with_faults(rank: int, world: int, names: Sequence[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))


NARROW, CUT = with_fields(SPEC, name="tiny-float8-narrow", intermediate_size=128), plan_of("tp")
"""Of whose gate and up a rank would have half a block of rows."""


def train_cut(rank: int, world: int) -> parity.Trace:
    with patch.object(scaled, "coded", cut_anywhere):
        return drawn.take_steps(rank, NARROW, CUT, 1)


@pytest.mark.prove
def test_a_cut_within_a_block_is_refused_cannot_be_computed_and_would_be_seen(ranks: RankPool) -> None:
    assert "parallel.tp" in {problem.where for problem in techniques.check(NARROW, CUT, parse_cluster("2xCPU"))}
    with pytest.raises(Exception, match="whole blocks"):
        ranks.run(drawn.train_on_rank, NARROW, [CUT], 1, world=2)
    found = parity.compare(drawn.plain(parity.job_of(NARROW, CUT, 1)), ranks.run(train_cut, world=2))
    assert found.gradient.error > 1e-6
