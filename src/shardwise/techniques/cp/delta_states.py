"""Gated delta nets of which ranks have some tokens each of the same rows: what passes between the pieces of a row.

A piece maps the state before it to the one after it, S -> M S + B, and all know every piece's map once these are
gathered: each rank computes its own without waiting for any other, then from all the state before each of its pieces,
in the order of the row. Backward is the same the other way round: dS_before = M^T dS_after + B'. Past a start of a
document M is exactly 0, and so is what a piece that begins with one reads of the state: bounds are masks here too.
The sums over tokens get the last tokens of the piece before, and send their gradients back.

The way is the same whatever attention's kind is, for it needs neither whole rows nor that ranks can share heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.distributed.collectives import stacked
from shardwise.distributed.torch_private import group_named
from shardwise.models import delta
from shardwise.models.delta import Chunks, Given, given_of, of_outputs
from shardwise.models.delta_sizes import kept
from shardwise.models.layers import accumulation_dtype
from shardwise.spec.rows import RowShare, WholeRows, pieces_of

Place = tuple[int, int]
"""A rank, and which of its pieces of a row."""


@dataclass(frozen=True)
class RowPieces:
    """The pieces of ``count`` rows: ``places`` are those of each row in its order, with the first token of each;
    ``size`` tokens each, of which the rank ``index`` has some."""

    rows: WholeRows
    index: int
    size: int
    places: tuple[tuple[tuple[int, Place], ...], ...]

    def alike(self) -> Iterator[tuple[slice, list[Place]]]:
        """Yield the order of the pieces of rows in which it is the same."""
        each = [slice(None)] if self.rows.bounds is None else [slice(i, i + 1) for i in range(len(self.places))]
        for rows, places in zip(each, self.places, strict=False):
            yield rows, [place for _, place in places]

    def starts(self, before: int, length: int) -> list[int] | None:
        """Return where documents start among ``length`` tokens of each own piece, of which the first lies so many
        ``before`` the piece, counted over all; None where rows are documents."""
        if self.rows.bounds is None:
            return None
        found, at = list[int](), 0
        for row, places in enumerate(self.places):
            documents = (0, *self.rows.ends(row)[:-1])
            for begin in (first - before for first, (rank, _) in places if rank == self.index):
                found += [at + start - begin for start in documents if begin <= start < begin + length]
                at += length
        return found


@lru_cache(maxsize=64)
def line_of(rows: WholeRows, count: int, ring: int, ulysses: int, index: int) -> RowPieces:
    """Return the pieces of ``count`` rows among rings of so many ranks across groups of ``ulysses``."""
    size, places = rows.length // (ring * ulysses * pieces_of(ring)), []
    for row in range(count):
        runs = [RowShare(ring, ulysses, rank).runs(rows, row) for rank in range(ring * ulysses)]
        firsts = [[at for run in own for at in range(run.start, run.stop, size)] for own in runs]
        found = ((at, (rank, part)) for rank, own in enumerate(firsts) for part, at in enumerate(own))
        places.append(tuple(sorted(found)))
    return RowPieces(rows, index, size, tuple(places))


class Pieces(NamedTuple):
    """Over whom rows are cut: ``group`` is the name of the ranks' process group, ``length`` is ``row_length`` and
    ``bounds`` those of ``MaskSpec``; ranks are a ``ring`` across groups of ``ulysses`` neighbours."""

    bounds: Tensor | None
    group: str
    length: int
    ring: int
    ulysses: int

    def line(self, count: int, index: int) -> RowPieces:
        rows = WholeRows(self.length, None if self.bounds is None else tuple(self.bounds.tolist()))
        return line_of(rows, count, self.ring, self.ulysses, index)

    def cut(self, x: Tensor) -> Tensor:
        """[b,s,..] -> [b*pieces,s/pieces,..]."""
        return x.unflatten(1, (pieces_of(self.ring), -1)).flatten(0, 1)

    def gathered(self, own: Tensor) -> Tensor:
        """[b*pieces,..] of each rank -> [ranks,b,pieces,..]."""
        return stacked(own, group_named(self.group)).unflatten(1, (-1, pieces_of(self.ring)))


@lru_cache(maxsize=64)
def _documents(line: RowPieces, before: int, length: int, device: torch.device) -> Tensor | None:
    starts = line.starts(before, length)
    return None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)


def _here(pieces: Pieces, count: int) -> RowPieces:
    return pieces.line(count, group_named(pieces.group).rank())


def across(given: Given) -> Tensor:
    """Return the map [b,heads,values of each,key,key+value] of these tokens from the state before them to that after
    them: M beside B of S -> M S + B. Past a start of a document M is exactly 0."""
    shape, key = given.state_shape, given.state_shape[3]
    eye = torch.eye(key, dtype=accumulation_dtype(given.v.dtype), device=given.v.device)
    state = pad(eye, (0, shape[4])).expand(*shape[:3], -1, -1)
    for at, count in given.blocks():
        block = Chunks(given, at, count)
        block.v = pad(block.v, (key, 0))
        for number in range(count):
            state = block.step(number, state)[2]
    return state


def asked(grad: Tensor, given: Given) -> Tensor:
    """Return the gradient of the state before these tokens by their own outputs' ``grad``, [b,heads,values of
    each,key,value]: of that of the state after them it has M^T times as much besides."""
    after = given.v.new_zeros(given.state_shape, dtype=accumulation_dtype(given.v.dtype))
    for at, count in reversed(given.blocks()):
        block = Chunks(given, at, count)
        scored, of_state = of_outputs(block, block.cut(grad))
        for number in reversed(range(count)):
            after = block.back(number, after, scored, of_state)[2]
    return after


_CUT = "Tensor? bounds, str group, SymInt length, SymInt ring, SymInt ulysses"
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? documents"
_RULE = f"Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, {_CUT}"


@torch.library.custom_op("shardwise::gated_delta_across", mutates_args=(), schema=f"(Tensor? grad, {_GIVEN}) -> Tensor")
def gated_delta_across(grad: Tensor | None, *given: Any) -> Tensor:
    """Return what :func:`across` does; of the gradient of the outputs, what :func:`asked` does."""
    return across(given_of(given)) if grad is None else asked(grad, given_of(given))


@gated_delta_across.register_fake
def _(grad: Tensor | None, *given: Any) -> Tensor:
    *heads, key, value = Given(*given).state_shape
    width = value + key * (grad is None)
    made: Tensor = given[2].new_empty(*heads, key, width, dtype=accumulation_dtype(given[2].dtype))
    return made


@torch.library.custom_op(
    "shardwise::passed_states",
    mutates_args=(),
    schema=f"(Tensor maps, SymInt index, bool back, {_CUT}) -> Tensor",
)
def passed_states(maps: Tensor, index: int, back: bool, *cut: Any) -> Tensor:
    """Return the state before each own piece, [b*pieces,heads,values of each,key,value], from the maps of all pieces
    [ranks,b,pieces,heads,values of each,key,key+value]; ``back``: the gradient of the one after it."""
    key = maps.shape[-2]
    line: RowPieces = Pieces(*cut).line(maps.shape[1], index)
    found = maps[0, ..., key:].clone()
    for rows, order in line.alike():
        state = torch.zeros_like(found[rows, 0])
        for rank, part in reversed(order) if back else order:
            if rank == index:
                found[rows, part] = state
            own = maps[rank, rows, part]
            state = (own[..., :key].mT if back else own[..., :key]) @ state + own[..., key:]
    return found.flatten(0, 1)


@passed_states.register_fake
def _(maps: Tensor, *cut: Any) -> Tensor:
    b, pieces, *heads, key, width = maps.shape[1:]
    return maps.new_empty(b * pieces, *heads, key, width - key)


def forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what :func:`gated_delta_over_ranks` returns, operation by operation."""
    pieces = Pieces(*given[2:])
    line = _here(pieces, v.shape[0])
    own = *map(pieces.cut, (q, k, v, *given[:2])), _documents(line, 0, line.size, v.device)
    maps = gated_delta_across(None, *own)
    before = passed_states(pieces.gathered(maps), line.index, False, *pieces)
    transition = maps[..., : k.shape[-1]].contiguous()
    del maps
    out, states = delta.gated_delta(*own, before)
    return out.view(v.shape), states.view(*v.shape[:3], -1), before, transition


