"""Plans of known models along all axes, drawn with seeds: what recipes say rarely, and a search would find."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout, least_dp_shard
from shardwise.spec.pipelines import PIPELINES
from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.pp import even

DEGREES = (1, 1, 1, 2, 3, 4, 8, 16)


@cache
def specs() -> list[ModelSpec]:
    """Every known model once, and those with experts or windows four times more."""
    each = [load_spec(name) for name in configs()]
    return each + 4 * [spec for spec in each if spec.experts or spec.attention.sliding_window]


def drawn(number: int) -> tuple[ModelSpec, Plan]:
    """Plan ``number``, and its model. What cannot be done with the model is drawn again."""
    draw = random.Random(f"layout {number}")
    while True:
        spec = draw.choice(specs())
        plan = _plan(draw, spec)
        if plan is not None and not techniques.check(spec, plan, parse_cluster("8xCPU")):
            return spec, plan


def _plan(draw: random.Random, spec: ModelSpec) -> Plan | None:
    tp, pp, shards, replicas = (draw.choice(DEGREES) for _ in range(4))
    cp, kind = draw.choice((1, 1, 1, 2, 3, 4, 6, 8)), draw.choice(("ring", "ring", "ulysses", "gather", "nested"))
    ulysses = {"ulysses": cp, "nested": 2}.get(kind, 1) if cp > 1 else 1
    schedule = draw.choice([*PIPELINES])
    each = draw.choice((PIPELINES[schedule].least_stages, max(2, PIPELINES[schedule].least_stages)))
    if cp % ulysses or pp * each > spec.num_hidden_layers or pp * tp * cp * shards * replicas > 2**12:
        return None
    strategy = draw.choice(("ddp", "zero1", "zero2", "zero3"))
    layout = Layout(dp_replicate=replicas, dp_shard=shards, pp=pp, cp=cp, tp=tp, ulysses=ulysses)
    layout = Layout(**{**vars_of(layout), "ep": draw.choice((1, 2, 4, 8)) if spec.experts else 1})
    if strategy == "ddp":
        least = least_dp_shard(layout)
        if layout.dp % least:
            return None
        layout = Layout(**{**vars_of(layout), "dp_replicate": layout.dp // least, "dp_shard": least})
    layout = Layout(**{**vars_of(layout), "v_shaped": pp > 1 and PIPELINES[schedule].shape == "v"})
    length = draw.choice((1024, 2048, 4096, 8192, 32_768)) * draw.choice((1, 3))
    rows = draw.choice((1, 2, 3))
    tokens = rows * length // cp
    batch = Batch(rows, draw.choice((1, 2, 3, 8, 16)), length, draw.choice((1024, 4096, tokens)))
    lora = draw.choice((None, None, None, Lora(16), Lora(8, nf4=True), Lora(64, dora=True, targets=("q", "v"))))
    return Plan(
        layout,
        batch,
        Shard(strategy),  # type: ignore[arg-type]
        Precision("bf16"),
        Remat(draw.choice(("none", "selective", "full")), draw.choice((1, 2))),
        sequence_parallel=tp > 1 and draw.choice((True, True, False)),
        cp_kind=kind if cp > 1 else "ring",  # type: ignore[arg-type]
        optim=Optim(draw.choice(("adamw", "adamw", "lion", "adafactor"))),
        lora=lora,
        pipeline=Pipeline(schedule, each, even(spec, length, pp * each)) if pp > 1 else Pipeline(),  # type: ignore[arg-type]
    )


def vars_of(layout: Layout) -> dict[str, Any]:
    """The fields of a layout by name."""
    return {name: vars(layout)[name] for name in Layout.__dataclass_fields__}
