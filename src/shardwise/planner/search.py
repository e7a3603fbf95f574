"""From a recipe to a plan. What the recipe pins stays; the rest is derived, each value with its reason.

Until plans are priced in seconds, ``strategy: auto`` is a rule: of the settings of the dial, hybrid ones included,
whose predicted peak is at most 0.8 of the memory, the one that keeps the wire busy for the shortest time; where there
is none, the same with smaller micro-batches, then with the next settings that techniques have to try (selective, then
full recomputation); where there still is none, all of it again with tensor parallelism inside a node; and where that
does not help either, the smallest. Which settings there are, each technique's ``choices`` say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from shardwise import techniques
from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec
from shardwise.planner.price import price
from shardwise.planner.wire import wire_s
from shardwise.spec.batch import batch, batch_reasons
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes, show_seconds
from shardwise.techniques import shard, tp
from shardwise.techniques.shard.degrees import grouped

MARGIN = 0.8
"""An estimate below this share of the memory did not run out in 454 published runs (Fujii et al., arXiv 2411.06465)."""
TIE = 0.02
"""Times on the wire that differ by less are the same: padding makes such a difference."""
CHUNK_NUMBERS = {"cuda": 2**26, "cpu": 2**22}
"""At most so many logits at a time: 256 MiB in fp32 on a GPU, which wants large products; on a CPU 16 MiB, which is as
fast as more and takes less memory (docs/benchmarks.md)."""
LARGER_CHUNKS = (2**28, 2**27)
"""What a GPU takes instead where memory allows: every chunk reads and writes the fp32 gradient of the output weight
once more. For Llama 3.1 8B on an H100 that is 2.5 % of a step with 2^26 logits and 0.6 % with 2^28."""


def choose(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan to run. Raises ConfigError with everything that makes the recipe's pins illegal."""
    refused: list[Problem] = []
    tried: list[Plan] = []
    for degree in tp.choices(recipe, spec, cluster, _open(recipe, spec, cluster)):
        for found, problems in _attempts(recipe, spec, cluster, degree):
            if able := [plan for plan in found if fits(plan)]:
                return _larger_chunks(_least_memory(able, recipe, cluster), spec, cluster)
            refused += problems
            tried += found
        if refused:
            raise ConfigError(*dict.fromkeys(refused))
    smallest = min(tried, key=lambda plan: plan.estimate.peak_bytes)
    share = f"{show_bytes(smallest.estimate.peak_bytes)} of {show_bytes(smallest.estimate.capacity_bytes)}"
    reason = f"derived: no plan stays below {MARGIN:.0%} of the memory; this is the smallest ({share})"
    return _explained(smallest, reason, recipe)


def could_fit(recipe: Recipe, spec: ModelSpec, cluster: Cluster, share: float) -> bool:
    """Whether ``share`` of the memory is enough for the smallest micro-batches with as much recomputation as may be."""
    for degree in tp.choices(recipe, spec, cluster, _open(recipe, spec, cluster)):
        for tried, plan in [*_trials(recipe, spec, cluster, degree)][-1:]:
            found, refused = _priced(tried, spec, cluster, plan)
            small = any(p.estimate.peak_bytes <= share * p.estimate.capacity_bytes for p in found)
            if small or (refused and _asked(recipe, degree)):
                return True
    return False


def fits(plan: Plan) -> bool:
    """Whether the plan stays below the margin."""
    return plan.estimate.peak_bytes <= MARGIN * plan.estimate.capacity_bytes


