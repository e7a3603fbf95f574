"""What tensor-parallel ranks hold of each parameter, and which gradients are parts of a sum over them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.models.roles import role
from shardwise.spec.sheet import Sheet, Tensor

COLUMNS = ("q", "k", "v", "gate", "up")
"""Roles of products whose outputs are cut."""
ROWS = ("o", "down")
"""Roles of products whose inputs are cut, so that each rank has a part of a sum."""
TABLES = ("embed", "head")


@dataclass(frozen=True)
class State:
    """Of a parameter: the dim that is cut over the ranks, None if each holds it whole. ``inside``: it is used between
    ``enter`` and ``leave``, where ranks compute different things, not on the residual stream."""

    dim: int | None
    inside: bool

    def partial(self, *, sequence_parallel: bool) -> bool:
        """Whether each rank's gradient is only a part of a sum over the ranks: so it is for a parameter that all ranks
        hold, but use with their own heads, columns or tokens."""
        return self.dim is None and (self.inside or sequence_parallel)


def state(name: str, key_heads: int, ranks: int, *, heads_apart: bool = True) -> State:
    """The technique's one fact, by canonical name; a name of which it does not know is a ValueError. ``heads_apart``:
    queries and keys are normalised head by head, not over the whole projection."""
    layer, _, word = name.rpartition(".")
    *_, place = layer.split(".")
    if word == "lora_m":  # a number for each output of its layer
        adapted = state(f"{layer}.weight", key_heads, ranks)
        return State(0 if adapted.dim == 0 else None, inside=True)
    if place in ("lora_a", "lora_b"):
        adapted = state(f"{layer.rpartition('.')[0]}.weight", key_heads, ranks)
        own = 0 if place == "lora_b" else 1  # B has the outputs of its layer, A its inputs
        return State(own if adapted.dim == own else None, inside=True)
    if word == "groups":  # of a matrix in 4 bits, which is quantised whole
        return State(None, inside=True)
    if place in ("k", "v") and key_heads < ranks:
        return State(None, inside=True)  # whole, and each rank uses the head that its query heads look at
    if place in COLUMNS:
        return State(0, inside=True)
    if place in ROWS:
        return State(1, inside=True) if word in ("weight", "codes", "sizes") else State(None, inside=False)
    if place in TABLES:
        return State(0, inside=True)
    if word != "weight" or role(name) != "norm":
        raise ValueError(f"tensor parallelism does not know how to cut `{name}`: add what it is to {__name__}.state")
    if place in ("q_norm", "k_norm"):
        return State(None if heads_apart else 0, inside=True)
    return State(None, inside=False)


def whole_shape(weight: Tensor, sheet: Sheet, ranks: int) -> tuple[int, ...]:
    """The shape of the whole parameter of which ``weight``, on a sheet that tensor parallelism has cut, is a piece."""
    shape = [dim for dim in weight.shape if isinstance(dim, int)]
    cut = state(weight.name, sheet.key_heads, ranks, heads_apart=sheet.heads_apart).dim if ranks > 1 else None
    if cut is not None:
        ids = weight.name.rpartition(".")[0] in TABLES
        shape[cut] = sheet.sizes["V"] if ids else shape[cut] * ranks
    return tuple(shape)
