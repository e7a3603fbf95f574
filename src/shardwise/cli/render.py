"""A plan as lines of text: what it is, where the memory goes, what is sent, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby
from math import ceil

from shardwise.cli.show import coloured
from shardwise.models.config import ModelSpec, active_parameter_count, parameter_count
from shardwise.planner.compare import MARGIN, seconds, tokens_per_s
from shardwise.planner.remedy import Remedy
from shardwise.spec.cluster import Cluster
from shardwise.spec.keys import PLANNED, dotted
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Plan
from shardwise.spec.units import columns, show_bytes, show_count, show_payload, show_seconds

NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
WORDS = {**PLANNED, "batch.loss_chunk_tokens": "tokens in a chunk of the loss"}
DRIVE_TBW = 600
"""What the maker of a drive of 1 TB warrants to be written to it (TBW), in TB."""
SENT = {"node": "sent in the node", "network": "over the network"}
LONG_VALUE = 24
"""A value with more characters does not widen the column of values."""
COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def label(plan: Plan) -> str:
    """``ZeRO-3 over 8, 2 replicas``."""
    name, layout = NAMES[plan.shard.strategy], plan.layout
    words = plan.model_words
    if layout.size("loss") == 1 and words:
        return words
    tensor = f", {words}" if words else ""
    if plan.shard.strategy == "ddp":
        return f"{name} over {layout.size('loss')}{tensor}"
    replicas = f", {layout.dp_replicate} replicas (hybrid)" if layout.dp_replicate > 1 else ""
    return f"{name} over {layout.fsdp}{replicas}{tensor}"


def execution(plan: Plan) -> str:
    """The batch and what each rank does with it, in one line."""
    batch, dp = plan.batch, plan.layout.dp
    whole = batch.global_batch_size(dp)
    parts = [
        f"micro-batch {batch.micro_batch_size} x {batch.seq_len:,}",
        f"accumulation {batch.accumulation}",
        f"{whole} sequences ({show_count(whole * batch.seq_len)} tokens) per step",
        f"compute {plan.precision.compute}, {plan.kept}",
        f"recompute {plan.remat.mode}",
    ]
    if plan.compile:
        parts.append("compiled")
    parts += plan.offload.words
    return " · ".join(parts)


def title(spec: ModelSpec, cluster: Cluster) -> str:
    """The model and the machines, in one line."""
    device = cluster.device
    nodes = f"{cluster.nodes} nodes x " if cluster.nodes > 1 else ""
    each = f"{show_bytes(device.memory_bytes)} each"
    parameters = f"{show_count(parameter_count(spec))} parameters"
    if spec.experts:
        parameters += f", {show_count(active_parameter_count(spec))} active"
    return f"{spec.name} ({parameters}) on {nodes}{cluster.devices_per_node} x {device.name} ({each})"


def memory_lines(estimate: Estimate) -> list[str]:
    """Memory of the fullest rank at its peak, a category a line, with bars."""
    total = estimate.peak_bytes or sum(estimate.memory.values()) or 1
    order = [*MEMORY_CATEGORIES, *(name for name in estimate.memory if name not in MEMORY_CATEGORIES)]
    held = {name: size for name in order if (size := estimate.memory.get(name))}
    rows = [(name, show_bytes(size), "#" * ceil(40 * size / total)) for name, size in held.items()]
    rows += [(f"{name}, on the host", show_bytes(size), "") for name, size in estimate.host.items()]
    lines = ["  " + line for line in columns(rows, "<><")]
    return [*lines, *(["  " + wear(estimate)] if estimate.disk_bytes else [])]


def wear(estimate: Estimate) -> str:
    """What a step writes to a node's disks, and for how long a drive may be written so; or what it reads alone."""
    if not estimate.written_bytes:
        return f"{show_bytes(estimate.disk_bytes)} of weights are on the disks of a node, and steps do not write there"
    steps = int(DRIVE_TBW * 1e12 / estimate.written_bytes)
    written = show_bytes(estimate.written_bytes)
    return f"a step writes {written} to the disks of a node: {steps:,} steps are {DRIVE_TBW} TB, what small drives last"


def traffic_lines(estimate: Estimate) -> list[str]:
    """What one rank sends in one step: payload, by axis and link."""
    rows = []
    for t in estimate.traffic:
        calls = f"in {t.count:,} call{'' if t.count == 1 else 's'}"
        rows.append((t.axis, _words(t.kind), t.category, show_payload(t.bytes), calls, t.link))
    return ["  " + line for line in columns(rows, "<<<>><")]


