"""What is left of a unit on paper when some of its weights are frozen, or nothing before it is trained.

Autograd's rule, in the terms of a sheet: a backward operation runs if what it makes leads to a gradient that is wanted,
or if it is in one function with an operation that runs; within a function only what makes the gradient of a frozen
weight, and nothing else, is left out. A tensor is saved if an operation that runs reads it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardwise.spec.sheet import KEPT_UNITS, Op, Unit


@lru_cache(maxsize=KEPT_UNITS)
def prune(unit: Unit, held: frozenset[str], *, input_trained: bool) -> Unit:
    """``unit`` with the weights named in ``held`` frozen; ``input_trained``: its input needs a gradient."""
    wanted = tuple((name, tensor) for name, tensor in unit.weight_gradients if name not in held)
    unwanted = frozenset(tensor for name, tensor in unit.weight_gradients if name in held)
    roots = {tensor for _, tensor in wanted} | ({unit.gradient_out} if input_trained else set())
    running = _running(unit.backward, frozenset(roots), unwanted)
    read = {tensor for op in unit.backward for tensor in op.reads}
    still_read = {tensor for index in running for tensor in unit.backward[index].reads}
    saved = frozenset(tensor for tensor in unit.saved if tensor in still_read or tensor not in read)
    return replace(
        unit,
        weights=tuple(replace(weight, trained=weight.name not in held) for weight in unit.weights),
        forward=_forward(unit, unit.saved - saved),
        backward=_backward(unit, running, saved),
        weight_gradients=wanted,
        gradient_out=unit.gradient_out if input_trained else -1,
        saved=saved,
    )


def _running(ops: tuple[Op, ...], roots: frozenset[int], unwanted: frozenset[int]) -> list[int]:
    """The indices of the backward operations that run."""
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for tensor in op.reads:
            readers.setdefault(tensor, []).append(index)
    dropped: set[int] = set()
    for index in range(len(ops) - 1, -1, -1):
        made = ops[index].allocates
        if made and all(
            tensor in unwanted or (bool(readers.get(tensor)) and dropped.issuperset(readers[tensor])) for tensor in made
        ):
            dropped.add(index)
    running: set[int] = set()
    needed, nodes, grown = set(roots), set[int](), True
    while grown:  # once more where a node is found by an operation that is not its last
        before = len(running)
        for index in range(len(ops) - 1, -1, -1):
            op = ops[index]
            if index in running or index in dropped:
                continue
            if (op.node >= 0 and op.node in nodes) or not needed.isdisjoint(op.allocates):
                running.add(index)
                nodes.add(op.node)
                needed.update(op.reads)
        grown = len(running) > before
    return sorted(running)


def _forward(unit: Unit, released: frozenset[int]) -> tuple[Op, ...]:
    """Forward frees what is no longer saved where it would be freed if nothing were."""
    return tuple(
        op.freeing((*op.frees, *more))
        if (more := [t for t in plain.frees if t in released and t not in op.frees])
        else op
        for op, plain in zip(unit.forward, unit.forward_plain, strict=True)
    )


def _backward(unit: Unit, running: list[int], saved: frozenset[int]) -> tuple[Op, ...]:
    """What runs, with everything that it makes or uses up freed at its last use."""
    ops = {index: unit.backward[index] for index in running}
    alive = saved | {unit.gradient_in} | {tensor for op in ops.values() for tensor in op.allocates}
    frees: dict[int, list[int]] = {index: [] for index in running}
    for index, op in enumerate(unit.backward):
        for tensor in op.frees:
            if tensor not in alive:
                continue
            place = index
            if index not in ops or (tensor in saved and _let_go(unit.backward, index, tensor, running)):
                uses = [_end(ops, i) for i, other in ops.items() if tensor in other.reads or tensor in other.allocates]
                place = max(uses, default=running[0] if running else -1)
            if place >= 0:
                frees[place].append(tensor)
    return tuple(op if op.frees == (own := tuple(frees[index])) else op.freeing(own) for index, op in ops.items())


def _let_go(ops: tuple[Op, ...], index: int, tensor: int, running: list[int]) -> bool:
    """Whether the operation at ``index`` frees the tensor for a product before it, of the same layer, that is left out:
    the layer then never held it."""
    op = ops[index]
    before = index - 1
    return tensor not in op.reads and before not in running and tensor in ops[before].reads and _paired(ops[before], op)


def _end(ops: dict[int, Op], index: int) -> int:
    """Where the function that ran the operation at ``index`` lets go of what it saved: of a layer's two products, both
    with the incoming gradient, at the second."""
    return index + 1 if index + 1 in ops and _paired(ops[index], ops[index + 1]) else index


def _paired(one: Op, other: Op) -> bool:
    return one.kind == other.kind == "matmul" and one.reads[:1] == other.reads[:1]
