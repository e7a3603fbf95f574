"""Tensor parallelism on paper: what crosses the edge between the residual stream and a rank's heads and columns.

A rank computes what a smaller model would, with its share of the heads and columns, and its sheet comes with those
sizes. What is added here are the operations of distributed/collectives.py and vocabulary.py: where a product reads a
tensor of the stream, and where the stream reads what a product left inside. With sequence parallelism tensors of the
stream have places for a rank's own tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from shardwise.spec.sheet import KEPT_UNITS, Dim, Op, Unit
from shardwise.techniques.draft import Draft

SEND = "send"
"""The kind of operations that are collectives over the tensor-parallel ranks; their names are those of collectives."""
ROW_PRODUCTS = ("o", "down")
"""Roles of products whose inputs are cut."""
STATISTICS = ("aten.linalg_vector_norm", "aten.sum.dim_IntList")
"""Operations that make a number a token in a norm, forward and backward."""
SPREAD = "aten.slice_backward"
"""The operation that puts the gradient of some rows among zeros for the others."""
TOKENS = frozenset({"b", "s", "b*s"})


@dataclass(frozen=True)
class Crossing:
    """``ranks`` that compute a block together, and of how many ``tokens`` each has its own in the stream; 0: all ranks
    have all tokens."""

    ranks: int
    tokens: int = 0


class _CrossedDraft(Draft):
    """``cut``: ranks have ``share`` tokens of the stream each, the last ones' filled up."""

    def __init__(self, unit: Unit, crossing: Crossing) -> None:
        super().__init__(unit)
        self.ranks, self.cut, self.share = crossing.ranks, crossing.tokens > 0, ceil(crossing.tokens / crossing.ranks)
        self.uneven = crossing.tokens % self.ranks > 0

    def stream(self, index: int) -> bool:
        """Whether the tensor has a place for every token and is not inside."""
        return not self.tensors[index].inside and self.has_tokens(index)

    def has_tokens(self, index: int) -> bool:
        """Whether the tensor has a place for every token."""
        return not TOKENS.isdisjoint(self.tensors[index].shape)

    def crosses(self, op: Op) -> bool:
        """Whether what ``op`` makes is of the stream."""
        return any(self.stream(made) for made in op.allocates)

    def enters(self, op: Op) -> bool:
        """Whether ``op`` stands inside: a product, or what makes of what it reads something inside."""
        return op.kind == "matmul" or any(self.tensors[made].inside for made in op.allocates)

    def like(self, index: int, *, inside: bool, shape: tuple[Dim, ...] = ()) -> int:
        """A new tensor like another."""
        made = replace(self.tensors[index], name=f"t{len(self.tensors)}", inside=inside)
        self.tensors.append(replace(made, shape=shape) if shape else made)
        return len(self.tensors) - 1

    def gathered(self, share: int) -> int:
        """A new tensor for what the ranks' shares make together."""
        return self.like(share, inside=True, shape=(self.share * self.ranks, self.tensors[share].shape[-1]))

    def sums(self, part: int, total: int, frees: tuple[int, ...]) -> list[Op]:
        """The operations that make ``total``, for the stream, of the ranks' parts."""
        if not self.uneven:
            return [Op(SEND, "reduce_scatter" if self.cut else "all_reduce", (total,), frees, (part,))]
        filled = self.gathered(part)
        fill = Op("elementwise", "aten.constant_pad_nd", (filled,), (), (part,))
        return [fill, Op(SEND, "reduce_scatter", (total,), (filled, *frees), (filled,))]

    def cut_stream(self) -> None:
        """Leaves places for a rank's own tokens, where it has no others."""
        for index, tensor in enumerate(self.tensors):
            if self.cut and self.stream(index):
                kept = tuple(dim for dim in tensor.shape if dim not in TOKENS)
                self.tensors[index] = replace(tensor, shape=(self.share, *kept))


@lru_cache(maxsize=KEPT_UNITS)
def block(unit: Unit, crossing: Crossing, whole: tuple[tuple[str, tuple[int, ...]], ...], *, heads_apart: bool) -> Unit:
    """A block whose attention and MLP are entered from the stream and left to it. ``whole``: names and shapes of
    weights that every rank holds whole, of which it multiplies with a part of the rows. ``heads_apart``: norms of
    queries and keys are of a head."""
    draft, shapes = _CrossedDraft(unit, crossing), dict(whole)
    _join(draft, heads_apart=heads_apart)
    entered = _enter(draft) if draft.cut else {}
    _leave(draft)
    _leave_backward(draft, entered)
    _enter_backward(draft)
    _keep(draft, entered)
    _spread(draft, shapes)
    draft.cut_stream()
    return draft.done(replace(w, shape=shapes.get(w.name, w.shape)) for w in unit.weights)


