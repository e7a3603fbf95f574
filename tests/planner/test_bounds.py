"""No bound is above what it bounds: of plans that the planner's pages look at, and of plans drawn at random."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.planner.bounds import LowerBounds
from shardwise.planner.comparison import peak_share, seconds
from shardwise.planner.price import price
from shardwise.planner.search import Search
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe
from tests.planner.test_exhaustive import MODELS, Case, asked

PAGES = {
    "8B on 8": ("meta-llama/Llama-3.1-8B", "8xH100"),
    "70B on 16": ("meta-llama/Llama-3.1-70B", "2x8xH100"),
    "Mixtral on 8": ("mistralai/Mixtral-8x7B-v0.1", "8xH100"),
    "Qwen3-30B-A3B on 16": ("Qwen/Qwen3-30B-A3B", "2x8xH100"),
    "70B on 512": ("meta-llama/Llama-3.1-70B", "64x8xH100"),
    "405B on 16,384": ("meta-llama/Llama-3.1-405B", "2048x8xH100"),
}
DRAWN = MODELS | {"Qwen3-30B": "Qwen/Qwen3-30B-A3B", "Mixtral": "mistralai/Mixtral-8x7B-v0.1"}
SETTINGS: list[dict[str, object]] = [
    {},
    {"precision": {"weights": "bf16"}},
    {"precision": {"reduce": "bf16"}},
    {"precision": {"compute": "fp32"}},
    {"optim": {"name": "adamw8bit"}},
    {"lora": {"rank": 16}},
    {"lora": {"rank": 16, "frozen": "nf4"}},
    {"method": {"name": "dpo"}},
    {"offload": {"optimizer": "auto"}},
    {"offload": {"optimizer": "host", "weights": "host"}},
    {"offload": {"activations": "host"}},
    {"model": {"frozen": ["embed.*", "layers.0.*"]}},
    {"parallel": {"strategy": "zero3", "reshard_after_forward": False}},
    {"parallel": {"strategy": "zero3", "backward_prefetch": 0}},
    {"parallel": {"strategy": "zero3", "sync_each_batch": False}},
    {"parallel": {"strategy": "hsdp"}},
    {"recompute": {"mode": "full", "every": 2}},
]
MACHINES = ("1xH100", "4xA100", "8xL40S", "8xH200", "2x8xH100+100Gb/node", "4x8xH100+10Gb/node", "16x8xB200", "4xCPU")


@cache
def spec_of(model: str) -> ModelSpec:
    return load_spec(model)


def check(recipe: Recipe, spec: ModelSpec, cluster: Cluster, count: int, seed: object, most_ranks: int = 32) -> None:
    """Of so many plans with stages and without, in whatever order they are asked: what is known of one bounds
    others."""
    random = Random(str(seed))
    try:
        search = Search(recipe, spec, cluster)
        plans = random.sample(search.all, min(count, len(search.all)))
    except ConfigError:
        return
    able = [degrees for degrees in search.pipelines if degrees.staged.layout.pp <= most_ranks]
    for degrees in random.sample(able, min(-(-count // 4), len(able))):
        staged = search.tried.plans(degrees)
        plans += random.sample(staged, min(2, len(staged)))
    bounds = LowerBounds(spec, cluster)
    for plan in plans:
        below(bounds, plan)


def below(bounds: LowerBounds, plan: Plan) -> None:
    """The bounds of one plan."""
    rough_s, bound_s = bounds.roughly(plan), bounds.seconds(plan)
    priced = timed(bounds.spec, price(bounds.spec, plan, bounds.cluster), bounds.cluster)
    assert 0 < rough_s <= bound_s * (1 + 1e-9) <= seconds(priced).step_s * (1 + 2e-9), plan
    if plan.layout.pp > 1:
        assert bound_s <= bounds.replayed(plan) <= seconds(priced).step_s * (1 + 2e-9), plan
    assert bounds.may_fit(plan, peak_share(priced) * (1 + 1e-12)), plan


@pytest.mark.matrix(3)
@pytest.mark.parametrize("page", PAGES)
def test_some_plans_of_a_page(page: str) -> None:
    model, cluster = PAGES[page]
    check(Recipe(), spec_of(model), parse_cluster(cluster), 12, page, most_ranks=8)


@pytest.mark.prove
@pytest.mark.parametrize("page", PAGES)
def test_many_plans_of_a_page(page: str) -> None:
    model, cluster = PAGES[page]
    check(Recipe(), spec_of(model), parse_cluster(cluster), 100, f"many of {page}", most_ranks=8)


def drawn(group: int) -> list[tuple[str, dict[str, object], str, int, int]]:
    """Twenty recipes, always the same: model, settings, machines, tokens of a sequence, sequences of each rank."""
    every = [*product(DRAWN, SETTINGS, MACHINES, (512, 2048, 8192), (1, 2, 8))]
    return Random(group).sample(every, 20)


@pytest.mark.rare(4)
@pytest.mark.parametrize("group", range(10))
def test_generated(group: int) -> None:
    for model, settings, machines, seq_len, each in drawn(group):
        cluster = parse_cluster(machines)
        train = {"seq_len": seq_len, "global_batch_size": cluster.world * each}
        recipe = Recipe.model_validate({"train": train} | settings)
        check(recipe, spec_of(DRAWN[model]), cluster, 4, (group, model, settings, machines), most_ranks=8)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    [
        ("8B", "qlora", "4x8xH100+10Gb/node", 4096, 32),
        ("70B", "qlora", "8xL40S", 4096, 16),
        ("70B", "full", "2x8xH100+400Gb/node", 4096, 32),
        ("1B", "full", "8xH100", 4096, 64),
    ],
    ids=str,
)
def test_all_plans_of_a_recipe(case: Case) -> None:
    recipe, spec, cluster = asked(case)
    plans = Search(recipe, spec, cluster).all
    Random(1).shuffle(plans)
    bounds = LowerBounds(spec, cluster)
    for plan in plans:
        below(bounds, plan)


def test_tails_that_are_reduced_before_the_last_block() -> None:
    """Under ZeRO-1 gradients of several micro-batches are added up whole, and the head's are gone when those of the
    last block are reduced; with experts apart, these before the block's."""
    spec, cluster = spec_of(PAGES["Mixtral on 8"][0]), parse_cluster("8xH100")
    bounds = LowerBounds(spec, cluster)
    for ep, strategy, reduce in product((1, 2, 8), ("zero1", "zero2", "zero3"), ("fp32", "bf16")):
        layout, batch = Layout(dp_shard=8, ep=ep, ranks_per_node=8), Batch(1, 4, 2048, 2048)
        precision = Precision(reduce=reduce)  # type: ignore[arg-type]
        below(bounds, Plan(layout, batch, Shard(strategy), precision, Remat("full"), model=spec.name))  # type: ignore[arg-type]


