"""Expert parallelism: each rank of a group has some of the experts of every layer, for the tokens of all of them.

    what                      where it is                           what is sent
    weights of experts        cut over ep by expert; what is left   a step, as the strategy does, over expert_fsdp and
                              is cut, or replicated, as others are  dp_replicate instead of fsdp and dp_replicate
    a token's row             on the rank of each of its experts    all-to-all there and back, forward and backward

The ranks of dp_shard x cp x tp are folded anew (spec/layout.py): neighbours have different experts, and those that have
the same ones, ``expert_fsdp``, stand across. An expert's gradient is whole once these and the replicas have added
theirs, for the tokens of the ep ranks came to it. Nothing is dropped: how many rows a rank gets is known when they are
routed, so the host waits for these numbers once a layer. While rows go to their experts, and while their gradients
come back, the MLP that all tokens share is computed. On paper each rank gets as many rows as it sends, and memory
is reserved for ``expert_imbalance`` times as many. It pays where the weights of experts, and not the tokens, fill the
memory or the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, with_fields
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import divisors, least_dp_shard
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.techniques.dtypes import compute_dtype, torch_dtype
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.distributed.meshes import Meshes
    from shardwise.models.moe import Experts

SETTINGS = {"layout.ep": 1}
INSIDE = ("techniques/ep/__init__.py", "techniques/ep/dispatch.py", "techniques/product.py", "techniques/share.py")
RANKS, ARRIVED = 59, 50_000_017
"""Primes that stand, where a unit is traced, for the ranks, and for the rows that come to one: more than it sends, for
of what is sent and what comes the larger is counted."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True) -> Iterator[Plan]:
    """Yield the plan with the pinned degree; else with 1, and every number of ranks that divides the experts and the
    devices of a stage."""
    asked, ranks = recipe.parallel.ep, cluster.world // plan.layout.pp
    degrees = divisors(gcd(spec.experts.num_experts, ranks)) if spec.experts else (1,)
    imbalance = recipe.parallel.expert_imbalance or plan.expert_imbalance
    for degree in [asked] if asked and pinned else degrees:
        why = {"layout.ep": "pinned" if asked else "searched"} if degree > 1 and pinned else {}
        layout = replace(plan.layout, ep=degree)
        split = plan.sequence_parallel and spec.experts.expert_capacity is None  # which needs whole rows
        yield replace(plan, layout=layout, expert_imbalance=imbalance, sequence_parallel=split, why={**plan.why, **why})


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked = recipe.parallel
    return {
        "parallel.ep": (plan.layout.ep, asked.ep or "auto"),
        "parallel.expert_imbalance": (plan.expert_imbalance, asked.expert_imbalance or "auto"),
    }


def folded(plan: Plan) -> int:
    """The technique's one fact: over how many ranks experts can be spread, those of one replica."""
    return plan.layout.dp_shard * plan.layout.cp * plan.layout.tp


def check(spec: ModelSpec, plan: Plan, cluster: Cluster | None = None) -> list[Problem]:
    layout, ranks = plan.layout, folded(plan)
    if cut := _cut_rows(spec, plan):
        return [cut]
    if layout.ep == 1:
        return []
    if not spec.experts:
        return [Problem("PLAN027", f"{spec.name} has no experts", "parallel.ep", "`parallel.ep=1`")]
    problems = []
    could = ranks
    axes = "dp_shard x cp x tp"
    if not plan.sharded:  # ddp can arrange its replicas as the experts need them
        could, axes = ranks * layout.dp_replicate, "dp x cp x tp"
    legal = [str(n) for n in divisors(gcd(spec.experts.num_experts, could))]
    if str(layout.ep) not in legal:
        what = f"ep {layout.ep} does not divide the {spec.experts.num_experts} experts of a layer"
        if spec.experts.num_experts % layout.ep == 0:
            what = f"ep {layout.ep} does not divide the {could} ranks of {axes}, over which experts are spread"
        problems.append(Problem("PLAN027", what, "parallel.ep", f"one of {', '.join(legal)}"))
    elif ranks % layout.ep:
        what = f"ep {layout.ep} does not divide the {ranks} ranks of dp_shard x cp x tp, over which experts are spread"
        least = least_dp_shard(layout)
        fix = f"dp_replicate {layout.dp // least} and dp_shard {least}, or `parallel.ep=1`"
        problems.append(Problem("PLAN027", what, "parallel.dp_shard", fix))
    if layout.tp > 1 and not plan.sequence_parallel:
        what = "ep with tp needs sequence parallelism: without it the ranks of a tp group would send the same tokens"
        fix = "`parallel.sequence_parallel=true`, or `parallel.ep=1`"
        problems.append(Problem("PLAN027", what, "parallel.sequence_parallel", fix))
    if plan.expert_imbalance < 1:
        what = f"expert_imbalance is {plan.expert_imbalance}, but the fullest rank gets at least its even share"
        problems.append(Problem("PLAN027", what, "parallel.expert_imbalance", "1.0 or more"))
    return problems


