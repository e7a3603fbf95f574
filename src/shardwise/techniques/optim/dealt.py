"""Which rank orthogonalises which matrix, and what is sent for it: what Muon's program and its paper agree on. No
torch.

Ranks that hold pieces or copies of a matrix deal out the work on it. Of a weight of a linear layer these are all ranks
of a stage; an expert's, of which ranks have different ones, is dealt out among those that have the same. Matrices are
taken in the order of their cost, in rounds, in each of which a rank has about as many elements: from the first rank to
the last and, in the next round, back. So ranks wait little for each other, and what they hold at a time is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise.models.roles import is_linear, is_stacked
from shardwise.spec.layout import GROUPS, Axis, Layout, cut
from shardwise.spec.sheet import Collective
from shardwise.techniques.states import States

NS_STEPS = 5
"""Newton-Schulz iterations of an update, after which singular values lie between 0.7 and 1.2."""
ROUND_ELEMENTS, AT_ONCE = 2**24, 8
"""What a rank takes in a round: matrices of so many elements together, at least one and at most so many."""
FEW = 8
"""The numbers of 2 bytes that are made for each of a piece whose momentum or weight is updated: four of fp32."""
DEALT_OVER = ("stage", "expert_loss", "dp_replicate")
"""The groups among whose ranks matrices are dealt out."""
Range = tuple[int, int]


class Weight(NamedTuple):
    """A weight of whole ``shape``: a matrix, or a ``stack`` of so many, one's rows after another's. ``cuts``: the
    groups over which it is cut, and along which dims, in this order."""

    shape: tuple[int, int]
    stack: int
    cuts: tuple[tuple[str, int], ...]

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of each matrix."""
        return self.shape[0] // self.stack, self.shape[1]

    @property
    def flops(self) -> int:
        """The operations of the products of an update of each matrix."""
        return 2 * sum(prod(sizes) for sizes in products(*self.matrix))


class Matrix(NamedTuple):
    """A matrix of the ``weight`` with this place in a list, by its ``number`` in the stack. ``owner``: the rank that
    orthogonalises it, by its number in the group."""

    weight: int
    number: int
    owner: int


Round = tuple[Matrix, ...]


def matrices(name: str, dims: int, experts: int) -> int:
    """Return how many matrices of linear layers the parameter with this canonical name is; 0 if it is none."""
    if dims != 2:
        return 0
    return experts if is_stacked(name) else int(is_linear(name))