def _least_memory(able: list[Plan], recipe: Recipe, cluster: Cluster) -> Plan:
    """Of the plans that fit, those that take as long on the wire as the shortest, the one that takes the least
    memory."""
    seconds = {id(plan): wire_s(plan.estimate.traffic, plan.layout, cluster) for plan in able}
    able = sorted(able, key=lambda plan: seconds[id(plan)])
    limit_s = (1 + TIE) * seconds[id(able[0])]
    ties = [plan for plan in able if seconds[id(plan)] <= limit_s]
    best = min(ties, key=lambda plan: plan.estimate.peak_bytes)
    if best.layout.dp == 1:
        return _explained(best, "derived: there is one data-parallel rank, and nothing to shard over others", recipe)
    reason = f"derived: least time on the wire among plans below {MARGIN:.0%} of the memory"
    reason += f": {show_seconds(seconds[id(able[0])])}"
    if best is not able[0]:
        reason += f", the same as {name(able[0])}, which needs more memory"
    for slower in able[len(ties) : len(ties) + 1]:
        reason += f"; {name(slower)}: {show_seconds(seconds[id(slower)])}"
    return _explained(best, reason, recipe)


def name(plan: Plan) -> str:
    """``zero3 over 8 x 2, tp 4``."""
    layout = plan.layout
    over = layout.dp if plan.shard.strategy == "ddp" else layout.fsdp
    replicas = f" x {layout.dp_replicate}" * (plan.shard.strategy != "ddp" and layout.dp_replicate > 1)
    return f"{plan.shard.strategy} over {over}{replicas}" + f", tp {layout.tp}" * (layout.tp > 1)


