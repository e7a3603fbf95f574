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
from unittest.mock import patch

from shardwise import methods, techniques
from shardwise.models import sizes
from shardwise.models.config import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.rows import parts_of
from shardwise.techniques import quantised
from shardwise.techniques.optim import elementwise

Case = tuple[ModelSpec, Plan]
DEQUANTISED, UPDATED = 2**8, 2**6
"""Elements of a small weight, at a time."""
BUCKETS = tuple(round(2 ** (half / 2)) for half in range(12, 36))
"""Bytes of a bucket, of which some are below and some above most gradients of a small model."""
IDS = 1009
"""A prime, of a vocabulary that weighs more than a block."""
ROUNDS = 2
"""How often all sizes are looked at, one after another."""


@contextmanager
def scaled() -> Iterator[None]:
    """Within it loops go over few elements at a time."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(quantised, "NF4_WIDE", DEQUANTISED))
        stack.enter_context(patch.dict(elementwise.PIECE, cpu=UPDATED))
        yield


def stated(spec: ModelSpec, plan: Plan) -> list[tuple[ModuleType, Callable[[ModelSpec, Plan], dict[str, bool]]]]:
    """Who states paths that a plan may take, and what it says of a plan of its kind: by name, whether it does."""
    parts = [(one, partial(techniques.regimes, order=(one,))) for one in techniques.acting(plan, "regimes")]
    return [(sizes, sizes.regimes), (methods, methods.regimes), *parts]


def held(spec: ModelSpec, plan: Plan, asked: Container[ModuleType] | None = None) -> frozenset[str]:
    """The names of the paths that code takes, of those that ``asked`` state. Moments that are rounded are not, in a
    proof."""
    plan = replace(plan, optim=plan.optim.exact)
    each = (says(spec, plan) for who, says in stated(spec, plan) if asked is None or who in asked)
    return frozenset(name for found in each for name, holds in found.items() if holds)


def lost(wanted: frozenset[str], case: Case, asked: Container[ModuleType] | None = None) -> frozenset[str]:
    """Those that are wanted and do not hold of a small case."""
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
    """Cases that differ from this one in one of its sizes. A model that runs in transformers'
    own modules has the sizes of its config."""
    fixed = case[0].hf_model is not None
    for knob in KNOBS:
        yield from (other for other in knob(*case) if other != case and not (fixed and other[0] != case[0]))


def _sized(spec: ModelSpec, plan: Plan, **changes: int) -> Case:
    """Another batch, with several chunks of the loss where there were several."""
    several = plan.batch.loss_chunk_tokens < plan.batch.micro_batch_size * plan.row_tokens
    batch = replace(plan.batch, **changes)
    if not several and "loss_chunk_tokens" not in changes:
        batch = replace(batch, loss_chunk_tokens=2 * batch.micro_batch_size * batch.seq_len)
    return spec, replace(plan, batch=batch)


def _batches(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    batch, multiple = plan.batch, parts_of(plan.layout.ring, plan.layout.ulysses)
    yield from (_sized(spec, plan, loss_chunk_tokens=chunk) for chunk in (5, 3, 4))
    for rows, longer in product((batch.micro_batch_size, 1, 3), range(4)):
        yield _sized(spec, plan, micro_batch_size=rows, seq_len=batch.seq_len + longer * multiple)
    for count, rows in product((1, 3, *range(batch.accumulation + 1, batch.accumulation + 4)), (1, 2)):
        yield _sized(spec, plan, accumulation=count, micro_batch_size=rows)


def _buckets(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    """Of a model whose embedding may be larger than its blocks."""
    for ids, size in product((spec.vocab_size, IDS), BUCKETS):
        yield replace(spec, vocab_size=ids), replace(plan, shard=replace(plan.shard, bucket_bytes=size))


def _windows(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    if spec.sliding_window is not None:
        for window in (2, 3, 4, 5, 6, 8, plan.batch.seq_len - 1, 2 * plan.batch.seq_len):
            yield replace(spec, sliding_window=window), plan


def _heads(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    each = spec.num_attention_heads // spec.num_key_value_heads
    for key_heads, group in product((1, 2, 3, 4), (each, 2, 3, 4)):
        yield replace(spec, num_key_value_heads=key_heads, num_attention_heads=key_heads * group), plan


def _others(spec: ModelSpec, plan: Plan) -> Iterator[Case]:
    """Adapters of another rank, other experts, wider layers, and rotation that was trained on fewer tokens."""
    if plan.lora is not None:
        yield from ((spec, replace(plan, lora=replace(plan.lora, rank=rank))) for rank in (1, 2, 3))
    for more in range(1, 5) if spec.experts else ():
        yield replace(spec, experts=spec.experts + more), plan
    yield from ((replace(spec, vocab_size=spec.vocab_size + more), plan) for more in (-1, 1, 2, 3, 4))
    yield from ((replace(spec, hidden_size=spec.hidden_size + more), plan) for more in (1, 2, 3))
    for times, more in product((2, 3), (1, 2, 4, 8)):
        wide = {key: times * vars(spec)[key] for key in ("hidden_size", "intermediate_size", "expert_size")}
        yield (
            replace(spec, **wide),
            replace(plan, shard=replace(plan.shard, bucket_bytes=more * plan.shard.bucket_bytes)),
        )
    if spec.rope_scaling is not None:
        trained = replace(spec.rope_scaling, original_max_position_embeddings=plan.batch.seq_len // 3)
        yield replace(spec, rope_scaling=trained), plan


KNOBS = (_batches, _buckets, _windows, _heads, _others)
