"""From a recipe to a plan. What the recipe pins stays; the rest is derived, each value with its reason.

Until plans are priced in seconds, ``strategy: auto`` is a rule: of the settings of the dial, hybrid ones included,
whose predicted peak is at most 0.8 of the memory, the one that keeps the wire busy for the shortest time; where there
is none, the same with smaller micro-batches, then with selective and with full recomputation; where there still is
none, all of it again with tensor parallelism inside a node; and where that does not help either, the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardwise import techniques
from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec
from shardwise.planner.layouts import grouped, inside, layouts
from shardwise.planner.price import least_bytes, price, traffic
from shardwise.planner.sheets import sheet_of, variant
from shardwise.planner.wire import wire_s
from shardwise.spec.batch import batch, batch_reasons
from shardwise.spec.cluster import BF16_GAIN, Cluster, Products
from shardwise.spec.plan import Batch, Matmul, Optim, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe, Train
from shardwise.spec.sheet import Sheet
from shardwise.spec.units import show_bytes, show_seconds
from shardwise.techniques import lora

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
Mode = Literal["none", "selective", "full"]
REMAT: tuple[Mode, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A plan before it is replayed: its sheet, its seconds on the wire, and a bound below its memory."""

    plan: Plan
    sheet: Sheet
    wire_s: float
    least_bytes: int

    def priced(self, cluster: Cluster) -> Plan:
        return price(self.sheet, self.plan, cluster)


