"""Sizes at which code takes another path, as the model, the method and the techniques state them; and, of a small plan
that lacks some of them, sizes near its own that have them.

What a plan does not say, how many elements go through a loop at a time, is scaled with the sizes (:func:`scaled`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

from shardwise import methods, techniques
from shardwise.models import odd_sizes
from shardwise.models.config import ModelSpec, flat, with_fields
from shardwise.spec.plan import Plan
from shardwise.spec.rows import parts_of
from shardwise.techniques import quantised
from shardwise.techniques.optim import dealt, elementwise

Case = tuple[ModelSpec, Plan]
DEQUANTISED, UPDATED = 2**8, 2**6
"""Elements of a small weight, at a time."""
STORED_BLOCK = 24
"""Rows and columns of a small weight in float8 that share a scale: no divisor of most sizes, so that edges are cut."""
BUCKETS = tuple(round(2 ** (half / 2)) for half in range(12, 36))
"""Bytes of a bucket, of which some are below and some above most gradients of a small model."""
IDS, WIDE = 1009, ("hidden_size", "intermediate_size", "expert_size")
"""A prime, of a vocabulary that weighs more than a block; sizes that grow together."""
ROUNDS = 2
"""How often all sizes are looked at, one after another."""


@contextmanager
def scaled() -> Iterator[None]:
    """Have loops go over few elements at a time, within the block."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(quantised, "AT_ONCE", DEQUANTISED))
        stack.enter_context(patch.object(quantised, "STORED_BLOCK", STORED_BLOCK))
        stack.enter_context(patch.dict(elementwise.PIECE, cpu=UPDATED))
        stack.enter_context(patch.object(dealt, "AT_ONCE", 2))
        yield


def stated(spec: ModelSpec, plan: Plan) -> list[tuple[ModuleType, Callable[[ModelSpec, Plan], dict[str, bool]]]]:
    """List who states paths that a plan may take, and what it says of a plan of its kind: by name, whether it
    does."""
    parts = [(one, partial(techniques.regimes, order=(one,))) for one in techniques.acting(plan, "regimes")]
    return [(odd_sizes, odd_sizes.regimes), (methods, methods.regimes), *parts]


def held(spec: ModelSpec, plan: Plan, asked: Container[ModuleType] | None = None) -> frozenset[str]:
    """Return the names of the paths that code takes, of those that ``asked`` state; moments are not rounded."""
    plan = replace(plan, optim=plan.optim.exact)
    each = (says(spec, plan) for who, says in stated(spec, plan) if asked is None or who in asked)
    return frozenset(name for found in each for name, holds in found.items() if holds)


def lost(wanted: frozenset[str], case: Case, asked: Container[ModuleType] | None = None) -> frozenset[str]:
    """Return the paths that are wanted and that a small case does not take."""
    with scaled():
        return wanted - held(*case, asked)


def nearest(case: Case, wanted: frozenset[str], legal: Callable[[Case], bool]) -> tuple[Case, frozenset[str]]:
    """The case, or one near it that has more of what is wanted, and what it still lacks: of several the first that has
    most, the smaller ones coming first."""
    missing = lost(wanted, case)
    who = [(one, says(*case).keys()) for one, says in stated(*case)] if missing else []
    for _ in range(ROUNDS):
        for other in _near(case) if missing else ():
            asked = [one for one, names in who if names & missing]
            if len(lost(missing, other, asked)) == len(missing):
                continue
            left = lost(wanted, other)
            if len(left) < len(missing) and legal(other):
                case, missing = other, left
            if not missing:
                break
    return case, missing


def _near(case: Case) -> Iterator[Case]:
    """Cases that differ from this one in one of its sizes. A model that runs in transformers' own modules has those of
    its config."""
    spec, _ = case
    for made in (_plans, _models, _both):
        yield from (other for other in made(*case) if other != case and (spec.hf_model is None or other[0] == spec))


def _plans(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    """Other batches, with several chunks of the loss where there were several, and adapters of another rank."""
    batch, multiple = plan.batch, parts_of(plan.layout.ring, plan.layout.ulysses)
    several = batch.loss_chunk_tokens < batch.micro_batch_size * plan.row_tokens
    counts, rows = (1, 3, *range(batch.accumulation + 1, batch.accumulation + 4)), batch.micro_batch_size
    lengths = [batch.seq_len + longer * multiple for longer in range(4)]
    tried: list[dict[str, int]] = [{"loss_chunk_tokens": chunk} for chunk in (5, 3, 4)]
    tried += [{"micro_batch_size": few, "seq_len": length} for few, length in product((rows, 1, 3), lengths)]
    tried += [{"accumulation": count, "micro_batch_size": few} for count, few in product(counts, (1, 2))]
    for each in tried:
        whole = {} if several else {"loss_chunk_tokens": 2 * each.get("micro_batch_size", rows) * lengths[-1]}
        yield spec, replace(plan, batch=replace(batch, **(whole | each)))
    if plan.lora is not None:
        yield from ((spec, replace(plan, lora=replace(plan.lora, rank=rank))) for rank in (1, 2, 3))


def _models(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    """Other windows, heads, experts, ids and widths, and rotation that was trained on fewer tokens."""
    length, group = plan.batch.seq_len, spec.attention.num_attention_heads // spec.attention.num_key_value_heads
    windows = (2, 3, 4, 5, 6, 8, length - 1, 2 * length) if spec.attention.sliding_window else ()
    tried: list[dict[str, Any]] = [{"sliding_window": window} for window in windows]
    heads = product((1, 2, 3, 4), (group, 2, 3, 4))
    tried += [{"num_key_value_heads": few, "num_attention_heads": few * each} for few, each in heads]
    tried += [{"num_experts": spec.experts.num_experts + more} for more in range(1, 5) if spec.experts]
    tried += [{key: vars(spec)[key] + more} for key in ("vocab_size", "hidden_size") for more in (-1, 1, 2, 3, 4)]
    if (scaling := spec.positions.rope_scaling) is not None:
        tried.append({"rope_scaling": replace(scaling, original_max_position_embeddings=length // 3)})
    yield from ((with_fields(spec, **each), plan) for each in tried)


def _both(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    """Other buckets, of a model that is wider, or whose embedding is larger than its blocks, or not."""
    sizes: list[dict[str, int]] = [{}, {"vocab_size": IDS}]
    known = flat(spec)
    sizes += [{key: times * known[key] for key in WIDE} for times in (2, 3)]
    for each, size in product(sizes, BUCKETS):
        yield with_fields(spec, **each), replace(plan, shard=replace(plan.shard, bucket_bytes=size))
