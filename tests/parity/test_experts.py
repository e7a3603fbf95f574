"""The losses of routers are one number, and their gradients those of ordinary autograd over whole rows, in any layout;
tokens are counted once. With large coefficients, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models import moe, router_losses
from shardwise.models.router_losses import Routing, RowPlaces
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime import expert_counts as steps
from shardwise.runtime.step import StepStats
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision
from shardwise.spec.records import TOKEN_ACCURACY
from shardwise.techniques import cp
from shardwise.techniques.tp import row_counts
from tests.parity import drawn, experts, planted
from tests.parity.experts import DEEP, FULL, MOE, PLANS, plan
from tests.parity.planted import Fault
from tests.parity.test_fp64 import holds

GROUPS: dict[str, tuple[str, ...]] = {
    "E6 micro-batches and data-parallel ranks": (
        "2 micro-batches, full",
        "4 micro-batches, selective",
        "ddp",
        "zero3",
        "hsdp",
    ),
    "E7 T1 T2 T3 tensor parallelism": ("tp", "tp, whole stream", "tp 4, uneven", "dp x tp"),
    "E7 C17 context parallelism": ("cp", "cp, ulysses", "cp x tp"),
    "E9 stages": ("1f1b", "zbv", "interleaved x dp"),
}
SAMPLE = ("4 micro-batches, selective", "ddp", "tp", "cp", "1f1b")
"""Those that `make test` runs; the others, on more ranks, are for `make prove`."""


def test_every_layout_is_in_a_group() -> None:
    assert {name for names in GROUPS.values() for name in names} == PLANS.keys() - {"alone"}


def proved(pool: RankPool, names: list[str]) -> None:
    for spec in (MOE, DEEP):
        if plans := [PLANS[name] for name in names if experts.model(PLANS[name]) == spec]:
            holds(drawn.prove(pool, spec, plans, 2), plans)


@pytest.mark.prove
def test_e6_e7_e9_c17_gradients_of_a_sample(ranks: RankPool) -> None:
    proved(ranks, [*SAMPLE])


@pytest.mark.prove
@pytest.mark.parametrize("group", GROUPS)
def test_gradients(ranks: RankPool, group: str) -> None:
    proved(ranks, [name for name in GROUPS[group] if name not in SAMPLE])


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_gradients_in_other_dtypes(compute: Any) -> None:
    """With the tolerances of test_fp32_bf16.py. In fp16 the losses of routers are scaled as the method's is."""
    spec = replace(MOE, initializer_range=0.1, hidden_size=64)
    of = replace(plan(accumulation=2), precision=Precision(compute))
    found = parity.compare(drawn.plain(parity.job_of(spec, of, 1)), [drawn.take_steps(0, spec, of, 1)])
    assert found.gradient.error <= 1e-5 if compute == "fp32" else found.turn.error <= 1e-3, found


@pytest.mark.prove
def test_e10_losses_and_loads_of_a_sample(ranks: RankPool) -> None:
    told(ranks, SAMPLE[1:])


@pytest.mark.big
def test_e10_losses_and_loads(ranks: RankPool) -> None:
    told(ranks, [name for name in PLANS if name not in SAMPLE[1:]])


def told(pool: RankPool, names: Any) -> None:
    """Every rank tells the same losses and loads, those of the model's own logits of whole rows, under recomputation
    or not."""
    for world in sorted({PLANS[name].layout.world for name in names}):
        chosen = [name for name in names if PLANS[name].layout.world == world]
        answers = pool.run(experts.counted, [PLANS[name] for name in chosen], world=world)
        for place, name in enumerate(chosen):
            for answer in answers:
                agrees(answer[place][0], PLANS[name])
                assert answer[place][1].loads == answers[0][place][1].loads


def agrees(first: StepStats, of: Plan) -> None:
    figures, loads = experts.expected(of)
    told = dict(first.figures)
    assert 0 <= told.pop(TOKEN_ACCURACY) <= 1
    assert told == pytest.approx(figures, rel=1e-9), of
    assert {layer: [*counts] for layer, counts in first.loads.items()} == loads, of
    tokens = of.batch.global_batch_size(of.layout.dp) * of.batch.seq_len
    assert {sum(counts) for counts in loads.values()} == {MOE.experts.experts_per_token * tokens}


# Planted faults ------------------------------------------------------------------------------------------------------

of_rows, places = steps.rows_of, RowPlaces.of


def own_rows(batches: Any, of: Plan) -> int:
    return of_rows(batches, of) // of.layout.dp


def own_counts(counts: Tensor, group: Any) -> Tensor:
    return counts


def with_padding(self: RowPlaces, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    row, inside = places(self, tokens, like)
    return row, torch.ones_like(inside)


def from_the_first_row(self: RowPlaces, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return places(self._replace(first=0), tokens, like)


def thrown_away(routing: Routing, *others: Any) -> Routing:
    return routing


def each_ranks_own(module: Any, groups: Any) -> None:
    """Ranks that share rows take their tokens for whole rows."""


TP, CP = plan(Layout(tp=2)), plan(Layout(cp=2))
UNEVEN = replace(TP, batch=Batch(1, 1, 13, 7))
"""One row over both ranks, and on the second a token of padding."""
FAULTS: dict[str, Fault] = {
    "E6: the loss is divided by the rows of a rank": (
        lambda: patch.object(steps, "rows_of", own_rows),
        MOE,
        plan(Layout(dp_replicate=2)),
    ),
    "E6: what autograd returned is thrown away": (lambda: patch.object(moe, "balanced", thrown_away), MOE, TP),
    "E7: shares are of the tokens of one rank": (lambda: patch.object(row_counts, "summed", own_counts), MOE, UNEVEN),
    "E7: tokens count for the rows of the first rank": (
        lambda: patch.object(RowPlaces, "of", from_the_first_row),
        MOE,
        TP,
    ),
    "E7: padding counts": (lambda: patch.object(RowPlaces, "of", with_padding), MOE, UNEVEN),
    "E7 C17: a part of a row is taken for a row": (lambda: patch.object(cp, "_share_rows", each_ranks_own), MOE, CP),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[Any, Any]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))


def counted_with_faults(rank: int, world: int) -> Mapping[str, list[StepStats]]:
    """Of a step with padding: as it is, with padding counted; and with recomputation that counts."""
    again = replace(UNEVEN, remat=FULL)
    with patch.object(RowPlaces, "of", with_padding):
        padding = experts.counted(rank, world, [UNEVEN])[0]
    with patch.object(router_losses, "in_backward", lambda: False):
        doubled = experts.counted(rank, world, [again])[0]
    return {"right": experts.counted(rank, world, [again])[0], "padding": padding, "doubled": doubled}


@pytest.mark.prove
def test_planted_faults_of_the_counts_are_caught(ranks: RankPool) -> None:
    """13 tokens over two ranks, of which the second has one of padding."""
    found = ranks.run(counted_with_faults, world=2)[0]
    agrees(found["right"][0], UNEVEN)
    right, padding, doubled = (sum(found[name][0].loads[0]) for name in ("right", "padding", "doubled"))
    assert (right, padding, doubled) == (13 * 2, 14 * 2, 2 * 13 * 2)
