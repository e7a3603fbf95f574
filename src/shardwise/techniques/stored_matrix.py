"""A linear layer, or experts, whose frozen matrix is stored as bytes: codes, and the scales of these. The matrix is
made when it is multiplied by, forward and backward, and kept in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.distributed.slices import local
from shardwise.models.grouped import grouped
from shardwise.models.moe import Stacked, of_owners, taken
from shardwise.models.roles import is_adaptable
from shardwise.techniques.product import bias_of, product_of, share_of
from shardwise.techniques.quantised import Shapes
from shardwise.techniques.share import MatrixPiece

BY_ROWS = ("codes", "sizes", "e4m3")
"""What is stored that has a row for each row of the matrix."""
Kept = Sequence[Tensor]
"""What is stored of a matrix."""
Restore = Callable[[Kept, torch.dtype, MatrixPiece | None, int, bool], Tensor]
"""Makes of what is stored the matrix [out, in] in a dtype: a piece of the whole one, or those of so many experts; in
backward ``again``, which the compiler must not take for the operation of forward: it would keep the matrix for it."""
Made = Callable[[Kept, torch.dtype, bool], Tensor]
"""The same, of the rows that a rank multiplies by: [out, in], or of experts [E, out, in]."""


class StoredMatrix(NamedTuple):
    """Stands in a layer in the place of a weight: ``used()`` is what is stored of the rows that it multiplies by."""

    used: Callable[[], list[Tensor]]
    made: Made


def linear(x: Tensor, bias: Tensor | None, kept: Kept, made: Made) -> Tensor:
    """x [.., in] -> [.., out] in x's dtype, by the matrix that is ``made`` of what is ``kept``."""
    out: Tensor = _Linear.apply(x, bias, made, *parts(kept))
    return out


def parts(kept: Kept) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one by one what is kept: torch's compiler takes no function of autograd with a number of arguments that is
    open."""
    return kept[0], kept[1], kept[2] if len(kept) > 2 else None


def as_kept(codes: Tensor, scales: Tensor, groups: Tensor | None) -> list[Tensor]:
    """Return as a list what :func:`parts` gave one by one."""
    return [codes, scales] if groups is None else [codes, scales, groups]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, made: Made, codes: Tensor, scales: Tensor, groups: Tensor | None
    ) -> Tensor:
        return functional.linear(x, made(as_kept(codes, scales, groups), x.dtype, False), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.made, codes, scales, groups = inputs
        ctx.save_for_backward(codes, scales, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, groups = ctx.saved_tensors
        return grad @ ctx.made(as_kept(codes, scales, groups), grad.dtype, True), None, None, None, None, None


def stacked(x: Tensor, counts: Tensor, kept: Kept, made: Made) -> Tensor:
    """x [R, in], sorted by expert, of which each has so many of its rows (``counts`` [E]) -> [R, out]. The matrices of
    all are made when they are used."""
    out: Tensor = _ProductOfExperts.apply(x, counts, made, *parts(kept))
    return out


class _ProductOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, counts: Tensor, made: Made, codes: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
        return grouped(x, made(as_kept(codes, scales, groups), x.dtype, False), counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, counts, ctx.made, codes, scales, groups = inputs
        ctx.save_for_backward(counts, codes, scales, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, codes, scales, groups = ctx.saved_tensors
        matrices = ctx.made(as_kept(codes, scales, groups), grad.dtype, True)
        return grouped(grad, matrices.transpose(1, 2), counts), None, None, None, None, None


def store_layers(parts: list[nn.Module], shapes: Shapes, restore: Restore) -> list[nn.Module]:
    """Have all linear layers and experts of blocks store their matrices so (:func:`store_as`)."""
    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear | Stacked) and is_adaptable(f"{name}.weight"):
                experts = module.experts if isinstance(module, Stacked) else 1
                rows, columns = module.weight.shape
                store_as(module, shapes(rows, columns, experts), restore)
    return parts


def store_as(module: nn.Linear | Stacked, shapes: Mapping[str, tuple[int, int]], restore: Restore) -> None:
    """Replace the weight of a layer by parameters of bytes with these names and shapes, by which it multiplies from now
    on. For techniques that multiply in another way it has ``stored``, a :class:`StoredMatrix`; a linear layer can also
    give the values of its matrix (``dequantised``)."""
    device = module.weight.device
    for name, shape in shapes.items():
        kept = torch.empty(shape, dtype=torch.uint8, device=device)
        module.register_parameter(name, nn.Parameter(kept, requires_grad=False))
    del module.weight

    def used() -> list[Tensor]:
        share = share_of(module)
        held = {name: local(module.get_parameter(name)) for name in shapes}
        return [share.used(held[name]) if name in BY_ROWS else held[name] for name in shapes]

    if isinstance(module, Stacked):
        product_of(module).multiply = _of_experts(module, StoredMatrix(used, _matrices(module, restore)))
    else:
        product_of(module).multiply = _of_linear(module, StoredMatrix(used, _matrix(module, restore)))


def _of_experts(module: Stacked, stored: StoredMatrix) -> Callable[[Tensor, Tensor], Tensor]:
    def multiply(x: Tensor, counts: Tensor) -> Tensor:
        out = stacked(taken(x), counts, stored.used(), stored.made)
        return out if module.bias is None else out + of_owners(local(module.bias), counts, out)

    module.stored = stored  # type: ignore[assignment]
    return multiply


def _matrices(module: Stacked, restore: Restore) -> Made:
    def made(kept: Kept, dtype: torch.dtype, again: bool) -> Tensor:
        experts = kept[0].shape[0] // module.rows
        return restore(kept, dtype, None, experts, again).unflatten(0, (experts, module.rows))

    return made


def _of_linear(module: nn.Linear, stored: StoredMatrix) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        return linear(x, bias_of(module, x.dtype), stored.used(), stored.made)

    module.stored = stored  # type: ignore[assignment]
    module.dequantised = lambda: stored.made(stored.used(), torch.float32, False)  # type: ignore[assignment]
    return multiply


def _matrix(module: nn.Linear, restore: Restore) -> Made:
    return lambda kept, dtype, again: restore(kept, dtype, share_of(module).piece, 1, again)
