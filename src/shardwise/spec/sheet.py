"""The sheet: a model on paper. Tensors and operations, not totals.

A *unit* is a piece of the model that runs in one go: the embedding (the look-up of token ids, rotation tables), a
block, the head (last norm, output layer, loss). It lists its operations forward and backward; each says what it
allocates and what is free once it has run, as they were seen when the real modules ran on fake tensors
(planner/trace.py). Sizes are products of symbols: one traced unit serves every model with the same features, and a
model binds its numbers to the symbols (planner/sheets.py), all but the micro-batch ``b`` and the sequence length ``s``.
Techniques rewrite a sheet with their ``cost``; nothing in a sheet knows a peak or a second: planner/schedule.py tells
those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.rank_kind import RankKind, Stage

Tier = Literal["device", "host", "disk"]
"""Where bytes are."""
Dim = int | str
"""A whole number, or a product such as ``b*s``, ``2*K*e`` or ``b*s*d/64``. Bound, only ``b``, ``s`` and ``b*s`` are
left. Symbols are: b rows of a micro-batch, s tokens of a row, d hidden_size, f intermediate_size, V vocab_size, K key
heads, G query heads for each key head, e head_dim, p pairs of elements of a head that are rotated. Techniques have
symbols of their own (``RANK`` of lora, ``RANKS`` of tp)."""

Sizes = Mapping[str, int]
"""The number that each symbol but ``b`` and ``s`` stands for."""


def size_of(dim: Dim, sizes: Sizes) -> int:
    """The product that ``dim`` stands for. Raises ValueError where it is no whole number."""
    if isinstance(dim, int):
        return dim
    above, _, below = dim.partition("/")
    size, rest = divmod(prod(sizes[x] if x in sizes else int(x) for x in above.split("*")), int(below or 1))
    if rest:
        raise ValueError(f"{dim} is no whole number: {below} does not divide what stands above")
    return size


def grown(dim: Dim, sizes: Sizes) -> tuple[int, str]:
    """The product without its ``b`` and ``s``, and these: ``b``, ``b*s``, ``b*s*s``, or nothing."""
    if isinstance(dim, int):
        return dim, ""
    above, bar, below = dim.partition("/")
    per = [x for x in above.split("*") if x in ("b", "s")]
    rest = [x for x in above.split("*") if x not in ("b", "s")]
    return size_of("*".join(rest or ["1"]) + bar + below, sizes), "*".join(per)


def number(dim: Dim, sizes: tuple[int, int]) -> int:
    """A bound dim for ``b`` sequences of ``s`` tokens."""
    if isinstance(dim, int):
        return dim
    each = {"b": sizes[0], "s": sizes[1]}
    return prod(each[factor] if factor in each else int(factor) for factor in dim.split("*"))


GROUPED, GROUPED_OUTER = "shardwise.grouped", "shardwise.grouped_outer"
"""Products whose rows belong to groups, and the gradients of their matrices: of their groups, m, n and k (``Op.dims``)
the rows, m of the one and k of the other, are those of all groups."""
SCALED = ("shardwise.scaled_product", "shardwise.scaled_gradient")
"""Products in float8: of rows [m,k] with the transpose of a matrix [n,k], and of gradients [m,k] with one [k,n]; of
experts with that of each. Where ranks have parts of the rows, their names end otherwise."""
ARRIVED, EXPERT_ROWS = "R", "expert rows"
"""The symbol of the rows that come to a rank's experts, and the category of tensors of so many: of these the fullest
rank has more than its share."""
SEND = "send"
"""The kind of operations that are collectives; their names are those of collectives."""


CONTROL_BYTES = 64
"""Collectives of at most this many bytes carry counts, norms or votes, not tensors of the model."""


def is_control(kind: str, size: int) -> bool:
    """Return whether a collective of so many bytes counts as ``control``; an all-to-all never does, which has the
    counts of experts' rows."""
    return size <= CONTROL_BYTES and kind != "all_to_all"


