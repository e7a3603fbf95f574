"""Mixtures of experts: a router, which chooses some experts for each token, the experts, and perhaps an MLP that all
tokens share.

Two seams. ``MoE.route`` says which experts each token goes to; ``Experts.inner`` computes rows that are sorted by their
expert, and is what expert parallelism replaces: while rows are on their way it has the shared MLP computed. Two more
for what is counted (models/router_losses.py): ``MoE.rows_of`` says in which rows a pass's tokens are, ``MoE.over_rows``
sums over the ranks that have tokens of the same rows. With a capacity, experts drop in training what is beyond it
(models/capacity.py). Weights of all experts of a layer are one matrix, one expert's rows after another's, so that
whatever cuts, adapts or stores a matrix by rows serves here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from shardwise.models.capacity import within_capacity
from shardwise.models.config import ModelSpec
from shardwise.models.grouped import grouped, owners, sorting
from shardwise.models.kinds import SigmoidRouting
from shardwise.models.layers import GATES, MLP, accumulation_dtype
from shardwise.models.room import expert_room
from shardwise.models.router_losses import Routing, RowPlaces, Tally, balanced, count_once


class _RouterProduct(torch.autograd.Function):
    """x [n,d], weight [E,d] -> logits [n,E] in fp32 (fp64 for fp64). Saves x as it is, where the weight is trained: a
    copy in fp32 would be as large as the activations of two layers."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):  # which would have it in bf16
            return torch.mm(x.to(wide), weight.to(wide).t())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, weight = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide, wanted = grad.dtype, ctx.needs_input_grad
        grad_x = torch.mm(grad, weight.to(wide)).to(ctx.dtype) if wanted[0] else None
        grad_weight = torch.mm(grad.t(), x.to(wide)).to(weight.dtype) if wanted[1] else None
        return grad_x, grad_weight


class Router(nn.Module):
    """The logits of each expert for each token, computed in fp32 whatever the dtype of the rest. ``correction`` [E], of
    one that chooses by sigmoids: added to the scores where experts are chosen, and trained by no gradient."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.experts.num_experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.experts.num_experts)) if spec.experts.router_bias else None
        if spec.experts.sigmoid is not None:
            self.correction = nn.Parameter(torch.zeros(spec.experts.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [n,d] -> [n,E]."""
        return logits(x, self.weight, self.bias)


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits that a router computes with these weights."""
    found: Tensor = _RouterProduct.apply(x, weight)
    return found if bias is None else found + bias.to(found.dtype)


class Stacked(nn.Module):
    """A matrix [n,k] for each of E experts, as one of [E*n,k], and perhaps a bias [E*n]; ``like`` says their dtype and
    device."""

    def __init__(self, experts: int, rows: int, columns: int, *, bias: bool = False, **like: Any) -> None:
        super().__init__()
        self.experts = experts
        self.rows = rows
        self.columns = columns
        self.weight = nn.Parameter(torch.empty(experts * rows, columns, **like))
        self.bias = nn.Parameter(torch.empty(experts * rows, **like)) if bias else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [R,k], sorted by expert, of which each has so many of its rows -> [R,n]."""
        return stacked(x, counts, self.weight, self.bias, self.rows)


