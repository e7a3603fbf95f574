"""Sizes at which a model's own modules compute otherwise, whatever the layout. No torch."""

from __future__ import annotations

from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.spec.plan import Plan


def can_idle(spec: ModelSpec) -> bool:
    """Return whether weights of a router can be drawn with which no token chooses a certain expert: for each of a
    token's choices two others are needed, of which one comes before it. Not where a correction is added to scores, or
    experts are chosen in groups."""
    own = spec.experts
    return own.sigmoid is None and own.softmax_groups is None and own.num_experts > 2 * own.experts_per_token > 0


def regimes(spec: ModelSpec, plan: Plan) -> dict[str, bool]:
    """Return which of these a plan has: experts that no token chooses, rows longer than a window or than what
    rotation was trained on."""
    scaling, length = spec.positions.rope_scaling, plan.batch.seq_len
    windows = {kind.window for kind in layer_kinds(spec)[0]} - {None}
    by_length = scaling is not None and scaling.kind in ("dynamic", "longrope")
    trained = scaling.original_max_position_embeddings if scaling is not None else length
    return {
        "an expert without rows": can_idle(spec),
        "a window shorter than a row": any(window < length for window in windows if window),
        "rows longer than rotation was trained on": by_length and length > trained,
    }
