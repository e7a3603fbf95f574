"""The data-parallel strategy: what lives on a slice of the data-parallel ranks.

    strategy   on a slice                   sends a step, with m micro-batches and P bytes of weights
    ddp        nothing                      all-reduce of the gradients, once
    zero1      moments, masters             gathers P once; reduce-scatters once
    zero2      + gradients                  gathers P once; reduce-scatters m times
    zero3      + weights                    gathers P 2m times (the ends m times); reduce-scatters m times, or once

(fsdp is another name of zero3.) With dp_replicate > 1 a sharded strategy is hybrid (hsdp): slices over dp_shard ranks,
and one all-reduce of the slices over dp_replicate a step. Built on FSDP2's ``fully_shard``, a unit of which is the
embedding, a block, or the last norm with the output layer; ddp on replicas.py. Gradients are sums, never means: the
loss is already divided by the number of supervised tokens of the whole step. FSDP2 takes the dtypes as arguments, so
this file reads those of precision.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.distributed.torch_private import begin_sharding, end_backward, gather_as
from shardwise.errors import Problem
from shardwise.models.blocks import blocks, ends
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_expert
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import divisors, least_dp_shard
from shardwise.spec.plan import BYTES, Plan, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques.coded_gather import layers_in_codes
from shardwise.techniques.dtypes import compute_dtype, torch_dtype
from shardwise.techniques.shard.degrees import grouped, layouts
from shardwise.techniques.shard.prefetch import gather_ahead
from shardwise.techniques.shard.replicas import Replicas, buckets
from shardwise.techniques.states import division, is_cut, one_of_each, piece, summed_over

if TYPE_CHECKING:
    from torch import nn

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"layout.dp_replicate": 1, "layout.dp_shard": 1, "layout.cp": 1, "layout.ep": 1}
_REPLICAS: WeakKeyDictionary[nn.Module, list[Replicas]] = WeakKeyDictionary()


def units(part: nn.Module) -> list[list[nn.Module]]:
    """The technique's one fact: the units, each gathered and reduced as one: the modules before the blocks, each block,
    the modules after them, and last the root with everything else. Where the two ends cannot be separated, both belong
    to the root."""
    embedding, head = ends(part)
    return [unit for unit in (embedding, *([block] for block in blocks(part)), head, [part]) if unit]


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True) -> Iterator[Plan]:
    """Every strategy and split of the devices that the recipe allows, for groups of ``layout.tp`` devices in each of
    ``layout.pp`` stages; with ``pinned`` false all of them, whatever the recipe says. Raises ConfigError (PLAN001) if
    the degrees do not multiply to the number of devices."""
    asked, each = recipe.parallel, cluster.devices_per_node
    own = grouped(cluster, plan)
    for strategy, degrees in layouts(recipe, own, plan.layout.cp, pinned=pinned):
        why = dict(plan.why)
        again = asked.reshard_after_forward
        ahead = asked.backward_prefetch
        each_batch = asked.sync_each_batch is not False
        if pinned and (asked.strategy != "auto" or cluster.world == 1):
            why["shard.strategy"] = "pinned" if asked.strategy != "auto" else "derived: one process"
        if again is not None and strategy != "zero3":
            why["shard.reshard_after_forward"] = f"not used: {strategy} keeps its weights unsharded"
        if ahead is not None and strategy != "zero3":
            why["shard.backward_prefetch"] = f"not used: {strategy} gathers nothing for backward"
        if asked.sync_each_batch is not None and strategy != "zero3":
            why["shard.sync_each_batch"] = "not used: but for zero3, strategies differ in it"
        layout = dataclasses.replace(
            plan.layout, dp_replicate=degrees.dp_replicate, dp_shard=degrees.dp_shard, ranks_per_node=each
        )
        if strategy == "ddp" and degrees.dp_replicate % (least := least_dp_shard(layout)) == 0:
            layout = dataclasses.replace(layout, dp_replicate=degrees.dp_replicate // least, dp_shard=least)
        shard = Shard(strategy)
        if strategy == "zero3":
            shard = Shard(strategy, True if again is None else again, 1 if ahead is None else ahead, each_batch)
        yield dataclasses.replace(plan, layout=layout, shard=shard, why=why)


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked = recipe.parallel
    layout = plan.layout
    shard = plan.shard
    strategy = "auto" if layout.size("loss") == 1 else asked.strategy
    zero3 = shard.strategy == "zero3"
    again, ahead = (asked.reshard_after_forward, asked.backward_prefetch) if zero3 else (None, None)
    each_batch = asked.sync_each_batch if zero3 else None
    return {
        "parallel.strategy": (shard.strategy, "zero3" if strategy in ("fsdp", "hsdp") else strategy),
        "parallel.dp_replicate": (layout.dp_replicate, asked.dp_replicate or "auto"),
        "parallel.dp_shard": (layout.dp_shard, asked.dp_shard or "auto"),
        "parallel.reshard_after_forward": (shard.reshard_after_forward, "auto" if again is None else again),
        "parallel.backward_prefetch": (shard.backward_prefetch, "auto" if ahead is None else ahead),
        "parallel.sync_each_batch": (shard.sync_each_batch, "auto" if each_batch is None else each_batch),
    }


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    layout, problems = plan.layout, []
    least = least_dp_shard(layout)
    if plan.shard.strategy == "ddp" and layout.dp_shard != least and layout.dp_shard > 1:
        what = f"ddp shards nothing, but dp_shard is {layout.dp_shard}"
        fix = f"dp_replicate {layout.dp // least} and dp_shard {least}, or strategy zero1, zero2 or zero3"
        problems.append(Problem("PLAN014", what, "parallel.dp_shard", fix))
    if plan.shard.strategy != "ddp" and layout.fsdp == 1 and layout.dp > 1:
        what = f"{plan.shard.strategy} shards over dp_shard ranks, but dp_shard is 1"
        problems.append(Problem("PLAN014", what, "parallel.dp_shard", f"dp_shard {layout.dp}, or strategy ddp"))
    k = plan.shard.reshard_after_forward
    if not isinstance(k, bool) and (plan.shard.strategy != "zero3" or k < 2 or layout.fsdp % k or k == layout.fsdp):
        legal = [str(d) for d in divisors(layout.fsdp)[1:-1]]
        what = f"reshard_after_forward {k} with {plan.shard.strategy} over {layout.fsdp} ranks"
        fix = f"strategy zero3 with {', '.join(legal) or 'true or false'}"
        problems.append(Problem("PLAN015", what, "parallel.reshard_after_forward", fix))
    if not plan.shard.sync_each_batch and plan.shard.strategy != "zero3":
        what = f"sync_each_batch false with {plan.shard.strategy}"
        problems.append(
            Problem("PLAN015", what, "parallel.sync_each_batch", "strategy zero3, or zero1 instead of zero2")
        )
    ahead, where = plan.shard.backward_prefetch, plan.offload.weights
    if ahead != 1 and (plan.shard.strategy != "zero3" or k is False):
        what = f"backward_prefetch {ahead}, but nothing is gathered for backward"
        fix = "1, or strategy zero3 with reshard_after_forward true"
        problems.append(Problem("PLAN015", what, "parallel.backward_prefetch", fix))
    elif ahead != 1 and where != "none":
        what = f"backward_prefetch {ahead}, but weights come from the {where} one block ahead"
        problems.append(Problem("PLAN015", what, "parallel.backward_prefetch", "1, or `offload.weights=none`"))
    return problems


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Cuts weights along dim 0. When they are gathered and their gradients summed, paper.py tells."""
    spread = plan.layout.ep > 1
    return sheet.rewritten(lambda unit: _cut_over_ranks(unit, spread=spread)) if plan.sharded else sheet


