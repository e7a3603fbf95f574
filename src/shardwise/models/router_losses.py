"""The losses of routers, and how many tokens go to each expert.

Of a row of T tokens and a layer with E experts, f_e is the number of the row's tokens that go to expert e over T (so
that f sums to the experts of a token), and P_e the mean of their scores. The auxiliary loss (Switch Transformers, arXiv
2101.03961) is E times the sum of f_e P_e: k where tokens are spread evenly, E where all go to the same. The z-loss
(ST-MoE, arXiv 2202.08906) is the mean of the square of the log-sum-exp of a token's logits. Of a step each is the mean
over its rows and the layers with experts: the same number in any layout (docs/decisions/0019).

Neither is added to a method's loss. The routing weights pass through a function that does nothing in forward, and in
backward goes on from the losses too, as if they had been added: so nothing is sent between stages, and every schedule
and recomputation are as they are without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.distributed.torch_private import in_backward


class Routing(NamedTuple):
    """The experts of n tokens: their ``ids`` [n,k], the ``weights`` [n,k] of what they make, and ``counts`` [E]: how
    many tokens go to each expert. What they follow from: the router's ``logits`` and ``scores`` [n,E]. ``kept``: how
    many ids are those of an expert, where others are dropped and are E; None: all of them."""

    ids: Tensor
    weights: Tensor
    counts: Tensor
    logits: Tensor
    scores: Tensor
    kept: int | None = None


class RowPlaces(NamedTuple):
    """The places of a pass's tokens among its ``rows``, of each of which this rank and those beside it have ``length``
    tokens, laid row after row. This rank's begin at ``first``; behind the last row may come padding. ``ranks``: over
    how many ranks each row was cut before, of which these have one part. ``filled`` [rows]: how many tokens of each row
    are more than padding at its end; None: all."""

    rows: int
    length: int
    first: int = 0
    ranks: int = 1
    filled: Tensor | None = None

    def of(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each of this rank's tokens, int64 [tokens], and with it 1 or, for padding, 0, in the
        dtype of ``like``."""
        place = torch.arange(self.first, self.first + tokens, device=like.device)
        inside = (place < self.rows * self.length).to(like.dtype)
        return place.div(self.length, rounding_mode="floor").clamp_(max=self.rows - 1), inside


@dataclass(frozen=True)
class Tally:
    """A record of what a layer with experts is told in a training step, and where it counts, all in fp64. ``loads`` [E]
    and ``losses`` [2] are added to: tokens of this rank, and auxiliary loss and z-loss, summed over rows; ``factors``
    [2] are what these sums are multiplied by in the loss of the step. ``dropped`` [1], of layers with a capacity: how
    many times a token found no room in one of its experts."""

    loads: Tensor
    losses: Tensor
    factors: Tensor
    dropped: Tensor | None = None


@torch.library.custom_op("shardwise::count", mutates_args=("total",))
def count_once(total: Tensor, found: Tensor) -> None:
    """Adds ``found`` to ``total``, but not again where recomputation comes by: an operation, so that it is asked when
    it runs, in compiled code too."""
    if not in_backward():
        total.add_(found)


@count_once.register_fake
def _(total: Tensor, found: Tensor) -> None:
    return None


class _RowProduct(torch.autograd.Function):
    """The sum over tokens of scores [n,E] times what ``shares`` [rows,E] has for their rows, of those ``inside`` one:
    a scalar. Saves no tensor of the size of the scores."""

    @staticmethod
    def forward(scores: Tensor, shares: Tensor, row: Tensor, inside: Tensor) -> Tensor:
        return shares.index_select(0, row).mul_(scores).sum(-1).dot(inside)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shares, row, inside = ctx.saved_tensors
        return shares.index_select(0, row).mul_((inside * grad).unsqueeze(-1)), None, None, None


class _WithLoss(torch.autograd.Function):
    """``x`` as it is. Backward goes on from ``loss``, a scalar, as if it were added to what backward began from."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


def row_counts(ids: Tensor, row: Tensor, inside: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return how many tokens of each row go to each expert, [rows,E], of which ``sizes`` has both numbers. ``ids``
    [n,k] are the experts of each token, and ``row`` [n] is its row; where ``inside`` [n] is 0, it is in none."""
    rows, experts = sizes
    chosen = (row.unsqueeze(-1) * experts + ids).flatten()
    tokens = inside.unsqueeze(-1).expand_as(ids).flatten()
    return (
        torch.zeros(rows * experts, dtype=inside.dtype, device=ids.device).scatter_add_(0, chosen, tokens).view(sizes)
    )


def balanced(
    routing: Routing,
    places: RowPlaces,
    tally: Tally,
    coefficients: tuple[float, float],
    over_rows: Callable[[Tensor], Tensor],
) -> Routing:
    """The routing, whose weights lead backward to the losses that have ``coefficients``; counts them, and the tokens.
    ``over_rows`` sums the counts [rows,E] over the ranks that have tokens of the same rows."""
    tokens, experts = routing.scores.shape
    row, inside = places.of(tokens, routing.scores)
    whole = places.length * places.ranks
    counts = row_counts(routing.ids, row, inside, (places.rows, experts))
    count_once(tally.loads, counts.sum(0))
    losses: dict[int, Tensor] = {}
    if coefficients[0]:
        shares = over_rows(counts) * (experts / whole**2)
        losses[0] = _RowProduct.apply(routing.scores, shares, row, inside)
    if coefficients[1]:
        losses[1] = routing.logits.logsumexp(-1).square().dot(inside) / whole
    weights = routing.weights
    for number, loss in losses.items():
        count_once(tally.losses[number], loss.detach())
        weights = _WithLoss.apply(weights, loss * tally.factors[number])
    return routing._replace(weights=weights)