def settings(recipe: Recipe, spec: ModelSpec, cluster: Cluster, chosen: Plan | None = None) -> list[Plan]:
    """Every legal setting of the dial with its estimate, hybrid shard included where there is more than one node, then
    the chosen one under each degree of tensor parallelism, with as many sequences a device; all else as in the plan
    that was chosen."""
    chosen = chosen or choose(recipe, spec, cluster)
    strategy = chosen.shard.strategy if chosen.layout.dp > 1 else "zero3"
    kept = {key: why for key, why in chosen.why.items() if not key.startswith(("layout.", "shard."))}
    alike = replace(chosen, why={**kept, **batch_reasons(recipe.train)})
    found: list[Plan] = []
    for degree in tp.choices(recipe, spec, cluster, alike, pinned=False):
        ranks = degree.layout.tp
        share, rest = divmod(chosen.batch.micro_batch_size * chosen.batch.accumulation * ranks, chosen.layout.tp)
        micro = max(1, chosen.batch.micro_batch_size * ranks // chosen.layout.tp)
        if rest or share % micro:
            continue
        asked = _with_batch(recipe, micro, share // micro)
        try:
            plans, _ = _legal(asked, spec, cluster, degree, pinned=False)
        except ConfigError:  # degrees that are pinned leave no room for this one
            continue
        batch = replace(chosen.batch, micro_batch_size=micro, accumulation=share // micro)
        found += [
            price(spec, replace(plan, batch=batch), cluster)
            for plan in plans
            if ranks == 1 or plan.shard.strategy == strategy or plan.layout.dp == 1
        ]
    return found


def _open(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan before any technique has been set: what is the recipe's alone to say."""
    why = batch_reasons(recipe.train)
    if recipe.attention != "auto":
        why["attention"] = "pinned where it serves; see docs/techniques/attention.md"
    return Plan(
        deterministic=recipe.run.deterministic,
        attention=recipe.attention,
        loss="dpo" if recipe.pairs else "cross_entropy",
        why=why,
        model=spec.name,
        cluster=str(cluster),
    )


def _attempts(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, degree: Plan
) -> Iterator[tuple[list[Plan], list[Problem]]]:
    """The legal plans of each trial at one degree of tensor parallelism, and what is wrong with others, which is the
    recipe's to mend: nothing of a degree that it does not ask for. One by one: an illegal mesh is reported before a
    batch that does not suit it."""
    asked = _asked(recipe, degree)
    try:
        for tried, plan in _trials(recipe, spec, cluster, degree):
            found, refused = _priced(tried, spec, cluster, plan)
            yield found, refused if asked else []
    except ConfigError:
        if asked:
            raise


def _asked(recipe: Recipe, degree: Plan) -> bool:
    return degree.layout.tp in (1, recipe.parallel.tp)


def _trials(recipe: Recipe, spec: ModelSpec, cluster: Cluster, degree: Plan) -> Iterator[tuple[Recipe, Plan]]:
    """What is tried at one time with every setting of the dial: what other techniques have to try, and for each of
    them ever smaller micro-batches."""
    ranks = degree.layout.tp
    others = [technique for technique in techniques.ORDER if technique not in (tp, shard)]
    for plan in techniques.choices(others, recipe, spec, cluster, degree):
        for tried in _smaller_micro_batches(recipe, grouped(cluster, ranks).world, ranks):
            yield tried, plan


def _smaller_micro_batches(recipe: Recipe, dp: int, ranks: int) -> Iterator[Recipe]:
    """The batch as asked, then the same global batch in smaller micro-batches, down to single sequences."""
    yield recipe
    if recipe.train.micro_batch_size is not None or recipe.train.gradient_accumulation_steps is not None:
        return
    micro, accumulation, _ = batch(recipe.train, dp, ranks)
    while micro > 1:
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        micro, accumulation = smaller, accumulation * (micro // smaller)
        yield _with_batch(recipe, micro, accumulation)


def _with_batch(recipe: Recipe, micro: int, accumulation: int) -> Recipe:
    sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "global_batch_size": None}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=sizes)})


def _priced(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> tuple[list[Plan], list[Problem]]:
    """The plan with each legal setting of the dial, and what is wrong with the others."""
    found, refused = _legal(recipe, spec, cluster, plan)
    return [price(spec, each, cluster) for each in found], refused


def _legal(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True
) -> tuple[list[Plan], list[Problem]]:
    """The same without a price."""
    found: list[Plan] = []
    refused: list[Problem] = []
    seq_len = recipe.train.seq_len
    for split in shard.choices(recipe, spec, cluster, plan, pinned=pinned):
        micro, accumulation, _ = batch(recipe.train, split.layout.dp, split.layout.tp)
        chunk, reasons = _chunk(spec, CHUNK_NUMBERS[cluster.kind], micro * seq_len)
        whole = replace(split, batch=Batch(micro, accumulation, seq_len, chunk), why={**split.why, **reasons})
        problems = techniques.check(spec, whole, cluster)
        refused += problems
        found += [whole] * (not problems)
    return found, refused


def _larger_chunks(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan with the largest chunks of the loss that fit, on a GPU; it has the smallest."""
    tokens = plan.batch.micro_batch_size * plan.batch.seq_len
    for most in LARGER_CHUNKS if cluster.kind == "cuda" and plan.batch.loss_chunk_tokens < tokens else ():
        chunk, reasons = _chunk(spec, most, tokens)
        larger = replace(plan, batch=replace(plan.batch, loss_chunk_tokens=chunk), why={**plan.why, **reasons})
        if fits(priced := price(spec, larger, cluster)):
            return priced
    return plan


def _chunk(spec: ModelSpec, most: int, tokens: int) -> tuple[int, dict[str, str]]:
    chunk = max(128, most // spec.vocab_size // 128 * 128)
    if chunk >= tokens:
        return tokens, {"batch.loss_chunk_tokens": "derived: all tokens of a micro-batch, since their logits are few"}
    size = show_bytes(4 * chunk * spec.vocab_size)
    return chunk, {"batch.loss_chunk_tokens": f"derived: {chunk:,} x {spec.vocab_size:,} logits at a time, {size}"}


def _explained(plan: Plan, reason: str, recipe: Recipe) -> Plan:
    """With why the search took this plan: ``reason``, unless the recipe left it no choice."""
    why = {"shard.strategy": reason, **plan.why}
    asked = batch(recipe.train, plan.layout.dp, plan.layout.tp)
    if (plan.batch.micro_batch_size, plan.batch.accumulation) != asked[:2]:
        why["batch.micro_batch_size"] = "derived: larger ones do not fit"
        why["batch.accumulation"] = "derived: keeps the global batch"
    order = [field.name for field in fields(plan)]
    ordered = sorted(why, key=lambda key: (key != "shard.strategy", order.index(key.partition(".")[0])))
    return replace(plan, why={key: why[key] for key in ordered})
