"""Makes the units that ship with the package: ``python -m shardwise.planner.ship``. A test makes some again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardwise import techniques
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec
from shardwise.planner.sheets import key_of, pack_unit, shipped
from shardwise.planner.shipped_units import SHIPPED, written
from shardwise.planner.trace import trace
from shardwise.planner.variants import chosen
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.safe_path import safe_path
from shardwise.techniques.variant import Variant

TYPES = ((Precision(), False), (Precision("bf16"), True), (Precision("bf16"), False))
"""fp32; bf16 over fp32 as FSDP2 gathers it, and cast where it is used."""
MOST_RANKS = 16
"""A mixture's heads are cut over at most so many: latents have 128 heads, and no node so many devices."""
ADAPTERS = (None, Lora(), Lora(nf4=True), Lora(float8=True))
"""None, LoRA, and LoRA over weights in 4 bits and in float8, on all linear layers."""


def ordinary() -> dict[Variant, None]:
    """The variants of the units that ordinary plans make of the known models."""
    return {chosen(spec, plan, RankKind(plan.layout), unit).variant: None for spec, plan, unit in _asked()}


def _asked() -> Iterator[tuple[ModelSpec, Plan, int | str]]:
    for name, (types, sharded), lora in product(configs(), TYPES, ADAPTERS):
        spec = load_spec(name)
        if spec.experts:
            yield from _mixtures(spec, types, sharded, lora)
            continue
        _, order = layer_kinds(spec)
        # Of each kind one that is not first.
        later = {kind: number for number, kind in reversed([*enumerate(order)][1:])}
        heads = spec.attention.num_key_value_heads
        few = 2 * heads
        alone = spec.attention.num_attention_heads % few or spec.attention.qk_norm == "projection"
        one_each = (heads,) if types.compute == "bf16" else ()  # of the key heads; CPUs are few
        for ranks in (1, 2, *one_each) if alone else (1, 2, *one_each, few):
            layout = Layout(dp_shard=2 if sharded else 1, tp=ranks)
            adapted = lora and replace(lora, frozen=types.compute)
            plan = Plan(layout, Batch(ranks, 1, 64), _shard(sharded=sharded), types, lora=adapted)
            units: list[int | str] = ["embedding", "head", 0, *later.values()]
            plan = replace(plan, sequence_parallel=ranks > 1)
            held = heads // ranks
            long_rows = sharded and held and not (lora and lora.codes)
            for exchanging in {1, 2, held} if long_rows else ():  # a ring; tokens for some heads, and for one
                cut = replace(layout, cp=max(2, exchanging), ulysses=exchanging)
                long = replace(plan, layout=cut, batch=Batch(ranks, 1, 64 * cut.cp))
                yield from ((spec, long, unit) for unit in (0, *later.values()))
            yield from ((spec, plan, unit) for unit in units)
            yield replace(spec, tie_word_embeddings=False), plan, "head"  # with stages each end has its own weight


def _shard(*, sharded: bool) -> Shard:
    return Shard(techniques.STRATEGIES[-1] if sharded else techniques.STRATEGIES[0])


def _mixtures(
    spec: ModelSpec, types: Precision, sharded: bool, lora: Lora | None
) -> Iterator[tuple[ModelSpec, Plan, int | str]]:
    """Yield the units of a mixture of experts: each rank with all experts, some, or one."""
    order = layer_kinds(spec)[1]
    kinds = {(order[n], spec.has_experts(n)): n for n in range(spec.num_hidden_layers - 1, 0, -1)}
    units: list[int | str] = ["embedding", "head", 0, *kinds.values()]
    heads = spec.attention.num_key_value_heads
    cuts = (
        [(1, 1)]
        if types.compute == "fp32"
        else product(sorted({1, 2, heads, 2 * heads}), (1, 2, spec.experts.num_experts))
    )
    for ranks, spread in cuts:
        if spec.attention.num_attention_heads % ranks or ranks > MOST_RANKS:
            continue
        layout = Layout(dp_shard=(1 + sharded) * spread, tp=ranks, ep=spread)
        adapted = lora and replace(lora, frozen=types.compute)
        shard = _shard(sharded=sharded)
        plan = Plan(layout, Batch(ranks, 1, 64), shard, types, lora=adapted, sequence_parallel=ranks > 1)
        yield from ((spec, plan, unit) for unit in units)


def make(variants: Iterable[Variant]) -> dict[str, list[Any]]:
    """Packed units by key."""
    return {key_of(variant): json.loads(json.dumps(pack_unit(trace(variant)))) for variant in variants}


def main() -> None:
    """Write the file that the package carries, with what it has already if it would be the same. On two cores it takes
    some eight minutes to make all."""
    every, processes, known = {key_of(variant): variant for variant in ordinary()}, os.cpu_count() or 1, shipped()
    wanted = [variant for key, variant in every.items() if key not in known.keys]
    with safe_path(), get_context("spawn").Pool(processes) as pool:
        made = pool.map(make, [wanted[first::processes] for first in range(processes)])
    units = {key: unit for key in every if (unit := known.unit(key))}
    units |= {key: unit for each in made for key, unit in each.items()}
    Path(__file__).with_name(SHIPPED).write_bytes(written(units))


if __name__ == "__main__":
    main()
