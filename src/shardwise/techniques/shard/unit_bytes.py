"""The bytes that the units of a sharded plan gather and reduce."""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from shardwise.models.roles import is_expert
from shardwise.spec.plan import BYTES, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import Sheet, Tensor
from shardwise.techniques.coded_gather import code_bytes, in_codes
from shardwise.techniques.states import is_cut, slices_over


class Slices(NamedTuple):
    """The ``group`` over whose ``ranks`` weights are cut."""

    group: str
    ranks: int


class GroupCall(NamedTuple):
    """A collective over a group: the bytes of all ranks' parts, and of one's."""

    over: str
    bytes: int
    part: int


@dataclass(frozen=True)
class UnitBytes:
    """The bytes of one unit. Of each call: ``gathers``, what every rank gathers, padding included; ``regathers``, the
    same from the ranks that keep a copy after forward; ``gradients``, by name the padded gradients of trained weights,
    in the dtype of reduction, and over whom they are summed. Of the unit: ``whole``, its weights as they are used;
    ``cast``, this rank's slice of the weights that are cast, or coded, before they are gathered; ``gradient``, its
    slice of the sum; ``unpadded``, the same without padding; ``kept``, its share of the copies after forward. Where
    some are gathered as codes: ``codes``, the most that is there of these beside the weights that they become;
    ``coding`` and ``decoding``, the bytes whose copy takes as long as making codes, and weights of them."""

    gathers: tuple[GroupCall, ...]
    regathers: tuple[GroupCall, ...]
    gradients: tuple[tuple[Slices, tuple[tuple[str, int], ...]], ...]
    gradient_bytes: int
    unpadded_bytes: int
    whole_bytes: int
    cast_bytes: int
    kept_bytes: int
    codes_bytes: int = 0
    coding_bytes: int = 0
    decoding_bytes: int = 0

    def reduces_of(self, names: Set[str]) -> tuple[GroupCall, ...]:
        """Return the calls that reduce gradients where only the weights of these names have any."""
        sizes = ((over, sum(size for name, size in call if name in names)) for over, call in self.gradients)
        return tuple(GroupCall(over.group, size, size // over.ranks) for over, size in sizes if size)

    @property
    def last(self) -> str:
        """The weight whose gradient is the last of its call, and of the unit."""
        return self.gradients[-1][1][-1][0] if self.gradients else ""

    @property
    def wire_bytes(self) -> int:
        return sum(call.bytes for call in self.gathers)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the gathers to which other ranks add a part."""
        return sum(call.bytes for call in self.gathers if call.part < call.bytes)


class ExpertsOf(NamedTuple):
    """The name of what the experts of a block are as a unit of their own, where ranks have different ones."""

    block: int


def groups(sheet: Sheet, plan: Plan) -> dict[Hashable, UnitBytes]:
    """The units of a sharded plan: blocks by number, their experts, and the two ends."""
    found: dict[Hashable, UnitBytes] = {}
    kinds = [_apart(block.weights, plan) for block in sheet.blocks]
    codes = [in_codes(block, plan) for block in sheet.blocks]
    each = zip(kinds, codes, strict=True)
    sizes = [[_group(weights, plan, sheet.rank_kind, coded) for weights in kind] for kind, coded in each]
    for index, kind in enumerate(sheet.order):
        found[index] = sizes[kind][0]
        if kinds[kind][1]:
            found[ExpertsOf(index)] = sizes[kind][1]
    return found | {name: _group(weights, plan, sheet.rank_kind) for name, weights in _ends(sheet).items()}


def _apart(weights: tuple[Tensor, ...], plan: Plan) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the weights of a block that are cut, and apart the experts that are cut over other ranks."""
    spread = plan.layout.ep > 1
    weights = tuple(weight for weight in weights if is_cut(weight.name, len(weight.shape)))
    own = tuple(weight for weight in weights if not (spread and is_expert(weight.name)))
    return own, tuple(weight for weight in weights if spread and is_expert(weight.name))


def _ends(sheet: Sheet) -> dict[str, tuple[Tensor, ...]]:
    """The weights of ``embedding`` and of ``head``; all under ``head``, where models/blocks.py leaves both to the
    root."""
    tables = all(op.name == "aten.embedding" for op in sheet.embedding.forward if op.weight)
    if tables and not sheet.tied:
        return {"embedding": sheet.embedding.weights, "head": sheet.head.weights}
    return {"head": sheet.embedding.weights + sheet.head.weights}


def _group(weights: tuple[Tensor, ...], plan: Plan, rank_kind: RankKind, codes: Set[str] = frozenset()) -> UnitBytes:
    """``codes``: the weights that are gathered as codes, which need no padding."""
    precision = plan.precision
    padded = {weight.name: weight.local_numel(rank_kind, padded=True) for weight in weights}
    trained = [weight for weight in weights if weight.trained]
    gathers = []
    regathers = []
    gradients = []
    every: list[tuple[Tensor, int]] = []
    kept = 0
    for over, call in _calls(weights, plan):
        k = int(plan.shard.reshard_after_forward) or 1 if over.group == "fsdp" else 1  # ranks that keep a copy
        numbers = [(w, padded[w.name] * over.ranks) for w in call]
        gathers.append(_gather(over.group, [_sent(w, n, codes) for w, n in numbers], over.ranks))
        # The padded buffer of all ranks, cut in k.
        again = [_sent(w, ceil(n / k) * k, codes) for w, n in numbers]
        regathers.append(_gather(f"{over.group}/{k}" if k > 1 else over.group, again, over.ranks))
        every += numbers
        kept += gathers[-1].bytes // k if k > 1 else 0
        each = over.ranks * BYTES[precision.reduce]
        own = tuple((w.name, padded[w.name] * each) for w in call if w.trained)
        gradients += [(over, own)] if own else []
    coded = [(weight, numbers) for weight, numbers in every if weight.name in codes]
    coding, decoding = PASSES[plan.compile]
    return UnitBytes(
        gathers=tuple(gathers),
        regathers=tuple(regathers),
        gradients=tuple(gradients),
        gradient_bytes=sum(padded[weight.name] for weight in trained) * BYTES[precision.weights],
        unpadded_bytes=sum(weight.local_numel(rank_kind, padded=False) for weight in trained)
        * BYTES[precision.weights],
        whole_bytes=sum(numbers * BYTES[weight.used_as] for weight, numbers in every),
        cast_bytes=sum(
            _sent(weight, padded[weight.name], codes)
            for weight in weights
            if weight.dtype != weight.used_as or weight.name in codes
        ),
        kept_bytes=kept,
        codes_bytes=_codes_left(coded),
        coding_bytes=round(coding * sum(padded[weight.name] for weight, _ in coded)),
        decoding_bytes=round(decoding * sum(numbers for _, numbers in coded)),
    )


PASSES = {False: (6.5, 3.5), True: (4.5, 1.5)}
"""The bytes for each number of a weight whose copy takes as long as what makes its codes (fp32 rounded to bf16, the
maxima found, scaled, converted), besides a copy of them, and as what makes it of them (converted, scaled): operation by
operation, or as the compiler fuses all but the rounding."""


def _sent(weight: Tensor, numbers: int, codes: Set[str]) -> int:
    """The bytes of so many numbers of a weight as they are gathered."""
    return code_bytes(numbers) if weight.name in codes else numbers * BYTES[weight.used_as]


def _codes_left(coded: list[tuple[Tensor, int]]) -> int:
    """The most bytes that are there of codes, beyond those that weights do not take yet: these are made one after
    another, and the codes of each go once it is."""
    most = codes = missing = 0
    for weight, numbers in reversed(coded):
        codes += code_bytes(numbers)
        most = max(most, codes - missing)
        missing += numbers * BYTES[weight.used_as]
    return most


def _gather(over: str, sizes: list[int], ranks: int) -> GroupCall:
    return GroupCall(over, sum(sizes), sum(sizes) // ranks)


def _calls(weights: tuple[Tensor, ...], plan: Plan) -> list[tuple[Slices, list[Tensor]]]:
    """Modules that compute in a type of their own are gathered and reduced apart from the rest of their unit; so are
    experts that are cut over other ranks."""
    alike = (plan.precision.compute, "uint8")  # bytes of codes travel with the rest
    found: dict[tuple[str, str], list[Tensor]] = {}
    for weight in weights:
        own = "" if weight.used_as in alike else weight.name.rpartition(".")[0]
        found.setdefault((slices_over(weight.name, plan), own), []).append(weight)
    return [(Slices(group, plan.layout.size(group)), call) for (group, _), call in found.items()]
