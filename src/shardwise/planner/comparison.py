"""Plans beside one another: which fit, which are faster, which simpler.

Plans are gone through in the order of a time that none of them can beat (planner/bounds.py), until that is longer than
the best that was found: few are priced, fewer replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.bounds import LowerBounds
from shardwise.planner.budget import Choice, Subset
from shardwise.planner.candidates import LARGER_CHUNKS, chunk_of
from shardwise.planner.figures import alike
from shardwise.planner.price import price, unstaged
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import MARGIN as MARGIN
from shardwise.spec.plan import Estimate, Plan, Seconds

TIGHT = 0.95
"""What may be taken where nothing stays below the margin: more is left to chance."""
TIE = 0.02
"""Steps that differ by less count as equally fast: runs of one plan differ by as much."""
KINDS = (*techniques.KINDS, "ep", "cp", "tp", "pp", "pp x tp")
"""The kinds of plans, from the simplest on."""


def fits(plan: Plan) -> bool:
    """Say whether the plan's memory stays below the margin."""
    return plan.estimate.share <= MARGIN


def in_order(plan: Plan) -> tuple[object, ...]:
    """A table of plans has this order: those that fit, by the time of a step, then those that are tight, then
    others."""
    return not fits(plan), peak_share(plan) > 1, seconds(plan).step_s


def peak_share(plan: Plan) -> float:
    """The share of the memory that the fullest rank takes, or a node's ranks of the host's."""
    return plan.estimate.share


def seconds(plan: Plan) -> Seconds:
    """Return the seconds of a plan that has some."""
    assert plan.estimate.seconds is not None
    return plan.estimate.seconds


def tokens_per_s(plan: Plan) -> float:
    """Tokens of all ranks."""
    return plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len / seconds(plan).step_s


def name(plan: Plan) -> str:
    """Return its strategy, and what else it splits: ``... over 8 x 2, tp 4, pp 4 (1f1b)``."""
    layout = plan.layout
    split = f", cp {layout.cp} ({plan.cp_kind})" * (layout.cp > 1)
    split += f", ep {layout.ep}" * (layout.ep > 1) + f", tp {layout.tp}" * (layout.tp > 1)
    split += f", pp {layout.pp} ({plan.pipeline.schedule})" * (layout.pp > 1)
    if layout.size("loss") == 1 and split:
        return split.removeprefix(", ")
    return f"{techniques.words(plan)}{split}"


def kind(plan: Plan) -> str:
    """Return which of ``KINDS`` a plan is of."""
    split = [axis for axis in ("pp", "tp", "cp", "ep") if vars(plan.layout)[axis] > 1]
    if split[:2] == ["pp", "tp"]:
        return "pp x tp"
    return split[0] if split else techniques.kind(plan)


def twins(one: Plan, other: Plan) -> bool:
    """Return whether two plans of one micro-batch a step are of kinds that are one program then."""
    once = one.batch.accumulation == other.batch.accumulation == 1
    found = (techniques.twin(one), other), (techniques.twin(other), one)
    return once and any(twin is not None and kind(twin) == kind(plan) for twin, plan in found)


def same_program(one: Plan, other: Plan) -> bool:
    """Return whether two plans with different settings are one program."""
    found = (techniques.twin(one), other), (techniques.twin(other), one)
    return any(twin == replace(plan, estimate=Estimate(), why=twin.why) for twin, plan in found if twin)


def _but_for_recomputation(plan: Plan) -> tuple[object, ...]:
    return plan.layout, plan.cp_kind, plan.batch, plan.shard, plan.pipeline, plan.compile, plan.offload


def simplest(plans: list[Plan]) -> Plan:
    """Return the simplest of those plans that are as fast as the fastest. All have seconds."""
    limit_s = (1 + TIE) * min(seconds(plan).step_s for plan in plans)
    return min((plan for plan in plans if seconds(plan).step_s <= limit_s), key=techniques.simplicity)