@lru_cache(maxsize=8 * KEPT_UNITS)
def _cut_over_ranks(unit: Unit, *, spread: bool) -> Unit:
    """``spread``: ranks have different experts."""
    groups = ("expert_fsdp" if spread and is_expert(weight.name) else "fsdp" for weight in unit.weights)
    pairs = zip(unit.weights, groups, strict=True)
    cut = (weight.cut((group, 0)) if is_cut(weight.name, len(weight.shape)) else weight for weight, group in pairs)
    return dataclasses.replace(unit, weights=tuple(cut))


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return what does not divide into slices, and how gradients of replicas fill buckets."""
    layout, of = plan.layout, (division(spec, plan), plan)
    last = RankKind(layout, layout.rank({"dp_shard": layout.dp_shard - 1, "cp": layout.cp - 1}))
    every = one_of_each({**parameter_shapes(spec), **trained} if plan.sharded else {})
    kinds = RankKind(layout), last
    ends = [[prod(piece(name, shape, of, kind)) for kind in kinds] for name, shape in every.items()]
    bits, limit = BYTES[plan.precision.weights], plan.shard.bucket_bytes
    alone = plan.sharded or layout.size("loss") == 1
    sizes = {} if alone else {name: prod(piece(name, shape, of, last)) * bits for name, shape in trained.items()}
    each = [buckets([(name, sizes[name]) for name in held], limit) for held in _together(spec, plan, sizes)]
    filled = [bucket for own in each for bucket in own]
    of_blocks = [{name.split(".")[1] for name in bucket if name.startswith("layers.")} for bucket in filled]
    return {
        "rows that shards do not divide": any(mine < first for first, mine in ends),
        "a shard without rows of a weight": any(mine == 0 for _, mine in ends),
        "more than one bucket": any(len(own) > 1 for own in each),
        "several gradients in a bucket": any(len(bucket) > 1 for bucket in filled),
        "a gradient as large as a bucket": any(size >= limit for size in sizes.values()),
        "a bucket of several blocks": any(len(blocks) > 1 for blocks in of_blocks),
        "a block in several buckets": sum(map(len, of_blocks)) > len(set[str]().union(*of_blocks)),
    }


def _together(spec: ModelSpec, plan: Plan, names: Iterable[str]) -> Iterable[list[str]]:
    """The names of each stage's parameters that are summed over the same ranks, in their order."""
    stages, found = plan.stages(spec.num_hidden_layers), dict[tuple[int, str], list[str]]()
    at = {f"layers.{block}": number for number, own in enumerate(stages) for block in own}
    for name in names:
        stage = at.get(".".join(name.split(".")[:2]), 0 if name.startswith("embed.") else len(stages) - 1)
        found.setdefault((stage, summed_over(name, plan)), []).append(name)
    return found.values()


