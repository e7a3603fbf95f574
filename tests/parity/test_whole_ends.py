"""Embedding and output layer trained whole beside adapters: as one process computes it, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from tests.parity.cases import FP64, SEQ_LEN, STRATEGIES, TIED, UNTIED, plan
from tests.parity.test_fp64 import holds

BOTH = Lora(3, 6.0, frozen="fp64", modules_to_save=("embed", "head"))
EVEN = replace(UNTIED, intermediate_size=28)
"""What two ranks divide."""


def of(layout: Layout, lora: Lora = BOTH, strategy: str = "ddp", **settings: object) -> Plan:
    made = Plan(layout, Batch(2, 2, SEQ_LEN, 23), Shard(strategy, bucket_bytes=4096), FP64, lora=lora)  # type: ignore[arg-type]
    return replace(made, **settings)  # type: ignore[arg-type]


def proved(ranks: RankPool, spec: ModelSpec, plans: list[Plan]) -> None:
    holds(parity.prove(ranks, spec, plans, 3), plans)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(ranks: RankPool, strategy: str) -> None:
    """Both ends of a model whose ends are two weights, of one whose ends are one, and one end alone."""
    world = 4 if strategy == "hsdp" else 2
    for spec, lora in (
        (UNTIED, BOTH),
        (TIED, replace(BOTH, rank=2)),
        (UNTIED, replace(BOTH, modules_to_save=("head",))),
        (UNTIED, replace(BOTH, modules_to_save=("embed",), targets=("q", "down"))),
    ):
        proved(ranks, spec, [replace(plan(strategy, world, FP64, Remat("selective"), 2), lora=lora)])


@pytest.mark.prove
@pytest.mark.parametrize("spec", [EVEN, replace(TIED, intermediate_size=28)], ids=lambda spec: spec.name)
def test_every_axis(ranks: RankPool, spec: ModelSpec) -> None:
    lora = replace(BOTH, rank=2)
    stages = Pipeline("1f1b", split=(1, spec.num_hidden_layers - 1))
    heads_are_few = spec.attention.num_key_value_heads < 2
    plans = [
        of(Layout(tp=2), lora, sequence_parallel=True),
        of(Layout(cp=2), lora),
        of(Layout(pp=2), lora, pipeline=stages),
    ]
    proved(ranks, spec, plans)
    proved(ranks, spec, [of(Layout(dp_shard=2, tp=2), lora, "zero3", sequence_parallel=not heads_are_few)])


def test_they_are_trained_and_the_rest_is_not(ranks: RankPool) -> None:
    """And only where they are named."""
    for whole in (("embed", "head"), ("head",), ()):
        made = replace(of(Layout(dp_shard=2), strategy="zero3"), lora=replace(BOTH, modules_to_save=whole))
        [trace, _] = [mine[0] for mine in ranks.run(parity.train_on_rank, UNTIED, [made], 2, world=2)]
        begun = parity.plain_parameters(parity.job_of(UNTIED, made, 2))
        moved = {name for name, value in begun.items() if not torch.equal(trace.weights[name], value.detach())}
        assert {name for name in moved if ".lora_" not in name} == {f"{name}.weight" for name in whole}
        assert {name for name in trace.gradients if ".lora_" not in name} == {f"{name}.weight" for name in whole}
