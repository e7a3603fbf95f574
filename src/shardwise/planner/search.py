"""The search for a recipe's plan. What the recipe pins stays; the rest is searched, each value with its reason.

Of all legal plans the one is chosen that takes the fewest seconds a step among those that fit, and of those that are
within 2 % of it the simplest: no pipeline before one, no tensor parallelism before some, one group of slices before
replicas of several, less recomputation before more, larger micro-batches before smaller ones
(``techniques.simplicity``). A step is the same sequences under every plan, so that seconds compare. Pipelines are made
where their degrees and schedule are not ruled out by the best plan without one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec
from shardwise.planner.candidates import Pipelines, StagedDegrees, candidates
from shardwise.planner.comparison import (
    KINDS,
    MARGIN,
    TIE,
    TIGHT,
    Comparison,
    fits,
    in_order,
    kind,
    peak_share,
    seconds,
    simplest,
    smallest_ones,
)
from shardwise.planner.why import Reasons
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe


def _budget_gain(recipe: Recipe) -> float | None:
    """Return how many times as fast as others what saves by a budget must be, where such plans are looked for."""
    return {"auto": 1 + TIE, "budget": 1.0}.get(recipe.recompute.mode)


def choose(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan to run. Raises ConfigError with everything that makes the recipe's pins illegal."""
    return Search(recipe, spec, cluster).chosen


@dataclass
class Search:
    """What there is for one recipe on one cluster: ``all`` legal plans, without stages unless the recipe has some,
    simpler ones first; of those that are as simple, in the order of techniques' choices. ``refused``: what is wrong
    with others. ``pinned``: as the recipe splits the ranks, or in every way. ``stages``: how many are tried where the
    recipe leaves them open, if not any number. Raises ConfigError as :func:`choose`."""

    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    pinned: bool = True
    stages: frozenset[int] | None = None

    def __post_init__(self) -> None:
        with uncollected():
            plans, self.refused = candidates(self.recipe, self.spec, self.cluster, pinned=self.pinned)
            self.all = sorted(plans, key=techniques.simplicity)
        whole = self.all[0].batch.global_batch_size(self.all[0].layout.dp)
        self.tried = Pipelines(self.recipe, self.spec, self.cluster, whole, self.pinned)
        self.known = Comparison(self.spec, self.cluster, _budget_gain(self.recipe))

    @cached_property
    def pipelines(self) -> list[StagedDegrees]:
        """Degrees and schedules of pipelines that are tried where the recipe pins none."""
        if self.stages == frozenset({1}):
            return []
        return [one for one in self.tried.degrees() if not self.stages or one.staged.layout.pp in self.stages]

    @cached_property
    def fitting(self) -> list[Plan]:
        """The plans that may be taken: the fastest without a pipeline, and pipelines that are faster by more than runs
        differ; below the margin of memory, or if there are none, of those that are tight."""
        for share in (MARGIN, TIGHT):
            found = self.known.fastest(self.all, share)
            best = min(found, key=lambda plan: seconds(plan).step_s, default=None)
            limit_s = seconds(self.known.with_larger_chunks(best)).step_s if best else float("inf")
            if found := found + fastest_pipelines(self, limit_s / (1 + TIE), share):
                return found + self._with_budgets(found, share)
        return []

    def _with_budgets(self, found: list[Plan], share: float) -> list[Plan]:
        """Return what is faster than all that was ``found`` with a budget for recomputation: of all plans without
        a pipeline unless the recipe has some, and of those with the degrees of the fastest."""
        best = min(found, key=lambda plan: seconds(plan).step_s)
        own = _of_degrees(self, best) if best.layout.pp > 1 else []
        return self.known.with_budgets([*dict.fromkeys((*self.all, *own))], share, best)

    @cached_property
    def best(self) -> Plan:
        """The best plan, still without its reasons, for which others have to be looked at; where none fits, the
        smallest. Raises ConfigError where none does, and the recipe's pins rule out others."""
        with uncollected():
            if self.fitting:
                best = simplest(self.fitting)
                return self.known.with_larger_chunks(best) if fits(best) else best
            if self.refused:
                raise ConfigError(*dict.fromkeys(self.refused))
            return self.known.timed(self.known.smallest(self.all))

    @cached_property
    def chosen(self) -> Plan:
        """The same with its reasons: the plan to run."""
        return explained(self)


def explained(search: Search, scale: float = 1.0, others: Sequence[Plan] = ()) -> Plan:
    """Return the best plan with why, in seconds that are multiplied by ``scale``; beside ``others`` too, that are legal
    and have been found elsewhere."""
    with uncollected():
        return reasons(search, scale, others).explained


def reasons(search: Search, scale: float = 1.0, others: Sequence[Plan] = ()) -> Reasons:
    """Why the best plan, likewise."""
    best = search.best
    fitting = search.fitting
    tried = bool(search.pipelines)
    share = MARGIN if fits(best) else TIGHT
    beside = [plan for plan in others if fitting and peak_share(plan) <= share]
    return Reasons(search.recipe, search.known, search.all, [*fitting, *beside], best, tried, scale)


