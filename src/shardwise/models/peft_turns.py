"""Adapters of layers whose rows the files have in turn, head by head, in one layer with those of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.models.hf_names import Location, locations
from shardwise.models.roles import is_expert
from shardwise.models.stored import StoredParameter
from shardwise.models.tensorfile import Entry


def in_turn(spec: ModelSpec) -> dict[str, tuple[Location, ...]]:
    """Return where the rows of a layer are, by its weight, that shares one of the files' with others, head by head."""
    if spec.hf_model is not None:
        return {}
    found = {name: parts for name, parts in locations(spec).items() if len(parts) > 1 and not is_expert(name)}
    return {name: parts for name, parts in found.items() if parts[0].expert is None}


def weight_of(name: str) -> str:
    """Return the weight of the layer whose adapter has the parameter with this name."""
    return f"{name.removesuffix('.weight').rpartition('.')[0]}.weight"


def turned(joined: Tensor, names: Sequence[str], turns: Mapping[str, tuple[Location, ...]]) -> Tensor:
    """Rows of several layers, one's after another's, in the places where the files have them."""
    held = [one for name in names for one in turns.get(weight_of(name), ())]
    if not held:
        return joined
    order = [torch.arange(one.first, one.first + one.stop - one.start) for one in held]
    return torch.empty_like(joined).index_copy_(0, torch.cat(order), joined)


def mixed(blocks: Sequence[tuple[Entry | StoredParameter, int]], shapes: Sequence[tuple[int, ...]], wide: int) -> bool:
    """Return whether rows hold anything outside their block of columns, ``wide`` with the others', which begins at the
    given column."""
    rank = wide // len(blocks)
    found = (
        (entry.read() if isinstance(entry, Entry) else entry.read_finite((slice(0, shape[0]), slice(0, wide))), column)
        for (entry, column), shape in zip(blocks, shapes, strict=True)
    )
    return any(rows.count_nonzero() > rows[:, column : column + rank].count_nonzero() for rows, column in found)
