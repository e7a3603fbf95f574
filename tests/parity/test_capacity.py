"""With a capacity the same choices are dropped in any layout, and what is left trains as one process does, in float64.

The plain loop gives what is dropped no weight (prove/plain_routers.py); ranks neither send nor compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import collate
from shardwise.data.pack import IGNORE, Sample
from shardwise.methods.loss import mask
from shardwise.models import moe
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Routing, RowPlaces
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting, Workload, job_of, random_everywhere, texts
from shardwise.runtime.expert_counts import layers_of
from shardwise.runtime.step import StepStats
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Pipeline, Plan
from tests.models.test_capacity import by_hand
from tests.parity import drawn, experts, planted
from tests.parity.experts import DEEP, FULL, MOE, SELECTIVE, TWO, plan
from tests.parity.mixtures import GPT_OSS, QWEN2
from tests.parity.planted import Fault
from tests.parity.test_fp64 import holds

FIVE, FOUR = with_fields(MOE, expert_capacity=1.0), with_fields(MOE, num_experts=4, expert_capacity=1.25)
BIASED, SHARED = (with_fields(spec, expert_capacity=1.0) for spec in (GPT_OSS, QWEN2))
STAGED = with_fields(DEEP, num_experts=4, expert_capacity=1.0)
LORA = Lora(3, 6.0, frozen="fp64")
Case = tuple[ModelSpec, Plan]
SAMPLE: dict[str, Case] = {
    "4 micro-batches, selective": (FOUR, plan(accumulation=4, remat=SELECTIVE)),
    "ep, full": (FOUR, plan(Layout(dp_shard=2, ep=2), "zero3", 2, remat=FULL)),
}
CASES: dict[str, Case] = SAMPLE | {
    "ddp": (FIVE, plan(Layout(dp_replicate=2), remat=SELECTIVE)),
    "zero1": (FIVE, plan(Layout(dp_shard=2), "zero1", 2, remat=FULL)),
    "zero2": (FIVE, plan(Layout(dp_shard=4), "zero2")),
    "hsdp": (FIVE, plan(Layout(dp_replicate=2, dp_shard=2), "zero3", 2)),
    "tp, whole stream": (SHARED, replace(plan(Layout(tp=2), remat=FULL), sequence_parallel=False)),
    "1f1b": (STAGED, plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, TWO), remat=FULL)),
    "1f1b x ep": (
        STAGED,
        plan(Layout(pp=2, dp_shard=2, ep=2), "zero3", 2, pipeline=Pipeline("1f1b", 1, TWO), remat=SELECTIVE),
    ),
    "ep, selective": (BIASED, plan(Layout(dp_shard=2, ep=2), "ddp", 2, remat=SELECTIVE)),
    "ep 4": (SHARED, plan(Layout(dp_shard=4, ep=4), "zero1", remat=FULL)),
    "ep, hybrid": (BIASED, plan(Layout(dp_replicate=2, dp_shard=2, ep=2), "zero3")),
    "adapters": (FIVE, plan(Layout(dp_replicate=2), remat=FULL, lora=LORA)),
    "adapters, ep": (BIASED, plan(Layout(dp_shard=2, ep=2), "zero3", lora=LORA, remat=SELECTIVE)),
}


@pytest.mark.prove
def test_training_is_that_of_one_process(ranks: RankPool) -> None:
    proved(ranks, SAMPLE)


@pytest.mark.big
def test_training_is_that_of_one_process_in_other_layouts(ranks: RankPool) -> None:
    proved(ranks, {name: case for name, case in CASES.items() if name not in SAMPLE})


def proved(pool: RankPool, cases: dict[str, Case]) -> None:
    for spec in dict.fromkeys(spec for spec, _ in cases.values()):
        plans = [of for own, of in cases.values() if own == spec]
        holds(drawn.prove(pool, spec, plans, 2), plans)


def padded(job: Workload, number: int) -> list[Sample]:
    """Rows of which more and more is padding: one token, over and over, in a document of its own."""
    found = []
    for index, sample in enumerate(texts(job, number)):
        padding = index * job.seq_len // (2 * job.rows)
        end = job.seq_len - padding
        sample.ids[end:], sample.labels[end:] = 0, IGNORE
        sample.positions[:] = [*range(end), *range(padding)]
        segments = (end, padding) if padding else (end,)
        found.append(replace(sample, segments=segments, padding=padding))
    return found


@pytest.mark.prove
def test_rows_with_padding_train_as_in_one_process_in_any_micro_batch(ranks: RankPool) -> None:
    plans = [
        plan(Layout(dp_replicate=2), accumulation=2, remat=SELECTIVE),
        plan(Layout(dp_shard=2, ep=2), "zero3", 4, remat=FULL),
    ]
    holds(parity.prove(ranks, FOUR, plans, 2, Setting(rows=padded, draw=random_everywhere)), plans)


# What is dropped ------------------------------------------------------------------------------------------------------


def counted(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[list[StepStats], int]]:
    """Of each case what two steps tell, and how many rows this rank has sorted in them, to send or compute."""
    found, apply = [], moe._Sorted.apply
    for spec, of in cases:
        sizes: list[int] = []

        def watched(*given: Any, sizes: list[int] = sizes) -> Tensor:
            made: Tensor = apply(*given)
            sizes.append(made.shape[0])
            return made

        with patch.object(moe, "_Sorted", SimpleNamespace(apply=watched)):
            found.append((experts.two_steps(spec, of), sum(sizes)))
    return found


def expected(spec: ModelSpec, of: Plan) -> dict[int, float]:
    """By layer the share that plain loops over rows, experts and tokens drop in the first step."""
    job, counts = job_of(spec, of, 1, drawn.RANDOM), list[int]()

    def looped(self: MoE, x: Tensor) -> Tensor:
        made, count = by_hand(self, spec, x)
        counts.append(count)
        return made

    batch = collate(job.batch(0))
    with torch.no_grad(), patch.object(MoE, "forward", looped):
        torch.func.functional_call(
            Decoder(spec).double(), parity.plain_parameters(job), (batch.ids, batch.positions, mask(batch))
        )
    choices = batch.ids.numel() * spec.experts.experts_per_token
    return {layer: count / choices for layer, count in zip(layers_of(spec), counts, strict=True)}


def tells(pool: RankPool, cases: dict[str, Case]) -> None:
    """Every rank tells the share that plain loops drop, some of it in each layer, recomputed or not; and nobody sends
    or computes it."""
    for world in sorted({of.layout.world for _, of in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case[1].layout.world == world}
        answers = pool.run(counted, [*chosen.values()], world=world)
        for place, (name, (spec, of)) in enumerate(chosen.items()):
            steps = answers[0][place][0]
            assert all(answer[place][0][0].dropped == steps[0].dropped for answer in answers), name
            assert steps[0].dropped == pytest.approx(expected(spec, of), rel=1e-12), name
            assert min(steps[0].dropped.values()) > 0.01, name
            kept = sum(sum(step.loads[n]) * (1 - share) for step in steps for n, share in step.dropped.items())
            times = 1 if of.remat.mode == "none" else 2
            ranks = of.layout.tp if not of.sequence_parallel else 1
            assert sum(answer[place][1] for answer in answers) == pytest.approx(times * ranks * kept, rel=1e-12), name


@pytest.mark.prove
def test_the_share_that_is_dropped(ranks: RankPool) -> None:
    tells(ranks, {"ep, full": SAMPLE["ep, full"]})


@pytest.mark.big
def test_the_share_that_is_dropped_in_other_layouts(ranks: RankPool) -> None:
    tells(ranks, {name: (spec, of) for name, (spec, of) in CASES.items() if name != "ep, full" and of.lora is None})


# Planted faults -------------------------------------------------------------------------------------------------------

within = moe.within_capacity


def by_pass(ids: Tensor, weights: Tensor, places: RowPlaces, count: int, room: int) -> tuple[Tensor, Tensor]:
    return within(ids, weights, RowPlaces(1, places.rows * places.length), count, places.rows * room)


def the_first_come(ids: Tensor, weights: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return within(ids, torch.zeros_like(weights), *others)


def all_computed(self: MoE, routing: Routing, *others: Any) -> Routing:
    return routing


def the_last_row(rows: Tensor, order: Tensor | None, inverse: Tensor) -> Tensor:
    return rows.index_select(0, inverse.clamp(max=rows.shape[0] - 1))


def to_the_last_expert(ids: Tensor, weights: Tensor, places: RowPlaces, count: int, room: int) -> Any:
    found, dropped = within(ids, weights, places, count, room)
    return found.clamp(max=count - 1), dropped


def renormalised(self: MoE, routing: Routing, *others: Any) -> Routing:
    found = kept(self, routing, *others)
    weights = found.weights * (found.ids < found.counts.shape[0])
    return found._replace(weights=weights / weights.sum(-1, keepdim=True).clamp_min(1e-9))


kept = MoE.kept
DDP, PAIR = plan(Layout(dp_replicate=2)), plan(Layout(dp_shard=2, ep=2), "zero3", remat=FULL)
FAULTS: dict[str, Fault] = {
    "capacity: rows of a micro-batch share their room": (
        lambda: patch.object(moe, "within_capacity", by_pass),
        FIVE,
        DDP,
    ),
    "capacity: the first tokens are kept": (lambda: patch.object(moe, "within_capacity", the_first_come), FIVE, DDP),
    "capacity: what is dropped is computed all the same": (lambda: patch.object(MoE, "kept", all_computed), FOUR, PAIR),
    "capacity: what is dropped gets what was kept last": (
        lambda: patch.object(moe, "unsorted", the_last_row),
        FOUR,
        PAIR,
    ),
    "capacity: what is dropped goes to the last expert": (
        lambda: patch.object(moe, "within_capacity", to_the_last_expert),
        FOUR,
        PAIR,
    ),
    "capacity: weights of what is kept add up to one": (lambda: patch.object(MoE, "kept", renormalised), FIVE, DDP),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))
