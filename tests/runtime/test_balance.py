"""What a training step tells layers with experts and reads of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.distributed.meshes import Meshes
from shardwise.models.blocks import blocks
from shardwise.models.config import model_spec, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoE
from shardwise.prove import parity
from shardwise.prove.workload import OPTIM, job_of
from shardwise.runtime import expert_counts, passes, reduce
from shardwise.runtime.begin import open_log
from shardwise.runtime.build import build
from shardwise.runtime.expert_counts import Counts, spread, told
from shardwise.runtime.job import open_job
from shardwise.runtime.step import accumulate
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, Recipe
from tests.parity import drawn, experts
from tests.parity.experts import DEEP, MOE
from tests.runtime.metrics.test_log import lines, state_at, stats
from tests.runtime.small_run import MODEL, recipe
from tests.runtime.small_run import plan as small_plan

BATCH: Any = SimpleNamespace(ids=torch.zeros(2, 12, dtype=torch.int64))
PLAN = Plan(Layout(dp_shard=2, tp=2))


def layers(decoder: Decoder) -> list[MoE]:
    return [module for module in decoder.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("scale", [None, 256.0])
def test_the_factors_are_those_of_the_whole_step(scale: float | None) -> None:
    """Two micro-batches of two rows on two data-parallel ranks are eight rows; three of four layers have experts; in
    fp16 gradients are scaled as those of the loss."""
    decoder = Decoder(DEEP)
    with expert_counts.counting([decoder], [BATCH, BATCH], PLAN, None if scale is None else torch.tensor(scale)):
        for layer in layers(decoder):
            assert layer.tally is not None
            expected = [(scale or 1.0) * coefficient / (8 * 3) for coefficient in (2.0, 0.5)]
            assert layer.tally.factors.tolist() == pytest.approx(expected, rel=1e-15)
    assert all(layer.tally is None for layer in layers(decoder))


def test_after_a_step_that_fails_nothing_is_counted() -> None:
    decoder = Decoder(MOE)
    with pytest.raises(RuntimeError, match="no memory"), expert_counts.counting([decoder], [BATCH], PLAN, None):
        raise RuntimeError("no memory")
    assert all(layer.tally is None for layer in layers(decoder))


def test_a_model_without_experts_counts_nothing() -> None:
    spec = model_spec("dense", 67, 16, 32, 1, 4, 4, 4, router_aux_loss_coef=1.0)
    with expert_counts.counting([Decoder(spec)], [BATCH], PLAN, None) as numbers:
        assert numbers.shape == (0,) and spec.expert_counts == 0
    counts = Counts(spec, 8)
    assert counts.losses([]) == {} and counts.loads([]) == {} and told({}) == {}


def test_each_layer_counts_in_its_own_row_of_the_whole_model() -> None:
    """Of a stage with layers 2 and 3: layer 1 has no experts."""
    part = Decoder(DEEP, [2, 3], embedding=False)
    with expert_counts.counting([part], [BATCH], PLAN, None) as numbers:
        for layer, amount in zip(layers(part), (2.0, 3.0), strict=True):
            assert layer.tally is not None
            layer.tally.loads.fill_(amount)
    assert Counts(DEEP, 4).loads(numbers.tolist()) == {0: [0.0] * 5, 2: [2.0] * 5, 3: [3.0] * 5}


def test_every_part_of_a_rank_counts() -> None:
    """Of a rank that has two stages of a pipeline."""
    parts = [Decoder(DEEP, [0], embedding=False), Decoder(DEEP, [3])]
    with expert_counts.counting(parts, [BATCH], PLAN, None) as numbers:
        for part in parts:
            [layer] = layers(part)
            assert layer.tally is not None
            layer.tally.loads.fill_(1.0)
    assert Counts(DEEP, 4).loads(numbers.tolist()) == {0: [1.0] * 5, 2: [0.0] * 5, 3: [1.0] * 5}


@pytest.mark.parametrize(("sequence_parallel", "shares"), [(True, [1] * 8), (False, [1, 0, 0, 0] * 2)])
def test_what_ranks_count_alike_is_taken_once(sequence_parallel: bool, shares: list[int]) -> None:
    plan = Plan(Layout(dp_shard=2, tp=4), sequence_parallel=sequence_parallel)
    found = [float(expert_counts.share(torch.ones(1), plan, Meshes(plan.layout, rank))) for rank in range(8)]
    assert found == shares


def test_losses_without_a_coefficient_are_not_told() -> None:
    numbers = [6.0, 3.0, *[1.0] * 10]
    assert Counts(with_fields(MOE, router_z_loss_coef=0.0), 3).losses(numbers) == {"router_aux_loss": 1.0}
    assert Counts(with_fields(MOE, router_aux_loss_coef=0.0), 3).losses(numbers) == {"router_z_loss": 0.5}


def test_the_spread_of_loads() -> None:
    found = spread({0: [5.0, 5.0], 1: [0.0, 8.0], 2: [0.0, 0.0]})
    assert found == {"layer": [0, 1, 2], "entropy": [1.0, 0.0, 0.0], "fullest": [1.0, 2.0, 0.0], "dead": [0, 1, 2]}


def test_evaluation_counts_nothing_and_computes_the_same() -> None:
    """With coefficients that would change everything, and between two training steps."""
    plan, large = experts.plan(), with_fields(MOE, router_aux_loss_coef=1e6)
    job = job_of(MOE, plan, 1, drawn.RANDOM)
    [batch] = parity.share_of_rank(job.batch(0), Meshes(), plan)
    scores = []
    for spec in (MOE, large):
        decoder = Decoder(spec).double()
        decoder.load_state_dict({name: value.detach() for name, value in parity.plain_parameters(job).items()})
        scores.append(passes.infer([decoder], batch, passes.score_of(plan)))
        assert len(blocks(decoder)) == 2 and all(layer.tally is None for layer in layers(decoder))
    assert scores[0] is not None and torch.equal(scores[0], scores[1])  # type: ignore[arg-type]


class NoHostReads(TorchDispatchMode):
    """Fails where the host asks the device for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_host_waits_for_a_device() -> None:
    """Neither in the micro-batches nor when what they counted is summed. (Where products of experts are no single
    kernel they read the counts, in models/grouped.py.)"""
    plan = experts.plan(accumulation=2)
    job = job_of(MOE, plan, 1, drawn.RANDOM)
    state = build(Recipe(optim=OPTIM), MOE, plan, Meshes(), torch.device("cpu"), drawn.RANDOM.draw)
    rules = passes.StepRules(plan, Meshes(), OPTIM, 10, passes.finish_of(Method(), plan))
    batches = parity.share_of_rank(job.batch(0), Meshes(), plan)
    with NoHostReads():
        _, counted = accumulate(state, batches, 1, rules)
        found = reduce.combine(Meshes(), torch.zeros(()), torch.zeros(()), counted=counted)
    assert found.shape == (2 + MOE.expert_counts,) and counted[2:].sum() == 8 * 12 * 2 * 2


def test_the_fullest_of_ranks_with_different_experts() -> None:
    loads = {0: [4.0, 1.0, 0.0, 1.0], 2: [1.0, 2.0, 2.0, 1.0]}
    assert told(loads, 2)["expert_imbalance"] == pytest.approx(5 / 3, abs=1e-4)
    assert told(loads, 4)["expert_imbalance"] == pytest.approx(4 / 1.5, abs=1e-4)
    assert "expert_imbalance" not in told(loads)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_tells_the_fullest_of_its_ranks_where_they_have_different_experts(tmp_path: Path, ranks: int) -> None:
    mixture = {**MODEL, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    plan = replace(small_plan("zero3", 2), layout=Layout(dp_shard=2, ep=ranks))
    job = open_job(recipe(tmp_path, model={"config": mixture}), plan)
    job.directory.mkdir(parents=True)
    log = open_log(job, state_at(0))
    log.step(state_at(1), replace(stats(1), loads={0: [3.0, 2.0, 1.0, 2.0]}), torch.device("cpu"))
    log.close()
    [line] = [line for line in lines(job.directory / "metrics.jsonl") if "experts" in line]
    assert line.get("expert_imbalance") == (None if ranks == 1 else 1.25)
