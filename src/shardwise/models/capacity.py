"""How many tokens an expert takes of a row at most, and which of those that chose it find no room.

An expert keeps those with the largest router weights, of equal ones the earlier. What is dropped is neither sent nor
computed: it adds nothing to its token from this expert, and the weights of the token's other experts stay what they
are. A row is counted by itself, so that the same tokens are dropped in any layout (docs/decisions/0021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.models.balance import RowPlaces


def within_capacity(ids: Tensor, weights: Tensor, places: RowPlaces, experts: int, room: int) -> tuple[Tensor, Tensor]:
    """The ids [n,k], with E, which is none of so many ``experts``, for each that finds no room where an expert has
    ``room`` of a row; and how many these are. Padding has E too: it takes no room, and is not counted."""
    row, inside = places.of(ids.shape[0], weights)
    outside = places.rows * experts
    group = (row.unsqueeze(-1) * experts + ids).masked_fill_(inside.unsqueeze(-1) == 0, outside).flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    order = by_weight[group[by_weight].argsort(stable=True)]
    group = group[order]
    ahead = torch.arange(len(order), device=order.device) - torch.searchsorted(group, group)
    padding, full = group == outside, ahead >= room
    dropped = torch.empty_like(full).scatter_(0, order, full | padding).view_as(ids)
    return ids.masked_fill(dropped, experts), (full & ~padding).sum()
