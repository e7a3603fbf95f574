"""The room that an expert has for the tokens of a row, and the choice of those that find none.

An expert keeps the tokens with the largest router weights, of equal ones the earlier: weights are compared as rounded
to bf16, so that another layout or micro-batch, whose sums round otherwise, reorders none that are alike. Padding takes
no room: it would be alike in hundreds. What is dropped is neither sent nor computed: it adds nothing to its token from
this expert, and the weights of the token's other experts stay what they are. A row is counted by itself, so that the
same tokens are dropped in any layout (docs/decisions/0021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.models.router_losses import RowPlaces


def within_capacity(ids: Tensor, weights: Tensor, places: RowPlaces, experts: int, room: int) -> tuple[Tensor, Tensor]:
    """The ids [n,k], with E, which is none of so many ``experts``, for each that finds no room where an expert has
    ``room`` of a row; and how many these are. Padding has E too: it takes no room, and is not counted."""
    row, inside = places.of(ids.shape[0], weights)
    outside, absent = places.rows * experts, inside == 0
    if places.filled is not None:
        place = places.first + torch.arange(ids.shape[0], device=ids.device) - row * places.length
        absent |= place >= places.filled.index_select(0, row)
    group = (row.unsqueeze(-1) * experts + ids).masked_fill_(absent.unsqueeze(-1), outside).flatten()
    by_weight = rounded(weights).flatten().argsort(descending=True, stable=True)
    order = by_weight[group[by_weight].argsort(stable=True)]
    group = group[order]
    ahead = torch.arange(len(order), device=order.device) - torch.searchsorted(group, group)
    padding, full = group == outside, ahead >= room
    dropped = torch.empty_like(full).scatter_(0, order, full | padding).view_as(ids)
    return ids.masked_fill(dropped, experts), (full & ~padding).sum()


def rounded(weights: Tensor) -> Tensor:
    """Router weights as they are compared."""
    return weights.to(torch.bfloat16)