def apply(
    parts: list[nn.Module],
    plan: Plan,
    meshes: Meshes,
    whole: Set[int] = frozenset(),
    apart: Sequence[nn.Module] = (),
) -> list[nn.Module]:
    """``whole``: the ids of blocks that are not sharded as units of their own but belong to the root; ``apart``:
    further modules that are units. What cannot be cut is replicated under every strategy."""
    summed = [group for group in ("loss", *["expert_loss"] * (plan.layout.ep > 1)) if plan.layout.size(group) > 1]
    wire = torch_dtype(plan.precision.reduce)
    known: set[nn.Parameter] = set()
    for part in parts:
        own = {name: parameter for name, parameter in part.named_parameters() if parameter not in known}
        known.update(own.values())
        if plan.sharded:
            if len(own) < len([*part.parameters()]):
                raise ValueError("FSDP2 cannot shard a weight that two parts have: leave it untied, or use ddp")
            _fully_shard(part, plan, meshes, whole, apart)
            own = {name: parameter for name, parameter in own.items() if not is_cut(name, parameter.ndim)}
        _REPLICAS[part] = [
            Replicas(named, meshes.groups[group], plan.shard.bucket_bytes, wire)
            for group in summed
            if (named := [each for each in own.items() if summed_over(each[0], plan) == group])
        ]
    return parts


