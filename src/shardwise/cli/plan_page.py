"""A plan as a page: the verdict, pictures of the plans, of memory, of a step and of the machines, and all figures of
the text in tables. What is in a table is what :mod:`shardwise.cli.planned` tells in lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.cli import render, step_time
from shardwise.cli.length import length_lines
from shardwise.cli.machine_picture import machines
from shardwise.cli.planned import Planned, head_lines, rates_of_changes, schedule_of
from shardwise.cli.timeline import NAMES, overall
from shardwise.data.remote import all_shown, shown
from shardwise.interop.emit_files import named_elsewhere
from shardwise.pages.charts import Dot, Picture, areas, bars, scatter
from shardwise.pages.page import Chapter, Listing, Paragraphs, Part, Table, WebPage
from shardwise.pages.timelines import TimeBlock, cut_out, timeline
from shardwise.planner.comparison import TIE, seconds
from shardwise.planner.played import enough
from shardwise.planner.remedy import Remedy
from shardwise.planner.step_record import memory_by_pass, streams_of_kinds
from shardwise.spec import explain
from shardwise.spec.emit import emit
from shardwise.spec.explain import MARGIN, execution, fit, label, memory_rows, traffic_rows, why_rows
from shardwise.spec.load import dump_plan, dump_recipe
from shardwise.spec.plan import Estimate, Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes, show_seconds
from shardwise.techniques.pp.replay import Replay

TONES = {"fits": "good", "tight": "close", "does not fit": "bad"}
STREAM_KINDS = {
    "forward": "c0",
    "backward": "c1",
    "leaving": "c2",
    "optimizer": "c3",
    "waits": "c4",
    "sends": "c6",
    "copies": "c7",
    "host": "c11",
}
FAR = 4
"""What is so many times as much as another is not drawn beside it."""
NEAR = 0.02
"""The share of a step, each way, that a second drawing has of it."""
BEGINNING = 0.15
"""The share of a pipeline's step that a second drawing has of it."""
PIPELINE_KINDS = {"F": "c0", "B": "c1", "I": "c5", "W": "c2"}
"""The classes of colours, by what a stream or a rank does."""


class NextCommand(NamedTuple):
    """A command to type after this one: ``when``, and what may be added to it."""

    when: str
    command: str
    more: str = ""

    def __str__(self) -> str:
        return f"{self.when}: {self.command}" + f"        {self.more}" * bool(self.more)


def page_of(answer: Planned, following: Sequence[NextCommand]) -> WebPage:
    """The page of a search's answer; ``following``: what to type next."""
    best, cluster = answer.best, answer.cluster
    head, *facts = filter(None, head_lines(answer))
    facts += step_time.step_lines(answer.spec, best, cluster)
    waits = step_time.bottleneck(best, cluster), step_time.assumed_rates(best, cluster)
    facts += [*filter(None, waits), *length_lines(answer.length)]
    sections = [
        Chapter("Plans", _plans(answer.plans, best)),
        Chapter("Memory", _memory(answer)),
        Chapter("A step", _step(answer)),
        Chapter("Machines", [machines(cluster, best), *_traffic(best)]),
        Chapter("Why", [_why(answer.chosen)]),
        *_changes(answer),
        Chapter(
            "To copy",
            [Listing("The recipe", recipe_text(answer.recipe)), _plan_file(answer.chosen), *_next(following)],
        ),
    ]
    return WebPage(head, explain.sentence(best), sections, TONES[fit(best.estimate)[0]], facts)


def page_of_plan(plan: Plan) -> WebPage:
    """The page of a plan alone, as a file has it."""
    head = f"{plan.model or 'A plan'}: {label(plan)}"
    word = fit(plan.estimate)[0]
    sections = [
        Chapter("Plan", [Paragraphs(_chosen(plan))]),
        *([Chapter("Memory", [_bars([plan]), *_memory_tables(plan)])] if plan.estimate.memory else []),
        *([Chapter("A step", [_parts(plan), _times(plan)])] if plan.estimate.seconds else []),
        Chapter("What is sent", _traffic(plan)),
        Chapter("Why", [_why(plan)]),
        Chapter("To copy", [_plan_file(plan)]),
    ]
    return WebPage(head, explain.sentence(plan), sections, TONES[word])


