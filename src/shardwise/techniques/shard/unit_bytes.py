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
    in the dtype of reduction, and over whom they are summed. Of the unit: ``cast``, this rank's slice of the weights
    that are cast before they are gathered; ``gradient``, its slice of the sum; ``unpadded``, the same without padding;
    ``kept``, its share of the copies after forward."""

    gathers: tuple[GroupCall, ...]
    regathers: tuple[GroupCall, ...]
    gradients: tuple[tuple[Slices, tuple[tuple[str, int], ...]], ...]
    gradient_bytes: int
    unpadded_bytes: int
    cast_bytes: int
    kept_bytes: int

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
    sizes = [[_group(weights, plan, sheet.rank_kind) for weights in kind] for kind in kinds]
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


def _group(weights: tuple[Tensor, ...], plan: Plan, rank_kind: RankKind) -> UnitBytes:
    precision = plan.precision
    padded = {weight.name: weight.local_numel(rank_kind, padded=True) for weight in weights}
    trained = [weight for weight in weights if weight.trained]
    gathers = []
    regathers = []
    gradients = []
    kept = 0
    for over, call in _calls(weights, plan):
        k = int(plan.shard.reshard_after_forward) or 1 if over.group == "fsdp" else 1  # ranks that keep a copy
        sizes = [(padded[w.name] * over.ranks, BYTES[w.used_as]) for w in call]
        gathers.append(_gather(over.group, sizes, over.ranks))
        # The padded buffer of all ranks, cut in k.
        again = [(ceil(numel / k) * k, size) for numel, size in sizes]
        regathers.append(_gather(f"{over.group}/{k}" if k > 1 else over.group, again, over.ranks))
        kept += gathers[-1].bytes // k if k > 1 else 0
        each = over.ranks * BYTES[precision.reduce]
        own = tuple((w.name, padded[w.name] * each) for w in call if w.trained)
        gradients += [(over, own)] if own else []
    return UnitBytes(
        gathers=tuple(gathers),
        regathers=tuple(regathers),
        gradients=tuple(gradients),
        gradient_bytes=sum(padded[weight.name] for weight in trained) * BYTES[precision.weights],
        unpadded_bytes=sum(weight.local_numel(rank_kind, padded=False) for weight in trained)
        * BYTES[precision.weights],
        cast_bytes=sum(
            padded[weight.name] * BYTES[weight.used_as] for weight in weights if weight.dtype != weight.used_as
        ),
        kept_bytes=kept,
    )


def _gather(over: str, sizes: list[tuple[int, int]], ranks: int) -> GroupCall:
    total = sum(numel * size for numel, size in sizes)
    return GroupCall(over, total, total // ranks)


def _calls(weights: tuple[Tensor, ...], plan: Plan) -> list[tuple[Slices, list[Tensor]]]:
    """Modules that compute in a type of their own are gathered and reduced apart from the rest of their unit; so are
    experts that are cut over other ranks."""
    alike = (plan.precision.compute, "uint8")  # bytes of codes travel with the rest
    found: dict[tuple[str, str], list[Tensor]] = {}
    for weight in weights:
        own = "" if weight.used_as in alike else weight.name.rpartition(".")[0]
        found.setdefault((slices_over(weight.name, plan), own), []).append(weight)
    return [(Slices(group, plan.layout.size(group)), call) for (group, _), call in found.items()]
