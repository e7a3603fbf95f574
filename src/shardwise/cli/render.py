"""A plan as lines of text: what it is, where the memory goes, what is sent, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardwise.cli.show import coloured
from shardwise.models.config import ModelSpec, active_parameter_count, parameter_count
from shardwise.planner.comparison import seconds, tokens_per_s
from shardwise.planner.remedy import Remedy
from shardwise.spec import explain
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import WORDS, execution, fit, label, words_of
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Plan
from shardwise.spec.units import columns, show_bytes, show_count, show_payload, show_seconds

SENT = {"node": "sent in the node", "network": "over the network"}
COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def verdict(estimate: Estimate) -> str:
    """Say in colour whether it fits."""
    return coloured(explain.verdict(estimate), COLOURS[fit(estimate)[0]])


def sentence(plan: Plan) -> str:
    """The verdict, coloured."""
    return coloured(explain.sentence(plan), COLOURS[fit(plan.estimate)[0]])


def title(spec: ModelSpec, cluster: Cluster) -> str:
    """The model and the machines, in one line."""
    device = cluster.device
    nodes = f"{cluster.nodes} nodes x " if cluster.nodes > 1 else ""
    each = f"{show_bytes(device.memory_bytes)} each"
    parameters = f"{show_count(parameter_count(spec))} parameters"
    if spec.experts:
        parameters += f", {show_count(active_parameter_count(spec))} active"
    return f"{spec.name} ({parameters}) on {nodes}{cluster.devices_per_node} x {device.name} ({each})"


def family_lines(plans: list[Plan], chosen: Plan) -> list[str]:
    """A line for the best plan of each kind, in the order of their seconds, the chosen one marked; of one that does not
    fit, how much memory it would take."""
    rows = family_rows(plans, chosen)
    lines = columns(rows, "<<<" + ">" * (len(rows[0]) - 4) + "<")
    table = lines[:1] + [coloured(line, COLOURS[row[-1]]) for line, row in zip(lines[1:], rows[1:], strict=True)]
    return [*table, *family_notes(plans)]


def family_rows(plans: list[Plan], chosen: Plan) -> list[tuple[str, ...]]:
    """The head of the table, and a row for each plan."""
    links = [link for link in SENT if any(link in sent_by_link(plan) for plan in plans)]
    named = [SENT[link] for link in links] if len(links) > 1 else ["sent per step"] * len(links)
    head = ("", "plan", "recompute", "batch", "a step", "per rank", "of", *named, "")
    rows: list[tuple[str, ...]] = [head]
    for plan in plans:
        word, share = fit(plan.estimate)
        by_link, batch = sent_by_link(plan), plan.batch
        step = show_seconds(plan.estimate.seconds.step_s) if plan.estimate.seconds else ""
        figures = (step, show_bytes(plan.estimate.peak_bytes), f"{share:.0%}")
        sent = [show_payload(by_link.get(link, 0)) for link in links]
        mark = ">" if same_split(plan, chosen) else ""
        shape = f"{batch.micro_batch_size} x {batch.accumulation}"
        rows.append((mark, label(plan), plan.remat.mode, shape, *figures, *sent, word))
    return rows


def family_notes(plans: list[Plan]) -> list[str]:
    """Return the sentences that stand below the table."""
    alike = any(plan.shard.strategy == "zero1" and plan.batch.accumulation == 1 for plan in plans)
    tall = [plan for plan in plans if fit(plan.estimate)[0] == "does not fit"]
    return [
        *["with one micro-batch a step ZeRO-2 is the same as ZeRO-1"] * alike,
        *["what does not fit: of its kind the plan that takes least, and the step that it would take"] * bool(tall),
    ]


def same_split(one: Plan, other: Plan) -> bool:
    """Return whether two plans are the same but for estimates and reasons."""
    bare = Estimate()
    return replace(one, estimate=bare, why={}) == replace(other, estimate=bare, why={})


def sent_by_link(plan: Plan) -> Counter[str]:
    """Bytes that a rank sends in a step within its node and over the network."""
    found: Counter[str] = Counter()
    for traffic in plan.estimate.traffic:
        found[traffic.link] += traffic.bytes
    return found


def remedy_lines(found: list[Remedy], estimate: Estimate) -> list[str]:
    """Return what would make a plan with this estimate fit, with the memory and the cost of each change; or what comes
    closest."""
    return [remedy_head(found, estimate), *change_lines(found)]


def remedy_head(found: list[Remedy], estimate: Estimate) -> str:
    """Say whether one of these changes is enough, and for what."""
    enough = all(remedy.plan.estimate.share <= 1 for remedy in found)
    made = "makes it fit" if estimate.share > 1 else "leaves more room"
    return f"any one of these changes {made}" if enough else f"no single change {made}; these come closest"


def change_lines(found: list[Remedy]) -> list[str]:
    """Each change of the recipe or of the machines with the step, the memory and the plan that it makes, and what it
    costs."""
    return ["  " + line for line in columns(change_rows(found), "<>><<<<<")]


def change_rows(found: list[Remedy]) -> list[tuple[str, ...]]:
    """Return a row of :func:`change_lines` for each change."""
    return [
        (
            remedy.change,
            show_seconds(seconds(remedy.plan).step_s) + " a step",
            show_count(tokens_per_s(remedy.plan)) + " tokens/s",
            explain.verdict(remedy.plan.estimate),
            label(remedy.plan),
            f"recompute {remedy.plan.remat.mode}",
            f"batch {remedy.plan.batch.micro_batch_size} x {remedy.plan.batch.accumulation}",
            remedy.price,
        )
        for remedy in found
    ]


def remedy_words(found: list[Remedy]) -> str:
    """Return the remedies in one line, for an error: what to write, and the memory that a rank then needs."""
    if not found:
        return "`shardwise plan` shows every setting; more or larger devices, or a smaller model"
    enough = all(remedy.plan.estimate.share <= 1 for remedy in found)
    head = "" if enough else "no single change is enough; the closest are "
    each = []
    for remedy in found:
        words = remedy.price if remedy.change.startswith("--") else f"`{remedy.change}`"
        each.append(f"{words} ({show_bytes(remedy.plan.estimate.peak_bytes)})")
    return f"{head}{', or '.join(each)}; `shardwise plan` says what each costs"


def summary(plan: Plan) -> list[str]:
    """The plan in a few lines, for the head of a run; the first says what it is."""
    lines = [f"plan    {label(plan)} · {execution(plan)}"]
    if memory := plan.estimate.memory:
        shares = [f"{name} {show_bytes(memory[name])}" for name in MEMORY_CATEGORIES if memory.get(name)]
        lines.append(f"memory  {verdict(plan.estimate)} per rank")
        lines.append(f"        {' · '.join(shares)}")
    if plan.estimate.traffic:
        sent = (f"{words_of(t.kind)} of {t.category} {show_payload(t.bytes)} ({t.axis})" for t in plan.estimate.traffic)
        lines.append(f"traffic per step and rank: {' · '.join(sent)}")
    if plan.why:
        key = "shard.strategy" if "shard.strategy" in plan.why else next(iter(plan.why))
        lines.append(f"why     {WORDS.get(key, key)}: {plan.why[key]}        (shardwise plan explains the rest)")
    return lines