def choose(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan to run. Raises ConfigError with everything that makes the recipe's pins illegal."""
    refused: list[Problem] = []
    tried: list[Plan] = []
    last: list[Candidate] = []
    for tp in _degrees(recipe, cluster):
        found: list[Candidate] = []
        for found, problems in _attempts(recipe, spec, cluster, tp):
            refused += problems
            found.sort(key=lambda candidate: candidate.wire_s)
            for at, candidate in enumerate(found):
                if candidate.least_bytes > MARGIN * cluster.device.memory_bytes:
                    continue
                tried.append(candidate.priced(cluster))
                if fits(tried[-1]):
                    return _larger_chunks(_least_memory(found[at:], tried[-1], recipe, cluster), spec, cluster)
        if refused:
            raise ConfigError(*dict.fromkeys(refused))
        last += found
    smallest = min(tried, key=lambda plan: plan.estimate.peak_bytes, default=None)
    for candidate in sorted(last, key=lambda candidate: candidate.least_bytes):
        if smallest is None or candidate.least_bytes < smallest.estimate.peak_bytes:
            smallest = min(
                filter(None, (candidate.priced(cluster), smallest)), key=lambda plan: plan.estimate.peak_bytes
            )
    assert smallest is not None
    share = f"{show_bytes(smallest.estimate.peak_bytes)} of {show_bytes(smallest.estimate.capacity_bytes)}"
    reason = f"derived: no plan stays below {MARGIN:.0%} of the memory; this is the smallest ({share})"
    return _explained(smallest, reason, recipe)


def could_fit(recipe: Recipe, spec: ModelSpec, cluster: Cluster, share: float) -> bool:
    """Whether the bound leaves a chance of ``share`` of the memory to the smallest micro-batches with as much
    recomputation as may be."""
    for tp in _degrees(recipe, cluster):
        for found, refused in list(_attempts(recipe, spec, cluster, tp))[-1:]:
            if refused or any(c.least_bytes <= share * cluster.device.memory_bytes for c in found):
                return True
    return False


def fits(plan: Plan) -> bool:
    """Whether the plan stays below the margin."""
    return plan.estimate.peak_bytes <= MARGIN * plan.estimate.capacity_bytes


def _least_memory(found: list[Candidate], first: Plan, recipe: Recipe, cluster: Cluster) -> Plan:
    """Of the candidates that take as long on the wire as the first of ``found``, which fits and is ``first``, the one
    that takes the least memory."""
    limit_s = (1 + TIE) * found[0].wire_s
    able = [c for c in found if c.least_bytes <= MARGIN * cluster.device.memory_bytes]
    ties = [first, *(c.priced(cluster) for c in able[1:] if c.wire_s <= limit_s)]
    best = min(ties, key=lambda plan: plan.estimate.peak_bytes)
    reason = f"derived: least time on the wire among plans below {MARGIN:.0%} of the memory"
    reason += f": {show_seconds(found[0].wire_s)}"
    if best is not first:
        reason += f", the same as {name(first)}, which needs more memory"
    if slower := next((c for c in able if c.wire_s > limit_s), None):
        reason += f"; {name(slower.plan)}: {show_seconds(slower.wire_s)}"
    return _explained(best, reason, recipe)


def name(plan: Plan) -> str:
    """``zero3 over 8 x 2, tp 4``."""
    layout = plan.layout
    over = layout.dp if plan.shard.strategy == "ddp" else layout.dp_shard
    replicas = f" x {layout.dp_replicate}" * (plan.shard.strategy != "ddp" and layout.dp_replicate > 1)
    return f"{plan.shard.strategy} over {over}{replicas}" + f", tp {layout.tp}" * (layout.tp > 1)


def settings(recipe: Recipe, spec: ModelSpec, cluster: Cluster, chosen: Plan | None = None) -> list[Plan]:
    """Every legal setting of the dial with its estimate, hybrid shard included where there is more than one node, then
    the chosen one under each degree of tensor parallelism, with as many sequences a device; all else as in the plan
    that was chosen."""
    chosen = chosen or choose(recipe, spec, cluster)
    strategy = chosen.shard.strategy if chosen.layout.dp > 1 else "zero3"
    found: list[Plan] = []
    for tp in sorted({1, chosen.layout.tp, *inside(cluster)}):
        share, rest = divmod(chosen.batch.micro_batch_size * chosen.batch.accumulation * tp, chosen.layout.tp)
        micro = max(1, chosen.batch.micro_batch_size * tp // chosen.layout.tp)
        if rest or share % micro:
            continue
        batch = replace(chosen.batch, micro_batch_size=micro, accumulation=share // micro)
        train = _with_batch(recipe.train, micro, batch.accumulation)
        try:
            candidates, _ = _candidates(recipe, spec, cluster, Trial(chosen.remat.mode, train, tp), pinned=False)
        except ConfigError:  # degrees that are pinned leave no room for this one
            continue
        alike = [c for c in candidates if c.plan.shard.strategy == strategy or c.plan.layout.dp == 1]
        found += [
            price(candidate.sheet, replace(candidate.plan, batch=batch), cluster)
            for candidate in (candidates if tp == 1 else alike)
        ]
    return found


@dataclass(frozen=True)
class Trial:
    """What is tried at one time with every setting of the dial."""

    mode: Mode
    train: Train
    tp: int


def _degrees(recipe: Recipe, cluster: Cluster) -> list[int]:
    """The degrees of tensor parallelism in the order in which they are tried."""
    return [recipe.parallel.tp] if recipe.parallel.tp else [1, *inside(cluster)]


def _attempts(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, tp: int
) -> Iterator[tuple[list[Candidate], list[Problem]]]:
    """The legal plans of each attempt, and what is wrong with others, which is the recipe's to mend: nothing of a
    degree that it does not ask for. One by one: an illegal mesh is reported before a batch that does not suit it."""
    modes = REMAT if recipe.recompute.mode == "auto" else (recipe.recompute.mode,)
    asked = tp in (1, recipe.parallel.tp)
    for mode in modes:
        try:
            for train in _smaller_micro_batches(recipe.train, grouped(cluster, tp).world, tp):
                found, refused = _candidates(recipe, spec, cluster, Trial(mode, train, tp))
                yield found, refused if asked else []
        except ConfigError:
            if asked:
                raise


def _smaller_micro_batches(train: Train, dp: int, tp: int) -> Iterator[Train]:
    """The batch as asked, then the same global batch in smaller micro-batches, down to single sequences."""
    yield train
    if train.micro_batch_size is not None or train.gradient_accumulation_steps is not None:
        return
    micro, accumulation, _ = batch(train, dp, tp)
    while micro > 1:
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        micro, accumulation = smaller, accumulation * (micro // smaller)
        yield _with_batch(train, micro, accumulation)


def _with_batch(train: Train, micro: int, accumulation: int) -> Train:
    update = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "global_batch_size": None}
    return train.model_copy(update=update)


def _candidates(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, attempt: Trial, *, pinned: bool = True
) -> tuple[list[Candidate], list[Problem]]:
    """The legal settings of the dial, and what is wrong with the others."""
    precision, why = _precision(recipe, cluster)
    compiled, reason = _compiled(recipe, cluster)
    mode, train, tp = attempt.mode, attempt.train, attempt.tp
    found: list[Candidate] = []
    refused: list[Problem] = []
    for strategy, of_groups in layouts(recipe, grouped(cluster, tp), pinned=pinned):
        layout = replace(of_groups, tp=tp, ranks_per_node=cluster.devices_per_node)
        micro, accumulation, _ = batch(train, layout.dp, tp)
        chunk, reasons = _chunk(spec, CHUNK_NUMBERS[cluster.kind], micro * train.seq_len)
        reshard = recipe.parallel.reshard_after_forward
        plan = Plan(
            layout=layout,
            batch=Batch(micro, accumulation, train.seq_len, chunk),
            shard=Shard(strategy, True if reshard is None or strategy != "zero3" else reshard),
            precision=precision,
            remat=Remat(mode, recipe.recompute.every if mode != "none" else 1),
            compile=compiled,
            deterministic=recipe.run.deterministic,
            attention=recipe.attention,
            sequence_parallel=tp > 1 and recipe.parallel.sequence_parallel,
            optim=Optim(recipe.optim.name, moments=recipe.optim.moments),
            frozen=tuple(recipe.model.frozen),
            lora=lora.settings(recipe.lora, precision),
            loss="dpo" if recipe.pairs else "cross_entropy",
            why={**why, **reasons, **batch_reasons(recipe.train), "compile": reason},
            model=spec.name,
            cluster=str(cluster),
        )
        problems = techniques.check(spec, plan, cluster)
        if recipe.compile == "auto" and (bars := [problem.what for problem in problems if problem.where == "compile"]):
            plan = replace(plan, compile=False, why={**plan.why, "compile": f"derived: off: {bars[0]}"})
            problems = techniques.check(spec, plan, cluster)
        if problems:
            refused += problems
            continue
        sheet = sheet_of(spec, variant(precision), ranks=tp)
        costed = techniques.cost(sheet, plan)
        busy_s = wire_s(traffic(costed, plan), layout, cluster)
        found.append(Candidate(plan, sheet, busy_s, least_bytes(costed, plan, cluster)))
    return found, refused


def _precision(recipe: Recipe, cluster: Cluster) -> tuple[Precision, dict[str, str]]:
    asked = recipe.precision
    compute, reason = asked.compute, "pinned"
    if compute == "auto":
        compute, reason = "bf16", "derived: the device computes in bf16"
        if not cluster.device.computes_bf16:
            compute, reason = "fp16", "derived: the device has no bf16 instructions"
        elif cluster.kind == "cpu":
            compute, reason = "fp32", "default: how fast this CPU multiplies bf16 was not measured"
    products = cluster.device.products
    if products is not None and asked.compute in ("auto", "bf16"):
        compute = products.compute if asked.compute == "auto" else "bf16"
        reason = f"{'measured' if asked.compute == 'auto' else 'pinned'}: {pace(products)}"
    reduce = asked.reduce or ("fp64" if compute == "fp64" else "fp32")
    why = {"precision.compute": reason, "precision.weights": "recipe: planning never changes the master weights"}
    matmul: Matmul = "highest" if asked.matmul == "auto" else asked.matmul
    if asked.matmul == "auto" and compute == "fp32" and products is not None:
        matmul = products.fp32
        gain, bad = products.medium_gain, "medium would not compute in fp32"
        why["precision.matmul"] = f"measured: {f'medium is {gain:.2f} times as fast' if gain else bad}"
    precision = Precision(compute, asked.weights, reduce, tuple(asked.modules.items()), matmul)
    why["precision.reduce"] = "pinned" if asked.reduce else "default: gradients are summed in fp32"
    return precision, why


def _compiled(recipe: Recipe, cluster: Cluster) -> tuple[bool, str]:
    """Whether blocks are compiled unless something bars it, and why."""
    if recipe.compile != "auto":
        return recipe.compile, "pinned"
    if cluster.kind == "cpu":
        return False, "default: off; see docs/techniques/compile.md"
    return True, "default: on for GPUs, which read and write less in joined operations"


def pace(products: Products) -> str:
    """How fast bf16 is on this CPU, in words."""
    gain = products.bf16_gain
    asked = f"; bf16 is used from {BF16_GAIN} on" if products.compute == "fp32" else ""
    return f"bf16 products are {gain:.2f} times as fast as fp32's on this CPU{asked}"


def _larger_chunks(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan with the largest chunks of the loss that fit, on a GPU; it has the smallest."""
    tokens = plan.batch.micro_batch_size * plan.batch.seq_len
    sheet = sheet_of(spec, variant(plan.precision), ranks=plan.layout.tp)
    for most in LARGER_CHUNKS if cluster.kind == "cuda" and plan.batch.loss_chunk_tokens < tokens else ():
        chunk, reasons = _chunk(spec, most, tokens)
        larger = replace(plan, batch=replace(plan.batch, loss_chunk_tokens=chunk), why={**plan.why, **reasons})
        if fits(priced := price(sheet, larger, cluster)):
            return priced
    return plan


def _chunk(spec: ModelSpec, most: int, tokens: int) -> tuple[int, dict[str, str]]:
    chunk = max(128, most // spec.vocab_size // 128 * 128)
    if chunk >= tokens:
        return tokens, {"batch.loss_chunk_tokens": "derived: all tokens of a micro-batch, since their logits are few"}
    size = show_bytes(4 * chunk * spec.vocab_size)
    return chunk, {"batch.loss_chunk_tokens": f"derived: {chunk:,} x {spec.vocab_size:,} logits at a time, {size}"}


def _explained(plan: Plan, reason: str, recipe: Recipe) -> Plan:
    if recipe.parallel.strategy != "auto":
        reason = "pinned"
    elif plan.layout.world == 1:
        reason = "derived: one process"
    why = {"shard.strategy": reason, **plan.why}
    if (plan.batch.micro_batch_size, plan.batch.accumulation) != batch(recipe.train, plan.layout.dp, plan.layout.tp)[
        :2
    ]:
        why["batch.micro_batch_size"] = "derived: larger ones do not fit"
        why["batch.accumulation"] = "derived: keeps the global batch"
    kept = (
        "derived: activations fit"
        if plan.remat.mode == "none"
        else "derived: less recomputation would need more memory than is available"
    )
    why["remat.mode"] = kept if recipe.recompute.mode == "auto" else "pinned"
    if recipe.parallel.reshard_after_forward is not None and plan.shard.strategy != "zero3":
        why["shard.reshard_after_forward"] = f"not used: {plan.shard.strategy} keeps its weights unsharded"
    if recipe.recompute.every != 1 and plan.remat.mode == "none":
        why["remat.every"] = "not used: nothing is recomputed"
    why["compile"] = why.pop("compile")  # told last
    if plan.layout.tp > 1:
        alone = "derived: no split of the batch and no recomputation alone stays below the margin"
        why["layout.tp"] = "pinned" if recipe.parallel.tp else alone
    if recipe.attention != "auto":
        why["attention"] = "pinned where it serves; see docs/techniques/attention.md"
    return replace(plan, why=why)
