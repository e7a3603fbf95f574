"""What products in float8 would make of a plan without them, found without tracing anything: of the sheets that it has,
the products that would be such are told so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.price import along_pipeline, of_rank_kinds
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import SCALED, Op, Sheet, Unit, number
from shardwise.techniques.states import division, use

PRODUCTS = ("aten.mm", "aten.addmm")


def in_float8(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Plan | None:
    """Return a priced plan whose linear layers multiply in float8, with the seconds that it then takes; what it holds
    is what it held. None where it is no plan in bf16 for a device that has such products, or they are not allowed; nor
    of a mixture, whose experts are multiplied in another way then."""
    if spec.experts:
        return None
    found = techniques.float8.proposed(recipe, spec, cluster, plan)
    if found is None:
        return None
    sheets = (of_rank_kinds if plan.layout.pp == 1 else along_pipeline)(spec, plan)
    return timed(spec, found, cluster, sheets=[scaled(sheet, spec, found) for sheet in sheets])


def scaled(sheet: Sheet, spec: ModelSpec, plan: Plan) -> Sheet:
    """The sheet of a plan without float8, as the ``plan`` would have it: of a layer's three products the two that are
    not the gradient of its weight, told by their sizes, are in float8."""
    how = division(spec, plan)
    ranks = plan.layout.tp
    sizes = dict[int, set[tuple[int, ...]]]()
    for name, (rows, columns) in techniques.float8.layers(spec, plan.precision).items():
        used, block = use(f"{name}.weight", how), int(name.split(".")[1])
        own = (rows, columns // ranks) if used == "inputs" else (rows if used == "stream" else rows // ranks, columns)
        sizes.setdefault(block, set()).update([own, own[::-1]])

    @cache
    def unit(kind: int, inside: frozenset[tuple[int, ...]]) -> Unit:
        return _scaled_unit(sheet.blocks[kind], lambda op: _sizes(op) in inside)

    blocks = zip(sheet.order, sheet.rank_kind.blocks, strict=True)
    made = [unit(kind, frozenset(sizes.get(block, ()))) for kind, block in blocks]
    distinct = list(dict.fromkeys(made))
    return replace(sheet, blocks=tuple(distinct), order=tuple(map(distinct.index, made)))


def _scaled_unit(unit: Unit, among: Callable[[Op], bool]) -> Unit:
    def told(ops: tuple[Op, ...], name: str) -> tuple[Op, ...]:
        return tuple(replace(op, name=name) if op.name in PRODUCTS and among(op) else op for op in ops)

    passes = told(unit.forward, SCALED[0]), told(unit.forward_plain, SCALED[0]), told(unit.backward, SCALED[1])
    return replace(unit, forward=passes[0], forward_plain=passes[1], backward=passes[2])


def _sizes(op: Op) -> tuple[int, ...]:
    """The sizes of the matrix that rows of tokens are multiplied by; nothing where the tokens are summed over."""
    _, _, n, k = op.dims
    return () if isinstance(k, str) and "b" in k else (number(n, (1, 1)), number(k, (1, 1)))