def _enter(draft: _CrossedDraft) -> dict[int, int]:
    """Gathers each tensor of the stream that products read, before the first of them; what is gathered, by the
    share."""
    shares = dict.fromkeys(t for op in draft.forward if draft.enters(op) for t in op.reads if draft.stream(t))
    entered = {share: draft.gathered(share) for share in shares}
    for ops in (draft.forward, draft.plain):
        made: list[Op] = []
        for op in ops:
            if draft.enters(op):
                gathers = [Op(SEND, "all_gather", (entered[t],), (), (t,)) for t in op.reads if t in entered]
                made += [gather for gather in gathers if gather not in made]
                op = replace(op, reads=_renamed(op.reads, entered))
            made.append(op)
        ops[:] = made
    return entered


def _join(draft: _CrossedDraft, *, heads_apart: bool) -> None:
    """Sums statistics of what ranks have columns of: of norms over a whole projection, a number a token each way; and
    DoRA's, of the rows of a layer whose inputs are cut."""
    for ops in (draft.forward, draft.plain, draft.backward):
        made: list[Op] = []
        for op in ops:
            made.append(op)
            new = op.allocates[:1]
            cut_rows = op.name == "dora" and op.weight.split(".")[-2] in ROW_PRODUCTS
            a_token = op.name in STATISTICS and draft.has_tokens(new[0]) and draft.tensors[new[0]].inside
            if cut_rows or (a_token and not heads_apart):
                late = tuple(t for t in op.frees if a_token and t not in op.reads)  # what is done in place reads it
                made[-1] = replace(op, frees=tuple(t for t in op.frees if t not in late))
                made.append(Op(SEND, "all_reduce", (), late, new))
        ops[:] = made


def _leave(draft: _CrossedDraft) -> None:
    """Sums what products leave inside as soon as it is there; a bias is added after. What attention or the MLP holds
    lives until then. A norm that follows saves the sum."""
    ends = {t for op in draft.forward if draft.crosses(op) for t in op.reads if draft.tensors[t].inside}
    left = {part: draft.like(part, inside=False) for part in ends}
    biases = {weight.name for weight in draft.unit.weights} & {"attention.o.bias", "mlp.down.bias"}
    sums = {part: draft.like(part, inside=False) for part in ends} if biases else left
    for ops in (draft.forward, draft.plain):
        made: list[Op] = []
        held: list[int] = []
        own: list[int] = []  # made since the row product, by its adapter too
        bias = ""
        for op in ops:
            if op.weight in biases:
                bias, op = op.weight, replace(op, name="aten.mm", weight=op.weight.replace("bias", "weight"))
            held += op.allocates if op.name == "all_gather" else ()
            if op.kind == "matmul" and op.weight.split(".")[-2] in ROW_PRODUCTS:
                own = []
            own += op.allocates
            op = _with(op, left)
            part = next((t for t in op.allocates if t in ends), None)
            if part is None:
                made.append(op)
                continue
            late = tuple(t for t in op.frees if t not in own)
            made.append(replace(op, frees=tuple(t for t in op.frees if t not in late)))
            frees = (part, *late, *(held if ops is draft.plain else ()))
            if bias:
                total = sums[part]
                made += draft.sums(part, total, ())
                made.append(Op("elementwise", "aten.add.Tensor", (left[part],), (total, *frees), (total,), bias))
            else:
                made += draft.sums(part, left[part], frees)
            held, bias = [], ""
        ops[:] = made
    draft.backward = _unbiased([_with(op, left) for op in draft.backward], draft.gradients, biases)
    draft.saved = {left.get(tensor, tensor) for tensor in draft.saved}


def _unbiased(backward: list[Op], gradients: dict[str, int], biases: set[str]) -> list[Op]:
    """Where a bias is added after the sum, its gradient comes first; then the weight's, as without a bias."""
    ops = list(backward)
    for bias in biases:
        weight = bias.replace("bias", "weight")
        wanted = (gradients.get(bias), gradients.get(weight))
        node = [i for i, op in enumerate(ops) if op.weight == weight or set(wanted).intersection(op.allocates)]
        if not node or node != list(range(node[0], node[-1] + 1)):  # with casts between them they keep their order
            continue
        run = sorted((ops[i] for i in node), key=lambda op: [*wanted, *op.allocates].index(op.allocates[0]))
        frees = tuple(t for op in run for t in op.frees)
        run = [replace(op, frees=()) for op in run]
        run[-1] = replace(run[-1], frees=frees)
        ops[node[0] : node[0] + len(node)] = run
    return ops