def _chosen(plan: Plan) -> list[str]:
    return [f"chosen: {label(plan)} · {execution(plan)}", explain.verdict(plan.estimate), named_elsewhere(plan)]


def _plans(plans: list[Plan], chosen: Plan) -> list[Part]:
    (_, *heads), *rows = render.family_rows(plans, chosen)
    most = max(plan.estimate.peak_bytes for plan in plans)
    unit, scale = _unit(most)
    marks, own = [], set()
    for number, (plan, (mark, *row)) in enumerate(zip(plans, rows, strict=True)):
        tone = TONES[fit(plan.estimate)[0]] + " chosen" * bool(mark)
        told = f"{number + 1}: {label(plan)}, {show_bytes(plan.estimate.peak_bytes)}, {row[3]} a step, {row[-1]}"
        name = f"{number + 1}" + " (chosen)" * bool(mark)
        marks.append(Dot(plan.estimate.peak_bytes / scale, seconds(plan).step_s, name, told, tone))
        own |= {number} if mark else set()
    legend = [(tone, word) for word, tone in TONES.items() if any(row[-1] == word for row in rows)]
    names = (f"memory of the fullest rank, {unit}", "seconds a step")
    limits = _limits(chosen.estimate, scale, most)
    drawn = scatter("Seconds a step by memory", names, marks, limits, legend)
    picture = replace(drawn, note="; ".join(_far(chosen, limits)))
    title = f"The best plan of each kind, by the time of a step; of those within {TIE:.0%} the simplest"
    numbered = [(str(number), *row) for number, (_, *row) in enumerate(rows, 1)]
    table = Table(("", *heads), numbered, ">" + "<" * 2 + ">" * (len(heads) - 3) + "<", title, frozenset(own))
    return [picture, table, Paragraphs([*render.family_notes(plans), *_chosen(chosen)])]


def _unit(most_bytes: float) -> tuple[str, float]:
    """The unit of an axis up to these bytes, and how many bytes one has."""
    return ("GiB", 2.0**30) if most_bytes >= 2**30 else ("MiB", 2.0**20)


def _limits(estimate: Estimate, scale: float, most_bytes: float = float("inf")) -> dict[str, float]:
    """The lines of what may be taken and of all there is, in units of ``scale``; none where everything that is drawn,
    ``most_bytes``, is far below."""
    size = estimate.capacity_bytes
    if not size or size > FAR * most_bytes:
        return {}
    return {f"{MARGIN:.0%}, to fit": MARGIN * size / scale, f"all, {show_bytes(size)}": size / scale}


def _bars(plans: list[Plan]) -> Picture:
    most = FAR * (plans[0].estimate.capacity_bytes or max(plan.estimate.peak_bytes for plan in plans))
    numbered = {f"plan {number}" if len(plans) > 1 else "rank": plan for number, plan in enumerate(plans, 1)}
    near = {name: plan for name, plan in numbered.items() if plan.estimate.peak_bytes <= most} or numbered
    highest = max(plan.estimate.peak_bytes for plan in near.values())
    unit, scale = _unit(highest)
    rows = {
        word: {name: plan.estimate.memory.get(name, 0) / scale for name in _categories(plans)}
        for word, plan in near.items()
    }
    beyond = [f"{name} takes {show_bytes(p.estimate.peak_bytes)}" for name, p in numbered.items() if name not in near]
    limits = _limits(plans[0].estimate, scale, highest)
    title = "Memory of the fullest rank at its peak"
    picture = bars(title, unit, rows, limits, lambda size: show_bytes(size * scale))
    notes = [*([f"far beyond what is drawn: {', '.join(beyond)}"] if beyond else []), *_far(plans[0], limits)]
    return replace(picture, note="; ".join(notes))


