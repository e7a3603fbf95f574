"""The single changes of a recipe or of machines that would make a plan fit, or a better one, each planned again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec
from shardwise.planner.comparison import MARGIN, TIE, TIGHT, fits, name, peak_share, seconds, tokens_per_s
from shardwise.planner.scaled_products import in_float8
from shardwise.planner.search import Search, could_fit
from shardwise.spec.cluster import Cluster
from shardwise.spec.complaints import cross_check
from shardwise.spec.devices import Device, devices, rented
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe

CLOSEST = 3
"""How many changes are shown if none is enough."""
NODE = 8
"""Devices of a full node."""
SPLIT = {"strategy", "dp_shard", "dp_replicate", "tp", "pp", "cp"}
"""Keys of ``parallel`` that say how the ranks are split."""
SMALLER = {"float8": "float8, half of bf16: a little less exact", "nf4": "4 bits: less exact"}
"""How frozen weights may be stored, the more exact first, and what it costs."""
MUCH_FASTER = 1.25
"""How many times as fast a tight plan must be to be told of beside one that fits."""
Change = tuple[dict[str, object], Cluster, str]
"""Keys of the recipe with their new values, the machines, and what it costs."""


@dataclass(frozen=True)
class Remedy:
    """``change`` is what to type; ``price`` what it costs, in words; ``plan`` what would run."""

    change: str
    price: str
    plan: Plan


def remedies(recipe: Recipe, spec: ModelSpec, cluster: Cluster, chosen: Plan) -> list[Remedy]:
    """Return the single changes that would make ``chosen``, which takes more memory than the margin leaves, fit; if
    there are none, those that come closest. Where the recipe leaves the number of stages open, only plans with as many
    as ``chosen`` and plans without stages are tried; likewise the ranks that share a row."""
    share = MARGIN if peak_share(chosen) <= 1 else 1.0
    found: list[Remedy] = []
    beyond: list[Change] = []
    for choices in (*_recipe_changes(recipe, cluster), *_cluster_changes(cluster)):
        for change in choices:
            remedy = _replanned(change, recipe, spec, share, chosen)
            if remedy is not None and peak_share(remedy.plan) <= share:
                found.append(remedy)
                break
        else:
            beyond += choices[-1:]
    if found:
        return found
    near = [remedy for change in beyond if (remedy := _replanned(change, recipe, spec, None, chosen))]
    return sorted(near, key=lambda remedy: peak_share(remedy.plan))[:CLOSEST]


def _recipe_changes(recipe: Recipe, cluster: Cluster) -> Iterator[list[Change]]:
    """Yield lists of changes of the recipe; of each list, the first that fits is shown."""
    optim, adapted, title = recipe.optim, recipe.lora.rank is not None, recipe.optim.spec.title
    if pins := recipe.parallel.model_dump(include=SPLIT, exclude_defaults=True):
        free: dict[str, object] = {f"parallel.{key}": vars(Parallel())[key] for key in pins}
        yield [(free, cluster, "the split of the ranks is chosen for you")]
    if recipe.recompute.mode in ("none", "selective"):
        yield [({"recompute.mode": "full"}, cluster, "forward runs twice: a third more arithmetic")]
    if recipe.offload.activations == "none" and recipe.recompute.mode in ("auto", "full"):
        waiting: dict[str, object] = {"offload.activations": "host", "recompute.mode": "full"}
        yield [(waiting, cluster, "inputs of blocks wait on the host, copied beside what blocks compute")]
    if recipe.offload.activations == "host":
        yield [({"offload.activations": "nvme"}, cluster, "inputs of blocks wait on NVMe, which may be waited for")]
    if recipe.offload.weights == "none" and (adapted or recipe.model.frozen):
        fetched: dict[str, object] = {"offload.weights": "host"}
        yield [(fetched, cluster, "frozen weights wait on the host, copied beside what blocks compute")]
    part = (recipe.offload.optimizer_fraction or 1.0) < 1
    all_blocks: dict[str, object] = {"offload.optimizer_fraction": None} if part else {}
    if all_blocks:
        yield [(all_blocks, cluster, f"{title} of all blocks on the host")]
    if recipe.offload.weights == "host":
        filed: dict[str, object] = {"offload.optimizer": "nvme"} if recipe.offload.optimizer == "host" else {}
        filed["offload.weights"] = "nvme"
        yield [(filed, cluster, "weights of blocks wait on NVMe, which is read twice in every micro-batch")]
    if (micro := recipe.train.micro_batch_size or 1) > 1:
        smaller: dict[str, object] = {"train.micro_batch_size": 1}
        if recipe.train.global_batch_size is None or recipe.train.gradient_accumulation_steps is not None:
            smaller["train.gradient_accumulation_steps"] = micro * (recipe.train.gradient_accumulation_steps or 1)
        yield [(smaller, cluster, "the same batch in smaller pieces")]
    if other := optim.spec.smaller:
        packed: dict[str, object] = {"optim.name": other} | ({"optim.moments": None} if optim.moments else {})
        yield [(packed, cluster, f"{title}'s moments in 8 bits: nearly the same updates")]
    if "moments" in optim.spec.options and optim.moments != "bf16":
        yield [({"optim.moments": "bf16"}, cluster, f"{title}'s moments in bf16: nearly the same updates")]
    if not adapted:
        here = recipe.offload.optimizer == "none"
        alike = f"{title} on the host, of blocks that need it: the same updates, at its memory's rate"
        alone: Change = {"offload.optimizer": "auto"}, cluster, alike
        moved: dict[str, object] = {"offload.optimizer": "host"} if here else all_blocks
        weights = moved | {"offload.weights": "host"}
        both: Change = weights, cluster, "weights of blocks on the host too, copied beside what blocks compute"
        more = recipe.offload.weights == "none" and (here or not recipe.model.frozen)
        files: list[Change] = []
        if optim.spec.streamed and optim.moments is None and recipe.offload.optimizer != "nvme":
            filed = all_blocks | {"offload.optimizer": "nvme"}
            read = f"{title} in files on NVMe, read and written in every step: the same updates"
            files = [(filed, cluster, read)]
            words = {"host": "weights of blocks on the host", "nvme": "weights of blocks too"}
            files += [
                (filed | {"offload.weights": where}, cluster, f"{read}; {words[where]}") for where in words if more
            ]
        yield [alone] * here + [both] * more + files
    if adapted or (recipe.model.config is None and recipe.model.init != "random"):
        yield from _of_adapters(recipe, cluster)
    if recipe.train.seq_len >= 256:
        yield [({"train.seq_len": recipe.train.seq_len // 2}, cluster, "half the context, half the tokens per step")]


def _of_adapters(recipe: Recipe, cluster: Cluster) -> Iterator[list[Change]]:
    """Adapters in the place of full weights, and smaller weights below adapters. Likewise."""
    new: dict[str, object] = {} if recipe.lora.rank is not None else {"lora.rank": 16}
    if new:
        yield [(new, cluster, "only adapters are trained")]
    if recipe.lora.frozen != "nf4":
        smaller = {kind: said for kind, said in SMALLER.items() if kind != recipe.lora.frozen}
        over = "only adapters are trained, over weights in" if new else "frozen weights in"
        yield from ([({**new, "lora.frozen": kind}, cluster, f"{over} {said}")] for kind, said in smaller.items())


def _cluster_changes(cluster: Cluster) -> Iterator[list[Change]]:
    """More devices of the same kind, then larger ones that are as fast. Likewise."""
    if cluster.kind != "cuda":
        return
    nodes = cluster.nodes
    each = cluster.devices_per_node
    full = min(NODE, cluster.device.per_node)
    sizes = [(nodes + 1, each), (2 * nodes, each), (4 * nodes, each)]
    if nodes == 1 and each < full:
        sizes = [(1, count) for count in (2 * each, 4 * each, 8 * each) if count <= full] + [(2, full), (4, full)]
    larger = [cluster.resized(n, count) for n, count in sizes]
    yield [({}, other, f"{other.world} devices instead of {cluster.world}") for other in larger]
    here = cluster.device
    better = [device for device in _no_worse(here, each) if device.memory_bytes > here.memory_bytes]
    better.sort(key=lambda device: (device.name not in rented(), device.memory_bytes))
    if better:
        yield [({}, cluster.resized(nodes, each, device), f"{device.name} instead of {here.name}") for device in better]


def _no_worse(here: Device, each: int) -> list[Device]:
    """The known devices with the same software, so many in a node, that are no smaller, nor slower, than this one."""
    return [
        device
        for device in devices().values()
        if device.per_node >= each
        and device.memory_bytes >= here.memory_bytes
        and device.bf16_flops >= here.bf16_flops
        and device.peer_bytes_per_s >= here.peer_bytes_per_s
        and device.name.startswith("MI") == here.name.startswith("MI")
    ]


def alternatives(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, chosen: Plan, others: Sequence[Plan]
) -> Iterator[Remedy]:
    """Yield what single changes of the machines and of the recipe would make of a recipe's plan: the split of a much
    faster one of ``others`` that is tight, other GPUs, more of them, faster links, half the sequence, adapters, and
    what is stored in fewer bits. Those that are not allowed, do not fit, or are slower, are left out; what is hardly
    faster takes less memory. Each is yielded as soon as it is found. Stages are tried as in :func:`remedies`."""

    def quick(plan: Plan) -> bool:
        tight = not fits(plan) and peak_share(plan) <= TIGHT
        return tight and MUCH_FASTER * seconds(plan).step_s < seconds(chosen).step_s

    def found() -> Iterator[Remedy | None]:
        if tight := list(filter(quick, others)):
            best = min(tight, key=lambda plan: seconds(plan).step_s)
            remedy = _replanned(_split_of(best, recipe, cluster), recipe, spec, None, best)
            yield remedy if remedy and quick(remedy.plan) else None
        for change in (*_other_machines(cluster), *_other_recipes(recipe, cluster)):
            yield _replanned(change, recipe, spec, None, chosen)
        if plan := in_float8(recipe, spec, cluster, chosen):
            words = "precision.products=float8" + f" precision.scales={plan.precision.scales}" * (
                plan.precision.scales != "block"
            )
            yield Remedy(words, "linear layers multiply numbers with four bits of mantissa", plan)

    for remedy in found():
        if remedy and peak_share(remedy.plan) <= 1 and _better(remedy.plan, chosen):
            yield remedy


def _better(plan: Plan, chosen: Plan) -> bool:
    """Return whether it trains on more tokens a second, or on as many in less memory."""
    faster = tokens_per_s(plan) / tokens_per_s(chosen)
    return faster > 1 + TIE or (faster >= 1 and peak_share(plan) < (1 - TIE) * peak_share(chosen))


def _split_of(plan: Plan, recipe: Recipe, cluster: Cluster) -> Change:
    """The keys with which the ranks are split as in ``plan``, whatever the recipe says of that."""
    layout, asked = plan.layout, recipe.parallel
    pinned = asked.model_dump(include={*SPLIT, "schedule", "stages_per_rank", "split"}, exclude_defaults=True)
    keys: dict[str, object] = Parallel().model_dump(include={*pinned}) | {"tp": layout.tp, "pp": layout.pp}
    keys |= {axis: vars(layout)[axis] for axis in ("cp", "ep") if vars(layout)[axis] > 1 or axis in pinned}
    if layout.dp > 1:
        keys |= {"strategy": plan.shard.strategy, "dp_replicate": layout.dp_replicate}
    price = f"leaves less than {1 - MARGIN:.0%} of the memory for what estimates miss"
    return {f"parallel.{key}": value for key, value in keys.items()}, cluster, price


def _other_machines(cluster: Cluster) -> Iterator[Change]:
    if cluster.kind != "cuda":
        return
    nodes = cluster.nodes
    each = cluster.devices_per_node
    here = cluster.device
    full = nodes > 1 or each >= min(NODE, here.per_node)
    size = (nodes + 1, each) if full else (nodes, 2 * each)
    more = replace(cluster.resized(*size), measured=cluster.measured)
    yield {}, more, f"{more.world} devices instead of {cluster.world}"
    if faster := [device for device in _no_worse(here, each) if device.bf16_flops > here.bf16_flops]:
        device = min(faster, key=lambda other: (other.name not in rented(), other.bf16_flops, other.memory_bytes))
        yield {}, cluster.resized(nodes, each, device), f"{device.name} instead of {here.name}"
    if nodes > 1:
        quick = replace(cluster, network_bytes_per_s=4 * cluster.network_bytes_per_s)
        yield {}, quick, "links between nodes four times as fast"


def _other_recipes(recipe: Recipe, cluster: Cluster) -> Iterator[Change]:
    if recipe.train.seq_len >= 256:
        yield {"train.seq_len": recipe.train.seq_len // 2}, cluster, "half the context, half the tokens a step"
    if recipe.lora.rank is None and recipe.model.config is None and recipe.model.init != "random":
        yield {"lora.rank": 16}, cluster, "only adapters are trained"
    optim = recipe.optim.spec
    if optim.smaller is not None and recipe.lora.rank is None and not recipe.optim.moments:
        yield {"optim.name": optim.smaller}, cluster, f"{optim.title}'s moments in 8 bits: nearly the same updates"
    if recipe.precision.compute == "fp32" and cluster.kind == "cuda" and cluster.device.computes_bf16:
        yield {"precision.compute": "bf16"}, cluster, "products in bf16, weights and their updates in fp32"
    if recipe.precision.weights == "fp32" and recipe.lora.rank is None and cluster.device.computes_bf16:
        yield {"precision.weights": "bf16"}, cluster, "weights in bf16: small updates are lost"


def _replanned(change: Change, recipe: Recipe, spec: ModelSpec, share: float | None, chosen: Plan) -> Remedy | None:
    """None if the change is not allowed, or if a lower bound already exceeds ``share`` of the memory."""
    keys, machines, price = change
    changed = recipe.model_dump(exclude_unset=True)
    for key, value in keys.items():
        section, _, leaf = key.partition(".")
        changed.setdefault(section, {})[leaf] = value
    other = Recipe.model_validate(changed)
    if cross_check(other, lambda key: key):
        return None
    stages = frozenset({1, chosen.layout.pp})
    found = [_planned(each, spec, machines, stages, share) for each in _near(other, chosen)]
    if not (plans := [plan for plan in found if plan]):
        return None
    words = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    best = min(plans, key=lambda plan: (not fits(plan), seconds(plan).step_s))
    return Remedy(" ".join(words) or f"--cluster {machines}", price + _faster_by(best, chosen), best)


def _faster_by(plan: Plan, chosen: Plan) -> str:
    """Say, where more is on the host and a step is shorter all the same, what makes it so."""
    moved = plan.layout.world == chosen.layout.world and len(plan.offload.words) > len(chosen.offload.words)
    if not moved or tokens_per_s(plan) <= tokens_per_s(chosen):
        return ""
    sizes, modes = (plan.batch.micro_batch_size, chosen.batch.micro_batch_size), (plan.remat.mode, chosen.remat.mode)
    found = [f"micro-batches of {sizes[0]} fit instead of {sizes[1]}"] if sizes[0] > sizes[1] else []
    less = techniques.recomputation(plan) < techniques.recomputation(chosen)
    found += [f"recompute {modes[0]} fits instead of {modes[1]}"] if less else []
    found = found or [f"the ranks can be split as {name(plan)}"] * (name(plan) != name(chosen))
    return f"; faster, since {' and '.join(found)}" if found else ""


def _near(recipe: Recipe, chosen: Plan) -> Iterator[Recipe]:
    """Yield the recipe with its number of context-parallel ranks fixed, where it leaves it open: that of ``chosen``,
    and one."""
    asked, layout = recipe.parallel, chosen.layout
    ranks = {asked.cp or 1}
    if asked.cp is None and asked.cp_kind == "auto":
        ranks |= {layout.cp}
    for cp in sorted(ranks):
        kind = chosen.cp_kind if cp == layout.cp > 1 else asked.cp_kind
        yield recipe.model_copy(update={"parallel": asked.model_copy(update={"cp": cp, "cp_kind": kind})})


def _planned(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, stages: frozenset[int], share: float | None
) -> Plan | None:
    try:
        search = Search(recipe, spec, cluster, stages=stages)
        return search.best if share is None or could_fit(search, share) else None
    except ConfigError:
        return None
