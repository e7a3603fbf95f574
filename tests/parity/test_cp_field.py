"""What broke context parallelism in the field, each by the number it has in the threads that told of it, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from shardwise.data.pack import IGNORE, Sample
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting, Workload, random_everywhere, texts
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from tests.parity.cases import FP64
from tests.parity.rings import DENSE, LENGTH, MODELS
from tests.parity.test_fp64 import holds

STEPS = 2


def plan(kind: str, layout: Layout, strategy: str = "ddp", rows: int = 2) -> Plan:
    batch = Batch(rows, 1, LENGTH, loss_chunk_tokens=7)
    return Plan(layout, batch, Shard(strategy, bucket_bytes=4096), FP64, cp_kind=kind)  # type: ignore[arg-type]


EACH = (
    plan("ring", Layout(cp=2)),
    plan("ring", Layout(cp=4)),
    plan("ulysses", Layout(cp=2, ulysses=2), "zero3"),
    plan("nested", Layout(cp=4, ulysses=2), "zero1"),
    plan("gather", Layout(cp=4), "zero3"),
)


@dataclass(frozen=True)
class SomeLabels:
    """Rows as always, of which the first ``rows`` keep the labels of tokens from ``start`` to ``stop``, and the others
    none."""

    start: int
    stop: int
    rows: int = 1_000

    def __call__(self, job: Workload, number: int) -> list[Sample]:
        found = []
        for index, sample in enumerate(texts(job, number)):
            labels, kept = np.full_like(sample.labels, IGNORE), slice(self.start, self.stop if index < self.rows else 0)
            labels[kept] = np.roll(sample.ids, -1)[kept]
            found.append(replace(sample, labels=labels))
        return found


@dataclass(frozen=True)
class Documents:
    """Rows of documents of these lengths, all of them supervised."""

    lengths: tuple[int, ...]

    def __call__(self, job: Workload, number: int) -> list[Sample]:
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        ends, found = np.array([*accumulate(self.lengths)]), []
        for sample in texts(job, number):
            labels = np.roll(sample.ids, -1)
            labels[ends - 1] = IGNORE
            found.append(Sample(sample.ids, labels, positions, self.lengths, masked=True))
        return found


ODD = (1, 5, 17, 3, 21, 1)
WHERE: dict[str, Callable[[Workload, int], list[Sample]]] = {
    "C1 the same loss on 1, 2 and 4 ranks": texts,
    "C2 one token of one rank is all there is to learn": SomeLabels(3, 4, rows=1),
    "C2 the labels of all rows are on one rank": SomeLabels(0, 5),
    "C3 a rank of each kind has no label": SomeLabels(24, 30),
    "C5 C7 S8 documents of odd lengths, cut anywhere": Documents(ODD),
    "S8 a document longer than all others together": Documents((3, 40, 5)),
    "S8 more documents than tokens in a piece": Documents((2, 3) * 9 + (3,)),  # of two alone q has no gradient
}


@pytest.mark.matrix
@pytest.mark.parametrize("where", WHERE)
def test_it_is_one_process(ranks: RankPool, where: str) -> None:
    """Loss, norm, every first gradient, and weights after two steps, whoever has the labels and wherever borders
    are."""
    setting = Setting(rows=WHERE[where], draw=random_everywhere)
    holds(parity.prove(ranks, DENSE, EACH, STEPS, setting), [*EACH])


@pytest.mark.prove
def test_C10_fewer_key_heads_than_ranks(ranks: RankPool) -> None:
    few = [plan("ulysses", Layout(cp=4, ulysses=4)), plan("nested", Layout(cp=4, ulysses=2))]
    holds(parity.prove(ranks, MODELS["one key head"], few, STEPS), few)


@pytest.mark.prove
def test_C15_beside_tensor_parallelism_with_norms_of_heads(ranks: RankPool) -> None:
    both = [
        replace(plan(kind, layout, "zero3"), sequence_parallel=sequence)
        for kind, layout in (("ring", Layout(cp=2, tp=2)), ("ulysses", Layout(cp=2, tp=2, ulysses=2)))
        for sequence in (False, True)
    ]
    holds(parity.prove(ranks, MODELS["normed heads"], both, STEPS), both)


def test_the_rows_are_what_they_are_called() -> None:
    job = parity.job_of(DENSE, EACH[0], 1)
    for name, rows in WHERE.items():
        samples = rows(job, 0)
        assert all(sum(sample.segments) == LENGTH for sample in samples), name
        if name.startswith("C3"):
            share = [torch.from_numpy(sample.labels[12:36]) for sample in samples]
            assert all((labels != IGNORE).any() for labels in share)
            assert all(
                (sample.labels[:12] == IGNORE).all() and (sample.labels[36:] == IGNORE).all() for sample in samples
            )
