"""What attention holds while it runs where its values are narrower than its keys, as latent attention has them."""

from __future__ import annotations

from shardwise.spec.sheet import At, Op, Within, number


def widened(op: Op, at: At) -> Within | None:
    """Return what attention holds meanwhile where its values are narrower than its keys, else None: copies as wide as
    keys of the values and the output; in backward of these, of the output's gradient and of that of the values
    (models/attention.py)."""
    heads, tokens, _, width, key_heads, value_width = (number(dim, (at.b, at.s)) for dim in op.dims)
    if width == value_width:
        return None
    queries, keys = (each * tokens * width * at.width for each in (heads, key_heads))
    if op.name.endswith("_backward"):
        return Within(2 * queries + 2 * keys - keys * value_width // width)
    return Within(queries + keys - queries * value_width // width)
