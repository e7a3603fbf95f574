"""What a plan computes in does not depend on whether there is anything to shard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.models.config import with_fields
from shardwise.prove.drift import drift
from shardwise.prove.parity import train_on_rank
from shardwise.prove.pool import RankPool
from shardwise.runtime import own
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Dtype, Plan, Precision, Remat, Shard
from shardwise.techniques.precision import check
from tests.models import hf_models
from tests.parity.cases import BF16, FP32, FP64, TIED, UNTIED

PRECISIONS = {
    "fp64": FP64,
    "fp32": FP32,
    "bf16": BF16,
    "bf16 weights": Precision("bf16", "bf16"),
    "fp16": Precision("fp16"),
    "own types": Precision("bf16", modules=(("*norm*", "fp32"), ("*.mlp.down", "fp32"))),
}
ONE = Plan(batch=Batch(2, 2, 12, 16))


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("name", "precision"), PRECISIONS.items())
def test_one_rank_computes_under_every_strategy_what_it_does_under_ddp(
    ranks: RankPool, name: str, precision: Precision
) -> None:
    plans = [
        replace(ONE, shard=Shard(strategy), precision=precision) for strategy in ("ddp", "zero1", "zero2", "zero3")
    ]  # type: ignore[arg-type]
    spec = hf_models.spec_of("gpt_neox") if name == "bf16" else TIED
    for model in (UNTIED, spec):
        [[expected, *found]] = ranks.run(train_on_rank, model, plans, 2, world=1)
        for trace in found:
            assert trace.losses == expected.losses
            assert all(torch.equal(value, expected.gradients[key]) for key, value in trace.gradients.items())
            assert all(torch.equal(value, expected.weights[key]) for key, value in trace.weights.items())


def test_replicas_that_shard_over_nobody_compute_what_ddp_does(ranks: RankPool) -> None:
    plans = [replace(ONE, layout=Layout(dp_replicate=2), shard=Shard(s), precision=BF16) for s in ("ddp", "zero3")]  # type: ignore[arg-type]
    for expected, found in ranks.run(train_on_rank, UNTIED, plans, 2, world=2):
        assert found.losses == expected.losses
        assert all(torch.equal(value, expected.weights[key]) for key, value in found.weights.items())


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("name", "precision"), PRECISIONS.items())
def test_the_plan_of_one_rank_says_what_it_holds(name: str, precision: Precision) -> None:
    remat = Remat("selective" if name == "own types" else "none")
    for layout in (Layout(), Layout(dp_replicate=2)):
        plan = replace(ONE, layout=layout, shard=Shard("zero3"), precision=precision, remat=remat)
        assert not drift(UNTIED, plan, 0).differences()


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_loop_of_ones_own_computes_in_the_type_of_its_plan(compute: Dtype) -> None:
    seen: list[torch.dtype] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            seen.append(x.dtype)
            return x

    plan = Plan(shard=Shard("zero3"), precision=Precision(compute))
    own.parallelize(Model(), plan, None)(torch.ones(2, 4))
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[compute]]


BEYOND_LLAMA = {
    "sinks": {"attention_sinks": True},
    "norms of heads": {"qk_norm": "head"},
    "layers without rotation": {"nope_layers": (1,)},
    "multipliers": {"residual_multiplier": 3.0},
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("what", BEYOND_LLAMA)
def test_rules_for_modules_are_refused_where_no_test_has_seen_them(what: str) -> None:
    spec, plan = with_fields(UNTIED, **BEYOND_LLAMA[what]), replace(ONE, precision=PRECISIONS["own types"])  # type: ignore[arg-type]
    assert not check(UNTIED, plan, parse_cluster("1xH100"))
    [problem] = check(spec, plan, parse_cluster("1xH100"))
    assert (problem.code, problem.where) == ("PLAN016", "precision.modules") and "that Llama lacks" in problem.what
