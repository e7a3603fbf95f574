"""precision.modules on paper: what changes in a unit when some of its modules have their own compute dtype.

Such a module converts its input, computes, and converts its result back. A linear layer then saves the converted input
instead of the one it was given; a norm in fp32 saves the fp32 copy that it would have made anyway.
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
        """Stop saving ``tensor`` if no backward operation reads it any more (``reads`` counts the ones that do): it is
        then freed in forward."""
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
        if any(_multiplies(op, module) for op in draft.forward):
            _linear(draft, module, dtype)
        elif module.endswith("norm"):
            _norm(draft, f"{module}.weight")
    return draft.done(
        replace(weight, used_as=types.get(weight.name.rpartition(".")[0], weight.used_as)) for weight in unit.weights
    )


def _multiplies(op: Op, module: str) -> bool:
    """Whether ``op`` is the product of the linear layer ``module``, or that with its bias added."""
    return op.kind == "matmul" and op.weight in (f"{module}.weight", f"{module}.bias")


def _linear(draft: _TypedDraft, module: str, dtype: Dtype) -> None:
    index = next(i for i, op in enumerate(draft.forward) if _multiplies(op, module))
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
    _linear_backward(draft, module, (given, inside))
    draft.release(given, sum(given in op.reads for op in draft.backward))


def _linear_backward(draft: _TypedDraft, module: str, inputs: tuple[int, int]) -> None:
    """Converts the incoming gradient once, forms the products (and the sum that is the gradient of a bias) in the
    module's type, converts the outgoing gradient."""
    given, inside = inputs
    names = (f"{module}.weight", f"{module}.bias")
    gradients = {draft.gradients[name] for name in names if name in draft.gradients}
    for gradient in gradients:
        draft.tensors[gradient] = replace(draft.tensors[gradient], dtype=draft.tensors[inside].dtype)
    own = [i for i, op in enumerate(draft.backward) if _multiplies(op, module) or gradients.intersection(op.allocates)]
    incoming = draft.backward[own[0]].reads[0]
    converted = draft.converted(incoming, draft.tensors[inside].dtype)
    freed = any(given in draft.backward[i].frees for i in own)
    outgoing = wide = -1
    for i in own:
        op = draft.backward[i]
        reads = tuple({incoming: converted, given: inside}.get(tensor, tensor) for tensor in op.reads)
        draft.backward[i] = replace(op, reads=reads, frees=tuple(tensor for tensor in op.frees if tensor != given))
        if _multiplies(op, module):
            (outgoing,) = op.allocates
            wide = draft.converted(outgoing, draft.tensors[inside].dtype)
            draft.backward[i] = replace(draft.backward[i], allocates=(wide,))
    last = draft.backward[own[-1]]
    draft.backward[own[-1]] = replace(last, frees=(*last.frees, inside, converted))
    draft.backward.insert(own[-1] + 1, Op("elementwise", "cast", (outgoing,), (wide,), (wide,)))
    draft.backward.insert(own[0], Op("elementwise", "cast", (converted,), (), (incoming,)))
    if freed:
        # Whoever still reads the given input is now the last to do so.
        last_read = max((i for i, other in enumerate(draft.backward) if given in other.reads), default=None)
        if last_read is not None:
            op = draft.backward[last_read]
            draft.backward[last_read] = replace(op, frees=(*op.frees, given))


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
