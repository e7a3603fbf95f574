"""What tensor parallelism does otherwise at other sizes. No torch."""

from __future__ import annotations

from shardwise.spec.plan import Plan


def own_head(ranks: int, key_heads: int, index: int) -> int | None:
    """Which key head a rank computes with, where each holds all of them; None: where it has heads of its own."""
    return None if key_heads >= ranks else index * key_heads // ranks


def travels_alone(size_bytes: int, plan: Plan) -> bool:
    """Whether a gradient of so many bytes is summed by itself, and not in one all-reduce with the others."""
    return size_bytes >= plan.shard.bucket_bytes