def _keep(draft: _CrossedDraft, entered: dict[int, int]) -> None:
    """What was gathered is saved in the place of the shares; what is not saved is free where it would be if nothing
    were."""
    read = {tensor for op in draft.backward for tensor in op.reads}
    draft.saved = (draft.saved - set(entered)) | read.intersection(entered.values())
    loose = {*entered, *entered.values()} - draft.saved
    for index, (op, plain) in enumerate(zip(draft.forward, draft.plain, strict=True)):
        more = tuple(t for t in plain.frees if t in loose and t not in op.frees)
        draft.forward[index] = replace(op, frees=(*op.frees, *more))


def _leave_backward(draft: _CrossedDraft, entered: dict[int, int]) -> None:
    """Gathers the gradients that row products read; what column products read was gathered in forward."""
    if not draft.cut:
        return
    wholes: dict[int, int] = {}
    late: dict[int, list[int]] = {}  # what is free after which operation
    made: list[Op] = []
    for index, op in enumerate(draft.backward):
        reads, frees = op.reads, _renamed(op.frees, entered)
        if draft.enters(op):
            reads = _renamed(reads, entered)
            for share in filter(draft.stream, reads):
                frees = tuple(t for t in frees if t != share)
                if share not in wholes:
                    readers = [i for i, o in enumerate(draft.backward) if draft.enters(o) and share in o.reads]
                    freed = any(share in draft.backward[i].frees for i in readers)
                    wholes[share] = draft.gathered(share)
                    made.append(Op(SEND, "all_gather", (wholes[share],), (share,) * freed, (share,)))
                    late.setdefault(_last_of_gain(draft.backward, readers), []).append(wholes[share])
            reads = _renamed(reads, wholes)
        made.append(replace(op, reads=reads, frees=(*frees, *late.get(index, ()))))
    draft.backward = made


def _last_of_gain(backward: list[Op], readers: list[int]) -> int:
    """The last of the operations that hold a gradient because ``readers`` read it: DoRA's gain, once it has multiplied
    the gradient, sums the one product over the tokens."""
    after, made = backward[readers[-1] + 1], {t for i in readers for t in backward[i].allocates}
    return readers[-1] + (after.name == STATISTICS[1] and not made.isdisjoint(after.reads))


def _enter_backward(draft: _CrossedDraft) -> None:
    """Sums the gradients that column products leave inside as soon as they are there."""
    _add_inside_first(draft)
    ends = {t for op in draft.backward if draft.crosses(op) for t in op.reads if draft.tensors[t].inside}
    sums = {part: draft.like(part, inside=False) for part in ends}
    made: list[Op] = []
    for op in draft.backward:
        made.append(_with(op, sums))
        for part in ends.intersection(op.allocates):
            made += draft.sums(part, sums[part], (part,))
    draft.backward = made


def _add_inside_first(draft: _CrossedDraft) -> None:
    """Where several products and no norm read the stream, autograd adds their gradients to the stream's one by one;
    entered, the stream is read once."""
    made: list[Op] = []
    pending: tuple[int, Op] | None = None  # adds what is inside to the stream, and where
    for op in draft.backward:
        adds = op.name == "aten.add.Tensor" and draft.crosses(op) and draft.tensors[op.reads[1]].inside
        if adds and pending is not None and op.reads[0] == pending[1].allocates[0]:
            (_, before), total = pending, draft.like(op.reads[1], inside=True)
            parts, both = (before.reads[1], op.reads[1]), (before.reads[0], total)
            made.append(replace(op, allocates=(total,), reads=parts, frees=parts))
            pending = (len(made), replace(op, reads=both, frees=both))
        elif adds:
            assert pending is None
            pending = (len(made), op)
        else:
            if pending is not None and pending[1].allocates[0] in op.reads:
                made.insert(*pending)
                pending = None
            made.append(op)
    if pending is not None:
        made.insert(*pending)
    draft.backward = made


def _spread(draft: _CrossedDraft, whole: dict[str, tuple[int, ...]]) -> None:
    """Puts the gradient of the rows that were used among zeros for the others, once all of its layer's are there."""
    parts: dict[str, list[str]] = {}
    for name in whole:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    for layer, names in parts.items():
        used = {name: draft.gradients[name] for name in names if name in draft.gradients}
        spread = []
        for name, part in used.items():
            if any(op.name == SPREAD and part in op.allocates for op in draft.backward):  # of all rows, as yet
                draft.tensors[part] = replace(draft.tensors[part], shape=whole[name])
                continue
            draft.gradients[name] = made = draft.like(part, inside=False, shape=whole[name])
            spread.append(Op("elementwise", SPREAD, (made,), (part,), (part,)))
        if spread:
            place = _end_of_layer(draft.backward, layer, {t for op in spread for t in op.reads})
            draft.backward[place:place] = spread


