"""Experts on paper: the shapes of a mixture's parameters, and the numbers that none can have. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.models.kinds import ExpertSpec
from shardwise.models.mixer import Matrices
from shardwise.spec.units import counted


def mlp_matrices(name: str, d: int, f: int, *, bias: bool) -> Matrices:
    """Return the matrices of an MLP with this name, ``f`` wide, beside a residual stream that is ``d`` wide."""
    return {f"{name}.gate": ((f, d), bias), f"{name}.up": ((f, d), bias), f"{name}.down": ((d, f), bias)}


def expert_matrices(own: ExpertSpec, d: int, *, bias: bool) -> Matrices:
    """Return the matrices of a mixture of experts: each matrix of all experts is one, an expert's rows after another's.
    ``bias``: of the MLP that all tokens share."""
    rows = own.num_experts * own.expert_size
    found: Matrices = {"mlp.router": ((own.num_experts, d), own.router_bias)}
    found |= {f"mlp.experts.expert_{name}": ((rows, d), own.expert_bias) for name in ("gate", "up")}
    found |= {"mlp.experts.expert_down": ((own.num_experts * d, own.expert_size), own.expert_bias)}
    found |= mlp_matrices("mlp.shared", d, own.shared_expert_size, bias=bias) if own.shared_expert_size else {}
    return found | ({"mlp.shared_gate": ((1, d), False)} if own.shared_expert_gate else {})


def expert_problems(own: ExpertSpec) -> Iterator[tuple[str, str]]:
    """Return what is wrong with the numbers of a mixture, and what would be right."""
    if not own:
        return
    if not 1 <= own.experts_per_token <= own.num_experts:
        what = f"{own.experts_per_token} experts for each token, of {own.num_experts}"
        yield what, f"num_experts_per_tok: 1 to {own.num_experts}"
    if own.expert_size < 1:
        yield f"experts are {own.expert_size} wide", "moe_intermediate_size: 1 or more"
    if (how := own.sigmoid or own.softmax_groups) is None:
        return
    each, least = own.num_experts // max(1, how.groups), 1 if own.sigmoid is None else 2
    if how.groups < 1 or own.num_experts % how.groups or (how.groups > 1 and each < least):
        fix = f"n_group: a divisor of {own.num_experts}, so that each has {counted(least, 'expert')} or more"
        yield f"{how.groups} groups of {own.num_experts} experts", fix
    elif not 1 <= how.kept_groups <= how.groups:
        yield f"{how.kept_groups} groups are kept of {how.groups}", f"topk_group: 1 to {how.groups}"
    elif own.experts_per_token > how.kept_groups * each:
        what = f"{own.experts_per_token} experts for each token, of {how.kept_groups} groups with {each} experts"
        yield what, f"num_experts_per_tok: 1 to {how.kept_groups * each}"
