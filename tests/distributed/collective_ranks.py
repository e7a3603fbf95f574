"""What the ranks of tests/distributed/test_collectives.py do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.distributed import collectives
from shardwise.distributed.collectives import enter, leave

WIDTH, INNER = 6, 8


def tensors(tokens: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Stream [*tokens,d], column weight, row weight, and what the result's gradient is."""
    torch.manual_seed(1)
    shapes = [(*tokens, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (*tokens, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(tokens: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Result, and gradients of stream and weights, of one process."""
    *inputs, slope = tensors(tokens, dtype)
    stream, column, row = (x.requires_grad_() for x in inputs)
    out = torch.tanh(stream + torch.tanh(stream @ column.mT) @ row.mT)
    out.backward(slope)
    return [out.detach(), *(x.grad for x in (stream, column, row))]


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def share(x: Tensor, rank: int, world: int) -> Tensor:
    """This rank's tokens of [..,d], filled up with zeros."""
    flat = x.flatten(0, -2)
    count = -(-len(flat) // world)
    padded = torch.cat([flat, flat.new_zeros(count * world - len(flat), flat.shape[-1])])
    return padded[rank * count :][:count].clone()


def block(
    stream: Tensor, column: Tensor, row: Tensor, group: dist.ProcessGroup, tokens: tuple[int, ...] | None
) -> Tensor:
    inner = torch.tanh(enter(stream, group, tokens) @ column.mT)
    return torch.tanh(stream + leave(inner @ row.mT, group, tokens is not None))


def kept(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(selective: bool) -> Callable[..., Tensor]:
    options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if selective else {}
    return partial(checkpoint, block, use_reentrant=False, **options)


def compiled() -> Callable[..., Tensor]:
    torch._dynamo.reset()
    run: Callable[..., Tensor] = torch.compile(block, fullgraph=True, backend="aot_eager")
    return run


def sum_in_place(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x.detach(), group=group)
    return x


HOW: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "plain": lambda: block,
    "full": lambda: recomputed(False),
    "selective": lambda: recomputed(True),
    "compiled": compiled,
    "in place": lambda: recomputed(True),
}


def ours(
    rank: int, world: int, how: str, tokens: tuple[int, ...], cut: bool, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """As :func:`whole`; of a cut stream this rank's tokens, of the weights its columns and rows."""
    plain = collectives.summed
    if how == "in place":
        collectives.summed = sum_in_place
    try:
        *inputs, slope = tensors(tokens, dtype)
        stream, column, row = inputs[0], inputs[1].chunk(world)[rank].clone(), inputs[2].chunk(world, 1)[rank].clone()
        if cut:
            stream, slope = share(stream, rank, world), share(slope, rank, world)
        given = [x.requires_grad_() for x in (stream, column, row)]
        before = [x.detach().clone() for x in given]
        out = HOW[how]()(*given, group(), tokens if cut else None)
        out.backward(slope)
        assert all(map(torch.equal, before, (x.detach() for x in given)))
        return [out.detach(), *(x.grad for x in given)]
    finally:
        collectives.summed = plain


def expected(rank: int, world: int, tokens: tuple[int, ...], cut: bool, dtype: torch.dtype) -> list[Tensor]:
    """What :func:`ours` must give on this rank, from :func:`whole`."""
    out, stream, column, row = whole(tokens, dtype)
    if cut:
        out, stream = share(out, rank, world), share(stream, rank, world)
    return [out, stream, column.chunk(world)[rank], row.chunk(world, 1)[rank]]


def products(rank: int, world: int, tokens: tuple[int, ...], cut: bool) -> tuple[float, float, float, float]:
    """<enter x, y>, <x, enter' y>, <leave y, x> and <y, leave' x> over all ranks; a whole x is one tensor, counted on
    the first rank, and y is another on each."""
    torch.manual_seed(2)
    x = torch.randn(*tokens, WIDTH, dtype=torch.float64)
    x = (share(x, rank, world) if cut else x).requires_grad_()
    torch.manual_seed(3 + rank)
    y = torch.randn(*tokens, WIDTH, dtype=torch.float64).requires_grad_()
    entered = enter(x, group(), tokens if cut else None)
    left = leave(y, group(), cut)
    once = float(cut or rank == 0)
    sums = [
        (entered * y).sum(),
        once * (x * torch.autograd.grad(entered, x, y.detach())[0]).sum(),
        once * (left * x).sum(),
        (y * torch.autograd.grad(left, y, x.detach())[0]).sum(),
    ]
    total = torch.stack(sums).detach()
    dist.all_reduce(total)
    return tuple(total.tolist())  # type: ignore[return-value]


def unrecorded(rank: int, world: int) -> bool:
    """Without gradients: nothing is recorded, and one pair behind the other gives ranks times the stream."""
    stream = torch.arange(24.0).view(2, 2, 6)
    with torch.no_grad():
        whole = leave(enter(stream, group()), group())
        back = leave(enter(share(stream, rank, world), group(), (2, 2)), group(), cut=True)
    assert not whole.requires_grad and not back.requires_grad
    return torch.equal(whole, world * stream) and torch.equal(back, world * share(stream, rank, world))
