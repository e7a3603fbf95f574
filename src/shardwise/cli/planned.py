"""What ``shardwise plan`` answers: the plan, what else there would be, and the page that tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.cli import render, step_time
from shardwise.cli.decide import suited, told, with_history
from shardwise.cli.length import Asked, known_count, length_lines, run_length
from shardwise.cli.timeline import text
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.hf_spec import NOTICE
from shardwise.planner.compare import fits, kind, seconds
from shardwise.planner.length import Length
from shardwise.planner.remedy import Remedy, alternatives, remedies
from shardwise.planner.search import Search
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
    first, chosen = recipe, told(search.chosen, recipe)
    recipe, chosen = suited(
        recipe, chosen, known_count(recipe), lambda other: told(Search(other, spec, cluster).chosen, other)
    )
    search = search if recipe is first else Search(recipe, spec, cluster)
    free = replace(search, pinned=False) if recipe.parallel != Parallel() else search
    plans = _with_chosen(free.families(), chosen)
    if here:
        plans = [with_history(plan, cluster, like=chosen) for plan in plans]
        chosen = with_history(chosen, cluster)
    length, able = run_length(recipe, chosen, cluster, asked), fits(chosen)
    needed = [] if able else remedies(recipe, spec, cluster, chosen)
    others = alternatives(recipe, spec, cluster, chosen, plans) if able else []
    return Planned(spec, cluster, chosen, plans, length, needed, others)


def _with_chosen(plans: list[Plan], chosen: Plan) -> list[Plan]:
    """The best plans of each kind, of which the chosen one stands for its own."""
    if not any(render.same_split(plan, chosen) for plan in plans):
        plans = [plan for plan in plans if kind(plan) != kind(chosen)] + [chosen]
    return sorted(plans, key=lambda plan: (not fits(plan), seconds(plan).step_s))


def as_json(answer: Planned) -> dict[str, Any]:
    """The answer for a program."""
    spec, cluster, chosen = answer.spec, answer.cluster, answer.chosen
    return {
        "model": {"name": spec.name, "parameters": parameter_count(spec)},
        "cluster": {**asdict(cluster), "name": str(cluster)},
        "plan": asdict(chosen),
        "tokens_per_s": step_time.tokens_per_s(chosen),
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
        *([waits] if waits else []),
        *length_lines(answer.length),
        "",
        *(schedule_lines(answer) if explain == "schedule" else []),
        *plan_lines(answer.plans, chosen, explain),
    ]


def schedule_of(answer: Planned) -> PipelineTimes:
    """When each rank of the chosen plan's pipeline computes what."""
    return pipeline_times(answer.spec, answer.chosen, answer.cluster, own_traits())


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
        step_time.named_elsewhere(chosen),
        "",
        "the best plan of each kind, by the time of a step",
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
        return [*render.remedy_lines(answer.remedies, answer.chosen.estimate), ""]
    if answer.alternatives:
        return ["what would change it", *render.change_lines(answer.alternatives), ""]
    return []
