"""From a recipe to a plan. What the recipe pins stays; the rest is searched, each value with its reason.

Of all legal plans the one is chosen that takes the fewest seconds a step among those that fit, and of those that are
within 2 % of it the simplest: no tensor parallelism before some, ddp before zero1, zero2 and zero3, one group of slices
before replicas of several, less recomputation before more, larger micro-batches before smaller ones. A step is the same
sequences under every plan, so that seconds compare. Plans are gone through in the order of a time that none of them can
beat (planner/bounds.py), until that is longer than the best that was found: few are priced, fewer replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec
from shardwise.planner.bounds import LowerBounds
from shardwise.planner.candidates import LARGER_CHUNKS, candidates, chunk_of
from shardwise.planner.price import price
from shardwise.planner.seconds.step import timed
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan, Seconds
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes, show_seconds
from shardwise.techniques.remat import MODES
from shardwise.techniques.shard.degrees import STRATEGIES

MARGIN = 0.8
"""An estimate below this share of the memory did not run out in 454 published runs (Fujii et al., arXiv 2411.06465)."""
TIGHT = 0.95
"""What may be taken where nothing stays below the margin: more is left to chance."""
TIE = 0.02
"""Steps that differ by less take as long: runs of one plan differ by as much."""
KINDS = (*STRATEGIES, "hybrid", "tp")
"""The kinds of plans, from the simplest on."""


def choose(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan to run. Raises ConfigError with everything that makes the recipe's pins illegal."""
    return Search(recipe, spec, cluster).chosen


def fits(plan: Plan) -> bool:
    """Whether the plan stays below the margin."""
    return plan.estimate.peak_bytes <= MARGIN * plan.estimate.capacity_bytes


def peak_share(plan: Plan) -> float:
    """The share of the memory that the fullest rank takes."""
    return plan.estimate.peak_bytes / max(1, plan.estimate.capacity_bytes)


def seconds(plan: Plan) -> Seconds:
    """Those of a plan that has some."""
    assert plan.estimate.seconds is not None
    return plan.estimate.seconds


def name(plan: Plan) -> str:
    """``zero3 over 8 x 2, tp 4``."""
    layout = plan.layout
    over = layout.dp if plan.shard.strategy == "ddp" else layout.fsdp
    replicas = f" x {layout.dp_replicate}" * (plan.shard.strategy != "ddp" and layout.dp_replicate > 1)
    return f"{plan.shard.strategy} over {over}{replicas}" + f", tp {layout.tp}" * (layout.tp > 1)


