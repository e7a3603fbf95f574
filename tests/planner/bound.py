"""Numbers in the place of symbols, for a whole unit at once: what planner/sheets.py does piece by piece, and only once
for pieces that are alike."""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.sheet import Op, Sizes, Tensor, Unit, grown, size_of


def bound(unit: Unit, sizes: Sizes) -> Unit:
    """The unit with the numbers that its symbols stand for."""
    weights, tensors = (tuple(tensor_of(each, sizes) for each in all_) for all_ in (unit.weights, unit.tensors))
    passes = (unit.forward, unit.forward_plain, unit.backward)
    forward, plain, backward = (tuple(op_of(op, sizes) for op in ops) for ops in passes)
    return replace(unit, weights=weights, tensors=tensors, forward=forward, forward_plain=plain, backward=backward)


def tensor_of(tensor: Tensor, sizes: Sizes) -> Tensor:
    if not tensor.symbols:
        return tensor
    shape = tuple(dim if dim in ("b", "s", "b*s") else size_of(dim, sizes) for dim in tensor.symbols)
    return replace(tensor, shape=shape)


def op_of(op: Op, sizes: Sizes) -> Op:
    """The operation with its numbers, and the matrix of one that is no product."""
    if op.dims and op.kind == "elementwise":
        return replace(op, dims=tuple(size_of(dim, sizes) for dim in op.dims))
    if not op.symbols:
        return op
    flops, per = grown(op.symbols, sizes)
    return replace(op, flops=flops, per=per)