def _far(plan: Plan, limits: Mapping[str, float]) -> list[str]:
    size = plan.estimate.capacity_bytes
    return [f"the limit, {show_bytes(size)}, is far beyond what is drawn"] if size and not limits else []


def _categories(plans: list[Plan]) -> list[str]:
    """The categories of memory that some of the plans has, in one order, so that each has one colour."""
    names = dict.fromkeys(name for plan in plans for name in plan.estimate.memory)
    return [name for name in names if any(plan.estimate.memory.get(name) for plan in plans)]


def _memory(answer: Planned) -> list[Part]:
    best = answer.best
    levels = memory_by_pass(answer.spec, best, answer.cluster)
    unit, scale = _unit(best.estimate.peak_bytes)
    names = _categories(answer.plans)
    points = [(float(x), {name: level.get(name, 0) / scale for name in names}) for x, level in enumerate(levels)]
    axes = ("passes of the embedding, the blocks and the head, forward and backward, in their order", unit)
    limits = _limits(best.estimate, scale, best.estimate.peak_bytes)
    over = areas("Memory over a step", axes, points, limits)
    count, batch = enough(best), best.batch.accumulation
    few = [f"of {count} micro-batches; those of {batch} take no more"] * (count < batch)
    over = replace(over, note="; ".join([*few, *_far(best, limits)]))
    return [_bars(answer.plans), over, *_memory_tables(best)]


def _memory_tables(plan: Plan) -> list[Part]:
    estimate = plan.estimate
    shares = [f"{size / estimate.peak_bytes:.0%}" for size in estimate.memory.values() if size]
    rows = memory_rows(estimate)
    filled = [(*row, share) for row, share in zip(rows, [*shares, *[""] * len(rows)], strict=False)]
    title = f"Memory of the fullest rank at its peak, {label(plan)}"
    table = Table(("", "size", "of the peak"), filled, "<>>", title)
    return [table, *([Paragraphs([explain.wear(estimate)])] if estimate.disk_bytes else [])]


def _step(answer: Planned) -> list[Part]:
    best = answer.best
    return [_parts(best), *(_pipeline(answer) if best.layout.pp > 1 else _streams(answer)), _times(best)]


def _parts(plan: Plan) -> Picture:
    parts = dict(step_time.parts(seconds(plan)))
    return bars("What a step's seconds are", "seconds", {"a step": parts}, {}, show_seconds)


def _times(plan: Plan) -> Table:
    heads = ("", "seconds", "of a step", "")
    return Table(heads, step_time.time_rows(plan), "<>><", f"A step of the slowest rank, {label(plan)}")


def _streams(answer: Planned) -> list[Part]:
    found = streams_of_kinds(answer.spec, answer.best, answer.cluster)
    pictures: list[Part] = []
    for record in found:
        rows = {
            name: [TimeBlock(one.begin_s, one.end_s, STREAM_KINDS[one.kind], one.what) for one in played]
            for name, played in sorted(record.streams.items(), key=lambda one: one[0] != "compute")
        }
        kinds = {one.kind for played in record.streams.values() for one in played}
        legend = [(class_, kind) for kind, class_ in STREAM_KINDS.items() if kind in kinds]
        several = f", as on rank {record.rank}" * (len(found) > 1)
        some = _some(record.micro_batches, answer.best.batch.accumulation)
        drawn = timeline(f"What each stream does in a step{several}{some}", rows, legend, show_seconds)
        pictures.append(replace(drawn, note=_left_out(answer.best, record.micro_batches)))
        turn_s = next((block.begin_s for block in rows["compute"] if block.kind == STREAM_KINDS["backward"]), 0.0)
        end_s = rows["compute"][-1].end_s
        near = cut_out(rows, max(0.0, turn_s - NEAR * end_s), turn_s + NEAR * end_s)
        pictures.append(
            timeline(f"The same around the first turn from forward to backward{several}", near, legend, show_seconds)
        )
    return pictures


def _some(played: int, all_of: int) -> str:
    return f", {played} of {all_of} micro-batches" * (played < all_of)