@dataclass(frozen=True, slots=True)
class Tensor:
    """``shape`` is global. ``shards`` are the (group, dim) pairs that cut it; local sizes follow from a kind of rank.
    ``dtype`` is a dtype of a plan (until a unit is bound, bf16 stands for fp16 too); ``used_as`` is the dtype that a
    weight has in forward and backward; one that is not ``trained`` has no gradient. ``symbols`` is the shape before it
    was bound."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    category: str = "activations"
    shards: tuple[tuple[str, int], ...] = ()
    used_as: str = "compute"
    trained: bool = True
    symbols: tuple[Dim, ...] = ()

    def typed(self, dtype: str, used_as: str) -> Tensor:
        """Return the tensor in other types. Written out, as :meth:`cut` is, since ``replace`` takes four times as long
        and every plan rewrites hundreds of tensors."""
        return Tensor(self.name, self.shape, dtype, self.category, self.shards, used_as, self.trained, self.symbols)

    def cut(self, *shards: tuple[str, int]) -> Tensor:
        """Return the tensor, cut along these dims over these groups, and no others."""
        kept = (self.used_as, self.trained, self.symbols)
        return Tensor(self.name, self.shape, self.dtype, self.category, shards, *kept)

    def numel(self, b: int, s: int) -> int:
        sizes = {"b": b, "s": s, "b*s": b * s}
        return prod(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)

    def bytes(self, b: int = 1, s: int = 1) -> int:
        """Bytes of the whole tensor."""
        return self.numel(b, s) * BYTES[self.dtype]

    def local_numel(self, rank_kind: RankKind, padded: bool) -> int:
        """Elements on ``rank_kind``. Each cut gives every rank ceil(size / n) rows but the last ones, which get what is
        left, perhaps none; ``padded`` counts the full ceil(size / n), which is what FSDP2 allocates."""
        shape = [dim if isinstance(dim, int) else 1 for dim in self.shape]
        for group, dim in self.shards:
            start, stop = (0, rank_kind.share(shape[dim], group)) if padded else rank_kind.part(shape[dim], group)
            shape[dim] = stop - start
        return prod(shape)


@dataclass(frozen=True, slots=True)
class Op:
    """``allocates`` and ``frees`` are indices into the unit's tensors: what comes into being with the operation and
    what is free once it has run; what it changes in place it ``writes``. ``flops`` are for b = s = 1 where they grow
    with tokens (``per``: ``b*s``); attention's grow with ``b*s*s``. ``symbols`` is the product that they are. A
    collective sends over ``axis``, and its ``flops`` are bytes. ``dims`` of a product are its batch, m, n and k; any
    other operation has ``read`` and ``written`` bytes, tensor by tensor, all in symbols.
    """

    kind: str
    name: str
    allocates: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    weight: str = ""
    flops: int = 0
    per: str = "b*s"
    symbols: Dim = ""
    writes: tuple[int, ...] = ()
    axis: str = ""
    dims: tuple[Dim, ...] = ()
    read: tuple[Dim, ...] = ()
    written: tuple[Dim, ...] = ()

    def freeing(self, frees: tuple[int, ...]) -> Op:
        """Return the operation with these tensors freed after it. Written out for the reason that :meth:`Tensor.typed`
        is."""
        kept = (self.weight, self.flops, self.per, self.symbols, self.writes, self.axis)
        return Op(self.kind, self.name, self.allocates, frees, self.reads, *kept, self.dims, self.read, self.written)


class Cut(NamedTuple):
    """Rows of ``length`` tokens that ranks have some of: the ``rank`` of this number in a ``ring``, whose keys
    come one rank's after another's, or all ``gathered`` at once."""

    length: int
    ring: int = 1
    rank: int = 0
    gathered: bool = False


class At(NamedTuple):
    """The place where an operation runs: on ``b`` rows of ``s`` tokens each, in numbers of so many bytes (``width``),
    in a unit with this ``window``; rows are ``cut``."""

    b: int
    s: int
    width: int
    window: int | None
    cut: Cut


class SentMeanwhile(NamedTuple):
    """A message; ``beside``: while it is on its way, such a share of the operation is computed."""

    kind: str
    bytes: int
    beside: float = 0.0


class Within(NamedTuple):
    """The memory and the messages of an operation besides what it reads and makes: so many bytes are held meanwhile,
    and messages sent along its axis."""

    workspace: int = 0
    sent: tuple[SentMeanwhile, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One call: ``bytes`` is what is gathered, scattered or reduced."""

    kind: str
    axis: str
    category: str
    bytes: int


KEPT_UNITS = 128
"""How many units each rewriting of units keeps (``lru_cache``): plans of one search share most of theirs."""


