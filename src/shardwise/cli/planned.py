"""The answer of ``shardwise plan``: the plan, what else there would be, and the page that tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

from shardwise.cli import render, step_time
from shardwise.cli.decide import by_history, suited, with_reasons
from shardwise.cli.length import Asked, known_count, length_lines, run_length
from shardwise.cli.timeline import text
from shardwise.interop.emit_files import named_elsewhere
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.hf_spec import NOTICE
from shardwise.planner.comparison import TIE, fits, in_order, kind, same_program, seconds, tokens_per_s
from shardwise.planner.length import Length
from shardwise.planner.remedy import Remedy, alternatives, remedies
from shardwise.planner.search import Search, best_of_kinds, explained, strategies
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.seconds.stages import pipeline_times
from shardwise.planner.seconds.step_seconds import straggling
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import execution, label, memory_lines, traffic_lines, why_lines
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe
from shardwise.spec.units import show_seconds
from shardwise.techniques.pp.replay import Replay

WIDTH = 100
"""Characters of a row of a drawing."""


@dataclass(frozen=True)
class Planned:
    """The answer of a search, each part found when it is first asked for; ``here``: on this machine,
    whose earlier runs correct its seconds. ``assumed``: why settings are what the recipe leaves open."""

    search: Search
    asked: Asked
    here: bool
    assumed: dict[str, str]

    @property
    def recipe(self) -> Recipe:
        return self.search.recipe

    @property
    def spec(self) -> ModelSpec:
        return self.search.spec

    @property
    def cluster(self) -> Cluster:
        return self.search.cluster

    @cached_property
    def best(self) -> Plan:
        """The chosen plan, without reasons. Raises ConfigError."""
        return self.corrected(self._told(self.search.best))

    @cached_property
    def chosen(self) -> Plan:
        """The chosen plan, with a reason for each setting."""
        return self.corrected(self._explained)

    @cached_property
    def _explained(self) -> Plan:
        legal = self._families if self.recipe.parallel == Parallel() else []
        return self._told(explained(self.search, seconds(self.best).scale, legal))

    @cached_property
    def plans(self) -> list[Plan]:
        """The best of each kind, among them the chosen one, by seconds."""
        return [self.corrected(plan) for plan in self._families]

    @cached_property
    def _families(self) -> list[Plan]:
        free = replace(self.search, pinned=False) if self.recipe.parallel != Parallel() else self.search
        best = self._told(self.search.best)
        return _with_chosen([*best_of_kinds(free), *strategies(self.search, best)], best)

    @cached_property
    def length(self) -> Length:
        """The length of the run."""
        return run_length(self.recipe, self.spec, self.best, self.cluster, self.asked)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """The changes that make the plan fit, where it does not."""
        if fits(self.best):
            return []
        found = remedies(self.recipe, self.spec, self.cluster, self._explained)
        return [self._at_its_clock(remedy) for remedy in found]

    @cached_property
    def alternatives(self) -> list[Remedy]:
        """The changes that could be made to a plan that fits."""
        return [*self.each_alternative()]

    def each_alternative(self) -> Iterator[Remedy]:
        """Yield the changes that could be made to a plan that fits, one by one, as they are found."""
        if "alternatives" in vars(self):
            yield from self.alternatives
        elif fits(self.best):
            found = alternatives(self.recipe, self.spec, self.cluster, self._explained, self._families)
            yield from map(self._at_its_clock, found)

    @cached_property
    def corrected(self) -> Callable[[Plan], Plan]:
        """The function that gives a plan the seconds that earlier runs taught."""
        return by_history(self.search.best, self.cluster, self.spec) if self.here else lambda plan: plan

    def _told(self, plan: Plan) -> Plan:
        plan = with_reasons(plan, self.recipe)
        return replace(plan, why={**plan.why, **self.assumed})

    def _at_its_clock(self, remedy: Remedy) -> Remedy:
        return replace(remedy, plan=self.corrected(remedy.plan))


def planned(recipe: Recipe, spec: ModelSpec, cluster: Cluster, asked: Asked, *, here: bool) -> Planned:
    """The answer, its plan chosen. Raises ConfigError with everything that makes the recipe's pins illegal."""
    search, key = Search(recipe, spec, cluster), "batch.global_batch_size"
    first, assumed = recipe, dict[str, str]()
    if finetune.batch_is_open(recipe):
        recipe, plan = suited(
            first, search.best, known_count(first, about=True), lambda other: Search(other, spec, cluster).best
        )
        assumed = {key: plan.why[key]}
        search = search if recipe is first else Search(recipe, spec, cluster)
    answer = Planned(search, asked, here, assumed)
    assert answer.best
    return answer


def _with_chosen(plans: list[Plan], chosen: Plan) -> list[Plan]:
    """The best plans of each kind, of which the chosen one stands for its own; of two that are one program, the
    chosen one or the simpler."""

    def own(plan: Plan) -> tuple[str, str]:
        return kind(plan), plan.shard.strategy

    if not any(render.same_split(plan, chosen) for plan in plans):
        plans = [plan for plan in plans if own(plan) != own(chosen)] + [chosen]
    chosen = next(plan for plan in plans if render.same_split(plan, chosen))
    twins = [(one, other) for one, other in permutations(plans, 2) if same_program(one, other)]
    dropped = [one for one, other in twins if other is chosen or (one is not chosen and one.shard.strategy == "zero2")]
    return sorted((plan for plan in plans if plan not in dropped), key=in_order)