def kind(plan: Plan) -> str:
    """Which of ``KINDS`` a plan is of."""
    if plan.layout.tp > 1:
        return "tp"
    return "hybrid" if plan.shard.strategy != "ddp" and plan.layout.dp_replicate > 1 else plan.shard.strategy


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Simpler plans come first."""
    hybrid = plan.shard.strategy != "ddp" and plan.layout.dp_replicate > 1
    dial = hybrid, STRATEGIES.index(plan.shard.strategy)
    return plan.layout.tp, *dial, MODES.index(plan.remat.mode), -plan.batch.micro_batch_size


@dataclass
class Search:
    """One recipe on one cluster. ``pinned``: as the recipe splits the ranks, or in every way."""

    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    pinned: bool = True
    prices: dict[Plan, Plan] = field(default_factory=dict, init=False, repr=False)
    times: dict[Plan, Plan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.bounds = LowerBounds(self.spec, self.cluster)

    @cached_property
    def all(self) -> list[Plan]:
        """Every legal plan, simpler ones first; of those that are as simple, in the order of techniques' choices."""
        return sorted(self._candidates[0], key=simplicity)

    @cached_property
    def _candidates(self) -> tuple[list[Plan], list[Problem]]:
        return candidates(self.recipe, self.spec, self.cluster, pinned=self.pinned)

    @cached_property
    def chosen(self) -> Plan:
        """The plan to run, with why. Raises ConfigError where none fits and the recipe's pins rule out others."""
        fitting = self.fastest(self.all) or self.fastest(self.all, TIGHT)
        if not fitting and (refused := self._candidates[1]):
            raise ConfigError(*dict.fromkeys(refused))
        if not fitting:
            smallest = self.smallest(self.all)
            share = f"{show_bytes(smallest.estimate.peak_bytes)} of {show_bytes(smallest.estimate.capacity_bytes)}"
            reason = f"derived: no plan stays below {MARGIN:.0%} of the memory; this is the smallest ({share})"
            return self._explained(self.timed(smallest), reason)
        best = self.simplest(fitting)
        if not fits(best):
            reason = f"derived: no plan stays below {MARGIN:.0%} of the memory; this is the fastest below {TIGHT:.0%}"
            return self._explained(best, reason)
        return self._explained(self._with_larger_chunks(best), self._reason(best, fitting))

    def families(self) -> list[Plan]:
        """The best plan of each kind, by seconds; behind them those of kinds of which none fits, the smallest of
        each."""
        found = []
        for each in KINDS:
            own = [plan for plan in self.all if kind(plan) == each]
            if fitting := self.fastest(own):
                found.append(self._with_larger_chunks(self.simplest(fitting)))
            elif own:
                found.append(self.timed(self.smallest(own)))
        return sorted(found, key=lambda plan: (not fits(plan), seconds(plan).step_s))

    def fastest(self, plans: list[Plan], share: float = MARGIN) -> list[Plan]:
        """Those that take at most ``share`` of the memory and may be as fast as any, with their seconds, in the order
        of ``plans``. Each plan is looked at when no other has a lower bound: at first a rough one, then a better one,
        then its price."""
        found: dict[int, Plan] = {}
        best_s, bounds = float("inf"), self.bounds
        standing = [(i, plan) for i, plan in enumerate(plans) if bounds.stand(plan, share)]
        waiting = [(bounds.roughly(plan), 0, i) for i, plan in standing]
        heapify(waiting)
        while waiting:
            bound_s, looked, i = heappop(waiting)
            if bound_s > (1 + TIE) * best_s:
                break
            if not looked and (rough_s := bounds.roughly(plans[i])) > bound_s:  # since more is known by now
                heappush(waiting, (rough_s, 0, i))
            elif not looked:
                heappush(waiting, (bounds.seconds(plans[i]), 1, i))
            elif peak_share(priced := self.priced(plans[i])) <= share:
                found[i] = self.timed(priced)
                best_s = min(best_s, seconds(found[i]).step_s)
        return [found[i] for i in sorted(found)]

    def simplest(self, plans: list[Plan]) -> Plan:
        """Of plans with seconds, the simplest of those that are as fast as the fastest."""
        limit_s = (1 + TIE) * min(seconds(plan).step_s for plan in plans)
        return min((plan for plan in plans if seconds(plan).step_s <= limit_s), key=simplicity)

    def smallest(self, plans: list[Plan]) -> Plan:
        """The plan whose fullest rank holds the least."""
        return min(map(self.priced, self.smallest_ones(plans)), key=lambda plan: plan.estimate.peak_bytes)

    def could_fit(self, share: float) -> bool:
        """Whether ``share`` of the memory is enough for the smallest plan."""
        small = [plan for plan in self.smallest_ones(self.all) if self.bounds.stand(plan, share)]
        return any(peak_share(self.priced(plan)) <= share for plan in small)

    def smallest_ones(self, plans: list[Plan]) -> list[Plan]:
        """Of each split of the ranks and mode of recomputation the plan with the smallest micro-batch."""
        found: dict[object, Plan] = {}
        for plan in plans:
            alike = plan.layout, plan.shard, plan.remat
            other = found.get(alike, plan)
            found[alike] = min(other, plan, key=lambda each: each.batch.micro_batch_size)
        return list(found.values())

    def priced(self, plan: Plan) -> Plan:
        """The plan with its estimate of memory and traffic, made once."""
        if plan not in self.prices:
            self.prices[plan] = price(self.spec, plan, self.cluster)
        return self.prices[plan]

    def timed(self, priced: Plan) -> Plan:
        """The same with seconds."""
        if priced not in self.times:
            self.times[priced] = timed(self.spec, priced, self.cluster)
        return self.times[priced]

    def _with_larger_chunks(self, plan: Plan) -> Plan:
        """The plan with the largest chunks of the loss that fit, on a GPU; it has the smallest."""
        tokens = plan.batch.micro_batch_size * plan.batch.seq_len
        for most in LARGER_CHUNKS if self.cluster.kind == "cuda" and plan.batch.loss_chunk_tokens < tokens else ():
            chunk, reasons = chunk_of(self.spec, most, tokens)
            larger = replace(plan, batch=replace(plan.batch, loss_chunk_tokens=chunk), why={**plan.why, **reasons})
            if fits(priced := self.priced(larger)):
                return self.timed(priced)
        return plan

    def _reason(self, best: Plan, fitting: list[Plan]) -> str:
        """Why this plan, in the figures by which it was chosen."""
        if best.layout.dp == 1:
            return "derived: there is one data-parallel rank, and nothing to shard over others"
        fastest = min(fitting, key=lambda plan: seconds(plan).step_s)
        step = show_seconds(seconds(self._with_larger_chunks(best)).step_s)
        if fastest is not best:
            differs = f" and recompute {fastest.remat.mode}" if fastest.remat != best.remat else ""
            return f"searched: {step} a step, within {TIE:.0%} of {name(fastest)}{differs}, and simpler"
        reason = f"searched: {step} a step, the fastest that fits"
        slower = self.fastest([plan for plan in self.all if kind(plan) != kind(best)])
        if slower:
            other = self._with_larger_chunks(min(slower, key=lambda plan: seconds(plan).step_s))
            reason += f"; {name(other)}: {show_seconds(seconds(other).step_s)}"
        return reason

    def _explained(self, plan: Plan, reason: str) -> Plan:
        """With why the search took this plan: ``reason``, unless the recipe left it no choice."""
        found = {"shard.strategy": reason}
        train = self.recipe.train
        if train.micro_batch_size is None and train.gradient_accumulation_steps is None:
            found["batch.micro_batch_size"] = "searched, with the step's sequences as they are"
        if self.recipe.recompute.mode == "auto":
            none = "activations fit" if fits(plan) else "activations are not what does not fit"
            less = "with less no plan fits, or none is as fast"
            found["remat.mode"] = f"searched: {none if plan.remat.mode == 'none' else less}"
        if plan.layout.tp > 1 and not self.recipe.parallel.tp:
            found["layout.tp"] = "searched: no plan without it fits, or is as fast"
        why = {**plan.why, **{key: words for key, words in found.items() if plan.why.get(key) != "pinned"}}
        order = [each.name for each in fields(plan)]
        ordered = sorted(why, key=lambda key: (key != "shard.strategy", order.index(key.partition(".")[0])))
        return replace(plan, why={key: why[key] for key in ordered})
