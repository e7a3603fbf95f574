"""Which ranks have other bits than those that should have the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

Place = tuple[int, int, str]
"""Where a pass makes something: in the forward (0) or the backward (1), how far in it, and the name of what it makes.
In this order a mistake spreads."""


@dataclass(frozen=True)
class RankBits:
    """Checksums of one rank: of what it ``holds``, by name and slice, which is equal wherever it is held; and of what
    it ``made`` of the micro-batch that all were given, by place, which is equal on ranks of the same ``role``."""

    host: str = ""
    device: str = ""
    role: str = ""
    holds: Mapping[str, int] = field(default_factory=dict)
    made: Mapping[Place, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Odd:
    """``ranks`` whose bits of ``name`` are not those of the ``others``. ``certain``: these are the ones that are wrong;
    else they may be the others. ``again``: whether the ranks make the same when they compute it once more; None where
    nothing was computed."""

    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    certain: bool
    again: bool | None = None


def odd_held(found: Sequence[RankBits]) -> Odd | None:
    """Return the first of what several ranks hold that is not the same on all of them; None if all is. ``found``: by
    rank."""
    held: dict[str, dict[int, int]] = {}
    for rank, bits in enumerate(found):
        for name, checksum in bits.holds.items():
            held.setdefault(name, {})[rank] = checksum
    return next((vote(name, sums) for name, sums in held.items() if len({*sums.values()}) > 1), None)


def differing(found: Sequence[RankBits], left_out: Set[str] = frozenset()) -> list[tuple[Place, dict[int, int]]]:
    """Return what ranks of the same role have made in different ways, in the order in which mistakes spread, with the
    checksum of each of these ranks. What is named in ``left_out`` is not compared."""
    made: dict[tuple[Place, str], dict[int, int]] = {}
    for rank, bits in enumerate(found):
        for place, checksum in bits.made.items():
            made.setdefault((place, bits.role), {})[rank] = checksum
    several = [(place, sums) for (place, _), sums in sorted(made.items()) if len({*sums.values()}) > 1]
    return [(place, sums) for place, sums in several if place[2] not in left_out]


def odd_made(rounds: Sequence[Sequence[RankBits]], left_out: Set[str] = frozenset()) -> tuple[Odd | None, set[str]]:
    """Return who computes wrongly, by what all ranks made of the same micro-batch in several ``rounds``; and the names
    of what is made anew each time, whose kernels are not deterministic, so that it says nothing."""
    varying, odds = set[str](), list[Odd]()
    several = differing(rounds[0], left_out)
    noise = {place for bits in rounds[0] for place in bits.made if place[2] in left_out}
    for place in dict.fromkeys(place for place, _ in several):
        of_roles = [sums for other, sums in several if other == place]
        changed = [changing(rounds, place, sums) for sums in of_roles]
        # ranks that a wrong number was sent to stand where its maker does, among those of their own role
        stands = {[*sums].index(rank) for sums, ranks in zip(of_roles, changed, strict=True) for rank in ranks}
        noisy = bool(varying) or any(other < place for other in noise)
        alone = len(stands) == 1 and all(agree_but(rounds, place, sums, *stands) for sums in of_roles)
        if stands and (noisy or not alone):
            varying.add(place[2])
            continue
        for sums, ranks in zip(of_roles, changed, strict=True):
            others = tuple(rank for rank in sums if rank not in ranks)
            once = Odd(place[2], tuple(ranks), others, certain=True, again=False)
            odds.append(once if ranks else vote(place[2], sums, again=True))
        return together(odds), varying
    return None, varying


def changing(rounds: Sequence[Sequence[RankBits]], place: Place, ranks: Iterable[int]) -> list[int]:
    """Return which of the ranks have not made the same in all rounds."""
    return [rank for rank in ranks if len({bits[rank].made.get(place) for bits in rounds}) > 1]


def agree_but(rounds: Sequence[Sequence[RankBits]], place: Place, ranks: Iterable[int], stands: int) -> bool:
    """Return whether all ranks but the one that stands there have made one and the same in all rounds, and that one
    something else in the first, which is in the minority of what all have made."""
    twins = [*ranks]
    rank = twins.pop(stands)
    made = [bits[rank].made.get(place) for bits in rounds]
    others = [bits[each].made.get(place) for bits in rounds for each in twins]
    first = made[0]
    return len({*others}) == 1 and first != others[0] and made.count(first) < [*made, *others].count(others[0])


def together(odds: Sequence[Odd]) -> Odd:
    """Return who is odd at one place, of ranks of all roles: what one has made others may have been sent."""
    ranks, others = (
        tuple(sorted(each for ones in many for each in ones))
        for many in ([odd.ranks for odd in odds], [odd.others for odd in odds])
    )
    return replace(
        odds[0],
        ranks=ranks,
        others=others,
        certain=all(odd.certain for odd in odds),
        again=all(odd.again for odd in odds),
    )


def vote(name: str, sums: Mapping[int, int], again: bool | None = None) -> Odd:
    """Return which ranks are odd by these checksums: those that are not of the majority. Without one, those that differ
    from the first rank's, and it is not certain."""
    ranks: dict[int, list[int]] = {}
    for rank, checksum in sums.items():
        ranks.setdefault(checksum, []).append(rank)
    most = max(ranks.values(), key=len)
    odd = tuple(rank for rank in sums if rank not in most)
    return Odd(name, odd, tuple(most), certain=2 * len(most) > len(sums), again=again)