@dataclass(frozen=True, eq=False)
class Unit:
    """``saved`` are the tensors that live from forward to backward (``input`` among them where it is saved).
    ``window`` is how many positions a query of its attention sees at most. ``stays``: the device updates its weights,
    though the host updates those of others. ``forward_plain`` are the forward operations with what each frees when
    nothing is saved: what runs under recompute. ``again``: the tensors of which the program says that recomputation
    makes them, whatever else it finds saved. A unit equals itself only, so that what a rewriting made of it is found
    again without a look at all that is in it."""

    name: str
    weights: tuple[Tensor, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    forward: tuple[Op, ...] = ()
    forward_plain: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    input: int = -1
    output: int = -1
    gradient_in: int = -1
    gradient_out: int = -1
    weight_gradients: tuple[tuple[str, int], ...] = ()
    saved: frozenset[int] = frozenset()
    recompute: bool = False
    saved_ops: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    window: int | None = None
    stays: bool = False


NO_HEAD = Unit("head")


def read_behind(embedding: Unit) -> int:
    """Return the tensor that the unit before the blocks makes beside its output for a block that predicts a further
    token."""
    made = {tensor for op in embedding.forward for tensor in op.allocates}
    shape = embedding.tensors[embedding.output].shape
    return next(tensor for tensor in sorted(embedding.saved & made) if embedding.tensors[tensor].shape == shape)


@lru_cache(maxsize=KEPT_UNITS)
def tables_alone(embedding: Unit) -> Unit:
    """Return the part of the unit before the blocks that makes the rotation tables, which every stage does for
    itself."""
    freed = {tensor for op in embedding.forward for tensor in op.frees}
    used = {tensor for op in embedding.backward for tensor in (*op.reads, *op.frees)}
    wanted = {tensor for op in embedding.forward for tensor in op.allocates} - freed - used - {embedding.output}
    kept = list[int]()
    for i, op in reversed([*enumerate(embedding.forward)]):
        if not op.weight and not wanted.isdisjoint((*op.allocates, *op.writes)):
            wanted.update(op.reads)
            kept.append(i)
    made = {tensor for i in kept for tensor in embedding.forward[i].allocates}
    forward, plain = (
        tuple(ops[i].freeing(tuple(t for t in ops[i].frees if t in made)) for i in reversed(kept))
        for ops in (embedding.forward, embedding.forward_plain)
    )
    saved = embedding.saved & made
    return replace(
        embedding, weights=(), forward=forward, forward_plain=plain, backward=(), weight_gradients=(), saved=saved
    )


@dataclass(frozen=True, eq=False)
class Sheet:
    """``blocks`` are the kinds of block there are; ``order`` gives the kind of each block in forward order. ``capped``:
    the loss caps its logits. ``vocabulary`` and ``key_heads`` are those of the whole model; ``heads_apart``: norms of
    queries and keys are of a head; ``narrow``: tokens are made narrow before heads are computed. ``rank_kind``: whose
    sheet it is; ``inside``: the plan that acted inside its units; ``plan``: that by which it has been rewritten. Of a
    pipeline: a rank that lacks an end of the model has a unit without weights in its stead; ``copied``: embedding and
    output layer are copies of one weight; ``trained``: of each stage, whether any of its weights is. ``counts``: how
    many numbers a step tells of experts (runtime/expert_counts.py). ``per_token``: how many hidden states of each token
    the output layer reads: two where a block predicts a further token."""

    model: str
    embedding: Unit
    blocks: tuple[Unit, ...]
    order: tuple[int, ...]
    head: Unit
    tied: bool
    step: tuple[Collective, ...] = ()
    capped: bool = False
    vocabulary: int = 0
    key_heads: int = 0
    heads_apart: bool = True
    narrow: bool = True
    rank_kind: RankKind = RankKind()
    inside: Plan | None = None
    plan: Plan | None = None
    copied: bool = False
    trained: tuple[bool, ...] = ()
    counts: int = 0
    per_token: int = 1

    @property
    def output(self) -> Tensor:
        """The weight of the output layer, [V,d], where the rank has it."""
        return self.embedding.weights[0] if self.tied else self.head.weights[-1]

    def of_stage(self, stage: Stage) -> Sheet:
        """The part of the sheet that is one of its rank's stages."""
        first = sum(len(other.blocks) for other in self.rank_kind.stages if other.number < stage.number)
        rank_kind = replace(self.rank_kind, blocks=stage.blocks, embedding=stage.embedding, head=stage.head, stages=())
        order = self.order[first : first + len(stage.blocks)]
        return replace(self, order=order, rank_kind=rank_kind).with_ends(embedding=stage.embedding, head=stage.head)

    def with_ends(self, *, embedding: bool, head: bool) -> Sheet:
        """The sheet where of the embedding only the rotation tables are left, unless it is held, and of the head
        nothing."""
        return replace(
            self,
            embedding=self.embedding if embedding else tables_alone(self.embedding),
            head=self.head if head else NO_HEAD,
        )

    def at(self, rank_kind: RankKind, plan: Plan | None = None) -> Sheet:
        """The sheet of ``rank_kind``, to be rewritten by ``plan``. Not by ``replace``, which takes five times as
        long."""
        made = object.__new__(Sheet)
        vars(made).update(vars(self), rank_kind=rank_kind, plan=plan)
        return made

    def check(self, plan: Plan) -> None:
        """Raises ValueError where this sheet has been rewritten by another plan than ``plan``, or by none."""
        if self.plan is not plan and self.plan != plan:
            what = "no plan" if self.plan is None else "another plan"
            raise ValueError(f"the sheet of {self.model} was rewritten by {what}: use techniques.cost(sheet, plan)")

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every kind of unit once."""
        return (self.embedding, *self.blocks, self.head)

    def repeated(self) -> list[tuple[Unit, int]]:
        """Every kind of unit with how often it occurs."""
        blocks = [(block, self.order.count(kind)) for kind, block in enumerate(self.blocks)]
        return [(self.embedding, 1), *blocks, (self.head, 1)]

    def rewritten(self, rewrite: Callable[[Unit], Unit]) -> Sheet:
        """The sheet with every kind of unit replaced by ``rewrite`` of it."""
        blocks = tuple(rewrite(block) for block in self.blocks)
        return replace(self, embedding=rewrite(self.embedding), blocks=blocks, head=rewrite(self.head))
