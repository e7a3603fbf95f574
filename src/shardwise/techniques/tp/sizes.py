"""The choices of tensor parallelism that depend on sizes. No torch."""

from __future__ import annotations

from shardwise.spec.plan import Plan


def own_head(ranks: int, key_heads: int, index: int) -> int | None:
    """Return the key head that a rank computes with, where each holds all of them; None where it has heads of its
    own."""
    return None if key_heads >= ranks else index * key_heads // ranks


def own_rows(layer: str, key_heads: int, width: int, ranks: int, index: int) -> slice | None:
    """The rows of k or v, held whole, or of its adapter's B, with which a rank multiplies; None: all that it holds."""
    head = own_head(ranks, key_heads, index)
    if head is None or layer.removesuffix(".lora_b").rpartition(".")[2] not in ("k", "v"):
        return None
    return slice(head * width, (head + 1) * width)


def travels_alone(size_bytes: int, plan: Plan) -> bool:
    """Return whether a gradient of so many bytes is summed by itself, and not in one all-reduce with the others."""
    return size_bytes >= plan.shard.bucket_bytes