def test_experts_that_are_spread() -> None:
    """Their weights are gathered over fewer ranks than others, or over none: of few tokens these take most of it."""
    spec, cluster = spec_of("Qwen/Qwen3-30B-A3B"), parse_cluster("8xL40S")
    bounds = LowerBounds(spec, cluster)
    for degree, strategy, seq_len in product((8, 2, 1), ("zero1", "zero3"), (512, 4096)):
        layout, batch = Layout(dp_shard=8, ep=degree, ranks_per_node=8), Batch(1, 1, seq_len, 512)
        below(bounds, Plan(layout, batch, Shard(strategy), Precision("bf16"), Remat("full"), model=spec.name))  # type: ignore[arg-type]


@pytest.mark.prove
def test_weights_that_are_gathered_as_codes() -> None:
    """In half the bytes, over slow links that they would fill otherwise; with stages, adapters and replicas too."""
    spec, cluster = spec_of(PAGES["8B on 8"][0]), parse_cluster("2x8xH100+25Gb/node")
    bounds = LowerBounds(spec, cluster)
    precision = Precision("bf16", products="float8", exclude=("first", "last"), gather="float8")
    staged = {"pipeline": Pipeline("1f1b", 1, (16, 16))}
    for layout, more in (
        (Layout(dp_shard=16), {}),
        (Layout(dp_replicate=2, dp_shard=8), {"lora": Lora(16, 32.0)}),
        (Layout(dp_shard=2, tp=8), {}),
        (Layout(pp=2, dp_shard=8), staged),
    ):
        for seq_len, count in ((512, 2), (4096, 4)):
            batch = Batch(1, count, seq_len, 512)
            layout = replace(layout, ranks_per_node=8)
            below(bounds, Plan(layout, batch, Shard("zero3"), precision, model=spec.name, **more))  # type: ignore[arg-type]