def verdict(estimate: Estimate) -> str:
    """``fits``, ``tight`` (with less than the margin) or ``does not fit``, with the share of the memory."""
    if not estimate.capacity_bytes:
        return "memory of the device unknown"
    word, share = _fit(estimate)
    peak, capacity = show_bytes(estimate.peak_bytes), show_bytes(estimate.capacity_bytes)
    return coloured(f"{word}: {peak} of {capacity} ({share:.0%}){_on_host(estimate)}", COLOURS[word])


def _on_host(estimate: Estimate) -> str:
    """What a node's ranks hold on their host and its disks, if anything."""
    if not estimate.host_bytes:  # of a CPU, whose device is the host
        return f"; {_on_disk(estimate)}" if estimate.disk_bytes else ""
    held, capacity = show_bytes(estimate.host_bytes), show_bytes(estimate.host_capacity_bytes)
    share = f"{estimate.host_bytes / max(1, estimate.host_capacity_bytes):.0%}"
    disk = f", {_on_disk(estimate)}" if estimate.disk_bytes else ""
    return f"; {held} of {capacity} on the host ({share}){disk}"


def _on_disk(estimate: Estimate) -> str:
    if not estimate.disk_capacity_bytes:
        return f"{show_bytes(estimate.disk_bytes)} on its disks"
    share = f"{estimate.disk_bytes / estimate.disk_capacity_bytes:.0%}"
    return f"{show_bytes(estimate.disk_bytes)} of {show_bytes(estimate.disk_capacity_bytes)} on its disks ({share})"


def sentence(plan: Plan) -> str:
    """The verdict: whether it fits, as what, and how long a step takes."""
    estimate = plan.estimate
    word, share = _fit(estimate)
    found = {"fits": "It fits", "tight": "It is tight", "does not fit": "It does not fit"}[word]
    size = f"{show_bytes(estimate.peak_bytes)} of {show_bytes(estimate.capacity_bytes)} a rank ({share:.0%})"
    size += _on_host(estimate)
    step = f", {show_seconds(estimate.seconds.step_s)} a step" if estimate.seconds else ""
    if word == "does not fit":
        return coloured(f"{found}: the smallest plan, {label(plan)}, needs {size}{step}.", COLOURS[word])
    return coloured(f"{found}: {label(plan)}, {size}{step}.", COLOURS[word])


def _fit(estimate: Estimate) -> tuple[str, float]:
    """Whether it fits, and the share of the device's memory (0 where that is unknown)."""
    if not estimate.capacity_bytes:
        return "fits", 0.0
    word = "fits" if estimate.share <= MARGIN else "tight" if estimate.share <= 1 else "does not fit"
    return word, estimate.peak_bytes / estimate.capacity_bytes


def family_lines(plans: list[Plan], chosen: Plan) -> list[str]:
    """A line for the best plan of each kind, in the order of their seconds, the chosen one marked; of one that does not
    fit, how much memory it would take."""
    links = [link for link in SENT if any(link in sent_by_link(plan) for plan in plans)]
    named = [SENT[link] for link in links] if len(links) > 1 else ["sent per step"] * len(links)
    head = ("", "plan", "recompute", "batch", "a step", "per rank", "of", *named, "")
    rows: list[tuple[str, ...]] = [head]
    for plan in plans:
        word, share = _fit(plan.estimate)
        by_link, batch = sent_by_link(plan), plan.batch
        step = show_seconds(plan.estimate.seconds.step_s) if plan.estimate.seconds else ""
        figures = (step, show_bytes(plan.estimate.peak_bytes), f"{share:.0%}")
        sent = [show_payload(by_link.get(link, 0)) for link in links]
        mark = ">" if same_split(plan, chosen) else ""
        shape = f"{batch.micro_batch_size} x {batch.accumulation}"
        rows.append((mark, label(plan), plan.remat.mode, shape, *figures, *sent, word))
    lines = columns(rows, "<<<" + ">" * (len(head) - 4) + "<")
    told = lines[:1] + [coloured(line, COLOURS[row[-1]]) for line, row in zip(lines[1:], rows[1:], strict=True)]
    alike = any(plan.shard.strategy == "zero1" and plan.batch.accumulation == 1 for plan in plans)
    told += ["with one micro-batch a step ZeRO-2 is the same as ZeRO-1"] * alike
    tall = [plan for plan in plans if _fit(plan.estimate)[0] == "does not fit"]
    return [
        *told,
        *["what does not fit: of its kind the plan that takes least, and the step that it would take"] * bool(tall),
    ]