def products(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of each product of an update of a matrix: in every iteration X X', its square, and what
    becomes of these times X, where X is no taller than wide."""
    short, long = sorted((rows, columns))
    return [(short, short, long), (short, short, short), (short, long, short)] * NS_STEPS


def weight_of(shape: Sequence[int], stack: int, of: States, layout: Layout) -> Weight:
    """Return the weight of this whole shape and these states."""
    cuts = [(group, state.dim) for group, state in of.items() if state.dim is not None and layout.size(group) > 1]
    return Weight((shape[0], shape[1]), stack, tuple(cuts))


@lru_cache(maxsize=4096)
def dealt_over(weight: Weight, layout: Layout) -> str:
    """Return the group among whose ranks the matrices of a weight are dealt out: those of a stage that do not hold
    other matrices of it whole."""
    apart = {group for group, _ in weight.cuts[: _apart(weight, layout)]}
    if apart & {"fsdp", "expert_fsdp"}:
        return "dp_replicate"
    return "expert_loss" if apart else "stage"


def _apart(weight: Weight, layout: Layout) -> int:
    """Return how many of the cuts, from the first, leave every matrix whole on some rank."""
    length, rows = weight.shape[0], weight.matrix[0]
    for found, (group, dim) in enumerate(weight.cuts):
        length = -(-length // layout.size(group))
        if dim != 0 or weight.stack == 1 or length % rows:
            return found
    return len(weight.cuts)


@lru_cache(maxsize=2**16)
def held(weight: Weight, layout: Layout, rank: int, cuts: int | None = None) -> tuple[Range, Range]:
    """Return the rows and the columns of the whole weight that a rank holds; or after the first ``cuts`` of it."""
    ranges = [(0, size) for size in weight.shape]
    for group, dim in weight.cuts[:cuts]:
        ranges[dim] = cut(ranges[dim], layout.size(group), layout.index(rank, group))
    return ranges[0], ranges[1]


def piece(weight: Weight, number: int, layout: Layout, rank: int) -> tuple[Range, Range]:
    """Return the rows and the columns of a matrix of the weight that a rank holds, perhaps none."""
    (start, stop), columns = held(weight, layout, rank)
    rows = weight.matrix[0]
    first, last = (min(max(end - number * rows, 0), rows) for end in (start, stop))
    return (first, last), columns


def numel(ranges: tuple[Range, Range]) -> int:
    """Return the elements of a piece."""
    return prod(stop - start for start, stop in ranges)


@lru_cache(maxsize=1024)
def ranks_of(layout: Layout, group: str, rank: int) -> tuple[int, ...]:
    """Return the ranks of the group to which a rank belongs."""
    return next(tuple(ranks) for ranks in layout.members(group) if rank in ranks)


@lru_cache(maxsize=4096)
def copies(weight: Weight, group: str) -> tuple[Axis, ...]:
    """Return the axes of the group along which ranks hold the same piece of a weight. Where they stand on these, the
    owner and those whose pieces it is sent agree."""
    cut_along = {axis for over, _ in weight.cuts for axis in GROUPS[over]}
    return tuple(axis for axis in GROUPS[group] if axis not in cut_along)


@lru_cache(maxsize=2**16)
def gives(weight: Weight, group: str, layout: Layout, ranks: tuple[int, int]) -> bool:
    """Return whether the first of two ranks of a group gives the second its piece of a matrix that this one owns."""
    one, other = ranks
    return all(layout.coordinate(one, axis) == layout.coordinate(other, axis) for axis in copies(weight, group))


def is_gathered(dealt: Round, weights: Sequence[Weight], group: str, layout: Layout) -> bool:
    """Return whether any matrix of a round is cut over the ranks of the group; else its owner has it."""
    return any(prod(map(layout.degree, copies(weights[one.weight], group))) < layout.size(group) for one in dealt)


def rounds(weights: Sequence[Weight], group: str, layout: Layout, rank: int) -> list[Round]:
    """Return the rounds of a group's ranks, each with its matrices in the order of their cost, the highest first."""
    costs = {weight: -weight.flops for weight in weights}
    waiting: list[tuple[int, Weight, int, int]] = []
    for place, weight in enumerate(weights):
        if dealt_over(weight, layout) == group:
            (start, stop), _ = held(weight, layout, rank, _apart(weight, layout))
            rows = weight.matrix[0]
            waiting += [(costs[weight], weight, place, number) for number in range(start // rows, -(-stop // rows))]
    waiting.sort()
    found = list[Round]()
    ranks = layout.size(group)
    begun = 0
    while begun < len(waiting):
        each = min(AT_ONCE, max(1, ROUND_ELEMENTS // prod(waiting[begun][1].matrix)))
        own, back = waiting[begun : begun + each * ranks], len(found) % 2
        owners = [ranks - 1 - i % ranks if back else i % ranks for i in range(len(own))]
        found.append(tuple(Matrix(*one[2:], owner) for one, owner in zip(own, owners, strict=True)))
        begun += len(own)
    return found


def regimes(weights: Sequence[Weight], layout: Layout) -> dict[str, bool]:
    """Return by name the paths that an update takes: what becomes of experts' matrices, and whether there is a round
    after the first."""
    apart = {weight: _apart(weight, layout) == len(weight.cuts) for weight in weights if weight.stack > 1}
    numbers = {group: sum(one.stack for one in weights if dealt_over(one, layout) == group) for group in DEALT_OVER}
    return {
        "matrices of experts that ranks have whole": any(apart[one] and one.cuts for one in apart),
        "matrices of experts that are cut": not all(apart.values()),
        "matrices in several rounds": any(numbers[each] > AT_ONCE * layout.size(each) for each in numbers),
    }


class OnPaper(NamedTuple):
    """An update on paper: what is sent, the shapes of the matrices that one rank after another waits for, with how many
    of each it multiplies together, and the most elements that are held at a time."""

    sent: tuple[Collective, ...]
    multiplied: tuple[tuple[int, int], ...]
    held: int


@lru_cache(maxsize=256)
def on_paper(weights: tuple[tuple[Weight, int], ...], layout: Layout, rank: int, width: int) -> OnPaper:
    """Return an update of so many weights of each kind by a rank, in numbers of ``width`` bytes."""
    each = [weight for weight, count in weights for _ in range(count)]
    sent = list[Collective]()
    multiplied = list[tuple[int, int]]()
    most = 0
    for group in DEALT_OVER:
        for dealt in rounds(each, group, layout, rank):
            multiplied += [each[one.weight].matrix for one in dealt[:: layout.size(group)]]
            calls, at_once = _exchanged(dealt, each, group, (layout, rank))
            sent += [Collective("all_to_all", group, "moments", width * size) for size in calls]
            most = max(most, at_once)
    return OnPaper(tuple(sent), tuple(multiplied), most)


def _exchanged(dealt: Round, weights: Sequence[Weight], group: str, at: tuple[Layout, int]) -> tuple[list[int], int]:
    """Return the elements of each exchange of a round, the larger of what is sent and received; and the most that are
    held at a time."""
    layout, rank = at
    ranks = ranks_of(layout, group, rank) if layout.size(group) > 1 else (rank,)
    mine = given = own = back = squares = largest = count = 0
    for one in dealt:
        weight, owner = weights[one.weight], ranks[one.owner]
        size = numel(piece(weight, one.number, layout, rank))
        mine, largest = mine + size, max(largest, size)
        given += size * gives(weight, group, layout, (rank, owner))
        if owner == rank:
            own += prod(weight.matrix)
            back += prod(weight.matrix) * prod(map(layout.degree, copies(weight, group)))
            squares += 2 * min(weight.matrix) ** 2
            count += 1
    gathered = is_gathered(dealt, weights, group, layout)
    multiplied = (3 if count > 1 else 2) * own + squares  # those of a shape together: copied once more
    most = [FEW * largest, given + 2 * own if gathered else 0, own * gathered + multiplied, mine + FEW * largest]
    if len(ranks) == 1:
        return [], mine + max(most)
    return [*([max(given, own)] if gathered else []), max(back, mine)], mine + max(*most, own + back + mine)
