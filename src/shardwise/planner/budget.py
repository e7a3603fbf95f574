"""A budget of memory for recomputation: which results a block saves, so that the least is computed again in what fits.

A knapsack. Each result that ``selective`` would save takes its bytes in every block of its kind, and spares the seconds
in which it would be made again; these add up, since a recomputation goes through all operations whose results are not
there, whatever else is. With none of them a plan is as with ``full``, with all as with ``selective``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

from shardwise import techniques
from shardwise.planner.held import recomputed
from shardwise.planner.seconds import step_seconds
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan, Remat, SavedResult
from shardwise.spec.sheet import Op, Sheet, Unit

EXACT = 2**12
"""Subsets that are all looked at, as many as twelve results have; of more, those are left out that take nearly the
bytes of a better one."""
WHOLE = 2**8
"""Subsets of whole results beside which parts of one more are looked at."""


@dataclass(frozen=True)
class Result:
    """What an operation makes, at one ``place`` of what may be saved, of blocks with so many ``products``. To save it
    in one, two and up to all eight eighths of the blocks takes so many ``bytes``, and spares so many ``seconds``."""

    name: str
    products: int
    place: int
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Subset:
    """Results that are saved, each in so many eighths of the blocks, with the bytes and seconds of all."""

    results: tuple[tuple[Result, int], ...] = ()
    bytes: int = 0
    seconds: float = 0.0

    def and_one(self, result: Result, eighths: int = 8) -> Subset:
        size, seconds = self.bytes + result.bytes[eighths - 1], self.seconds + result.seconds[eighths - 1]
        return Subset((*self.results, (result, eighths)), size, seconds)

    def of(self, plan: Plan) -> Plan:
        """The plan with a budget that saves these."""
        saved = (SavedResult(one.products, one.place, eighths) for one, eighths in self.results)
        return techniques.remat.budgeted(plan, saved)


@dataclass(frozen=True)
class Choice:
    """The ``subsets`` that no other beats in both, by their bytes, of a plan's results. ``whole_s``: what ``full``
    computes again takes so long."""

    subsets: tuple[Subset, ...]
    whole_s: float

    @classmethod
    def of(cls, costed: Sheet, plan: Plan, cluster: Cluster) -> Choice:
        """That of a plan without stages that saves none of its results, which has rewritten the sheet."""
        found = dict[tuple[int, int], Result]()
        whole_s = 0.0
        for kind, block in enumerate(costed.blocks):
            numbers = [number for number, own in enumerate(costed.order) if own == kind]
            if block.recompute and numbers:
                again_s, results = _results(block, replace(costed, order=(0,)), plan, cluster)
                whole_s += len(numbers) * again_s
                for name, products, place, size, seconds in results:
                    saved = (SavedResult(products, place, eighths) for eighths in range(1, 9))
                    times = [_saving(numbers, plan, one) for one in saved]
                    had = found.get((products, place), Result(name, products, place, (0,) * 8, (0.0,) * 8))
                    sizes = tuple(one + n * size for one, n in zip(had.bytes, times, strict=True))
                    spared = tuple(one + n * seconds for one, n in zip(had.seconds, times, strict=True))
                    found[products, place] = replace(had, bytes=sizes, seconds=spared)
        return cls(_subsets(list(found.values())), whole_s)

    def most(self, left: Callable[[Subset], float]) -> Subset | None:
        """Return the largest subset of those that leave any of the memory, ``left`` in bytes; None where that is the
        empty one. What one leaves says which is tried next."""
        fits, beyond = 0, len(self.subsets)
        spare = left_empty = left(self.subsets[0])
        slope = 1.0  # bytes of a rank's memory for a byte that is saved: one of a pipeline has some of the blocks
        had = 0
        while beyond - fits > 1 and spare >= 0:
            tried = self._up_to(had + spare / slope)
            if tried <= fits and fits:
                break
            tried = min(max(tried, fits + 1), beyond - 1)
            spare = left(self.subsets[tried])
            had = self.subsets[tried].bytes
            slope = max((left_empty - spare) / had, 1e-3)
            if spare >= 0:
                fits = tried
            else:
                beyond = tried
                spare, had = left_empty, 0
        return self.subsets[fits] if fits else None

    def _up_to(self, size: float) -> int:
        """Return the number of the last subset that takes at most so many bytes."""
        return bisect_right(self.subsets, size, key=lambda subset: subset.bytes) - 1

    def spared_s(self, size: float) -> float:
        """Return the seconds that so many bytes spare at most."""
        return self.subsets[self._up_to(size)].seconds

    def words(self, subset: Subset) -> str:
        """Say what is saved, and how much is computed again all the same."""
        names = dict.fromkeys(
            one.name if eighths == 8 else f"{one.name} in {eighths} of 8 blocks" for one, eighths in subset.results
        )
        again = 1 - subset.seconds / self.whole_s if self.whole_s else 0.0
        return f"searched: {', '.join(names)}; {again:.0%} of what full computes again"


def _saving(numbers: list[int], plan: Plan, saved: SavedResult) -> int:
    """Return how many of the blocks with these numbers save a result."""
    remat = Remat("budget", plan.remat.every, (saved,))
    return sum(bool(remat.places(number, saved.products)) for number in numbers)


def _results(
    block: Unit, sheet: Sheet, plan: Plan, cluster: Cluster
) -> tuple[float, list[tuple[str, int, int, int, float]]]:
    """Return the seconds of all that one block computes again, and of each of its results that a recomputation comes to
    the name, products, place, bytes and seconds."""
    reached, may = len(recomputed(block)), techniques.remat.may_save(block)
    places = [place for place, i in enumerate(may) if i in techniques.remat.saves(block) and i < reached]
    saving = [replace(block, saved_ops=frozenset({may[place]})) for place in places]
    all_s, *each_s = step_seconds.recomputations(sheet, [block, *saving], plan, cluster)
    b, s = plan.batch.micro_batch_size, plan.row_tokens
    found = []
    for place, saving_s in zip(places, each_s, strict=True):
        op = block.forward[may[place]]
        size = sum(block.tensors[tensor].bytes(b, s) for tensor in op.allocates)
        found.append((_name(op), techniques.remat.products_of(block), place, size, all_s - saving_s))
    return all_s, found


def _name(op: Op) -> str:
    """Return what makes a result: a layer, a product beside one, or another operation."""
    layer = op.weight.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return layer or ("a product" if op.kind == "matmul" else op.name.rpartition(".")[2].replace("_", " "))


def _subsets(results: list[Result]) -> tuple[Subset, ...]:
    """Return whole results, and beside them a part of one more."""
    found = [Subset()]
    for result in results:
        found = _unbeaten([*found, *(subset.and_one(result) for subset in found)], EXACT)
    found = _unbeaten(found, WHOLE)
    more = list(found)
    for subset in found:
        had = {one for one, _ in subset.results}
        more += (subset.and_one(one, part) for one in results if one not in had for part in range(1, 8))
    return tuple(_unbeaten(more, EXACT))


def _unbeaten(subsets: list[Subset], most: int) -> list[Subset]:
    """Return those that spare more than all that take no more bytes; of too many, the best of each of so many equal
    parts of the bytes."""
    found = list[Subset]()
    for subset in sorted(subsets, key=lambda one: (one.bytes, -one.seconds)):
        if not found or subset.seconds > found[-1].seconds:
            found.append(subset)
    if len(found) <= most:
        return found
    part = found[-1].bytes / most
    return [[*alike][-1] for _, alike in groupby(found, key=lambda one: -(-one.bytes // part))]
