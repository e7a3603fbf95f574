"""The losses of routers and the capacity of experts as anyone would write them, for the plain loop of parity: of whole
rows, by autograd alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from shardwise.models.balance import Routing
from shardwise.models.capacity import rounded
from shardwise.models.config import ModelSpec
from shardwise.models.moe import MoE
from shardwise.models.room import expert_room


@contextmanager
def plain_balance(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yields what tells, after one forward pass of the model within it, what is added to the loss of its rows: the
    losses of all routers, times their coefficients. What experts have no room for has no weight."""
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    found: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, MoE)]

    def routed(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        found.append(logits)

    def entered(module: nn.Module, args: tuple[Any, ...]) -> None:
        shapes.append((args[0].shape[0], args[0].shape[1]))
        rows.append(args[1].tolist() if len(args) > 1 else [args[0].shape[1]] * args[0].shape[0])

    def added() -> Tensor:
        each = (of_rows(logits.unflatten(0, shape), spec) for logits, shape in zip(found, shapes, strict=True))
        return sum(each, start=torch.zeros((), dtype=torch.float64)) / max(1, len(layers))

    def chosen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, routing, *more = args
        return x, routing._replace(weights=routing.weights * has_room(routing, shapes[-1], spec, rows[-1])), *more

    shapes: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    hooks = [layer.register_forward_pre_hook(entered) for layer in layers]
    hooks += [layer.router.register_forward_hook(routed) for layer in layers]
    hooks += [layer.experts.register_forward_pre_hook(chosen) for layer in layers if layer.room]
    try:
        yield added
    finally:
        for hook in hooks:
            hook.remove()


def has_room(routing: Routing, shape: tuple[int, int], spec: ModelSpec, filled: Sequence[int]) -> Tensor:
    """1 for each choice [n,k] of tokens [b,s] whose weight is among the largest of its expert in its row, else 0; of
    each row the first ``filled`` tokens are more than padding."""
    found = torch.zeros_like(routing.weights)
    each = (part.view(*shape, -1) for part in (routing.ids, rounded(routing.weights.detach()), found))
    for ids, weights, kept, tokens in zip(*each, filled, strict=True):
        for expert in range(spec.experts.num_experts):
            token, place = (ids[:tokens] == expert).nonzero(as_tuple=True)
            first = weights[token, place].argsort(descending=True, stable=True)[: expert_room(spec, shape[1])]
            kept[token[first], place[first]] = 1.0
    return found


def of_rows(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Both losses of a layer with logits [b,s,E], times their coefficients: means over the rows."""
    scores = logits.softmax(-1)
    chosen = (
        one_hot(scores.topk(spec.experts.experts_per_token).indices, spec.experts.num_experts).to(scores.dtype).sum(2)
    )
    shares, means = chosen.mean(1), scores.mean(1)  # [b,E]
    auxiliary = spec.experts.num_experts * (shares * means).sum(1).mean()
    of_loads, of_logits = spec.experts.router_losses
    return of_loads * auxiliary + of_logits * logits.logsumexp(-1).square().mean()
