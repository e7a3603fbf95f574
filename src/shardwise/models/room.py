"""The room that experts with a capacity have. Imports no torch."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from shardwise.models.config import ModelSpec


def expert_room(spec: ModelSpec, tokens: int) -> int:
    """Return how many tokens an expert takes of a row of so many: its capacity is a decimal fraction, as it was
    written."""
    return ceil(
        Fraction(str(spec.experts.expert_capacity)) * tokens * spec.experts.experts_per_token / spec.experts.num_experts
    )