def smallest_ones(plans: list[Plan]) -> list[Plan]:
    """Return for each split of the ranks and mode of recomputation the plan with the smallest micro-batch; and where
    gradients leave as one micro-batch makes them, and those of several would stay, the plan with one."""
    found: dict[object, Plan] = {}
    for plan in plans:
        leaves = techniques.leave_at_once(plan)
        alike = plan.layout, plan.cp_kind, plan.shard, plan.remat, plan.offload, leaves
        other = found.get(alike, plan)
        found[alike] = min(other, plan, key=lambda each: each.batch.micro_batch_size)
    return list(found.values())


@dataclass
class Comparison:
    """Plans of one model on one cluster, each priced and timed once. ``budget_gain``: how many times as fast as all
    others a plan must be that recomputes by a budget, if there may be any."""

    spec: ModelSpec
    cluster: Cluster
    budget_gain: float | None = None
    prices: dict[Plan, Plan] = field(default_factory=dict)
    too_large: dict[Plan, Plan] = field(default_factory=dict)
    times: dict[Plan, Plan] = field(default_factory=dict)
    known_choices: dict[object, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = LowerBounds(self.spec, self.cluster)

    def fastest(
        self, plans: list[Plan], share: float = MARGIN, limit_s: float = float("inf"), others: Sequence[Plan] = ()
    ) -> list[Plan]:
        """Return the plans that take at most ``share`` of the memory and may be as fast as any, as what takes
        ``limit_s``, and as ``others``, with their seconds, in the order of ``plans``. The plan whose bound is least is
        looked at next: at first a rough one, then better ones, then its price. What recomputes more than one that fits,
        and is as it otherwise, is no faster."""
        found: dict[int, Plan] = {}
        modes: dict[tuple[object, ...], float] = {}
        bounds = self.bounds
        easy = [(seconds(plan).step_s, techniques.simplicity(plan), -1) for plan in others]  # of what was found
        best_s = min([limit_s, *(step_s for step_s, _, _ in easy)])
        standing = [(i, plan) for i, plan in enumerate(plans) if bounds.may_fit(plan, share)]
        waiting = [(bounds.roughly(plan), 0, i) for i, plan in standing]
        heapify(waiting)
        while waiting:
            bound_s, looked, i = heappop(waiting)
            if bound_s > (1 + TIE) * best_s:
                break
            own, mode = _but_for_recomputation(plans[i]), techniques.recomputation(plans[i])
            if modes.get(own, mode) < mode:
                continue
            if bound_s > best_s and any(
                step_s <= (1 + TIE) * best_s and (simple, at) < (techniques.simplicity(plans[i]), i)
                for step_s, simple, at in easy
            ):
                continue  # it is not the fastest, nor would it be taken for being as fast
            if not looked and (rough_s := bounds.roughly(plans[i])) > bound_s:  # since more is known by now
                heappush(waiting, (rough_s, 0, i))
            elif not looked:
                heappush(waiting, (bounds.seconds(plans[i]), 1, i))
            elif looked == 1 and plans[i].layout.pp > 1:
                heappush(waiting, (bounds.replayed(plans[i]), 2, i))
            elif peak_share(priced := self.priced(plans[i], share)) <= share:
                modes[own], found[i] = mode, self.timed(priced)
                best_s = min(best_s, seconds(found[i]).step_s)
                easy.append((seconds(found[i]).step_s, techniques.simplicity(plans[i]), i))
        return [found[i] for i in sorted(found)]

    def with_budgets(self, plans: Sequence[Plan], share: float, best: Plan) -> list[Plan]:
        """Return what is faster than ``best`` by enough with a budget for recomputation, of those plans that save no
        results and would fit with some of them; each is faster than the one before it."""
        if self.budget_gain is None:
            return []
        found, limit_s = list[Plan](), seconds(best).step_s / self.budget_gain
        waiting = list[tuple[float, int]]()
        for i, plan in enumerate(plans):
            fastest = techniques.remat.saving_all(plan)
            if fastest and self.bounds.may_fit(plan, share) and self.bounds.roughly(fastest) < limit_s:
                waiting.append((self.bounds.seconds(fastest), i))
        for bound_s, i in sorted(waiting):
            if bound_s >= limit_s:
                break
            made = self._with_budget(plans[i], share, limit_s)
            if made and seconds(made).step_s < limit_s:
                found.append(made)
                limit_s = seconds(made).step_s
        if not found:
            return []
        limit_s = seconds(self.with_larger_chunks(best)).step_s / self.budget_gain
        return [plan for plan in found if seconds(self.with_larger_chunks(plan)).step_s < limit_s]

    def _with_budget(self, plan: Plan, share: float, limit_s: float) -> Plan | None:
        """Return the plan that saves as much as fits, if it may be faster than ``limit_s``."""
        key = alike(plan), replace(plan.batch, accumulation=1), plan.layout.pp > 1
        if key not in self.known_choices:
            self.known_choices[key] = Choice.of(self.bounds.figures.sheet(plan), unstaged(plan), self.cluster)
        choice, ranks = self.known_choices[key], plan.layout.pp
        alive = techniques.alive_before(plan) / ranks if ranks > 1 else 1.0  # of what all blocks save
        memory, bound_s = self.cluster.device.memory_bytes, self.bounds.seconds(plan)

        def too_slow(left_bytes: float) -> bool:
            spared_s = plan.batch.accumulation * choice.spared_s(max(0.0, left_bytes) / alive) / ranks
            return bound_s - spared_s >= limit_s

        def left(subset: Subset) -> float:
            estimate = self.priced(subset.of(plan) if subset.results else plan, share).estimate
            return round(share * estimate.capacity_bytes) - estimate.peak_bytes

        if len(choice.subsets) == 1 or too_slow((share - self.bounds.share(plan)) * memory):
            return None
        if peak_share(self.priced(plan, share)) > share or too_slow(left(choice.subsets[0])):
            return None
        last = choice.subsets[-1]
        all_fit = self.bounds.may_fit(last.of(plan), share) and left(last) >= 0
        taken = last if all_fit else choice.most(left)
        if taken is None or techniques.check(self.spec, made := taken.of(plan), self.cluster):
            return None
        why = {**plan.why, "remat.saved": choice.words(taken)}
        return replace(self.timed(self.priced(made, share)), why=why)

    def smallest(self, plans: list[Plan]) -> Plan:
        """The plan whose fullest rank holds the least; where it is the host that is full, of the device."""
        waiting = sorted((self.bounds.share(plan), i, plan) for i, plan in enumerate(smallest_ones(plans)))
        found: list[tuple[float, int, int, Plan]] = []
        for least, i, plan in waiting:
            if found and least > found[0][0]:
                break
            held = self.priced(plan)
            found = [min([*found, (peak_share(held), held.estimate.peak_bytes, i, held)], key=lambda one: one[:3])]
        return found[0][-1]

    def priced(self, plan: Plan, most: float = float("inf")) -> Plan:
        """The plan with its estimate of memory and traffic, made once; of a pipeline that takes more than ``most`` of
        the memory, that of a rank that does."""
        if plan in self.prices:
            return self.prices[plan]
        if plan in self.too_large and peak_share(self.too_large[plan]) > most:
            return self.too_large[plan]
        twin = techniques.twin(plan)
        made = (
            replace(plan, estimate=self.priced(twin).estimate)
            if twin
            else price(self.spec, plan, self.cluster, most=most)
        )
        whole = plan.layout.pp == 1 or peak_share(made) <= most
        (self.prices if whole else self.too_large)[plan] = made
        return made

    def timed(self, priced: Plan) -> Plan:
        """Return the priced plan with seconds too, found once."""
        if priced not in self.times:
            if twin := techniques.twin(priced):
                made = replace(priced, estimate=self.timed(self.priced(twin)).estimate)
            else:
                made = timed(self.spec, priced, self.cluster)
            self.times[priced] = made
        return self.times[priced]

    def with_larger_chunks(self, plan: Plan) -> Plan:
        """The plan with the largest chunks of the loss that fit, on a GPU; it has the smallest."""
        tokens = plan.batch.micro_batch_size * plan.row_tokens
        for most in LARGER_CHUNKS if self.cluster.kind == "cuda" and plan.batch.loss_chunk_tokens < tokens else ():
            chunk, reasons = chunk_of(self.spec, most, tokens)
            larger = replace(plan, batch=replace(plan.batch, loss_chunk_tokens=chunk), why={**plan.why, **reasons})
            if fits(priced := self.priced(larger)):
                return self.timed(priced)
        return plan