def stacked(x: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return what :class:`Stacked` computes with these weights; under autocast, as a linear layer, in its dtype."""
    x = taken(x)
    out = grouped(x, weight.to(x.dtype).unflatten(0, (-1, rows)), counts)
    return out if bias is None else out + of_owners(bias, counts, out)


def taken(x: Tensor) -> Tensor:
    """The input in the dtype in which a linear layer takes it: under autocast in its own."""
    kind = x.device.type
    wide = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if wide else x


def of_owners(bias: Tensor, counts: Tensor, out: Tensor) -> Tensor:
    """A bias [E*n] for each of the rows of ``out`` [R,n]: that of its expert."""
    return bias.to(out.dtype).unflatten(0, (-1, out.shape[1])).index_select(0, owners(counts, out.shape[0]))


@torch.library.custom_op("shardwise::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """rows [R,d], ``places`` [n,k] of which each of n has k -> [n,d]: the sums of these, weighted, in the order of the
    k. No copy of the rows is made in the order of the places, which would take longer than the sums."""
    return embedding_bag(places, rows, mode="sum", per_sample_weights=weights)


@sum_rows.register_fake
def _(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


def unsorted(rows: Tensor, order: Tensor | None, inverse: Tensor) -> Tensor:
    """Rows that were sorted, in the places where they were; zeros where those were that ``order`` lacks. None: all."""
    if order is None or order.shape == inverse.shape:
        return rows.index_select(0, inverse)
    return rows.new_zeros(inverse.shape[0], *rows.shape[1:]).index_copy_(0, order, rows)


def added_up(rows: Tensor, order: Tensor | None, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each token the weighted sum of the rows, which were sorted, of its ``places`` [n,k]."""
    if order is not None and order.shape[0] < places.numel():
        rows = unsorted(rows, order, places.flatten())
        places = torch.arange(rows.shape[0], device=rows.device).view_as(places)
    return sum_rows(rows, places, weights)


class _Sorted(torch.autograd.Function):
    """x [n,d] -> [R,d]: the row of each of ``order``, of which those of one token are copies. Gradients of these are
    added up in the order of the k, so that the sum does not depend on which thread comes first."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x.index_select(0, order // k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, order, inverse, ctx.k = inputs
        ctx.save_for_backward(inverse, None if order.shape == inverse.shape else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, order = ctx.saved_tensors
        return added_up(grad, order, inverse.unflatten(0, (-1, ctx.k))), None, None, None


class _Combined(torch.autograd.Function):
    """rows [R,d], sorted by expert, and weights [n,k] -> [n,d]: each token's rows, weighted and added up."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return added_up(rows, order, inverse.view_as(weights), weights.to(rows.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        of_token, grad_weights = grad.index_select(0, order // weights.shape[1]), None
        if ctx.needs_input_grad[1]:
            products = unsorted(torch.linalg.vecdot(rows, of_token), order, inverse)
            grad_weights = products.to(weights.dtype).view_as(weights)
        own = weights.to(rows.dtype).flatten().index_select(0, order).unsqueeze(-1)
        return of_token.mul_(own), grad_weights, None, None


@torch.library.custom_op("shardwise::choose", mutates_args=())
def choose(scores: Tensor, correction: Tensor | None, groups: int, kept: int, k: int, of_group: int = 2) -> Tensor:
    """The k experts [n,k] with the largest sums of scores [n,E] and correction [E], of the ``kept`` groups whose two
    best (``of_group``) are the largest together. One operation: nothing in it is saved, and it has no gradient."""
    sums = scores if correction is None else scores + correction.to(scores.dtype)
    if kept < groups:
        each = sums.unflatten(-1, (groups, -1))
        best = each.topk(of_group, -1).values.sum(-1).topk(kept, -1).indices
        outside = torch.ones_like(each[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        sums = each.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    return sums.topk(k, -1).indices


@choose.register_fake
def _(scores: Tensor, correction: Tensor | None, groups: int, kept: int, k: int, of_group: int = 2) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int64)


LEAST_SUM = 1e-20
"""Added to the sum of a token's sigmoids, which may all be zero."""


@dataclass
class Lazy:
    """A tensor that is computed when it is first asked for, once."""

    compute: Callable[[], Tensor]
    made: Tensor | None = None

    def __call__(self) -> Tensor:
        self.made = self.compute() if self.made is None else self.made
        return self.made


class Experts(nn.Module):
    """The MLPs of all experts: down(act(gate(x)) * up(x)) of the rows of each."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        own = spec.experts
        d = spec.hidden_size
        f = own.expert_size
        count = own.num_experts
        bias = own.expert_bias
        self.expert_gate = Stacked(count, f, d, bias=bias)
        self.expert_up = Stacked(count, f, d, bias=bias)
        self.expert_down = Stacked(count, d, f, bias=bias)
        self.gated = GATES[spec.activation]

    def forward(self, x: Tensor, routing: Routing, beside: Lazy | None = None) -> Tensor:
        """x [n,d] -> [n,d]: for each token the sum of what its experts make of it, weighted. ``beside``: what else is
        needed of the same x, and may be computed meanwhile."""
        k = routing.ids.shape[1]
        order, inverse = sorting(routing.ids.flatten())
        if routing.kept is not None:  # what is dropped comes last
            order = order[: routing.kept]
        rows = self.inner(_Sorted.apply(x, order, inverse, k), routing.counts, beside)
        return _Combined.apply(rows, routing.weights, order, inverse)

    def inner(self, rows: Tensor, counts: Tensor, beside: Lazy | None) -> Tensor:
        """The seam that expert parallelism replaces. Rows [R,d] sorted by expert, ``counts`` [E] for each -> [R,d]."""
        return self.products(rows, counts)

    def products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts that this rank has make of their rows."""
        return self.expert_down(self.gated(self.expert_gate(rows, counts), self.expert_up(rows, counts)), counts)


class MoE(nn.Module):
    """A mixture of experts in an MLP's place. ``tally``: during a training step, what is counted there."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.top, self.normalised = spec.experts.experts_per_token, spec.experts.normalised_top_k
        self.sigmoid, self.groups = spec.experts.sigmoid, spec.experts.softmax_groups
        self.coefficients = spec.experts.router_losses
        self.room = None if spec.experts.expert_capacity is None else partial(expert_room, spec)
        self.tally: Tally | None = None
        self.router, self.experts = Router(spec), Experts(spec)
        self.shared = MLP(spec, spec.experts.shared_expert_size) if spec.experts.shared_expert_size else None
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if spec.experts.shared_expert_gate else None

    def forward(self, x: Tensor, filled: Tensor | None = None) -> Tensor:
        """x [..,d] -> [..,d]. ``filled`` [b]: of whole rows how many tokens are more than padding at the end."""
        flat = x.flatten(0, -2)
        routing = self.route(flat)
        if self.tally is not None:
            routing = balanced(routing, self.rows_of(x), self.tally, self.coefficients, self.over_rows)
            if self.room is not None:
                routing = self.kept(routing, self.rows_of(x)._replace(filled=filled), self.room, self.tally)
        common = None if self.shared is None else Lazy(partial(self.common, self.shared, x))
        out = self.experts(flat, routing, common).view_as(x)
        return out if common is None else out + common()

    def common(self, shared: MLP, x: Tensor) -> Tensor:
        """Return what the MLP that all tokens share makes of x [..,d], times its gate where it has one."""
        out: Tensor = shared(x)
        return out if self.shared_gate is None else out * torch.sigmoid(self.shared_gate(x))

    def route(self, x: Tensor) -> Routing:
        """The seam that decides which experts compute a token. x [n,d], the weights in fp32."""
        found = self.router(x)
        if self.sigmoid is not None:
            return self.by_sigmoids(found, self.sigmoid)
        scores, how = found.softmax(-1), self.groups
        if how is None:
            weights, ids = scores.topk(self.top, -1)
        else:
            ids = choose(scores.detach(), None, how.groups, how.kept_groups, self.top, 1)
            weights = scores.gather(-1, ids)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if how is not None and how.scale != 1.0:
            weights = weights * how.scale
        return Routing(ids, weights, counted(ids, scores.shape[-1]), found, scores)

    def by_sigmoids(self, found: Tensor, how: SigmoidRouting) -> Routing:
        """Return the routing where experts are chosen by the sigmoids of the logits ``found`` [n,E]. In the loss
        that balances experts, the scores of a token add up to one, as DeepSeek-V3 has it."""
        scores = found.sigmoid()
        ids = choose(scores.detach(), self.router.correction, how.groups, how.kept_groups, self.top)
        weights = scores.gather(-1, ids)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        if how.scale != 1.0:
            weights = weights * how.scale
        if self.coefficients[0]:
            scores = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM)
        return Routing(ids, weights, counted(ids, scores.shape[-1]), found, scores)

    def kept(self, routing: Routing, places: RowPlaces, room: Callable[[int], int], tally: Tally) -> Routing:
        """The routing without what finds no room; counts that. The host waits for how much is left."""
        experts, most = routing.counts.shape[0], room(places.length)
        ids, dropped = within_capacity(routing.ids, routing.weights.detach(), places, experts, most)
        count_once(tally.dropped, dropped)
        counts = counted(ids, experts + 1)[:experts]
        return routing._replace(ids=ids, counts=counts, kept=int(counts.sum()))

    def rows_of(self, x: Tensor) -> RowPlaces:
        """The rows of the tokens of x [b,s,d]."""
        return RowPlaces(x.shape[0], x.shape[1])

    def over_rows(self, counts: Tensor) -> Tensor:
        """The sum of ``counts`` [rows,E] over the ranks that have tokens of the same rows."""
        return counts


def counted(ids: Tensor, experts: int) -> Tensor:
    """Return how many of the ids [n,k] are each expert's, int64 [E]."""
    chosen = ids.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, chosen, torch.ones_like(chosen))


def counting(block: nn.Module) -> list[Tensor]:
    """Have a block's layers with experts count as in a training step; returns what they read and write for it."""
    found: list[Tensor] = []
    for module in block.modules():
        if isinstance(module, MoE):
            experts = module.router.weight.shape[0]
            module.tally = Tally(*(torch.zeros(size, dtype=torch.float64) for size in (experts, 2, 2)))
            found += [each for each in vars(module.tally).values() if each is not None]
    return found
