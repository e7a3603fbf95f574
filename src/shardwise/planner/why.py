"""Why a search took its plan: each setting that it chose, beside the best plan that has another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwise import techniques
from shardwise.planner.comparison import (
    MARGIN,
    TIGHT,
    Comparison,
    fits,
    kind,
    name,
    peak_share,
    seconds,
    twins,
)
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_seconds

OTHERWISE = {
    "cp_kind": "as another kind",
    "offload.optimizer_fraction": "of other fractions",
    "offload.sums": "with sums on the device",
    "remat.mode": "with less",
}
"""What is compared with the plan, by the key of the setting; of other settings, plans without it."""
OF_A_SPLIT = {"cp_kind", "remat.mode"}
"""Settings that are compared within one split of the ranks."""


def difference(plan: Plan, other: Plan) -> str:
    """Return what ``plan`` is called beside ``other``: its split of the ranks, unless both have the same, and what else
    differs."""
    words = [name(plan)] if name(plan) != name(other) else []
    if plan.layout.pp > 1 and plan.pipeline.stages_per_rank != other.pipeline.stages_per_rank:
        words.append(f"{plan.pipeline.stages_per_rank} stages a rank")
    if plan.remat != other.remat:
        words.append(f"recompute {plan.remat.mode}")
    if plan.batch.micro_batch_size != other.batch.micro_batch_size:
        words.append(f"micro-batch {plan.batch.micro_batch_size}")
    if plan.offload != other.offload:
        words += plan.offload.words or ["nothing on the host"]
    return ("the same with " * (name(plan) == name(other))) + ", ".join(words or [name(plan)])


@dataclass(frozen=True)
class Reasons:
    """``best`` was taken of ``plans``, all without stages unless the recipe has some, and ``fitting``, the fastest of
    them with pipelines that are faster, if those were tried (``piped``). ``scale``: what seconds are multiplied by
    before they are told."""

    recipe: Recipe
    known: Comparison
    plans: list[Plan]
    fitting: list[Plan]
    best: Plan
    piped: bool
    scale: float = 1.0

    @property
    def explained(self) -> Plan:
        """The plan with why, that of the split of the ranks first."""
        found = {"shard.strategy": self.of_split()}
        train, best = self.recipe.train, self.best
        if train.micro_batch_size is None and train.gradient_accumulation_steps is None:
            found["batch.micro_batch_size"] = "searched, with the step's sequences as they are"
        found |= {key: self._sentence(key, other) for key, other in self.others.items()}
        if self.recipe.recompute.mode == "auto" and best.remat.mode == "none":
            none = "activations fit" if peak_share(best) <= 1 else "activations are not what does not fit"
            found["remat.mode"] = f"searched: {none}"
        why = {**best.why, **{key: words for key, words in found.items() if best.why.get(key) != "pinned"}}
        why |= techniques.float8.reasons(self.known.spec, best)
        order = [each.name for each in fields(best)]
        ordered = sorted(why, key=lambda key: (key != "shard.strategy", order.index(key.partition(".")[0])))
        return replace(best, why={key: why[key] for key in ordered})

    def of_split(self) -> str:
        """Why the ranks are split so: beside it what is faster, where that is less simple, or else the fastest of
        another kind."""
        best, below = self.best, f"derived: no plan stays below {MARGIN:.0%} of the memory; "
        if not self.fitting:
            return f"{below}this is the smallest ({best.estimate.share:.0%})"
        if fits(best) and best.layout.size("loss") == 1 and best.layout.pp == 1:
            return "derived: there is one data-parallel rank, and nothing to shard over others"
        head = f"{'searched: ' if fits(best) else f'{below}below {TIGHT:.0%}, '}{self._step(best)} a step, "
        fastest = self.known.with_larger_chunks(min(self.fitting, key=lambda plan: seconds(plan).step_s))
        other = self._fastest(lambda plan: kind(plan) == kind(best) or twins(plan, best))
        rival = min([fastest, *([other] if other else [])], key=lambda plan: seconds(plan).step_s)
        if seconds(rival).step_s < seconds(best).step_s:
            more = f"{seconds(best).step_s / seconds(rival).step_s - 1:.1%}"
            which = f"{difference(rival, best)} ({self._step(rival)})"
            return f"{head}{more} more than {which}{self._simpler(rival)}"
        beside = f"; {difference(other, best)}: {self._step(other)}" if other else ""
        return f"{head}the fastest{' that fits' * fits(best)}{beside}"

    @cached_property
    def others(self) -> dict[str, Plan | None]:
        """Return, by the keys of settings that were searched, the fastest plan that fits and has another; None without
        one."""
        return {key: self._fastest(has) for key, has in self._had.items()}

    @cached_property
    def _had(self) -> dict[str, Callable[[Plan], bool]]:
        """Return, by the same keys, whether a plan has the setting that the best one has."""
        return techniques.searched(self.recipe, self.best)

    def _sentence(self, key: str, other: Plan | None) -> str:
        """A reason for what was searched, with the plan that it was compared with, if one fits, and both times."""
        without = OTHERWISE.get(key, "without it")
        if not self.fitting:
            return f"searched: no plan stays below {TIGHT:.0%} of the memory, and the smallest has it"
        if other is not None:
            step = self._step(self.best)
            slower = seconds(other).step_s < seconds(self.best).step_s
            simpler = self._simpler(other) if slower else ""
            return f"searched: {step} a step{simpler}; {without} {self._step(other)} ({difference(other, self.best)})"
        if key in OF_A_SPLIT:
            return f"searched: {without} no plan of this split fits"
        fits_not = "fits" if any(not self._had[key](plan) for plan in self.plans) else "is legal"
        if self.piped and key != "layout.pp":
            return f"searched: {without} no plan of one stage {fits_not}, and no pipeline is faster"
        return f"searched: {without} no plan {fits_not}"

    def _simpler(self, other: Plan) -> str:
        return ", and simpler" if techniques.simplicity(self.best) < techniques.simplicity(other) else ""

    def _fastest(self, alike: Callable[[Plan], bool]) -> Plan | None:
        """The fastest of those that are not ``alike``, and take no more of the memory than the best may."""
        if not self.fitting:
            return None
        share = MARGIN if fits(self.best) else TIGHT
        found = self.known.fastest([plan for plan in self.plans if not alike(plan)], share)
        found += [plan for plan in self.fitting if not alike(plan)]
        return self.known.with_larger_chunks(min(found, key=lambda plan: seconds(plan).step_s)) if found else None

    def _step(self, plan: Plan) -> str:
        return show_seconds(self.scale * seconds(plan).step_s)
