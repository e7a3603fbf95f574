"""Peaks and sends of plans that recipes allow, drawn with seeds, stay what they were.

``generated_plans.txt`` has a line for each: the bytes of the peak, the bytes sent, a digest of the memory by category,
of every send (kind, ranks of its group, category, bytes, calls) and of the operations, and what was drawn. A change
that is meant to change some of them brings the new lines with it, and docs/log.md says why they differ:

    .venv/bin/python -m tests.planner.test_generated_plans > tests/planner/generated_plans.txt
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec, model_spec
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec
from shardwise.planner.price import price
from shardwise.planner.schedule import folded
from shardwise.planner.sheets import sheet_of
from shardwise.spec.batch import batch
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Recipe
from shardwise.techniques import shard, tp

COUNT = 600
GOLDEN = Path(__file__).with_name("generated_plans.txt")
CLUSTERS = (
    "1xH100",
    "2xA100-40",
    "8xH100",
    "6xRTX-4090",
    "2x8xH100",
    "3x4xA100",
    "16x8xH100",
    "1xCPU",
    "3xCPU",
    "8xCPU",
)


def small(**features: Any) -> ModelSpec:
    """A model with dims that few degrees divide."""
    sizes = {"vocab_size": 1009, "hidden_size": 96, "intermediate_size": 240, "num_hidden_layers": 7}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
    return model_spec(**{"name": "small", **sizes, **heads, **features})


SMALL = {
    "odd vocabulary": small(),
    "few key heads, tied": small(num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": small(num_key_value_heads=1, vocab_size=1008),
    "two blocks, biases": small(attention_bias=True, num_hidden_layers=2),
    "odd width": small(hidden_size=100, head_dim=16, num_hidden_layers=13, vocab_size=50257),
}
DENSE = [
    n for n in configs() if not load_spec(n).experts and "linear_attention" not in load_spec(n).attention.layer_types
]
MODELS = (*DENSE, *SMALL, *SMALL, *SMALL)
RARELY = (None, None, None)
SHARDINGS: dict[str, tuple[Any, ...]] = {
    "train.seq_len": (128, 1000, 2048, 4096, 8192),
    "train.micro_batch_size": (1, 1, 2, 3, 4, 8),
    "train.gradient_accumulation_steps": (1, 1, 2, 3, 5, 8),
    "parallel.strategy": ("auto", "auto", "ddp", "zero1", "zero2", "zero3", "hsdp"),
    "parallel.dp_shard": (*RARELY, 2, 4),
    "parallel.dp_replicate": (*RARELY, 2),
    "parallel.tp": (None, None, 2, 2, 3, 4, 8),
    "parallel.sequence_parallel": (None, "false"),
    "parallel.reshard_after_forward": (*RARELY, "true", "false", 2, 4),
    "precision.compute": ("bf16", "bf16", "bf16", "fp32", "fp16", "fp64"),
    "precision.weights": (*RARELY, "bf16", "fp64"),
    "precision.reduce": (*RARELY, "bf16"),
    "precision.modules": (*RARELY, *RARELY, "{'*norm': fp32}", "{'*.attention*': fp32}"),
    "recompute.mode": ("auto", "none", "selective", "full"),
    "recompute.every": (*RARELY, 2, 3),
    "lora.rank": (*RARELY, *RARELY, 8, 16, 20, 64),
    "model.frozen": (*RARELY, *RARELY, *RARELY, "['embed.*']", "['embed.*', 'layers.0.*']", "['*.mlp.*']"),
    "optim.name": (*RARELY, "adamw8bit"),
    "optim.moments": (*RARELY, "bf16"),
    "compile": ("auto", "true", "false"),
    "method.name": (*RARELY, "dpo"),
    "run.deterministic": (*RARELY, "true"),
}
ADAPTED: dict[str, tuple[Any, ...]] = {
    "lora.targets": (None, None, "[q, v]", "[q, k, v, o]", "[gate, up, down]", "[o]"),
    "lora.frozen": (None, "nf4", "nf4", "bf16", "fp32"),
    "lora.dropout": (None, 0.1),
    "lora.dora": (None, None, "true"),
}


@cache
def spec_of(name: str) -> ModelSpec:
    return SMALL[name] if name in SMALL else load_spec(name)


def keys(draw: random.Random) -> list[str]:
    """Keys of a recipe, and values for them."""
    chosen = {key: draw.choice(values) for key, values in SHARDINGS.items()}
    if chosen["lora.rank"] is not None:
        chosen |= {key: draw.choice(values) for key, values in ADAPTED.items()} | {"model.frozen": None}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def plans_of(recipe: Recipe, spec: ModelSpec, cluster: Cluster, chunk: int) -> list[Plan]:
    """The legal plans that the recipe allows."""
    found = []
    others = [technique for technique in techniques.ORDER if technique not in (tp, shard)]
    asked = Plan(deterministic=recipe.run.deterministic, loss="dpo" if recipe.pairs else "cross_entropy")
    for plan in techniques.choices([tp, *others, shard], recipe, spec, cluster, asked):
        micro, accumulation, _ = batch(recipe.train, plan.layout.dp, plan.layout.tp)
        found.append(replaced(plan, Batch(micro, accumulation, recipe.train.seq_len, chunk)))
    return [plan for plan in found if not techniques.check(spec, plan, cluster)]


def replaced(plan: Plan, sizes: Batch) -> Plan:
    return Plan(**{**vars(plan), "batch": sizes, "why": {}})


def drawn(number: int) -> tuple[str, ModelSpec, Cluster, Plan]:
    """Plan ``number``: what was drawn, in words, its model and cluster, and the plan. What no recipe may say, or cannot
    be done with the model, is drawn again."""
    draw = random.Random(f"plan {number}")
    while True:
        name, where, asked = draw.choice(MODELS), draw.choice(CLUSTERS), keys(draw)
        chunk = draw.choice((128, 1024, 16384))
        try:
            found = plans_of(load_recipe(None, asked), spec_of(name), parse_cluster(where), chunk)
        except ConfigError:
            continue
        if found:
            plan = draw.choice(found)
            split = f"{plan.shard.strategy} {plan.layout.dp_replicate}x{plan.layout.dp_shard}x{plan.layout.tp}"
            told = f"{plan.remat.mode} {'compiled ' * plan.compile}chunks of {chunk}"
            words = [name, where, split, told, *(key.partition(".")[2] or key for key in asked)]
            return "; ".join(words), spec_of(name), parse_cluster(where), plan


def line(number: int) -> str:
    """What plan ``number`` comes to."""
    words, spec, cluster, plan = drawn(number)
    sheet = sheet_of(spec, plan)
    estimate = price(spec, plan, cluster).estimate
    sent: Counter[tuple[str, int, str, int]] = Counter()
    for send, calls in folded(techniques.cost(sheet, plan), plan, cluster.kind).sent.items():
        sent[send.kind, plan.layout.size(send.axis), send.category, send.bytes] += calls
    memory = {name: size for name, size in estimate.memory.items() if size}
    told = repr((sorted(memory.items()), sorted(sent.items()), estimate.flops_per_step))
    total = sum(size * calls for (_, _, _, size), calls in sent.items())
    assert total == sum(each.bytes for each in estimate.traffic)
    return f"{number} {estimate.peak_bytes} {total} {sha256(told.encode()).hexdigest()[:16]} {words}"


@pytest.mark.matrix(40)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_generated_plan_takes_and_sends_what_it_did(number: int) -> None:
    assert line(number) == GOLDEN.read_text("utf-8").splitlines()[number]


if __name__ == "__main__":
    for number in range(COUNT):
        print(line(number), flush=True)
    assert "torch" not in sys.modules