def same_split(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same but for estimates and reasons."""
    bare = Estimate()
    return replace(one, estimate=bare, why={}) == replace(other, estimate=bare, why={})


def sent_by_link(plan: Plan) -> Counter[str]:
    """Bytes that a rank sends in a step within its node and over the network."""
    found: Counter[str] = Counter()
    for traffic in plan.estimate.traffic:
        found[traffic.link] += traffic.bytes
    return found


def remedy_lines(found: list[Remedy], estimate: Estimate) -> list[str]:
    """What would make a plan with this estimate fit, with the memory and the cost of each change; or what comes
    closest."""
    enough = all(remedy.plan.estimate.share <= 1 for remedy in found)
    made = "makes it fit" if estimate.share > 1 else "leaves more room"
    head = f"any one of these changes {made}" if enough else f"no single change {made}; these come closest"
    return [head, *change_lines(found)]


def change_lines(found: list[Remedy]) -> list[str]:
    """Each change of the recipe or of the machines with the step, the memory and the plan that it makes, and what it
    costs."""
    rows = [
        (
            remedy.change,
            show_seconds(seconds(remedy.plan).step_s) + " a step",
            show_count(tokens_per_s(remedy.plan)) + " tokens/s",
            verdict(remedy.plan.estimate),
            label(remedy.plan),
            f"recompute {remedy.plan.remat.mode}",
            f"batch {remedy.plan.batch.micro_batch_size} x {remedy.plan.batch.accumulation}",
            remedy.price,
        )
        for remedy in found
    ]
    return ["  " + line for line in columns(rows, "<>><<<<<")]


def remedy_words(found: list[Remedy]) -> str:
    """The same in one line, for an error: what to write, and the memory that a rank then needs."""
    if not found:
        return "`shardwise plan` shows every setting; more or larger devices, or a smaller model"
    enough = all(remedy.plan.estimate.share <= 1 for remedy in found)
    head = "" if enough else "no single change is enough; the closest are "
    each = []
    for remedy in found:
        words = remedy.price if remedy.change.startswith("--") else f"`{remedy.change}`"
        each.append(f"{words} ({show_bytes(remedy.plan.estimate.peak_bytes)})")
    return f"{head}{', or '.join(each)}; `shardwise plan` says what each costs"


def why_lines(plan: Plan) -> list[str]:
    """A reason for every value, under the recipe's name for it. Long values make no column wide, and where there is no
    value the reason stands in its place."""
    flat = dotted(asdict(plan)) | {"batch.global_batch_size": plan.batch.global_batch_size(plan.layout.dp)}
    rows = [(WORDS.get(key, key), _typed(flat.get(key)), reason) for key, reason in plan.why.items()]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    width = max((len(value) for _, value, _ in rows if len(value) <= LONG_VALUE), default=0)
    cells = ((f"{name:{name_width}}", *([f"{value:{width}}"] if value else []), reason) for name, value, reason in rows)
    return ["  " + "  ".join(row) for row in cells]


def summary(plan: Plan) -> list[str]:
    """The plan in a few lines, for the head of a run; the first says what it is."""
    lines = [f"plan    {label(plan)} · {execution(plan)}"]
    if memory := plan.estimate.memory:
        shares = [f"{name} {show_bytes(memory[name])}" for name in MEMORY_CATEGORIES if memory.get(name)]
        lines.append(f"memory  {verdict(plan.estimate)} per rank")
        lines.append(f"        {' · '.join(shares)}")
    if plan.estimate.traffic:
        sent = (f"{_words(t.kind)} of {t.category} {show_payload(t.bytes)} ({t.axis})" for t in plan.estimate.traffic)
        lines.append(f"traffic per step and rank: {' · '.join(sent)}")
    if plan.why:
        key = "shard.strategy" if "shard.strategy" in plan.why else next(iter(plan.why))
        lines.append(f"why     {WORDS.get(key, key)}: {plan.why[key]}        (shardwise plan explains the rest)")
    return lines


def _typed(value: object) -> str:
    """A value, written as in a recipe, or nothing where there is none; of a long split how many stages have how many
    blocks."""
    if value is None or value in ("", (), []):
        return ""
    if isinstance(value, tuple | list):
        runs = [(len(list(same)), each) for each, same in groupby(value)]
        if len(str(list(value))) > LONG_VALUE:
            return ", ".join(f"{times} of {each}" for times, each in runs)
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(kind: str) -> str:
    return kind.replace("_", "-")
