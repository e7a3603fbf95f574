"""What ``shardwise plan`` answers: the plan, what else there would be, and the page that tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

from shardwise.cli import render, step_time
from shardwise.cli.decide import told, with_history
from shardwise.cli.length import Asked, length_lines, run_length
from shardwise.cli.other_names import named_elsewhere
from shardwise.cli.timeline import text
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.hf_spec import NOTICE
from shardwise.planner.compare import TIE, fits, in_order, kind, same_program, seconds, tokens_per_s
from shardwise.planner.length import Length
from shardwise.planner.remedy import Remedy, alternatives, remedies
from shardwise.planner.search import Search, dials
from shardwise.planner.seconds.pipeline import PipelineTimes, pipeline_times
from shardwise.planner.seconds.rates import own_traits
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe
from shardwise.spec.units import show_seconds

WIDTH = 100
"""Characters of a row of a drawing."""


@dataclass(frozen=True)
class Planned:
    """``plans``: the best of each kind, among them the chosen one, by seconds. ``remedies`` make it fit, where it does
    not; where it does, ``alternatives`` change it."""

    spec: ModelSpec
    cluster: Cluster
    chosen: Plan
    plans: list[Plan]
    length: Length
    remedies: list[Remedy]
    alternatives: list[Remedy]


def planned(recipe: Recipe, spec: ModelSpec, cluster: Cluster, asked: Asked, *, here: bool) -> Planned:
    """The answer for a recipe on a cluster; ``here``: on this machine, whose earlier runs correct its seconds."""
    search = Search(recipe, spec, cluster)
    best = search.best

    def corrected(plan: Plan) -> Plan:
        return with_history(plan, cluster, spec, like=best) if here else plan

    def all_of(found: list[Remedy]) -> list[Remedy]:
        return [replace(remedy, plan=corrected(remedy.plan)) for remedy in found]

    chosen = told(search.explained(seconds(corrected(best)).scale), recipe)
    free = replace(search, pinned=False) if recipe.parallel != Parallel() else search
    plans = _with_chosen([*free.families(), *dials(search, chosen)], chosen)
    needed = [] if fits(chosen) else remedies(recipe, spec, cluster, chosen)
    others = alternatives(recipe, spec, cluster, chosen, plans) if fits(chosen) else []
    chosen, plans = corrected(chosen), [corrected(plan) for plan in plans]
    length = run_length(recipe, spec, chosen, cluster, asked)
    return Planned(spec, cluster, chosen, plans, length, all_of(needed), all_of(others))


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
    spec, cluster, chosen = answer.spec, answer.cluster, answer.chosen
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
    """What was asked and what was assumed."""
    lines = [render.title(answer.spec, answer.cluster)]
    if answer.spec.hf_model is not None:
        lines.append(f"{answer.spec.family}, {NOTICE}")
    if answer.cluster.assumptions:
        lines.append("assumed: " + "; ".join(answer.cluster.assumptions))
    return [*lines, ""]


def page_lines(answer: Planned, explain: str | None) -> list[str]:
    """The verdict, a step, the run, then what :func:`plan_lines` tells."""
    spec, cluster, chosen = answer.spec, answer.cluster, answer.chosen
    waits = step_time.bottleneck(chosen, cluster)
    return [
        render.sentence(chosen),
        "",
        *step_time.step_lines(spec, chosen, cluster),
        *filter(None, (waits, step_time.assumed_rates(chosen, cluster))),
        *length_lines(answer.length),
        "",
        *(schedule_lines(answer) if explain == "schedule" else []),
        *plan_lines(answer.plans, chosen, explain),
    ]


def schedule_of(answer: Planned) -> PipelineTimes:
    """When each rank of the chosen plan's pipeline computes what, by the clock of its seconds."""
    scale = seconds(answer.chosen).scale
    times = pipeline_times(answer.spec, answer.chosen, answer.cluster, own_traits())
    return replace(times, step=times.step.scaled(scale), makespan_s=scale * times.makespan_s)


def schedule_lines(answer: Planned) -> list[str]:
    """A step of the pipeline, drawn."""
    chosen = answer.chosen
    if chosen.layout.pp == 1:
        return ["the plan has no pipeline: every rank has all blocks, and no schedule is needed", ""]
    times = schedule_of(answer)
    played = 1 + max(one.action.micro for computed in times.step.computed for one in computed)
    some = f", the first {played} of {chosen.batch.accumulation} micro-batches" * (played < chosen.batch.accumulation)
    head = f"the schedule of a step ({chosen.pipeline.schedule}{some}): {show_seconds(times.step.makespan_s)}"
    return [head, *text(times.step, WIDTH), ""]


def plan_lines(plans: list[Plan], chosen: Plan, explain: str | None) -> list[str]:
    """A plan beside the best of the other kinds: where its memory goes, what it sends, and why."""
    lines = [
        f"chosen: {render.label(chosen)} · {render.execution(chosen)}",
        f"        {render.verdict(chosen.estimate)}",
        named_elsewhere(chosen),
        "",
        f"the best plan of each kind, by the time of a step; of those within {TIE:.0%} the simplest",
        *render.family_lines(plans, chosen),
        "",
    ]
    for plan in plans if explain == "memory" else [chosen]:
        head = f"memory of the fullest rank at its peak, {render.label(plan)}"
        lines += [head, *render.memory_lines(plan.estimate), ""]
    for plan in plans if explain == "network" else [chosen]:
        sent = render.traffic_lines(plan.estimate)
        lines += [f"sent by each rank in a step, {render.label(plan)}" + ("" if sent else ": nothing"), *sent, ""]
    for plan in plans if explain == "time" else []:
        lines += [f"a step of the slowest rank, {render.label(plan)}", *step_time.time_lines(plan), ""]
    decided = {key: reason for key, reason in chosen.why.items() if reason != "pinned"}
    reasons = render.why_lines(chosen if explain == "why" else replace(chosen, why=decided))
    return [*lines, *(["why", *reasons, ""] if reasons else [])]


def change_lines(answer: Planned) -> list[str]:
    """What would make it fit, or would change it."""
    if answer.remedies:
        return [*render.remedy_lines(answer.remedies, answer.chosen.estimate), *_rates_of_changes(answer), ""]
    if answer.alternatives:
        return ["what would change it", *render.change_lines(answer.alternatives), *_rates_of_changes(answer), ""]
    return []


def _rates_of_changes(answer: Planned) -> list[str]:
    """Rates that changes rest on, and the plan does not; of machines like its own."""
    own = step_time.assumed_rates(answer.chosen, answer.cluster)
    alike = [each.plan for each in (*answer.remedies, *answer.alternatives) if not each.change.startswith("--")]
    found = {step_time.assumed_rates(plan, answer.cluster) for plan in alike} - {own}
    return sorted({f"  {words}" for words in found if words}, key=len)[-1:]