def _left_out(plan: Plan, played: int) -> str:
    """Say of a drawing of some micro-batches how much more a step is."""
    more, found = plan.batch.accumulation - played, seconds(plan)
    if not more:
        return ""
    share = f"{found.optimizer_s / found.step_s:.1%}"
    whole = f"a whole step takes {show_seconds(found.step_s)}, and its optimizer {share} of that"
    return f"left out: {more:,} of {plan.batch.accumulation:,} micro-batches, like those that are drawn; {whole}"


def _pipeline(answer: Planned) -> list[Part]:
    replay = schedule_of(answer)
    rows, kinds, most = {}, set(), 0
    for rank, (computed, share) in enumerate(zip(replay.computed, replay.idle_shares, strict=True)):
        blocks = []
        for action, begin_s, end_s in computed:
            told = f"{NAMES[action.kind]} of micro-batch {action.micro}, stage {action.stage}"
            blocks.append(TimeBlock(begin_s, end_s, PIPELINE_KINDS[action.kind], told))
            kinds.add(action.kind)
            most = max(most, action.micro + 1)
        rows[f"{rank}, idle {share:.0%}"] = blocks
    legend = [(PIPELINE_KINDS[kind], name) for kind, name in NAMES.items() if kind in kinds]
    best = answer.best
    head = f"What each rank of a pipeline computes ({best.pipeline.schedule}{_some(most, best.batch.accumulation)})"
    first = cut_out(rows, 0.0, BEGINNING * replay.makespan_s)
    whole = replace(timeline(head, rows, legend, show_seconds), note=_idle(replay, best))
    return [whole, timeline("Its beginning", first, legend, show_seconds)]


def _idle(replay: Replay, plan: Plan) -> str:
    """Say how much of a step's passes ranks compute nothing, and why another figure is told of the whole step."""
    found = seconds(plan)
    share = found.exposed_s.get("pp", 0.0) / found.step_s
    of_step = f"the rank that computes longest waits for others for {share:.0%} of a whole step"
    return f"{overall(replay)}, waits for a rank's own weights and gradients among it; {of_step}"


def _traffic(plan: Plan) -> list[Part]:
    rows = traffic_rows(plan.estimate)
    title = f"Sent by each rank in a step, {label(plan)}"
    if not rows:
        return [Paragraphs([f"{title}: nothing"])]
    return [Table(("axis", "collective", "of", "payload", "calls", "link"), rows, "<<<>><", title)]


def _why(plan: Plan) -> Table:
    return Table(("setting", "value", "why"), why_rows(plan), "<<<")


def _changes(answer: Planned) -> list[Chapter]:
    found: list[Remedy] = answer.remedies or answer.alternatives
    if not found:
        return []
    head = render.remedy_head(found, answer.best.estimate) if answer.remedies else "what would change it"
    batch, memory = "micro-batch x accumulation", "memory of the fullest rank"
    heads = ("change", "time", "speed", memory, "best plan then", "activations", batch, "what it costs or needs")
    title = "What to add to the command, and what a step of the best plan is then"
    table = Table(heads, render.change_rows(found), "<>><<<<<", title)
    return [Chapter(head.capitalize(), [table, Paragraphs(rates_of_changes(answer, found))])]


def recipe_text(recipe: Recipe) -> str:
    """Return the keys that the recipe sets, or all keys of one that sets none, as YAML from which the same recipe is
    read, but for what may be secret in URLs: pages are handed on."""
    found = recipe.model_dump(mode="python", exclude_unset=True)
    return emit(all_shown(found), lambda path, value: "") if found else dump_recipe(recipe)


def _recipe(recipe: Recipe) -> Listing:
    return Listing("The recipe", recipe_text(recipe))


def _plan_file(plan: Plan) -> Listing:
    return Listing("The plan, as train --plan reads it", dump_plan(plan), folded=True)


def _next(following: Sequence[NextCommand]) -> list[Part]:
    """Each command alone, so that it can be copied."""
    parts: list[Part] = []
    for one in following:
        parts.append(Listing(f"What to type, {one.when}", shown(one.command)))
        parts += [Paragraphs([one.more])] if one.more else []
    return parts
