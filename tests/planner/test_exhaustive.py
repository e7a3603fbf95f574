"""What ``auto`` takes is as fast as the best of all plans, by its own seconds."""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random

import pytest

from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.planner.candidates import candidates
from shardwise.planner.comparison import MARGIN, TIE, fits, kind, name, peak_share, seconds, simplest
from shardwise.planner.price import price
from shardwise.planner.search import Search, best_of_kinds
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_seconds
from tests.covering import covering

MODELS = {"1B": "meta-llama/Llama-3.2-1B", "8B": "meta-llama/Llama-3.1-8B", "70B": "meta-llama/Llama-3.1-70B"}
METHODS: dict[str, dict[str, object]] = {
    "full": {},
    "bf16": {"precision": {"weights": "bf16"}},
    "8-bit": {"optim": {"name": "adamw8bit"}},
    "lora": {"lora": {"rank": 16}},
    "qlora": {"lora": {"rank": 16, "frozen": "nf4"}},
    "dpo": {"method": {"name": "dpo"}},
}
CLUSTERS = (
    "1x4090",
    "2x4090",
    "8x5090",
    "8xL40S",
    "4xA100",
    "8xRTX-PRO-6000",
    "1xH100",
    "8xH100",
    "2x8xH100+100Gb/node",
    "4x8xH100+10Gb/node",
    "2x8xH200+400Gb/node",
    "64x8xH100+400Gb/node",
)
Case = tuple[str, str, str, int, int]


def generated(count: int) -> list[Case]:
    """Cases drawn at random, but always the same, that meet every value of each setting and most pairs of them: model,
    method, cluster, tokens of a sequence, sequences a step."""
    drawn = Random(24).sample([*product(MODELS, METHODS, CLUSTERS, (2048, 4096, 8192), (1, 2, 4))], 400)
    taken = [drawn[place] for place in covering(drawn)[:count]]
    return [(*case, seq_len, parse_cluster(case[-1]).world * times) for *case, seq_len, times in taken]  # type: ignore[misc]


THREE: list[Case] = [
    ("8B", "lora", "4x8xH100+10Gb/node", 4096, 32),
    ("70B", "full", "2x8xH100+400Gb/node", 4096, 32),
    ("70B", "full", "2x8xRTX-PRO-6000+200Gb/node", 4096, 64),
]


@cache
def spec_of(model: str) -> ModelSpec:
    return load_spec(MODELS[model])


def asked(case: Case) -> tuple[Recipe, ModelSpec, Cluster]:
    model, method, cluster, seq_len, batch = case
    train = {"seq_len": seq_len, "global_batch_size": batch}
    return Recipe.model_validate({"train": train, **METHODS[method]}), spec_of(model), parse_cluster(cluster)


def every(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> list[Plan]:
    """All legal plans, priced, and those that fit with seconds."""
    found = [price(spec, plan, cluster) for plan in candidates(recipe, spec, cluster)[0]]
    return [timed(spec, plan, cluster) if fits(plan) else plan for plan in found]


@pytest.mark.prove
@pytest.mark.parametrize("case", THREE, ids=str)
def test_the_choice_is_as_fast_as_the_best_of_all(case: Case) -> None:
    check(case)


def test_generated_cases_meet_every_value() -> None:
    models, methods, clusters, lengths, _ = map(set, zip(*generated(30), strict=True))
    assert (models, methods, clusters, lengths) == ({*MODELS}, {*METHODS}, {*CLUSTERS}, {2048, 4096, 8192})


@pytest.mark.matrix
@pytest.mark.parametrize("case", generated(30), ids=str)
def test_generated(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Plans are compared with the smallest chunks of the loss that the search begins with; larger ones, which it takes
    last, make none slower."""
    recipe, spec, cluster = asked(case)
    search = Search(recipe, spec, cluster)
    plans, chosen = every(recipe, spec, cluster), search.chosen
    fitting = [plan for plan in plans if fits(plan)]
    assert fits(chosen) is bool(fitting)
    if fitting:
        best_s = min(seconds(plan).step_s for plan in fitting)
        found = simplest(search.known.fastest(search.all))
        assert seconds(chosen).step_s <= seconds(found).step_s <= (1 + TIE) * best_s
    else:
        least = min(plan.estimate.peak_bytes for plan in plans)
        assert chosen.estimate.peak_bytes <= 1.02 * least or MARGIN < peak_share(chosen) < 1


@pytest.mark.prove
def test_the_table_and_the_reason_agree() -> None:
    """The chosen plan is in the table, nothing that fits above it is faster by more than runs differ, and what the
    reason compares it with is the next kind of the table without stages."""
    for case in THREE[0], THREE[2], ("1B", "full", "8xH100", 4096, 64):
        recipe, spec, cluster = asked(case)
        search = Search(recipe, spec, cluster)
        plans = [plan for plan in best_of_kinds(search) if fits(plan)]
        of_its_kind = next(plan for plan in plans if kind(plan) == kind(search.chosen))
        assert of_its_kind.estimate == search.chosen.estimate
        assert seconds(search.chosen).step_s <= (1 + TIE) * seconds(plans[0]).step_s
        why = search.chosen.why["shard.strategy"]
        assert why.startswith("searched: ")
        if "the fastest that fits; " in why:
            others = [plan for plan in plans if kind(plan) != kind(search.chosen)]
            next_ = next(plan for plan in others if plan.layout.pp == 1)
            assert f"; {name(next_)}" in why and why.endswith(f": {show_seconds(seconds(next_).step_s)}")


@pytest.mark.prove
def test_adapters_on_slow_links_are_replicated_between_nodes() -> None:
    """ZeRO-3 over four nodes with 10 Gb/s gathers for half a minute what replicas need not send."""
    recipe, spec, cluster = asked(THREE[0])
    found = {kind(plan): seconds(plan).step_s for plan in best_of_kinds(Search(recipe, spec, cluster))}
    assert min(found["hybrid"], found["ddp"]) < 1 < 20 < found["zero3"]