def as_json(answer: Planned) -> dict[str, Any]:
    """The answer for a program."""
    spec = answer.spec
    cluster = answer.cluster
    chosen = answer.chosen
    return {
        "model": {"name": spec.name, "parameters": parameter_count(spec)},
        "cluster": {**asdict(cluster), "name": str(cluster)},
        "plan": asdict(chosen),
        "tokens_per_s": tokens_per_s(chosen),
        "mfu": step_time.mfu(spec, chosen, cluster),
        "length": asdict(answer.length),
        "settings": [asdict(plan) for plan in answer.plans],
        "remedies": _changes(answer.remedies),
        "alternatives": _changes(answer.alternatives),
    }


def _changes(found: list[Remedy]) -> list[dict[str, Any]]:
    return [{"change": each.change, "price": each.price, "plan": asdict(each.plan)} for each in found]


def head_lines(answer: Planned) -> list[str]:
    """Return the lines that say what was asked and what was assumed."""
    lines = [render.title(answer.spec, answer.cluster)]
    if answer.spec.hf_model is not None:
        lines.append(f"{answer.spec.family}, {NOTICE}")
    if answer.spec.stored:
        exported = "exported in 16 or 32 bits, or with `--dtype float8`"
        lines.append(f"its files are in {answer.spec.stored}: read with their scales, {exported}")
    if answer.cluster.assumptions:
        lines.append("assumed: " + "; ".join(answer.cluster.assumptions))
    return [*lines, ""]


def page_parts(answer: Planned, explain: str | None) -> Iterator[list[str]]:
    """The verdict, a step and the run, then what :func:`plan_parts` tells, each part as soon as it is known."""
    spec = answer.spec
    cluster = answer.cluster
    best = answer.best
    waits = step_time.bottleneck(best, cluster)
    yield [
        render.sentence(best),
        "",
        *step_time.step_lines(spec, best, cluster),
        *filter(None, (waits, step_time.assumed_rates(best, cluster))),
        *length_lines(answer.length),
        "",
        *(schedule_lines(answer) if explain == "schedule" else []),
    ]
    yield from plan_parts(best, lambda: answer.plans, lambda: answer.chosen, explain)


def schedule_of(answer: Planned) -> Replay:
    """Return when each rank of the chosen plan's pipeline computes what, by the clock of its seconds."""
    return replayed(answer.spec, answer.best, answer.cluster)


def replayed(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Replay:
    """Return the same of any plan that has a pipeline and seconds."""
    times = pipeline_times(spec, plan, cluster, own_traits())
    return times.step.scaled(straggling(cluster) * seconds(plan).scale)


def schedule_lines(answer: Planned) -> list[str]:
    """A step of the pipeline, drawn."""
    chosen = answer.best
    if chosen.layout.pp == 1:
        return ["the plan has no pipeline: every rank has all blocks, and no schedule is needed", ""]
    step = schedule_of(answer)
    played = 1 + max(one.action.micro for computed in step.computed for one in computed)
    some = f", the first {played} of {chosen.batch.accumulation} micro-batches" * (played < chosen.batch.accumulation)
    head = f"the schedule of a step ({chosen.pipeline.schedule}{some}): {show_seconds(step.makespan_s)}"
    return [head, *text(step, WIDTH), ""]


def plan_parts(
    chosen: Plan, others: Callable[[], list[Plan]], explained: Callable[[], Plan], explain: str | None
) -> Iterator[list[str]]:
    """A plan beside the best of the other kinds, where its memory goes, what it sends, and why; what ``others`` and
    ``explained`` find, when it is told."""
    yield [
        f"chosen: {label(chosen)} · {execution(chosen)}",
        f"        {render.verdict(chosen.estimate)}",
        named_elsewhere(chosen),
        "",
    ]
    plans, lines = others(), list[str]()
    head = f"the best plan of each kind, by the time of a step; of those within {TIE:.0%} the simplest"
    yield [head, *render.family_lines(plans, chosen), ""]
    for plan in plans if explain == "memory" else [chosen]:
        head = f"memory of the fullest rank at its peak, {label(plan)}"
        lines += [head, *memory_lines(plan.estimate), ""]
    for plan in plans if explain == "network" else [chosen]:
        sent = traffic_lines(plan.estimate)
        lines += [f"sent by each rank in a step, {label(plan)}" + ("" if sent else ": nothing"), *sent, ""]
    for plan in plans if explain == "time" else []:
        lines += [f"a step of the slowest rank, {label(plan)}", *step_time.time_lines(plan), ""]
    yield lines
    plan = explained()
    decided = {key: reason for key, reason in plan.why.items() if reason != "pinned"}
    if reasons := why_lines(plan if explain == "why" else replace(plan, why=decided)):
        yield ["why", *reasons, ""]


def change_parts(answer: Planned, *, each: bool) -> Iterator[list[str]]:
    """Return what would make it fit, or would change it: ``each`` change as soon as it is known, or all in one
    table."""
    if answer.remedies:
        yield [
            *render.remedy_lines(answer.remedies, answer.best.estimate),
            *rates_of_changes(answer, answer.remedies),
            "",
        ]
        return
    found = list[Remedy]()
    for remedy in answer.each_alternative():
        found.append(remedy)
        if each:
            yield ["what would change it"] * (len(found) == 1) + render.change_lines(found)[-1:]
    if found:
        table = [] if each else ["what would change it", *render.change_lines(found)]
        yield [*table, *rates_of_changes(answer, found), ""]


def rates_of_changes(answer: Planned, changes: list[Remedy]) -> list[str]:
    """Rates that changes rest on, and the plan does not; of machines like its own."""
    own = step_time.assumed_rates(answer.best, answer.cluster)
    alike = [each.plan for each in changes if not each.change.startswith("--")]
    found = {step_time.assumed_rates(plan, answer.cluster) for plan in alike} - {own}
    return sorted({f"  {words}" for words in found if words}, key=len)[-1:]
