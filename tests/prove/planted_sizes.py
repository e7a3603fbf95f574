"""Faults that show at some sizes only, and models and plans of these sizes: what a certificate must see though it looks
at a small plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local
from shardwise.models import grouped
from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.techniques import tp
from shardwise.techniques.cp import exchange, ulysses
from shardwise.techniques.shard import replicas

LLAMA, LARGE, MOE = (load_spec(name) for name in ("Llama-3.2-1B", "Llama-3.1-70B", "Qwen3-30B-A3B"))
pad, sums, buckets = collectives.pad, tp.after_backward, replicas.buckets


@dataclass(frozen=True)
class SizeFault:
    """``planted`` into the code of ranks it is seen where ``plan`` of ``spec`` takes the path ``regime``; ``world``
    ranks have a small one of it."""

    planted: Callable[[], AbstractContextManager[Any]]
    spec: ModelSpec
    plan: Plan
    regime: str
    world: int = 4


def by_turns(ranks: int, key_heads: int, index: int) -> int | None:
    return None if key_heads >= ranks else index % key_heads


def as_a_whole(x: Tensor, group: str, ranks: int) -> Tensor:
    """Heads 0 1 0 1 in the place of 0 0 1 1."""
    repeated = x.repeat(1, ranks // x.shape[1], 1, 1) if x.shape[1] < ranks else x
    swapped: Tensor = ulysses.exchange(repeated, group, ranks, ulysses.HEADS, ulysses.TOKENS)
    return swapped


def at_the_front(flat: Tensor, sides: tuple[int, ...]) -> Tensor:
    return pad(flat, (0, 0, sides[3], 0))


def large_ones_averaged(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    how = tp.division(tp.spec_of(parts), plan)
    sums(parts, plan, meshes)
    for name, parameter in tp.named(parts).items():
        gradient = parameter.grad
        if gradient is not None and tp._summed(name, how, plan):
            own = local(gradient)
            if tp.travels_alone(own.numel() * own.element_size(), plan):
                own /= plan.layout.tp


def not_passed_on(self: exchange.Passing, to_sums: Tensor | None, to_home: Tensor) -> None:
    """What others have summed for the keys of this step is lost."""
    for work in self.works:
        work.wait()
    if self.home is not None:
        to_home += self.home


def without_empty_ones(counts: Tensor) -> list[tuple[int, int]]:
    """Groups behind one without rows are taken for it."""
    return [*pairwise(torch.unique(torch.cat([counts.new_zeros(1), counts.cumsum(0)])).tolist())]


def only_the_first(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    return buckets(sizes, bucket_bytes)[:1]


FAULTS: dict[str, SizeFault] = {
    "ranks take key heads by turns": SizeFault(
        lambda: patch.object(tp.sizes, "own_head", by_turns),
        LLAMA,
        Plan(Layout(tp=16), Batch(1, 1, 4096)),
        "key heads between one and the ranks of tp",
    ),
    "key heads that go to several ranks are repeated as a whole": SizeFault(
        lambda: patch.object(ulysses, "heads_for_tokens", as_a_whole),
        LLAMA,
        Plan(Layout(cp=16, ulysses=16), Batch(1, 1, 4096), cp_kind="ulysses"),
        "key heads between one and those that exchange heads",
    ),
    "tokens are filled up at the front": SizeFault(
        lambda: patch.object(collectives, "pad", at_the_front),
        LLAMA,
        Plan(Layout(tp=2), Batch(1, 1, 4095), sequence_parallel=True),
        "tokens that the ranks of tp do not divide",
        2,
    ),
    "gradients as large as a bucket are averaged over tp": SizeFault(
        lambda: patch.object(tp, "after_backward", large_ones_averaged),
        LARGE,
        Plan(Layout(tp=16), Batch(1, 1, 4096)),
        "a gradient as large as a bucket, summed over tp",
    ),
    "sums of gradients are not passed on round a ring": SizeFault(
        lambda: patch.object(exchange.Passing, "add", not_passed_on),
        LLAMA,
        Plan(Layout(cp=8), Batch(1, 1, 4096)),
        "gradients of keys that pass through a third rank",
        3,
    ),
    "an expert without rows is left out": SizeFault(
        lambda: patch.object(grouped, "_spans", without_empty_ones),
        MOE,
        Plan(Layout(dp_shard=8, ep=8), Batch(1, 1, 4096), Shard("zero3")),
        "an expert without rows",
        2,
    ),
    "buckets behind the first are not summed": SizeFault(
        lambda: patch.object(replicas, "buckets", only_the_first),
        replace(LLAMA, tie_word_embeddings=False),
        Plan(Layout(dp_replicate=8), Batch(1, 1, 4096)),
        "more than one bucket",
        2,
    ),
}


def faulty(rank: int, world: int, name: str, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """``work`` with the fault in this rank's code."""
    with FAULTS[name].planted():
        return work(rank, world, *given)