def _fully_shard(part: nn.Module, plan: Plan, meshes: Meshes, whole: Set[int], apart: Sequence[nn.Module]) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from shardwise.models.moe import Experts

    dp_mesh, codes = meshes.mesh("dp_replicate", "fsdp"), layers_in_codes(part, plan)
    reshard = plan.shard.reshard_after_forward if plan.shard.strategy == "zero3" else False
    uncut = {parameter for name, parameter in part.named_parameters() if not is_cut(name, parameter.ndim)}
    reduce = torch_dtype(plan.precision.reduce)
    outside = torch_dtype(plan.precision.compute)
    # FSDP2 must not cast a block's inputs: rotation tables may be in fp32, under every strategy.
    policy = MixedPrecisionPolicy(outside, reduce, cast_forward_inputs=False)
    embedding, head = ends(part)
    spread = plan.layout.ep > 1
    expert_mesh = meshes.expert_mesh("dp_replicate", "expert_fsdp") if spread else dp_mesh
    once = [*embedding, *(block for block in _without_backward(part) if id(block) not in whole)]  # not for backward
    for name, module in part.named_modules():
        dtype = compute_dtype(plan.precision, name)
        if dtype != plan.precision.compute and next(module.parameters(recurse=False), None) is not None:
            own = MixedPrecisionPolicy(torch_dtype(dtype), reduce, output_dtype=outside)
            # After the blocks it is kept after forward, as the head is.
            inner = reshard if name.startswith("layers.") else bool(reshard) and module in once
            own_mesh, inner = (expert_mesh, bool(inner)) if spread and is_expert(f"{name}.") else (dp_mesh, inner)
            # What a product with a bias returns is a view, of which torch warns; nothing here writes to it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            fully_shard(module, mesh=own_mesh, mp_policy=own, reshard_after_forward=inner, ignored_params=uncut)
    for module in [each for each in part.modules() if isinstance(each, Experts)] if spread else ():
        fully_shard(module, mesh=expert_mesh, mp_policy=policy, reshard_after_forward=bool(reshard))
    places = {id(module): index for index, module in enumerate(part.modules())}
    for unit in sorted([*units(part), *([one] for one in apart)], key=lambda unit: -places[id(unit[0])]):  # inner first
        members = [one for one in unit if one is part or not (id(one) in whole or isinstance(one, FSDPModule))]
        after: bool | int | None = reshard
        if unit == [part]:
            after = None if reshard else False  # None lets FSDP2 keep the root, whose weights backward needs first
        elif unit == head or unit[0] in (*once, *apart):
            after = bool(reshard) and unit[0] in once
        if members:
            fully_shard(members, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=after, ignored_params=uncut)
    for module in [inner for one in once for inner in one.modules() if isinstance(inner, FSDPModule)]:
        # Otherwise the backward of the next unit would prefetch it, or the experts in it, for nothing.
        module.set_unshard_in_backward(False)
    for module in embedding:
        # Only itself; by default it would prefetch what ran before it: the head of the previous micro-batch.
        module.set_modules_to_backward_prefetch([module])  # type: ignore[operator]
    # In a pipeline micro-batches take turns: what ran before a unit may be of another one. With dtypes of their own,
    # what ran before it is a part of it.
    if plan.layout.pp > 1 or spread or plan.shard.backward_prefetch != 1 or plan.precision.modules:
        gather_ahead(part, plan)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # gloo can only sum, and elsewhere FSDP2 would take a mean although the loss is divided already.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    gather_as(part, codes)


def _without_backward(part: nn.Module) -> list[nn.Module]:
    """The leading blocks of which every weight, and every weight before them, is frozen."""
    from shardwise.models.layers import Part

    embedding = list(takewhile(lambda named: not named[0].startswith("layers."), part.named_parameters()))
    reached = part.input_trained if isinstance(part, Part) else not embedding
    if reached or any(parameter.requires_grad for _, parameter in embedding):
        return []
    return list(takewhile(lambda block: not any(p.requires_grad for p in block.parameters()), blocks(part)))


def _activate(part: nn.Module, *, last: bool) -> None:
    """Set whether gradients of replicas are summed as they arrive."""
    for replicas in _REPLICAS.get(part, ()):
        replicas.active = last


def before_waiting(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Gathers what stays whole for the step, while no stage before has sent anything yet."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts if plan.shard.strategy in ("zero1", "zero2") else ():
        if isinstance(part, FSDPModule):
            begin_sharding(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


def before_micro_batch(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Replicas send after the last micro-batch only; what FSDP2 sends and frees before it, the strategy says."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        _activate(part, last=last)
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(last)
            part.set_requires_all_reduce(last)
            if plan.shard.accumulates:
                part.set_requires_gradient_sync(last)
            if plan.shard.strategy != "zero3":
                part.set_reshard_after_backward(last)


def before_input_gradients(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Have FSDP2 reduce nothing yet in the first half of a backward."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        _activate(part, last=last)
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(False)
            part.set_requires_gradient_sync(False)
            part.set_reshard_after_backward(plan.shard.strategy == "zero3")


def after_weight_gradients(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """FSDP2 reduces at the end of a backward; here gradients are complete only now. Replicas of a hybrid sum what was
    scattered each time: FSDP2 can add up only the same parameters, and which have a gradient by now differs."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        _activate(part, last=last)  # and not at the first half of others
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(last or not plan.shard.accumulates)
            part.set_reshard_after_backward(last or plan.shard.strategy == "zero3")
            end_backward(part)


def after_backward(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Waits for the sums of replicas. FSDP2 has waited for its own when backward returns."""
    for part in parts:
        for replicas in _REPLICAS.get(part, ()):
            replicas.wait()


def after_inference(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Frees gathered weights. Until then FSDP2 shows whole parameters instead of shards."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def reduce_unused(part: nn.Module) -> bool:
    """Have every trained parameter reduced in every step, as zeros where a rank has no gradient; returns whether this
    torch can. Otherwise FSDP2 sends only the gradients that exist, and if ranks use different parameters, gradients of
    different parameters would be added."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(part, FSDPModule):
        return True
    supported = "set_reduce_scatter_unused_params" in dir(FSDPModule)
    if supported:
        part.set_reduce_scatter_unused_params(True)
    return supported
