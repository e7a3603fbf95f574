"""Parity must see what is wrong: faults planted into the ranks' code, each of which must break the tolerance by far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.slices import local
from shardwise.methods import loss as token_loss
from shardwise.methods import pretrain
from shardwise.methods.loss import Loss
from shardwise.models import init
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.distance import Worst
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting
from shardwise.runtime import passes, reduce
from shardwise.spec.plan import Plan
from shardwise.techniques import optim, shard
from shardwise.techniques.shard.replicas import Replicas
from tests.parity.cases import FP64, UNTIED, plan
from tests.said import shows

Fault = Callable[[Plan], AbstractContextManager[Any]]
wait, agree, loss = Replicas.wait, reduce.combine, pretrain.finish
forward = passes.forward
squares, rate, synchronise = reduce.local_squares, optim.learning_rate, shard.before_micro_batch


def mean_over_replicas(self: Replicas) -> None:
    wait(self)
    for bucket in self.buckets if self.active else []:
        for parameter in bucket:
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()


def clip_by_the_local_norm(meshes: Any, local: Tensor, share: Tensor, *figures: Tensor, **counted: Tensor) -> Tensor:
    return torch.stack([local, *agree(meshes, local, share, *figures, **counted)[1:]])


def loss_over_accumulation(hidden: Tensor, head: Any, batch: MicroBatch, denominator: float, **given: Any) -> Loss:
    return loss(hidden, head, batch, denominator * 4, **given)


def sees_other_documents(batch: MicroBatch) -> MaskSpec:
    return MaskSpec()


def no_positions(parts: Any, batch: MicroBatch, score: Any) -> Any:
    return forward(parts, replace(batch, positions=torch.zeros_like(batch.positions)), score)


def last_micro_batch_only(parts: Any, plan: Plan, *, last: bool) -> None:
    synchronise(parts, plan, last=True)
    for part in parts:
        part.zero_grad()


def padded(tensor: Tensor) -> Tensor:
    """This rank's rows, and where another rank has one more, its last row once more (or ones)."""
    rows = local(tensor)
    if not isinstance(tensor, DTensor) or rows.shape[0] * dist.get_world_size() >= tensor.shape[0]:
        return rows
    return torch.cat([rows, rows[-1:] if len(rows) else rows.new_ones(1, *rows.shape[1:])])


def squares_with_padding(parameters: Any, ranks: int) -> Tensor:
    with patch.object(reduce, "local", padded):
        return squares(parameters, ranks)


FAULTS: dict[str, tuple[Fault, Plan]] = {
    "mean instead of sum, replicas": (
        lambda plan: patch.object(Replicas, "wait", mean_over_replicas),
        plan("ddp", 2, FP64),
    ),
    "mean instead of sum, shards": (
        lambda plan: patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        plan("zero3", 2, FP64),
    ),
    "no all-reduce between replicas": (
        lambda plan: patch.multiple(Replicas, _arrived=lambda self, index: None, wait=lambda self: None),
        plan("ddp", 2, FP64),
    ),
    "no all-reduce between replicas of a hybrid": (
        lambda plan: patch.object(shard, "before_micro_batch", without_all_reduce),
        plan("hsdp", 4, FP64),
    ),
    "each rank divides by its own tokens": (
        lambda plan: patch.object(reduce, "count_supervised", lambda meshes, tokens: (tokens * plan.layout.dp, False)),
        plan("zero2", 2, FP64),
    ),
    "the loss is divided by the accumulation too": (
        lambda plan: patch.object(pretrain, "finish", loss_over_accumulation),
        plan("zero1", 2, FP64, accumulation=4),
    ),
    "clipping by the local norm": (
        lambda plan: patch.object(reduce, "combine", clip_by_the_local_norm),
        plan("zero3", 2, FP64),
    ),
    "replicas counted twice in the norm": (
        lambda plan: patch.object(reduce, "local_squares", lambda tensors, ranks: 2 * squares(tensors, ranks)),
        plan("hsdp", 4, FP64),
    ),
    "weight decay on norms": (
        lambda plan: patch.object(optim, "UNDECAYED", frozenset()),
        plan("ddp", 2, FP64),
    ),
    "the schedule is a step ahead": (
        lambda plan: patch.object(optim, "learning_rate", lambda o, step, steps: rate(o, step + 1, steps)),
        plan("zero3", 2, FP64),
    ),
    "documents see each other": (
        lambda plan: patch.object(token_loss, "mask", sees_other_documents),
        plan("zero2", 2, FP64),
    ),
    "positions are ignored": (
        lambda plan: patch.object(passes, "forward", no_positions),
        plan("ddp", 2, FP64),
    ),
    "gradients of early micro-batches are lost": (
        lambda plan: patch.object(shard, "before_micro_batch", last_micro_batch_only),
        plan("zero2", 2, FP64, accumulation=4),
    ),
    "padded rows are counted in the norm": (
        lambda plan: patch.object(reduce, "local_squares", squares_with_padding),
        plan("zero3", 2, FP64),
    ),
    "tokens without a label are counted": (
        lambda plan: patch.object(MicroBatch, "supervised_tokens", lambda self: self.labels.numel()),
        plan("zero1", 2, FP64),
    ),
    "buckets leave after the first micro-batch": (
        lambda plan: patch.object(shard, "before_micro_batch", lambda parts, plan, last: None),
        plan("ddp", 2, FP64, accumulation=4),
    ),
    "two ranks read the same rows": (
        lambda plan: patch("shardwise.distributed.meshes.Meshes.index", lambda self, group: 0),
        plan("zero3", 2, FP64),
    ),
}


