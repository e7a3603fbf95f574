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
        "row": tokens * max(4, compute),
        "out": spec.hidden_size * max(4, compute),
    }[what]


def layers(spec: ModelSpec, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Each linear layer of a block with its inputs and outputs on one rank."""
    t, d = plan.layout.tp, spec.hidden_size
    heads, key_heads = spec.attention.num_attention_heads // t, max(1, spec.attention.num_key_value_heads // t)
    q, k, f = heads * spec.attention.head_dim, key_heads * spec.attention.head_dim, spec.intermediate_size // t
    yield from (("q", d, q), ("k", d, k), ("v", d, k), ("o", q, d))
    yield from (("gate", d, f), ("up", d, f), ("down", f, d))


def multiplied_flops(spec: ModelSpec, plan: Plan, *, first: bool = False) -> dict[str, int]:
    """Floating-point operations of the products of one block on one rank, forward and backward: 2 a multiplication.
    Attention counts half of its square, twice forward (q k^T, p v) and five times backward. With adapters the layers'
    own weights have no gradient, nor has what enters the ``first`` block."""
    tokens, s = plan.batch.micro_batch_size * plan.batch.seq_len, plan.batch.seq_len
    query = spec.attention.num_attention_heads // plan.layout.tp * spec.attention.head_dim
    forward, backward = 2 * tokens * s * query, 5 * tokens * s * query
    for name, rows, columns in layers(spec, plan):
        product, unneeded = 2 * tokens * rows * columns, first and name in ("q", "k", "v")
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
