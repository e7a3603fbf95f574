"""Which plans there are for a recipe."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.models.lookup import load_spec
from shardwise.planner.candidates import candidates, chunk_of, splits
from shardwise.planner.comparison import fits
from shardwise.planner.search import choose
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe, Train

ONE_B, FOUR_HUNDRED_B = load_spec("meta-llama/Llama-3.2-1B"), load_spec("meta-llama/Llama-3.1-405B")


def found(cluster: str, **sections: object) -> list[Plan]:
    train = {"seq_len": 4096, "global_batch_size": 64}
    return candidates(Recipe.model_validate({"train": train, **sections}), ONE_B, parse_cluster(cluster))[0]


@pytest.mark.parametrize(
    ("train", "dp", "tp", "expected"),
    [
        (Train(seq_len=4096), 8, 1, [(2, 4), (1, 8)]),
        (Train(seq_len=4096), 8, 2, [(4, 2), (2, 4), (1, 8)]),
        (Train(seq_len=32768), 8, 1, [(1, 8)]),
        (Train(seq_len=4096, micro_batch_size=2), 8, 1, [(2, 4)]),
        (Train(seq_len=4096, micro_batch_size=3), 8, 1, []),
        (Train(seq_len=4096, gradient_accumulation_steps=2), 8, 1, [(4, 2)]),
        (Train(seq_len=4096, micro_batch_size=2, gradient_accumulation_steps=2), 8, 1, []),
        (Train(seq_len=4096), 48, 1, []),
    ],
)
def test_a_ranks_share_in_micro_batches(train: Train, dp: int, tp: int, expected: list[tuple[int, int]]) -> None:
    """Of 64 sequences a step; at most 8,192 tokens a device and micro-batch, unless pinned."""
    assert splits(train, 64, dp, tp) == expected


def test_where_gradients_leave_early_the_whole_share_is_tried() -> None:
    """However large it is: those of several micro-batches would stay on the device."""
    assert splits(Train(seq_len=4096), 64, 8, 1, undivided=True) == [(8, 1), (2, 4), (1, 8)]
    assert splits(Train(seq_len=4096), 16, 8, 1, undivided=True) == [(2, 1), (1, 2)]
    plans = [plan for plan in found("2xH100", offload={"optimizer": "host"}) if plan.layout.dp == 2]
    sizes = {name: {p.batch.micro_batch_size for p in plans if p.shard.strategy == name} for name in ("ddp", "zero3")}
    assert max(sizes["ddp"]) == 2 and 32 in sizes["zero3"]


def test_a_step_is_the_same_sequences_under_every_plan() -> None:
    plans = found("2x8xH100+400Gb/node")
    assert {plan.batch.global_batch_size(plan.layout.dp) for plan in plans} == {64}
    assert {plan.layout.tp for plan in plans} == {1, 2, 4, 8}
    assert {plan.remat.mode for plan in plans} == {"none", "selective", "full"}
    assert {plan.shard.strategy for plan in plans} == {"ddp", "zero1", "zero2", "zero3"}
    assert len(set(plans)) == len(plans)


def test_without_a_batch_every_degree_takes_the_same() -> None:
    """As many sequences as there are devices, where those are more than the default."""
    plans = found("8x8xH100+400Gb/node", train={"seq_len": 4096})
    assert {plan.batch.global_batch_size(plan.layout.dp) for plan in plans} == {64}


def test_pins_leave_what_they_say() -> None:
    pins = {"strategy": "zero2", "tp": 2}
    plans = found("8xH100", parallel=pins, recompute={"mode": "full"}, compile=False)
    assert {(plan.shard.strategy, plan.layout.tp, plan.remat.mode, plan.compile) for plan in plans} == {
        ("zero2", 2, "full", False)
    }


def test_a_batch_that_only_some_degrees_admit_is_planned_with_those() -> None:
    """2,048 sequences on 16,384 GPUs: tensor parallelism over eight leaves 2,048 groups."""
    recipe = Recipe.model_validate({"train": {"seq_len": 8192, "global_batch_size": 2048}})
    cluster = parse_cluster("2048x8xH100+3.2Tb/node")
    assert {plan.layout.tp for plan in candidates(recipe, FOUR_HUNDRED_B, cluster)[0]} == {8}
    plan = choose(recipe, FOUR_HUNDRED_B, cluster)
    assert fits(plan) and plan.batch.global_batch_size(plan.layout.dp) == 2048


def test_a_batch_that_no_degree_admits_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        found("8xH100", train={"seq_len": 4096, "global_batch_size": 3}, parallel={"tp": 1})
    assert [problem.code for problem in refused.value.problems] == ["CFG008"]


def test_a_pipeline_has_a_bound_of_its_micro_batches_and_the_loss_one_of_its_chunks() -> None:
    """Both are looked at one by one."""
    train = {"seq_len": 4096, "global_batch_size": 2**20, "micro_batch_size": 1}
    parallel = {"pp": 2, "schedule": "1f1b"}
    with pytest.raises(ConfigError) as caught:
        found("2xH100", train=train, parallel=parallel)
    assert {problem.code for problem in caught.value.problems} == {"PLAN024"}
    assert found("2xH100", train={**train, "global_batch_size": 1024}, parallel=parallel)
    chunk, _ = chunk_of(ONE_B, 2**26, 2**24)
    assert -(-(2**24) // chunk) <= 2048