def without_all_reduce(parts: Any, plan: Plan, *, last: bool) -> None:
    synchronise(parts, plan, last=last)
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_requires_all_reduce(False)


def train_with_faults(rank: int, world: int, spec: ModelSpec, names: list[str]) -> list[parity.Trace]:
    traces = []
    for name in names:
        fault, of = FAULTS[name]
        with fault(of):
            traces.append(parity.take_steps(rank, spec, of, 3))
    return traces


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_caught(ranks: RankPool, world: int) -> None:
    names = [name for name, (_, of) in FAULTS.items() if of.layout.world == world]
    answers = ranks.run(train_with_faults, UNTIED, names, world=world)
    for place, name in enumerate(names):
        right = parity.plain(parity.job_of(UNTIED, FAULTS[name][1], 3))
        found = parity.compare(right, [traces[place] for traces in answers])
        worst = max(found.loss.error, found.norm.error, found.gradient.error, found.weight.error)
        assert worst > 1e-4, f"{name} was not seen: {found}"


def test_a_fault_on_one_rank_only_is_seen() -> None:
    right = parity.plain(parity.job_of(UNTIED, plan("ddp", 2, FP64), 3))
    bent = {name: weight.clone() for name, weight in right.weights.items()}
    bent["layers.1.mlp.up.weight"][3, 4] *= 1.001
    found = parity.compare(right, [right, replace(right, weights=bent)])
    assert found.weight.where == "layers.1.mlp.up.weight, rank 1"
    assert found.weight.error > 1e-6
    assert found.gradient.error == 0.0


def test_a_missing_gradient_is_the_worst() -> None:
    right = parity.plain(parity.job_of(UNTIED, plan("ddp", 2, FP64), 3))
    lost = {name: gradient for name, gradient in right.gradients.items() if name != "norm.weight"}
    found = parity.compare(right, [right, replace(right, gradients=lost)])
    assert found.gradient == Worst(float("inf"), "norm.weight", 1)


def test_a_gradient_that_is_not_a_number_is_the_worst() -> None:
    right = parity.plain(parity.job_of(UNTIED, plan("ddp", 2, FP64), 3))
    poisoned = {name: gradient.clone() for name, gradient in right.gradients.items()}
    poisoned["layers.0.attention.q.weight"][0, 0] = float("nan")
    found = parity.compare(right, [replace(right, gradients=poisoned)])
    assert found.gradient.where == "layers.0.attention.q.weight, rank 0"
    assert not found.gradient.error <= 1e-9


def test_replicas_that_part_are_named() -> None:
    """By the first step after which two ranks hold other bits of a piece; of two copies on one rank too."""
    alike = {"embed.weight[0:5]": [1], "norm.weight[0:3]": [2]}
    bent = {**alike, "norm.weight[0:3]": [3], "embed.weight[5:9]": [4]}
    right = parity.plain(parity.job_of(UNTIED, plan("ddp", 2, FP64), 3))
    both = [replace(right, held=(alike, alike, alike)), replace(right, held=(alike, bent, bent))]
    assert shows(parity.compare(right, both).apart, "norm.weight[0:3] of rank 1", "rank 0", "step 2")
    copies = replace(right, held=({"embed.weight[0:5]": [1, 7]},))
    assert shows(parity.compare(right, [copies]).apart, "embed.weight[0:5] of rank 0", "rank 0", "step 1")


@pytest.mark.prove
def test_bits_of_a_rank_that_is_a_little_off_are_not_those_of_another(ranks: RankPool) -> None:
    """By less than any tolerance."""
    of = plan("ddp", 2, FP64)
    traces = ranks.run(off_by_a_bit, UNTIED, of, world=2)
    found = parity.compare(parity.plain(parity.job_of(UNTIED, of, 2)), traces)
    assert found.weight.error < 1e-9 and found.loss.error < 1e-9
    assert any(shows(line, "norm.weight[0:20] of rank 1", "rank 0") for line in found.apart)


def off_by_a_bit(rank: int, world: int, spec: ModelSpec, of: Plan) -> parity.Trace:
    def draw(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, of: ModelSpec) -> Tensor:
        return init.fill(name, shape, part, seed, of).double() + (1e-13 if rank and name == "norm.weight" else 0.0)

    return parity.take_steps(rank, spec, of, 2, setting=Setting(draw=draw))