def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """Compute what :func:`gated_delta_over_ranks_backward` returns, operation by operation."""
    given, (states, before, transition), pieces = saved[:5], saved[5:8], Pieces(*saved[8:])
    line, grad = _here(pieces, grad.shape[0]), pieces.cut(grad)
    own = *map(pieces.cut, given), _documents(line, 0, line.size, grad.device)
    maps = torch.cat([transition, gated_delta_across(grad, *own)], -1)
    after = passed_states(pieces.gathered(maps), line.index, True, *pieces)
    del maps
    grads = delta.gated_delta_backward(grad, *own, before, pieces.cut(states), after)
    return tuple(x.view(like.shape) for x, like in zip(grads, given, strict=True))


gated_delta_over_ranks = torch.library.custom_op(
    "shardwise::gated_delta_over_ranks",
    forward,
    mutates_args=(),
    schema=f"({_RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
)
"""The outputs of the rule; the states that it keeps; the state before each piece, and M of its map."""
gated_delta_over_ranks_backward = torch.library.custom_op(
    "shardwise::gated_delta_over_ranks_backward",
    backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor states, Tensor before, "
    f"Tensor transition, {_CUT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@gated_delta_over_ranks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    (b, _, heads, key), (value_heads, value) = k.shape, v.shape[2:]
    shape, wide = (b * pieces_of(given[-2]), heads, value_heads // heads, key), accumulation_dtype(v.dtype)
    states = v.new_empty(*v.shape[:3], kept(key, value), dtype=wide)
    return v.new_empty(v.shape), states, *(v.new_empty(*shape, width, dtype=wide) for width in (value, key))


@gated_delta_over_ranks_backward.register_fake
def _(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in saved[:5])


def _differentiable(operation: Any, backward: Any) -> None:
    """Give an operation over ranks its ``backward``, which reads the gradient of the first output, the inputs, the
    other outputs, which have none, and how rows are cut."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, bounds, ctx.group, ctx.length, ctx.ring, ctx.ulysses = inputs
        ctx.inputs = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, *output[1:], bounds)

    def gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing that was computed from the outputs has a gradient; other ranks find the same
            return (None,) * ctx.inputs
        cut = ctx.group, ctx.length, ctx.ring, ctx.ulysses
        return *backward(grad, *ctx.saved_tensors, *cut), *[None] * 5

    operation.register_autograd(gradients, setup_context=save)


_differentiable(gated_delta_over_ranks, gated_delta_over_ranks_backward)


def _neighbours(own: Tensor, pieces: Pieces, *, back: bool = False) -> Tensor:
    """Return what the piece before each own one has, or ``back`` the one after it; zeros where there is none."""
    whole = pieces.gathered(own)
    line, found = _here(pieces, whole.shape[1]), whole.new_zeros(whole.shape[1:])
    for rows, order in line.alike():
        for (giver, given), (taker, taken) in pairwise(reversed(order) if back else order):
            if taker == line.index:
                found[rows, taken] = whole[giver, rows, given]
    return found.flatten(0, 1)


def convolve(x: Tensor, weight: Tensor, *cut: Any) -> tuple[Tensor, Tensor]:
    """Compute what :func:`conv_silu_over_ranks` returns, operation by operation."""
    pieces, tokens = Pieces(*cut), weight.shape[-1] - 1
    line, own = _here(pieces, x.shape[0]), pieces.cut(x)
    tail = _neighbours(own[:, -tokens:], pieces)
    out = delta.conv_silu(own, weight, _documents(line, 0, line.size, x.device))
    first = torch.cat([tail, own[:, :tokens]], 1)
    first = delta.conv_silu(first, weight, _documents(line, tokens, 2 * tokens, x.device))
    out[:, :tokens] = first[:, tokens:]
    return out.view(x.shape), tail


def convolve_backward(grad: Tensor, x: Tensor, weight: Tensor, tail: Tensor, *cut: Any) -> tuple[Tensor, Tensor]:
    """Compute what :func:`conv_silu_over_ranks_backward` returns, operation by operation."""
    pieces, tokens = Pieces(*cut), weight.shape[-1] - 1
    line = _here(pieces, x.shape[0])
    own = pieces.cut(x)
    rest = pieces.cut(grad).clone()
    of_first = torch.cat([torch.zeros_like(tail), rest[:, :tokens]], 1)
    first, starts = torch.cat([tail, own[:, :tokens]], 1), _documents(line, tokens, 2 * tokens, x.device)
    of_first, of_weight = delta.conv_silu_backward(of_first, first, weight, starts)
    del first
    rest[:, :tokens] = 0
    grad_x, grad_weight = delta.conv_silu_backward(rest, own, weight, _documents(line, 0, line.size, x.device))
    del rest
    grad_x[:, :tokens] += of_first[:, tokens:]
    grad_x[:, -tokens:] += _neighbours(of_first[:, :tokens], pieces, back=True)
    grad_weight += of_weight
    return grad_x.view(x.shape), grad_weight


conv_silu_over_ranks = torch.library.custom_op(
    "shardwise::conv_silu_over_ranks",
    convolve,
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, {_CUT}) -> (Tensor, Tensor)",
)
"""What ``conv_silu`` returns of whole rows, and the last tokens of the piece before each."""
conv_silu_over_ranks_backward = torch.library.custom_op(
    "shardwise::conv_silu_over_ranks_backward",
    convolve_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor weight, Tensor tail, {_CUT}) -> (Tensor, Tensor)",
)


@conv_silu_over_ranks.register_fake
def _(x: Tensor, weight: Tensor, *cut: Any) -> tuple[Tensor, Tensor]:
    b, _, channels = x.shape
    return x.new_empty(x.shape), x.new_empty(b * pieces_of(cut[-2]), weight.shape[-1] - 1, channels)


@conv_silu_over_ranks_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


_differentiable(conv_silu_over_ranks, conv_silu_over_ranks_backward)
