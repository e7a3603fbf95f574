"""Cells: a layer with an adapter, traced alone (planner/trace.py) in symbols of its own, and spliced into a unit on
paper in the place of the layer.

A cell lists what the layer does with its own weight and bias frozen: its product first in forward and last in backward,
but for the sum of what both ways send to the input. The unit has that product already, with whatever else stands
around it, so everything else of the cell is put behind it in forward and before it in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from shardwise.spec.plan import Lora
from shardwise.spec.sheet import Dim, Op, Unit, size_of
from shardwise.techniques.draft import Draft

PRIMES = {"in": 211, "out": 223, "r": 229}
"""What stands for the sizes of the layer's input and output and for the rank where a cell is traced. A cell has one
more symbol: ``w``, the rows that are wide at a time while DoRA's norms are made, no product of these."""
NAMES: tuple[str, ...] = tuple(
    " ".join(["adapter", *words, *more])
    for words in ([], ["dropout"])
    for more in ([], *(["dora", *filter(None, kind)] for kind in product(("", "biased"), ("", "apart"))))
)
"""``apart``: the magnitudes are of a type of their own, that of statistics."""


def name_of(lora: Lora, *, biased: bool, apart: bool) -> str:
    """Which cell a layer is; ``biased``: it has a bias when its adapter runs."""
    words = {
        "dropout": lora.dropout > 0,
        "dora": lora.dora,
        "biased": lora.dora and biased,
        "apart": lora.dora and apart,
    }
    return " ".join(["adapter", *(word for word, said in words.items() if said)])


def splice(draft: Draft, index: int, cell: Unit, module: str, sizes: Mapping[str, int]) -> None:
    """Rewrites the product of ``module`` at ``index`` of the forward operations, and its backward; ``sizes`` are those
    of the cell's symbols."""
    spliced = _Spliced(draft, cell, module, sizes)
    spliced.forward(index)
    spliced.backward()


class _Spliced:
    def __init__(self, draft: Draft, cell: Unit, module: str, sizes: Mapping[str, int]) -> None:
        self.draft, self.cell, self.module, self.sizes = draft, cell, module, sizes
        self.names: dict[int, int] = {}
        self.dims: dict[Dim, Dim] = {dim: dim for dim in ("b", "s", "b*s")}

    def dim(self, dim: Dim) -> Dim:
        if dim not in self.dims:
            self.dims[dim] = size_of(dim, self.sizes)
        return self.dims[dim]

    def tensor(self, index: int) -> int:
        """The unit's tensor for one of the cell's."""
        if index not in self.names:
            traced = self.cell.tensors[index]
            self.names[index] = self.draft.add(*map(self.dim, traced.symbols), dtype=traced.dtype)
        return self.names[index]

    def op(self, op: Op, *held: int) -> Op:
        """The unit's operation for one of the cell's; it does not free what is ``held``."""
        made, reads = (tuple([self.tensor(t) for t in each]) for each in (op.allocates, op.reads))
        frees = tuple([self.tensor(t) for t in op.frees if t not in held])
        weight = f"{self.module}.{op.weight}" if op.weight else ""
        flops = int(self.dim(op.symbols)) if op.symbols else 0
        return Op(op.kind, op.name, made, frees, reads, weight, flops, op.per)

    def forward(self, index: int) -> None:
        """The caller lets go of what it held for the product once the layer has returned."""
        draft, cell = self.draft, self.cell
        op = draft.forward[index]
        result, last = op.allocates[0], cell.output
        self.names |= {cell.input: op.reads[0], cell.forward[0].allocates[0]: result}
        for ops, more in ((draft.forward, cell.forward[1:]), (draft.plain, cell.forward_plain[1:])):
            inner = [self.op(each, cell.input, last) for each in more]
            inner[-1] = inner[-1].freeing((*inner[-1].frees, *ops[index].frees))
            after = (renamed(other, result, self.tensor(last)) for other in ops[index + 1 :])
            ops[index:] = [ops[index].freeing(()), *inner, *after]
        if result in draft.saved:
            draft.saved = draft.saved - {result} | {self.tensor(last)}
        draft.saved |= {self.tensor(saved) for saved in cell.saved if saved != cell.input}
        draft.backward = [renamed(other, result, self.tensor(last)) for other in draft.backward]

    def backward(self) -> None:
        """The adapter's backward comes before the layer's own, and the input's gradients are summed as they arrive."""
        draft, cell = self.draft, self.cell
        *inner, own_product, total = cell.backward
        mine = {
            draft.gradients[name] for kind in ("weight", "bias") if (name := f"{self.module}.{kind}") in draft.gradients
        }
        product = next(op for op in draft.backward if op.kind == "matmul" and op.weight == f"{self.module}.weight")
        incoming, outgoing = product.reads[0], product.allocates[0]
        own = [i for i, op in enumerate(draft.backward) if op is product or not mine.isdisjoint(op.allocates)]
        first, last = own[0], own[-1]
        self.names[cell.gradient_in] = incoming
        freed = any(incoming in op.frees for op in draft.backward[first : last + 1])
        ops = [self.op(op, cell.input, *([] if freed else [cell.gradient_in])) for op in inner]
        if own_product.reads[0] != cell.gradient_in:
            self._reread(own, incoming, self.tensor(own_product.reads[0]))
        draft.gradients |= {f"{self.module}.{name}": self.tensor(tensor) for name, tensor in cell.weight_gradients}
        through, summed = self.tensor(total.reads[0]), self.tensor(cell.gradient_out)
        join = next(
            (i for i, op in enumerate(draft.backward) if op.name == "aten.add.Tensor" and outgoing in op.reads[1:]), 0
        )
        if join:  # another layer's gradient of the same input is there already
            before = draft.backward[join].reads[0]
            draft.tensors[summed] = replace(draft.tensors[summed], inside=draft.tensors[before].inside)
            ops.append(Op("elementwise", "aten.add.Tensor", (summed,), (before, through), (before, through)))
            draft.backward[join] = renamed(draft.backward[join], before, summed)
            draft.backward[first:first] = ops
        else:
            ops += draft.backward[first : last + 1]
            ops.append(Op("elementwise", "aten.add.Tensor", (summed,), (through, outgoing), (through, outgoing)))
            rest = [renamed(op, outgoing, summed) for op in draft.backward[last + 1 :]]
            draft.backward[first:] = ops + rest

    def _reread(self, own: list[int], incoming: int, bare: int) -> None:
        """The layer's ``own`` operations read what the adapter's backward hands on, the last of them as the last."""
        users = [i for i in own if incoming in self.draft.backward[i].reads]
        for i in own:
            op = renamed(self.draft.backward[i], incoming, bare)
            frees = (*(t for t in op.frees if t != bare), *([bare] if i == users[-1] else []))
            self.draft.backward[i] = op.freeing(frees)


def renamed(op: Op, old: int, new: int) -> Op:
    """``op`` reading and freeing ``new`` in the place of ``old``."""
    if old not in op.reads and old not in op.frees:
        return op
    reads = tuple(new if tensor == old else tensor for tensor in op.reads)
    frees = tuple(new if tensor == old else tensor for tensor in op.frees)
    return op.freeing(frees, reads)