def fastest_pipelines(
    search: Search, limit_s: float = float("inf"), share: float = MARGIN, tp: bool | None = None
) -> list[Plan]:
    """The pipelines that may be as fast as any, and as what takes ``limit_s``. ``tp``: only those with tensor
    parallelism, or without."""
    waiting, found = list[tuple[float, int]](), list[Plan]()
    for i, degrees in enumerate(search.pipelines):
        able = _able(search, degrees, share) if tp in (None, degrees.staged.layout.tp > 1) else None
        if able is not None:
            waiting.append((search.known.bounds.degrees_s(able), i))
    for bound_s, i in sorted(waiting):
        if bound_s > (1 + TIE) * min([limit_s, *(seconds(plan).step_s for plan in found)]):
            break
        found += search.known.fastest(search.tried.plans(search.pipelines[i]), share, limit_s, found)
    return sorted(found, key=techniques.simplicity)


def _able(search: Search, degrees: StagedDegrees, share: float) -> Plan | None:
    """Return the plan of a pipeline's degrees that would be the fastest, with the least recomputation that memory
    allows, if any fits; where the optimizer may be on the host, less of that may be faster than less recomputation."""
    able = (fast for fast, lean in degrees.ends if search.known.bounds.may_fit(lean, share))
    if search.recipe.offload.optimizer == "auto":
        return min(able, key=search.known.bounds.degrees_s, default=None)
    return next(able, None)


def best_of_kinds(search: Search) -> list[Plan]:
    """The best plan of each kind, by seconds; behind them those of kinds of which none fits, the smallest of each."""
    found, known = [], search.known
    with uncollected():
        for each in KINDS:
            own = [plan for plan in search.all if kind(plan) == each]
            piped = "pp" in each and not own
            more = fastest_pipelines(search, tp="tp" in each) if piped else []
            own = _lean_pipelines(search, tp="tp" in each) if piped and not more else own
            if fitting := more or known.fastest(own) or known.fastest(own, TIGHT):
                found.append(_with_budget(search, known.with_larger_chunks(simplest(fitting))))
            elif own:
                found.append(known.timed(known.smallest(own)))
    return sorted(found, key=in_order)


def _with_budget(search: Search, best: Plan) -> Plan:
    """Return the plan of a kind as fast as a budget for recomputation makes it, in the same split of the ranks; of
    pipelines, which take long to price, only the best plan itself."""
    if kind(best) == kind(search.best) and search.best.remat.mode == "budget":
        return search.best
    if best.layout.pp > 1:
        return best
    alike = [each for each in _of_degrees(search, best) if (each.layout, each.shard) == (best.layout, best.shard)]
    share = MARGIN if fits(best) else TIGHT
    found = search.known.with_budgets(alike, share, best)
    return search.known.with_larger_chunks(found[-1]) if found else best


def _lean_pipelines(search: Search, *, tp: bool) -> list[Plan]:
    """Return for each pipeline's degrees, with tensor parallelism or without, the plan that holds least, under the
    simplest schedule."""
    alike = [degrees for degrees in search.pipelines if (degrees.staged.layout.tp > 1) is tp]
    schedules = {degrees.staged.pipeline.schedule for degrees in alike}
    simplest = min(schedules, key=techniques.SCHEDULES.index, default=None)
    return [each.ends[-1][1] for each in alike if each.staged.pipeline.schedule == simplest]


def could_fit(search: Search, share: float) -> bool:
    """Say whether ``share`` of the memory is enough for the smallest plan."""
    small = [plan for plan in smallest_ones(search.all) if search.known.bounds.may_fit(plan, share)]
    alone = any(peak_share(search.known.priced(plan)) <= share for plan in small)
    return alone or any(_able(search, degrees, share) for degrees in search.pipelines)


def strategies(search: Search, chosen: Plan) -> list[Plan]:
    """Return, where ``chosen`` splits the model too, the best plans of its degrees with what fits of the other ways to
    shard over the rest."""
    if kind(chosen) in techniques.KINDS:
        return []

    with uncollected():
        alike = _of_degrees(search, chosen)
        others = (each for each in techniques.STRATEGIES if each != chosen.shard.strategy)
        found = [search.known.fastest([plan for plan in alike if plan.shard.strategy == each]) for each in others]
        return [search.known.with_larger_chunks(simplest(own)) for own in found if own]


def _of_degrees(search: Search, chosen: Plan) -> list[Plan]:
    """Return the plans with the degrees and the schedule of the chosen one."""
    staged = [each for each in search.pipelines if _degrees(each.staged) == _degrees(chosen)]
    plans = (*search.all, *(plan for each in staged for plan in search.tried.plans(each)))
    return [plan for plan in plans if _degrees(plan) == _degrees(chosen)]


def _degrees(plan: Plan) -> tuple[object, ...]:
    layout = plan.layout
    return layout.pp, layout.tp, layout.cp, layout.ep, plan.pipeline, plan.cp_kind


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection: a search keeps almost all of the many small objects that it makes, which a sixth of
    its time would go to looking through."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
