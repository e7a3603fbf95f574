"""What a layer sends and multiplies, by arithmetic alone: a second opinion on units that are traces. A trace says
faithfully what a wrong program does; what is here follows from the literature and the model's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from shardwise.models.config import ModelSpec
from shardwise.spec.plan import BYTES, Plan

TABLE = Path(__file__).with_name("sends.txt")


@dataclass(frozen=True)
class Line:
    """A line of the table: what ``unit`` sends in one pass, as (kind, what)."""

    unit: str
    when: str
    sends: tuple[tuple[str, str], ...]


def table() -> dict[str, list[Line]]:
    """The table of sends by its headings."""
    found: dict[str, list[Line]] = {}
    heading = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("  "):
            unit, when, told = line.split(maxsplit=2)
            sends = () if told == "-" else tuple(map(_send, told.split(", ")))
            found[heading].append(Line(unit, when, sends))
        elif line and not line.startswith("#"):
            heading = line.partition(":")[0]
            found[heading] = []
    return found


def _send(told: str) -> tuple[str, str]:
    kind, what = told.split()
    return kind, what


def payload_bytes(what: str, spec: ModelSpec, plan: Plan) -> int:
    """The bytes of what the table names."""
    tokens = plan.batch.micro_batch_size * plan.batch.seq_len
    filled = ceil(tokens / plan.layout.tp) * plan.layout.tp if plan.sequence_parallel else tokens
    compute = BYTES[plan.precision.compute]
    return {
        "stream": filled * spec.hidden_size * compute,
        "latents": filled * sum(latent_sizes(spec)) * compute,
        "row": tokens * max(4, compute),
        "out": spec.hidden_size * max(4, compute),
    }[what]


def latent_sizes(spec: ModelSpec) -> tuple[int, int, int]:
    """How wide the latent of queries, that of keys and values, and the key of all heads are."""
    return spec.latent.q_lora_rank or 0, spec.latent.kv_lora_rank, spec.latent.qk_rope_head_dim


def layers(spec: ModelSpec, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Each linear layer of a block with its inputs and outputs on one rank."""
    t, d = plan.layout.tp, spec.hidden_size
    if spec.attention.mixer == "latent":
        heads, f = spec.attention.num_attention_heads // t, spec.intermediate_size // t
        queries, latent, key = latent_sizes(spec)
        still, value = spec.latent.qk_nope_head_dim, spec.latent.v_head_dim
        yield from (("q_a", d, queries), ("q_b", queries, heads * (still + key)), ("kv_a", d, latent + key))
        yield from (("kv_b", latent, heads * (still + value)), ("o", heads * value, d))
        yield from (("gate", d, f), ("up", d, f), ("down", f, d))
        return
    heads, key_heads = spec.attention.num_attention_heads // t, max(1, spec.attention.num_key_value_heads // t)
    q, k, f = heads * spec.attention.head_dim, key_heads * spec.attention.head_dim, spec.intermediate_size // t
    yield from (("q", d, q), ("k", d, k), ("v", d, k), ("o", q, d))
    yield from (("gate", d, f), ("up", d, f), ("down", f, d))


def multiplied_flops(spec: ModelSpec, plan: Plan, *, first: bool = False) -> dict[str, int]:
    """Floating-point operations of the products of one block on one rank, forward and backward: 2 a multiplication.
    Attention counts half of its square, twice forward (q k^T, p v) and five times backward (three as wide as keys).
    With adapters the layers' own weights have no gradient, nor has what enters the ``first`` block. Latents are made of
    a rank's own tokens."""
    all_tokens, s = plan.batch.micro_batch_size * plan.batch.seq_len, plan.batch.seq_len
    heads, key = spec.attention.num_attention_heads // plan.layout.tp, spec.attention.head_dim
    value = spec.latent.v_head_dim if spec.attention.mixer == "latent" else key
    forward, backward = all_tokens * s * heads * (key + value), all_tokens * s * heads * (3 * key + 2 * value)
    for name, rows, columns in layers(spec, plan):
        own = name in ("q_a", "kv_a") and plan.sequence_parallel
        tokens = ceil(all_tokens / plan.layout.tp) if own else all_tokens
        product, unneeded = 2 * tokens * rows * columns, first and name in ("q", "k", "v", "q_a", "kv_a")
        forward += product
        if plan.lora is None:
            backward += 2 * product
            continue
        backward += 0 if unneeded else product
        if not plan.lora.targets or name in plan.lora.targets:
            down, up = (2 * tokens * plan.lora.rank * size for size in (rows, columns))
            forward += down + up
            backward += 2 * up + (1 if unneeded else 2) * down
    return {"forward": forward, "backward": backward}
