"""The order of the techniques, and the folds over it.

A technique is a module with three functions that say what may be asked of it:

    choices   (recipe, spec, cluster, plan) -> plans    the plan with each of its settings to try, and why; best first
    pins      (recipe, plan) -> pairs                   by recipe key, what the plan has and what the recipe asks for
    check     (spec, plan, cluster) -> problems         what makes the plan illegal

``SETTINGS`` has the settings of a plan that are its own, each with the value with which it does nothing: ``layout.tp``
with 1. Where all of them have it, none of the functions below is called; a technique without the name acts in every
plan. Whether its code takes another path at other sizes, one of two says, and ``prove`` keeps what holds:

    regimes     (spec, plan, trained) -> by name, whether it holds; ``trained``: the shapes of the weights that learn
    NO_REGIMES  why there are none

What it does, these say, of which it has those that it needs:

    traced    (made, spec, plan, rank_kind) -> made     what it does inside a unit: its part of the unit's variant
    cost      (sheet, plan) -> sheet                    what it makes of the units, on paper
    apply     (parts, plan, meshes) -> parts            its effect on the model's parts

    before_waiting      (parts, plan)                   where a step begins with waiting for another stage
    before_micro_batch  (parts, plan, last)             before each forward that a backward follows
    after_micro_batch   (parts, plan)                   after each backward
    after_backward      (parts, plan, meshes)           after the last backward of a step: sums gradients
    after_inference     (parts, plan)                   after forwards that no backward follows

    before_input_gradients  (parts, plan, last)         where a backward comes in two halves, first the gradients of
                                                        inputs: before the first half, instead of before_micro_batch
    after_weight_gradients  (parts, plan, last)         after the second, which before_micro_batch is called before

What it does between units while a step runs, on paper, classes of :mod:`~shardwise.techniques.between` say
(:func:`between`).

    wanted    (slices, shapes) -> slices                of which weights a rank must be given what
    store     (parameters, name, part, values) -> values    fills its own parameters from one that is read or drawn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, learnt_positions, parameter_shapes
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import cut
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, At, Op, Sheet, Tier, Unit, Within
from shardwise.techniques import (
    compile,
    cp,
    ep,
    float8,
    freeze,
    frozen_float8,
    lora,
    nf4,
    offload,
    optim,
    pp,
    precision,
    remat,
    shard,
    tp,
)
from shardwise.techniques.between import Between, Weights
from shardwise.techniques.between import StageTimes as StageTimes
from shardwise.techniques.events import EventLog, StageLog
from shardwise.techniques.offload import tiers
from shardwise.techniques.offload.legal import leave_at_once as leave_at_once
from shardwise.techniques.offload.legal import leave_early as leave_early
from shardwise.techniques.offload.legal import with_sums
from shardwise.techniques.offload.narrow import store_narrow
from shardwise.techniques.offload.paper import ComingWeights, LeavingGradients, WaitingInputs
from shardwise.techniques.offload.tiers import copied_after as copied_after
from shardwise.techniques.offload.tiers import moved as moved
from shardwise.techniques.offload.tiers import updated as updated
from shardwise.techniques.optim import on_whole_matrices as on_whole_matrices
from shardwise.techniques.pp import orders as orders
from shardwise.techniques.pp.actions import Action as Action
from shardwise.techniques.pp.replay import Replay as Replay
from shardwise.techniques.pp.seconds import PipelineReplay as PipelineReplay
from shardwise.techniques.pp.seconds import alive_before as alive_before
from shardwise.techniques.pp.seconds import in_flight
from shardwise.techniques.pp.seconds import least_step_s as least_step_s
from shardwise.techniques.served import unserved
from shardwise.techniques.settings import SCHEDULES as SCHEDULES
from shardwise.techniques.settings import inside as inside
from shardwise.techniques.settings import recomputation as recomputation
from shardwise.techniques.settings import searched as searched
from shardwise.techniques.settings import simplicity as simplicity
from shardwise.techniques.shard.bounds import BlockSeconds as BlockSeconds
from shardwise.techniques.shard.bounds import PassBytes as PassBytes
from shardwise.techniques.shard.bounds import Sizes as Sizes
from shardwise.techniques.shard.degrees import KINDS as KINDS
from shardwise.techniques.shard.degrees import STRATEGIES as STRATEGIES
from shardwise.techniques.shard.degrees import beside_stages as beside_stages
from shardwise.techniques.shard.degrees import grouped as grouped
from shardwise.techniques.shard.degrees import kind as kind
from shardwise.techniques.shard.degrees import sent_over as sent_over
from shardwise.techniques.shard.degrees import smallest as smallest
from shardwise.techniques.shard.degrees import streams as streams
from shardwise.techniques.shard.degrees import twin as twin
from shardwise.techniques.shard.degrees import words as words
from shardwise.techniques.shard.paper import Sharded
from shardwise.techniques.shard.replicated import Replicated
from shardwise.techniques.shard.replicated import period as period
from shardwise.techniques.states import frozen
from shardwise.techniques.states import trained_stages as trained_stages
from shardwise.techniques.variant import Traced
from shardwise.techniques.widened import widened

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.distributed.meshes import Meshes

ORDER: tuple[ModuleType, ...]
ORDER = (pp, lora, precision, freeze, nf4, frozen_float8, float8, tp, cp, ep, remat, compile, shard, offload, optim)


SPLIT = (pp, tp, cp, ep)
"""Those that split a model or its rows over ranks, in the order in which their degrees are tried."""


def choices(
    order: Sequence[ModuleType],
    recipe: Recipe,
    spec: ModelSpec,
    cluster: Cluster,
    plan: Plan,
    *,
    pinned: bool = True,
) -> Iterator[Plan]:
    """The plan with every combination of the settings of the techniques in ``order``. Each technique's best setting
    comes first; the settings of the last technique vary fastest. With ``pinned`` false whatever the recipe says of the
    split of the ranks."""
    if not order:
        yield plan
        return
    free: dict[str, bool] = {} if pinned or order[0] not in (*SPLIT, shard) else {"pinned": False}
    for chosen in order[0].choices(recipe, spec, cluster, plan, **free):
        yield from choices(order[1:], recipe, spec, cluster, chosen, pinned=pinned)


def within_split(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool) -> Iterator[Plan]:
    """A plan that is split so with every combination of all other settings, and of those every way to shard."""
    return choices((*_inside(), shard), recipe, spec, cluster, plan, pinned=pinned)


def _inside() -> list[ModuleType]:
    """Those techniques whose settings are tried within one split."""
    return [technique for technique in ORDER if technique not in (*SPLIT, shard)]


def staged(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool
) -> Iterator[tuple[Plan, list[Plan]]]:
    """The plan with every pipeline that is tried where the recipe pins none, and of each, not sharded yet, the settings
    within its split; none where inputs of blocks wait outside the device."""
    if (recipe.parallel.pp and pinned) or recipe.offload.activations != "none":
        return
    for split in choices(SPLIT[1:], recipe, spec, cluster, plan, pinned=pinned):
        ends = dict[bool, list[Plan]]()
        for piped in pp.pipelines(recipe, spec, cluster, split):
            halved = piped.pipeline.spec.splits_backward
            if halved not in ends:
                ends[halved] = [*choices(_inside(), recipe, spec, cluster, replace(piped, why=split.why))]
            yield piped, ends[halved]


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    """Return by the recipe's key what the plan has and what the recipe asks for; ``auto`` agrees with anything."""
    return {key: pair for technique in ORDER for key, pair in technique.pins(recipe, plan).items()}


