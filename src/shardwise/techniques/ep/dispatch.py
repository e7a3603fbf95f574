"""Rows go to the ranks that have their experts, and what these make of them comes back. One operation,
``shardwise::exchange_rows``, whose backward is the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.distributed.torch_private import group_named
from shardwise.models.grouped import owners, sorting

Products = Callable[[Tensor, Tensor], Tensor]
"""What the experts of this rank make of rows [R,d], sorted by expert, of which each has so many ([E])."""


class Dispatch(NamedTuple):
    """Between the ``ranks`` of the group with this name. ``imbalance``: in a fake world, where nothing comes, how many
    times the rows that it sends a rank is taken to get; None in a real one."""

    group: str
    ranks: int
    imbalance: float | None = None


def computed_elsewhere(products: Products, how: Dispatch, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows [n*k,d] sorted by expert, of which each of all E experts has so many ([E]) -> what the experts make of them,
    in the same order."""
    there = exchange_rows(counts, how.group, *[[counts.shape[0] // how.ranks] * how.ranks] * 2)
    if how.imbalance is None:
        sent, come = splits(counts.view(how.ranks, -1), there.view(how.ranks, -1))
    else:
        sent = _even(rows.shape[0], how.ranks)
        each = _even(round(rows.shape[0] * how.imbalance), there.shape[0])
        own_experts = there.shape[0] // how.ranks
        come = [sum(each[first : first + own_experts]) for first in range(0, there.shape[0], own_experts)]
        there = torch.tensor(each, device=there.device)
    of_rank = there.view(how.ranks, -1)
    own = exchange_rows(rows, how.group, sent, come)
    order, inverse = sorting(owners(of_rank.flatten(), own.shape[0]) % of_rank.shape[1])
    own = _Permuted.apply(own, order, inverse)
    own = _Permuted.apply(products(own, of_rank.sum(0)), inverse, order)
    back: Tensor = exchange_rows(own, how.group, come, sent)
    return back


def splits(by_rank: Tensor, of_rank: Tensor) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and come from each: of counts [ranks,E/ranks] for the experts of each rank, and
    from each rank for this one's. The one place where the host waits for the device."""
    sent, come = torch.stack([by_rank.sum(1), of_rank.sum(1)]).tolist()
    return sent, come


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (part < rows % parts) for part in range(parts)]


class _Permuted(torch.autograd.Function):
    """x [R,d] in another ``order``, whose ``inverse`` gives its gradients theirs: no two rows are one."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def exchanged(x: Tensor, group: str, sent: list[int], come: list[int]) -> Tensor:
    """x [R,..], of which each rank of a group gets so many rows (``sent``), one after another -> the rows that come
    from each, so many (``come``)."""
    out = x.new_empty(sum(come), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), come, sent, group=group_named(group))
    return out


exchange_rows = torch.library.custom_op("shardwise::exchange_rows", exchanged, mutates_args=())


@exchange_rows.register_fake
def _(x: Tensor, group: str, sent: list[int], come: list[int]) -> Tensor:
    return x.new_empty(sum(come), *x.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.sent, ctx.come = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange_rows(grad, ctx.group, ctx.come, ctx.sent), None, None, None


exchange_rows.register_autograd(_backward, setup_context=_save)