def _cut_rows(spec: ModelSpec, plan: Plan) -> Problem | None:
    """Refuse a capacity where a rank does not have the whole rows that it is counted by."""
    what = "`model.expert_capacity` is counted by whole rows, and {} cuts them"
    if spec.experts.expert_capacity is None:
        return None
    if plan.layout.cp > 1:
        fix = "`parallel.cp=1`, or leave out `model.expert_capacity`"
        return Problem("PLAN027", what.format("context parallelism"), "parallel.cp", fix)
    if plan.layout.tp == 1:
        return None
    if plan.layout.ep > 1:
        what = what.format("sequence parallelism, which ep with tp needs,")
        return Problem("PLAN027", what, "parallel.tp", "`parallel.tp=1` or `parallel.ep=1`")
    what, fix = what.format("sequence parallelism"), "`parallel.sequence_parallel=false`, or `parallel.tp=1`"
    return Problem("PLAN027", what, "parallel.sequence_parallel", fix) if plan.sequence_parallel else None


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Ranks that have the same experts, whose gradients are summed. That experts get no rows, models/odd_sizes.py
    says."""
    same = folded(plan) // plan.layout.ep
    return {"ranks with the same experts": same > 1, "ranks that all have other experts": same == 1}


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Give a block with experts its symbols: ``x`` ranks, of which each has ``E`` experts and gets ``R`` rows, as many
    as it sends."""
    ranks, model = plan.layout.ep, made.variant.model
    if not model.experts:
        return made
    atoms, own = dict(made.variant.atoms), spec.experts.num_experts // ranks
    if own == 1:
        atoms.pop("E")
    acting, spread = made.variant.plan, made.variant.spread
    tokens = acting.batch.micro_batch_size * acting.row_tokens
    imbalance = ARRIVED / (-(-tokens // spread) * model.experts.experts_per_token)
    made = made.told(
        model=with_fields(model, num_experts=atoms.get("E", 1) * RANKS),
        atoms=(("R", ARRIVED), *atoms.items(), ("x", RANKS)),
    )
    tokens = -(-plan.batch.micro_batch_size * plan.row_tokens // (plan.layout.tp if spread > 1 else 1))
    layout = replace(acting.layout, dp_shard=RANKS, ep=RANKS)
    return made.bound(E=own, x=ranks, R=tokens * spec.experts.experts_per_token).applied(
        layout=layout, expert_imbalance=imbalance
    )


def steps_of(operation: str) -> Callable[..., Any] | None:
    """Return what an operation of this technique's own does, operation by operation."""
    if operation == "shardwise::start_rows":
        from shardwise.techniques.ep.dispatch import started

        return started
    return None


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Give each rank its experts, and have rows sent to where theirs are."""
    from shardwise.models.moe import Experts, Stacked
    from shardwise.techniques.product import product_of

    compute = torch_dtype(plan.precision.compute)
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, Experts):
                module.inner = _inner(module, plan, meshes)  # type: ignore[method-assign]
            elif isinstance(module, Stacked):
                _cut(module, meshes)
                product_of(module, torch_dtype(compute_dtype(plan.precision, name)), compute)
    return parts


def _cut(module: nn.Module, meshes: Meshes) -> None:
    """Replace every parameter by a DTensor, of which this rank holds the rows of its experts."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    from shardwise.distributed.slices import local

    mesh = meshes.expert_mesh("ep")
    ranks = meshes.size("ep")
    index = meshes.index("ep")
    for word, parameter in list(module.named_parameters(recurse=False)):
        rows = parameter.shape[0] // ranks
        piece = local(parameter.detach()).narrow(0, index * rows, rows).contiguous()
        whole = DTensor.from_local(
            piece, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module.register_parameter(word, nn.Parameter(whole, parameter.requires_grad))


def _inner(module: Experts, plan: Plan, meshes: Meshes) -> Callable[..., Tensor]:
    from torch import distributed

    from shardwise.techniques.ep.dispatch import Dispatch, computed_elsewhere

    group = meshes.groups["ep"]
    nothing_comes = distributed.get_backend(group) == "fake"
    how = Dispatch(str(group.group_name), plan.layout.ep, plan.expert_imbalance if nothing_comes else None)
    return partial(computed_elsewhere, module.products, how)
