"""Zero3's ranks send each other weights as codes (``precision.gather: float8``): which, and what is against it.

A rank's rows are rounded to the dtype of compute and coded there, as a product would code them; codes and scales are
gathered, and what they stand for is the weight that is multiplied by, which codes it again, to codes that stand for the
same. So a run is bit for bit what it is without. That takes whole blocks on every rank, and that nothing else reads the
weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_expert, role
from shardwise.spec.layout import divisors
from shardwise.spec.plan import BYTES, Plan, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.units import show_payload
from shardwise.techniques.coded_gather import code_bytes, whole_blocks
from shardwise.techniques.quantised import FLOAT8_BLOCK
from shardwise.techniques.states import division, piece, slices_over

KEY = "precision.gather"
EXACT = ("bf16", "fp32", "fp64")
"""The dtypes in which what codes stand for is exact: fp16 has no numbers that small."""


def whole_rows(spec: ModelSpec, plan: Plan, layers: Iterable[str]) -> dict[str, int]:
    """Return by name the rows of these layers' weights that a rank has before they are sharded."""
    shapes, of = parameter_shapes(spec), (division(spec, plan), replace(plan, shard=Shard("ddp")))
    kind = RankKind(plan.layout)
    return {name: piece(weight, shapes[weight], of, kind)[0] for name in layers if (weight := f"{name}.weight")}


def divided(spec: ModelSpec, plan: Plan, layers: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return those of these layers whose weights are gathered as codes, and those that are gathered in the dtype of
    compute: their ranks have no whole blocks."""
    rows = {name: (n, _ranks(name, plan)) for name, n in whole_rows(spec, plan, layers).items()}
    coded = [name for name, each in rows.items() if whole_blocks(*each)]
    return coded, [name for name, (n, ranks) in rows.items() if ranks > 1 and not whole_blocks(n, ranks)]


def _ranks(name: str, plan: Plan) -> int:
    return plan.layout.size(slices_over(f"{name}.weight", plan))


def problems(spec: ModelSpec, plan: Plan, layers: Iterable[str]) -> list[Problem]:
    """Return why the weights of these layers cannot be gathered as codes: of the strategy and its ranks only where
    nothing else is wrong."""
    return [*_beside(plan)] or [*_over_ranks(spec, plan, layers)]


def _beside(plan: Plan) -> Iterator[Problem]:
    if plan.precision.scales != "block":
        what = f"codes are gathered with scales of blocks of {FLOAT8_BLOCK} alone"
        what += ": a row and a column have different ones" * (plan.precision.scales == "row")
        yield Problem("PLAN012", what, KEY, "compute, or `precision.scales: block`")
    if plan.precision.compute not in EXACT:
        what = f"what codes of float8 stand for is not exact in {plan.precision.compute}"
        yield Problem("PLAN012", what, KEY, f"compute, or `precision.compute: {EXACT[0]}`")
    if plan.lora is not None and plan.lora.float8:
        yield Problem("PLAN012", "frozen weights in float8 are gathered as the codes that they are", KEY, "compute")
    elif plan.lora is not None and plan.lora.dora:
        what = "DoRA takes the norms of a weight's rows, which those of its codes are not"
        yield Problem("PLAN012", what, KEY, "compute, or `lora.dora: false`")
    if plan.offload.optimizer != "none" or plan.offload.weights != "none":
        what = "weights that come from the host are gathered in the dtype of compute"
        yield Problem("PLAN012", what, KEY, "compute, or no `offload.optimizer` and no `offload.weights`")


def _over_ranks(spec: ModelSpec, plan: Plan, layers: Iterable[str]) -> Iterator[Problem]:
    if not plan.sharded or plan.shard.strategy != "zero3":
        what = "weights travel as codes where zero3 gathers them for each micro-batch, over more than one rank"
        yield Problem("PLAN012", what, KEY, "compute, or `parallel.strategy: zero3`, or hsdp")
    elif not isinstance(again := plan.shard.reshard_after_forward, bool):
        what = f"weights that are kept after forward over groups of {again} ranks are kept as they are used"
        yield Problem("PLAN012", what, "parallel.reshard_after_forward", f"true or false; or `{KEY}: compute`")
    else:
        rows = whole_rows(spec, plan, layers)
        if rows and not divided(spec, plan, rows)[0]:
            name, most = max(rows.items(), key=lambda each: each[1] // _ranks(each[0], plan))
            ranks = _ranks(name, plan)
            what = f"{ranks} ranks have no whole blocks of {FLOAT8_BLOCK} rows of any weight in float8: the most rows "
            what += (
                f"that can be divided, those of `{name}`, are {most:,}, and {FLOAT8_BLOCK * ranks:,} would be needed"
            )
            yield Problem("PLAN012", what, KEY, f"compute{_fewer(plan, rows)}")


def _fewer(plan: Plan, rows: dict[str, int]) -> str:
    """The most ranks over which something could be gathered as codes, in words."""
    others = [n for name, n in rows.items() if not (plan.layout.ep > 1 and is_expert(f"{name}."))]
    able = [n for n in divisors(plan.layout.dp_shard)[1:-1] if any(whole_blocks(each, n) for each in others)]
    if not able or plan.layout.cp > 1:
        return ""
    return f", or `parallel.strategy: hsdp` with `parallel.dp_shard: {able[-1]}`"


def reason(spec: ModelSpec, plan: Plan, layers: Iterable[str]) -> str:
    """Return what is gathered as codes and what is not, and in how many bytes the whole model then is."""
    shapes = parameter_shapes(spec)
    coded, others = divided(spec, plan, layers)
    numbers = sum(prod(shapes[f"{name}.weight"]) for name in coded)
    every, each = sum(map(prod, shapes.values())), BYTES[plan.precision.compute]
    after = show_payload((every - numbers) * each + code_bytes(numbers))
    words = f"pinned: the weights of {len(coded)} layers, so that the model is gathered in {after} instead of "
    words += show_payload(every * each)
    roles = sorted({role(f"{name}.weight") for name in others})
    return words + f"; of {', '.join(roles)} ranks have no whole blocks" * bool(roles)
