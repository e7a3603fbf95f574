"""Sheets, sizes of weights and bytes held: what is the same for plans that differ only in sharding, micro-batches or
stages is found once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.held import recomputed
from shardwise.planner.price import unstaged
from shardwise.planner.seconds import step_seconds
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.sheets import even, sheet_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit

OWN = {"layout", "batch", "shard", "pipeline", "estimate", "why", "cluster", "format"}
"""Settings that plans may differ in that compute the same, in micro-batches of another size or sharded over others."""
_settings = attrgetter(*(each.name for each in fields(Plan) if each.name not in OWN))
_of_weights = attrgetter(*(each.name for each in fields(Plan) if each.name not in {*OWN, "remat", "compile"}))


def alike(plan: Plan) -> int:
    """Return a number that is the same for all plans that compute the same, whatever the size of their micro-batches
    and the ranks over which they shard."""
    return _numbered(plan, "_alike", _settings)


def alike_weights(plan: Plan) -> int:
    """Return the same of plans that have the same weights, gradients and moments, whatever they compute again."""
    return _numbered(plan, "_alike_weights", _of_weights)


def _numbered(plan: Plan, name: str, settings: Callable[[Plan], object]) -> int:
    """Return the number of these settings, which the plan keeps under a name that is not pickled."""
    known: dict[str, int] = vars(plan)
    if name not in known:
        layout, numbers = plan.layout, _numbers()
        key = settings(plan), layout.tp, layout.cp, layout.ep, layout.ulysses, plan.sharded, plan.batch.seq_len
        known[name] = numbers.setdefault(key, len(numbers))
    return known[name]


@cache
def _numbers() -> dict[object, int]:
    return {}


class Standing(NamedTuple):
    """Bytes of weights and moments that the device holds, and the seconds of a step that do not grow with its
    micro-batches."""

    held: int
    once_s: float


@dataclass
class PlanFigures:
    """The figures of the plans of one model on one cluster. All searches for the model share its sheets and sizes."""

    spec: ModelSpec
    cluster: Cluster
    known_states: dict[object, Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known_sheets, self.known_sizes, self.known_flops = _of_model(self.spec)

    def sheet(self, plan: Plan) -> Sheet:
        """Return the sheet of the plan without stages. Plans with micro-batches of another size share it, unless ranks
        divide a micro-batch unevenly."""
        key = 0 if even(plan) else plan.batch.micro_batch_size, alike(plan)
        if key not in self.known_sheets:
            self.known_sheets[key] = costed_of(self.spec, unstaged(plan))
        return self.known_sheets[key]

    def own_sheet(self, plan: Plan) -> Sheet:
        """Return the same sheet at the first rank of the plan without stages."""
        whole = unstaged(plan)
        return self.sheet(plan).at(rank_kind_of(0, whole.layout, whole.stages(self.spec.num_hidden_layers)), whole)

    def flops(self, plan: Plan) -> int:
        """Return the operations of products a token, of all that compute the same."""
        key = alike(plan)
        if key not in self.known_flops:
            self.known_flops[key] = sum(times * _flops(unit) for unit, times in self.sheet(plan).repeated())
        return self.known_flops[key]

    def sizes(self, plan: Plan) -> techniques.Sizes:
        """Return the sizes of all that have the same weights, in micro-batches of whatever size."""
        key = alike_weights(plan)
        if key not in self.known_sizes:
            self.known_sizes[key] = techniques.Sizes.of(self.sheet(plan), plan)
        return self.known_sizes[key]

    def state(self, plan: Plan) -> Standing:
        """Return what the plan holds without stages, whatever its micro-batches."""
        key = plan.layout.fsdp, alike_weights(plan)
        if key not in self.known_states:
            whole, costed = unstaged(plan), self.own_sheet(plan)
            once_s = step_seconds.once_s(costed, whole, self.cluster, own_traits())
            self.known_states[key] = Standing(on_device(costed, whole), once_s)
        return self.known_states[key]


@cache
def _of_model(spec: ModelSpec) -> tuple[dict[object, Sheet], dict[int, techniques.Sizes], dict[int, int]]:
    return {}, {}, {}


def costed_of(spec: ModelSpec, whole: Plan) -> Sheet:
    """The sheet of a plan, rewritten by it."""
    return techniques.cost(sheet_of(spec, whole), whole)


def on_device(costed: Sheet, plan: Plan) -> int:
    """Return the bytes of weights and moments that the device holds."""
    return sum(size for (tier, _), size in techniques.held(costed, plan).items() if tier == "device")


@lru_cache(maxsize=8 * KEPT_UNITS)
def _flops(unit: Unit) -> int:
    """Operations of a unit's products for one token, recomputation included."""
    again = [op for i, op in enumerate(recomputed(unit)) if i not in unit.saved_ops] if unit.recompute else []
    return sum(op.flops for op in (*unit.forward, *again, *unit.backward) if op.kind == "matmul" and op.per == "b*s")