def _end_of_layer(backward: list[Op], layer: str, gradients: set[int]) -> int:
    """Behind the first run of operations that make the gradients of a layer's weights and input, and add the latter to
    others."""
    own = [op.weight == f"{layer}.weight" or bool(gradients.intersection(op.allocates)) for op in backward]
    made = {t for op, is_own in zip(backward, own, strict=True) if is_own for t in op.allocates}
    end = own.index(True)
    while end < len(backward) and (
        own[end] or (backward[end].name == "aten.add.Tensor" and made.intersection(backward[end].reads))
    ):
        end += 1
    return end


@lru_cache(maxsize=KEPT_UNITS)
def stem(unit: Unit, crossing: Crossing, rows: int) -> Unit:
    """The embedding, of which a rank holds ``rows``: each looks up the ids that are its own, and the sum over the ranks
    leaves to the stream."""
    draft = _CrossedDraft(unit, crossing)
    table, *others = unit.weights
    place = next(i for i, op in enumerate(draft.forward) if op.weight == table.name)
    looked = draft.forward[place].allocates[0]
    own, mask = draft.add("b", "s", dtype="int64"), draft.add("b", "s", dtype="bool")
    found, masked = (draft.like(looked, inside=True) for _ in range(2))
    for ops, kept in ((draft.forward, bool(draft.gradients)), (draft.plain, False)):
        ops[place : place + 1] = [
            Op("elementwise", "own", (own, mask)),
            replace(ops[place], allocates=(found,), reads=(own,)),
            Op("elementwise", "aten.masked_fill", (masked,), (found, *(() if kept else (own, mask))), (found, mask)),
            *draft.sums(masked, looked, (masked,)),
        ]
    shape = (rows, *table.shape[1:])
    if draft.gradients:
        draft.saved |= {own, mask}
        gradient = draft.gradients[table.name]
        draft.tensors[gradient] = replace(draft.tensors[gradient], shape=shape)
        _look_up_backward(draft, gradient, (own, mask))
    draft.cut_stream()
    return draft.done([replace(table, shape=shape), *others])


def _look_up_backward(draft: _CrossedDraft, gradient: int, kept: tuple[int, int]) -> None:
    own, mask = kept
    place = next(i for i, op in enumerate(draft.backward) if gradient in op.allocates)
    op = draft.backward[place]
    (given,) = op.reads
    masked, whole, gathers = draft.like(given, inside=True), given, []
    if draft.cut:
        whole = draft.gathered(given)
        gathers = [Op(SEND, "all_gather", (whole,), (given,), (given,))]
    draft.backward[place : place + 1] = [
        *gathers,
        Op("elementwise", "aten.masked_fill", (masked,), (whole, mask), (whole, mask)),
        replace(op, reads=(masked, own), frees=(masked, own)),
    ]


@lru_cache(maxsize=KEPT_UNITS)
def tail(unit: Unit, crossing: Crossing, rows: int | None) -> Unit:
    """The last norm, after which every rank's part of the output layer reads all tokens; ``rows``: how many a rank has
    of it, None where the output layer is the embedding."""
    draft = _CrossedDraft(unit, crossing)
    output, given = unit.output, unit.gradient_in
    if draft.cut:
        output = draft.gathered(unit.output)
        gather = Op(SEND, "all_gather", (output,), (), (unit.output,))
        draft.forward.append(gather)
        draft.plain.append(gather)
    if draft.backward:
        total = draft.like(given, inside=False)
        draft.tensors[given] = replace(draft.tensors[given], inside=True)
        after = [_with(op, {given: total}) for op in draft.backward]
        draft.backward = [*draft.sums(given, total, (given,)), *after]
    draft.cut_stream()
    weights = list(unit.weights)
    if rows is not None:
        weights[-1] = replace(weights[-1], shape=(rows, weights[-1].shape[1]))
    return replace(draft.done(weights), output=output)


def _with(op: Op, names: dict[int, int]) -> Op:
    return replace(op, reads=_renamed(op.reads, names), frees=_renamed(op.frees, names))


def _renamed(tensors: tuple[int, ...], names: dict[int, int]) -> tuple[int, ...]:
    return tuple(names.get(tensor, tensor) for tensor in tensors)