def check_split(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Return what makes the split of a plan illegal, whatever its stages."""
    return [problem for technique in SPLIT[1:] for problem in technique.check(spec, plan, cluster)]


def batched(spec: ModelSpec, plan: Plan, cluster: Cluster) -> tuple[list[Plan], list[Problem]]:
    """Return a legal plan with other micro-batches, and what these allow besides; or what is wrong with them."""
    problems = pp.check(spec, plan, cluster)
    return [] if problems else with_sums(plan), problems


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Everything that makes ``plan`` illegal for the model and the cluster."""
    problems = [problem for technique in ORDER for problem in technique.check(spec, plan, cluster)]
    if problem := unserved(spec, plan, cluster):
        problems.append(problem)
    longest = spec.max_position_embeddings
    if plan.batch.seq_len > longest and (learnt := learnt_positions(spec)):
        what = f"{spec.name} has learned positions for {longest} tokens ({learnt})"
        problems.append(Problem("PLAN008", what, "train.seq_len", f"{longest} or less"))
    return problems


def acting(plan: Plan, function: str, order: Sequence[ModuleType] | None = None) -> list[ModuleType]:
    """Return the techniques, of all or of ``order``, that the plan uses and that have the function."""
    return [one for one in (ORDER if order is None else order) if function in vars(one) and _uses(plan, one)]


def _uses(plan: Plan, technique: ModuleType) -> bool:
    settings = vars(technique).get("SETTINGS")
    return settings is None or any(attrgetter(name)(plan) != idle for name, idle in settings.items())


def regimes(spec: ModelSpec, plan: Plan, order: Sequence[ModuleType] | None = None) -> dict[str, bool]:
    """Return by name whether the code of a technique that the plan uses takes the path that it takes at some sizes
    only; of all techniques, or of ``order``."""
    every = parameter_shapes(spec) | (lora.adapters(spec, plan.lora) if plan.lora else {})
    trained, found = {name: shape for name, shape in every.items() if not frozen(name, plan)}, dict[str, bool]()
    for technique in acting(plan, "regimes", order):
        found |= technique.regimes(spec, plan, trained)
    return found


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Return what the whole plan makes of a unit of a model: a template becomes the variant that is to be traced."""
    for technique in acting(plan, "traced"):
        before, made = made.variant, technique.traced(made, spec, plan, rank_kind)
        if made.variant != before:
            made = made.told(code=(*made.variant.code, *technique.INSIDE))
    return made


def within(op: Op, at: At) -> Within | None:
    """Return what an operation holds and sends while it runs, if it is a technique's own, or attention whose values are
    narrower than its keys; None of any other."""
    if op.name in ("shardwise.attention", "shardwise.attention_backward"):
        return widened(op, at)
    does = _within(ORDER).get(op.name)
    return does(op, at) if does else None


@cache
def _within(order: tuple[ModuleType, ...]) -> dict[str, Callable[[Op, At], Within]]:
    return {name: does for technique in order for name, does in vars(technique).get("WITHIN", {}).items()}


def steps_of(operation: str) -> Callable[..., Any] | None:
    """Return the function that does, operation by operation, what an operation of a technique's own does, by torch's
    name for it; None for any other."""
    found = (technique.steps_of(operation) for technique in ORDER if "steps_of" in vars(technique))
    return next(filter(None, found), None)


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """The effect of the whole plan on the model on paper. Raises ValueError where the sheet is of another model, or
    another plan has acted inside its units."""
    if plan.model not in ("", sheet.model) or sheet.inside not in (None, inside(plan)):
        raise ValueError(f"a sheet of {sheet.model} was made for another plan, or the plan for another model")
    sheet = sheet.at(sheet.rank_kind, plan)
    for technique in acting(plan, "cost"):
        sheet = technique.cost(sheet, plan)
    return sheet


def between(log: EventLog, sheet: Sheet, plan: Plan, stage: int = 0) -> tuple[Weights, list[Between]]:
    """Return what has the weights of a stage and their gradients, and all that is done between its units, in the order
    in which each acts before a unit: after it, what was first is last."""
    own = log if plan.layout.pp == 1 else StageLog(log, stage)
    gradients = LeavingGradients(own, sheet, plan)
    weights: Weights = (Sharded if plan.sharded else Replicated)(own, sheet, plan, gradients)
    inputs = WaitingInputs(log, sheet, plan, stage)
    return weights, [ComingWeights(own, sheet, plan), weights, inputs, gradients]


def held(sheet: Sheet, plan: Plan) -> Mapping[tuple[Tier, str], int]:
    """Return the bytes that are there all the time on the sheet's kind of rank, by tier and category: weights and
    moments on the device, and what is kept elsewhere."""
    state, elsewhere = (optim.state_bytes(each, plan) for each in (sheet, tiers.elsewhere(sheet)))
    return tiers.held(sheet, plan, state, elsewhere["moments"], in_flight(sheet, plan))


def cuts(sheet: Sheet, plan: Plan) -> dict[str, set[int]]:
    """Return by the name of a group the sizes of dims that are cut over it, of a sheet that ``plan`` has rewritten. All
    that tensor parallelism cuts, but the vocabulary, it cuts evenly."""
    found: dict[str, set[int]] = {}
    for unit in sheet.units:
        for group, size in _cuts(unit):
            found.setdefault(group, set()).add(size)
    ids, ranks = sheet.vocabulary, plan.layout.tp
    if ids % ranks:
        pieces = {stop - start for start, stop in (cut((0, ids), ranks, index) for index in (0, ranks // 2, ranks - 1))}
        found["tp"], found["fsdp"] = {ids}, found.get("fsdp", set()) | (pieces if plan.sharded else set())
    return found


@lru_cache(maxsize=8 * KEPT_UNITS)
def _cuts(unit: Unit) -> frozenset[tuple[str, int]]:
    return frozenset((group, int(weight.shape[dim])) for weight in unit.weights for group, dim in weight.shards)


def apply(
    parts: list[nn.Module],
    plan: Plan,
    meshes: Meshes,
    allocate: Callable[[list[nn.Module]], None] = lambda parts: None,
) -> list[nn.Module]:
    """The effect of the whole plan on the model's parts. The optimizer is built later, on what this returns.

    ``allocate`` gives parts on the meta device memory: a replicated model before it is sharded, since its gradient
    hooks hold on to the very parameters; a sharded one after, so that a rank never allocates more than its shards.
    """
    inside, between = ORDER[: ORDER.index(shard)], ORDER[ORDER.index(shard) + 1 :]
    parts = _applied(inside, parts, plan, meshes)
    if not plan.sharded:
        allocate(parts)
    parts = _applied((shard,), parts, plan, meshes)
    if plan.sharded:
        allocate(parts)
    return _applied(between, parts, plan, meshes)


def _applied(order: Sequence[ModuleType], parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    for technique in acting(plan, "apply", order):
        parts = technique.apply(parts, plan, meshes)
        if technique is precision and plan.offload.optimizer != "none":
            store_narrow(parts, plan)
    return parts


def apply_inside(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Apply the whole plan but what acts on whole units, and return the parts."""
    return _applied([technique for technique in ORDER if technique is not shard], parts, plan, meshes)


def wanted(parameters: Mapping[str, Tensor], spec: ModelSpec, plan: Plan) -> dict[str, tuple[slice, ...]]:
    """Return by the name of each weight that is read or drawn what of it this rank must be given to fill its
    ``parameters``: what it holds, and more where a technique stores what follows from more."""
    from shardwise.distributed.slices import local_slice

    slices, shapes = {name: local_slice(parameter) for name, parameter in parameters.items()}, parameter_shapes(spec)
    for technique in acting(plan, "wanted"):
        slices = technique.wanted(slices, shapes)
    return slices


def store(parameters: Mapping[str, Tensor], name: str, part: tuple[slice, ...], values: Any, plan: Plan) -> None:
    """Fill the parameters that follow from the weight ``name``, of which ``values`` are, or give, the ``part`` that was
    :func:`wanted`. What was applied last replaced the weight last, so it is the first to store: the next is told what
    the layer then computes with."""
    made: Callable[[], Tensor] = values if callable(values) else lambda: values
    for technique in reversed(acting(plan, "store")):
        made = technique.store(parameters, name, part, made)


def before_waiting(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Call where a step begins with waiting for another stage: what can be done meanwhile."""
    for technique in acting(plan, "before_waiting"):
        technique.before_waiting(parts, plan)


def before_micro_batch(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Call before each forward that a backward follows at once, else before the backward. Whether it is the ``last`` of
    its step decides what it sends and frees."""
    for technique in acting(plan, "before_micro_batch"):
        technique.before_micro_batch(parts, plan, last=last)


def after_micro_batch(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Call after each backward, or the first half of one."""
    for technique in acting(plan, "after_micro_batch"):
        technique.after_micro_batch(parts, plan)


def before_input_gradients(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Call before the first half of a backward, which makes no gradient of a linear layer's weight. ``last``: its
    second half is the last of the step."""
    for technique in acting(plan, "before_input_gradients"):
        technique.before_input_gradients(parts, plan, last=last)


def after_weight_gradients(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Call after the second half, which :func:`before_micro_batch` was called before."""
    for technique in acting(plan, "after_weight_gradients"):
        technique.after_weight_gradients(parts, plan, last=last)


def after_backward(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Call after the last backward of a step. When it returns, gradients are summed over every axis: what was applied
    last saw them first, so it is the first to finish."""
    for technique in reversed(acting(plan, "after_backward")):
        technique.after_backward(parts, plan, meshes)


def after_inference(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Call after forward passes that no backward follows: the parts are then as they were before."""
    for technique in acting(plan, "after_inference"):
        technique.after_inference(parts, plan)
