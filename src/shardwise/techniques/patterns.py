"""precision.modules on paper: what changes in a unit when some of its modules compute in a type of their own.

Such a module converts its input, computes, and converts its result back. A linear layer then saves the converted input
instead of the one it was given; a norm in the type of statistics saves the wide copy that it would have made anyway.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.plan import Dtype
from shardwise.spec.sheet import Op, Unit
from shardwise.techniques.draft import Draft


class _TypedDraft(Draft):
    def converted(self, tensor: int, dtype: str) -> int:
        """The index of a copy of ``tensor`` in another type."""
        return self.add(*self.tensors[tensor].shape, dtype=dtype)

    def release(self, tensor: int, reads: int) -> None:
        """``tensor`` is no longer saved if no backward operation reads it (``reads`` counts those that still do), and
        so it is free in forward already."""
        if reads or tensor not in self.saved:
            return
        for index, op in enumerate(self.backward):
            self.backward[index] = replace(op, frees=tuple(other for other in op.frees if other != tensor))
        self.saved.discard(tensor)
        for op, plain in zip(list(self.forward), self.plain, strict=True):
            if tensor in plain.frees and tensor not in op.frees:
                index = self.forward.index(op)
                self.forward[index] = replace(op, frees=(*op.frees, tensor))


def rewrite(unit: Unit, types: dict[str, Dtype]) -> Unit:
    """``unit`` with the modules in ``types`` (by their name within the unit) in those types."""
    draft = _TypedDraft(unit)
    for module, dtype in types.items():
        weight = f"{module}.weight"
        if any(op.weight == weight and op.kind == "matmul" for op in draft.forward):
            _linear(draft, weight, dtype, draft.gradients[weight])
        elif module.endswith("norm"):
            _norm(draft, weight)
    return draft.done(
        replace(weight, used_as=types.get(weight.name.removesuffix(".weight"), weight.used_as))
        for weight in unit.weights
    )


def _linear(draft: _TypedDraft, weight: str, dtype: Dtype, gradient: int) -> None:
    index = next(i for i, op in enumerate(draft.forward) if op.weight == weight and op.kind == "matmul")
    given, result = draft.forward[index].reads[0], draft.forward[index].allocates[0]
    inside, product = draft.converted(given, dtype), draft.converted(result, dtype)
    for ops, keep in ((draft.forward, True), (draft.plain, False)):
        op = ops[index]
        ops[index : index + 1] = [
            Op("elementwise", "cast", (inside,), (), (given,)),
            replace(op, allocates=(product,), reads=(inside,), frees=() if keep else (inside,)),
            Op("elementwise", "cast", (result,), (product, *op.frees), (product,)),
        ]
    draft.saved.add(inside)
    draft.tensors[gradient] = replace(draft.tensors[gradient], dtype=dtype)
    _linear_backward(draft, weight, gradient, (given, inside))
    draft.release(given, sum(given in op.reads for op in draft.backward))


def _linear_backward(draft: _TypedDraft, weight: str, gradient: int, inputs: tuple[int, int]) -> None:
    """Converts the incoming gradient once, forms both products in the module's type, converts the outgoing one."""
    given, inside = inputs
    dtype = draft.tensors[inside].dtype
    first = next(i for i, op in enumerate(draft.backward) if gradient in op.allocates)
    second = next(i for i, op in enumerate(draft.backward) if op.weight == weight and op.kind == "matmul")
    incoming = draft.backward[first].reads[0]
    converted = draft.converted(incoming, dtype)
    outgoing = draft.backward[second].allocates[0]
    wide = draft.converted(outgoing, dtype)
    freed = any(given in draft.backward[i].frees for i in (first, second))
    for i in (first, second):
        op = draft.backward[i]
        draft.backward[i] = replace(op, frees=tuple(tensor for tensor in op.frees if tensor != given))
    op = draft.backward[second]
    draft.backward[second : second + 1] = [
        replace(op, allocates=(wide,), reads=(converted,), frees=(*op.frees, inside, converted)),
        Op("elementwise", "cast", (outgoing,), (wide,), (wide,)),
    ]
    draft.backward[first] = replace(draft.backward[first], reads=(converted, inside))
    draft.backward.insert(first, Op("elementwise", "cast", (converted,), (), (incoming,)))
    if freed:
        # Whoever still reads the given input is now the last to do so.
        last = max((i for i, other in enumerate(draft.backward) if given in other.reads), default=None)
        if last is not None:
            draft.backward[last] = replace(draft.backward[last], frees=(*draft.backward[last].frees, given))


def _norm(draft: _TypedDraft, weight: str) -> None:
    start = next(i for i, op in enumerate(draft.forward) if op.name == "aten._to_copy" and _norm_of(draft, i) == weight)
    given, wide = draft.forward[start].reads[0], draft.forward[start].allocates[0]
    for index, op in enumerate(draft.forward):
        if wide in op.frees:
            draft.forward[index] = replace(op, frees=tuple(tensor for tensor in op.frees if tensor != wide))
    draft.saved.add(wide)
    copy = next(i for i, op in enumerate(draft.backward) if op.reads == (given,) and op.name == "aten._to_copy")
    dropped = draft.backward[copy].allocates[0]
    draft.backward[copy] = replace(draft.backward[copy], allocates=(), reads=())
    for index, op in enumerate(draft.backward):
        reads = tuple(wide if tensor == dropped else tensor for tensor in op.reads)
        frees = tuple(tensor for tensor in op.frees if tensor != dropped)
        if given in frees:
            frees = (*frees, wide)
        draft.backward[index] = replace(op, reads=reads, frees=frees)
    draft.release(given, sum(given in op.reads for op in draft.backward))


def _norm_of(draft: _TypedDraft, start: int) -> str:
    """The norm that begins at this operation: the first whose weight is read from here on."""
    return next((op.weight for op in draft.forward[start:] if op.weight), "")
