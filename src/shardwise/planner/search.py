"""The search for a recipe's plan. What the recipe pins stays; the rest is searched, each value with its reason.

Of all legal plans the one is chosen that takes the fewest seconds a step among those that fit, and of those that are
within 2 % of it the simplest: no pipeline before one, no tensor parallelism before some, ddp before zero1, zero2 and
zero3, one group of slices before replicas of several, less recomputation before more, larger micro-batches before
smaller ones. A step is the same sequences under every plan, so that seconds compare. Pipelines are made where their
degrees and schedule are not ruled out by the best plan without one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec
from shardwise.planner.candidates import Pipelines, StagedDegrees, candidates
from shardwise.planner.compare import (
    KINDS,
    MARGIN,
    SIMPLER,
    TIE,
    TIGHT,
    Comparison,
    fits,
    in_order,
    kind,
    peak_share,
    seconds,
    simplest,
    simplicity,
    smallest_ones,
)
from shardwise.planner.why import Reasons
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.techniques.shard.degrees import STRATEGIES


def choose(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan to run. Raises ConfigError with everything that makes the recipe's pins illegal."""
    return Search(recipe, spec, cluster).chosen


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


@dataclass
class Search:
    """One recipe on one cluster. ``pinned``: as the recipe splits the ranks, or in every way. ``stages``: how many are
    tried where the recipe leaves them open, if not any number."""

    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    pinned: bool = True
    stages: frozenset[int] | None = None

    def __post_init__(self) -> None:
        self.known = Comparison(self.spec, self.cluster)

    @cached_property
    def all(self) -> list[Plan]:
        """Every legal plan, simpler ones first; of those that are as simple, in the order of techniques' choices."""
        return sorted(self._candidates[0], key=simplicity)

    @cached_property
    def _candidates(self) -> tuple[list[Plan], list[Problem]]:
        return candidates(self.recipe, self.spec, self.cluster, pinned=self.pinned)

    @cached_property
    def pipelines(self) -> list[StagedDegrees]:
        """Degrees and schedules of pipelines that are tried where the recipe pins none."""
        if self.stages == frozenset({1}):
            return []
        return [one for one in self._pipelines.degrees() if not self.stages or one.staged.layout.pp in self.stages]

    @cached_property
    def _pipelines(self) -> Pipelines:
        first = self.all[0]
        whole = first.batch.global_batch_size(first.layout.dp)
        return Pipelines(self.recipe, self.spec, self.cluster, whole, self.pinned)

    def piped(self, limit_s: float = float("inf"), share: float = MARGIN, tp: bool | None = None) -> list[Plan]:
        """The pipelines that may be as fast as any, and as what takes ``limit_s``. ``tp``: only those with tensor
        parallelism, or without."""
        waiting = list[tuple[float, int]]()
        for i, degrees in enumerate(self.pipelines):
            able = self._able(degrees, share) if tp in (None, degrees.staged.layout.tp > 1) else None
            if able is not None:
                waiting.append((self.known.bounds.degrees_s(able), i))
        found: list[Plan] = []
        for bound_s, i in sorted(waiting):
            if bound_s > (1 + TIE) * min([limit_s, *(seconds(plan).step_s for plan in found)]):
                break
            found += self.known.fastest(self._pipelines.plans(self.pipelines[i]), share, limit_s, found)
        return sorted(found, key=simplicity)

    def _lean_pipelines(self, tp: bool) -> list[Plan]:
        """Return for each pipeline's degrees, with tensor parallelism or without, the plan that holds least, under the
        simplest schedule."""
        alike = [degrees for degrees in self.pipelines if (degrees.staged.layout.tp > 1) is tp]
        simplest = min((degrees.staged.pipeline.schedule for degrees in alike), key=SIMPLER.index, default=None)
        return [each.ends[-1][1] for each in alike if each.staged.pipeline.schedule == simplest]

    def _able(self, degrees: StagedDegrees, share: float) -> Plan | None:
        """Return the plan of a pipeline's degrees that would be the fastest, with the least recomputation that memory
        allows, if any fits; where the optimizer may be on the host, less of that may be faster than less
        recomputation."""
        able = (fast for fast, lean in degrees.ends if self.known.bounds.stand(lean, share))
        if self.recipe.offload.optimizer == "auto":
            return min(able, key=self.known.bounds.degrees_s, default=None)
        return next(able, None)

    @cached_property
    def chosen(self) -> Plan:
        """The plan to run, with why. Raises ConfigError where none fits and the recipe's pins rule out others."""
        return self.explained()

    def explained(self, scale: float = 1.0, others: Sequence[Plan] = ()) -> Plan:
        """Return the same, with reasons in seconds that are multiplied by ``scale``; beside ``others`` too, that are
        legal and have been found elsewhere."""
        with uncollected():
            return self.reasons(scale, others).explained

    def reasons(self, scale: float = 1.0, others: Sequence[Plan] = ()) -> Reasons:
        """Why the best plan, in seconds that are multiplied by ``scale``."""
        tried = bool(self.pipelines)
        share = MARGIN if fits(self.best) else TIGHT
        beside = [plan for plan in others if self.fitting and peak_share(plan) <= share]
        return Reasons(self.recipe, self.known, self.all, [*self.fitting, *beside], self.best, tried, scale)

    @cached_property
    def best(self) -> Plan:
        """The best plan, still without its reasons, for which others have to be looked at."""
        with uncollected():
            fitting = self.fitting
            if not fitting and (refused := self._candidates[1]):
                raise ConfigError(*dict.fromkeys(refused))
            best = simplest(fitting) if fitting else self.known.timed(self.known.smallest(self.all))
            return self.known.with_larger_chunks(best) if fits(best) else best

    @cached_property
    def fitting(self) -> list[Plan]:
        """The plans that may be taken: the fastest without a pipeline, and pipelines that are faster by more than runs
        differ; below the margin of memory, or if there are none, of those that are tight."""
        for share in (MARGIN, TIGHT):
            found = self.known.fastest(self.all, share)
            best = min(found, key=lambda plan: seconds(plan).step_s, default=None)
            limit_s = seconds(self.known.with_larger_chunks(best)).step_s if best else float("inf")
            if found := found + self.piped(limit_s / (1 + TIE), share):
                return found
        return []

    def families(self) -> list[Plan]:
        """The best plan of each kind, by seconds; behind them those of kinds of which none fits, the smallest of
        each."""
        found = []
        with uncollected():
            for each in KINDS:
                own = [plan for plan in self.all if kind(plan) == each]
                more = self.piped(tp="tp" in each) if "pp" in each and not own else []
                own = own or ([] if more or "pp" not in each else self._lean_pipelines(tp="tp" in each))
                if fitting := more or self.known.fastest(own) or self.known.fastest(own, TIGHT):
                    found.append(self.known.with_larger_chunks(simplest(fitting)))
                elif own:
                    found.append(self.known.timed(self.known.smallest(own)))
        return sorted(found, key=in_order)

    def could_fit(self, share: float) -> bool:
        """Say whether ``share`` of the memory is enough for the smallest plan."""
        small = [plan for plan in smallest_ones(self.all) if self.known.bounds.stand(plan, share)]
        alone = any(peak_share(self.known.priced(plan)) <= share for plan in small)
        return alone or any(self._able(degrees, share) for degrees in self.pipelines)


def dials(search: Search, chosen: Plan) -> list[Plan]:
    """Return, where ``chosen`` splits the model too, the best plans of its degrees with what fits of the other ways to
    shard over the rest."""
    if kind(chosen) in (*STRATEGIES, "hybrid"):
        return []

    def degrees(plan: Plan) -> tuple[object, ...]:
        layout = plan.layout
        return layout.pp, layout.tp, layout.cp, layout.ep, plan.pipeline, plan.cp_kind

    with uncollected():
        staged = [each for each in search.pipelines if degrees(each.staged) == degrees(chosen)]
        plans = (*search.all, *(plan for each in staged for plan in search._pipelines.plans(each)))
        alike = [plan for plan in plans if degrees(plan) == degrees(chosen)]
        others = (each for each in STRATEGIES if each != chosen.shard.strategy)
        found = [search.known.fastest([plan for plan in alike if plan.shard.strategy == each]) for each in others]
        return [search.known.with_larger_chunks(simplest(own)) for own in found if own]
