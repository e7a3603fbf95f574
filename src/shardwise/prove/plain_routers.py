"""The losses of routers and the capacity of experts as anyone would write them, for the plain loop of parity: of whole
rows, by autograd alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from shardwise.models.capacity import rounded
from shardwise.models.config import ModelSpec
from shardwise.models.moe import MoE
from shardwise.models.room import expert_room
from shardwise.models.router_losses import Routing


class RouterTally:
    """A tally of what the routers of a model have done in one forward pass of whole rows. ``shapes``: the rows and
    tokens of each layer's input, and ``rows``, how many tokens of each row are more than padding at its end."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.logits: list[Tensor] = []
        self.chosen: dict[str, Tensor] = {}
        self.shapes: list[tuple[int, int]] = []
        self.rows: list[list[int]] = []

    def added(self) -> Tensor:
        """Return what is added to the loss of these rows: the losses of all routers, times their coefficients."""
        each = (
            of_rows(logits.unflatten(0, shape), ids.unflatten(0, shape), self.spec)
            for logits, ids, shape in zip(self.logits, self.chosen.values(), self.shapes, strict=True)
        )
        return sum(each, start=torch.zeros((), dtype=torch.float64)) / max(1, len(self.logits))

    def correct(self, parameters: Mapping[str, Tensor]) -> None:
        """Moves the corrections among these parameters: up where an expert got less than the mean, down where more."""
        if (routing := self.spec.experts.sigmoid) is None:
            return
        for layer, ids in self.chosen.items():
            loads = one_hot(ids, self.spec.experts.num_experts).sum((0, 1)).double()
            parameters[f"{layer}.router.correction"].data += routing.bias_rate * (loads.mean() - loads).sign()


@contextmanager
def plain_balance(model: nn.Module) -> Iterator[RouterTally]:
    """Yields what tells of one forward pass of the model within it. What experts have no room for has no weight."""
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    found = RouterTally(spec)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}

    def routed(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        found.logits.append(logits)

    def entered(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.shapes.append((args[0].shape[0], args[0].shape[1]))
        found.rows.append(args[1].tolist() if len(args) > 1 else [args[0].shape[1]] * args[0].shape[0])

    def chosen(name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, routing, *more = args
        found.chosen[name] = routing.ids
        if layers[name].room:
            room = has_room(routing, found.shapes[-1], spec, found.rows[-1])
            routing = routing._replace(weights=routing.weights * room)
        return x, routing, *more

    hooks = [layer.register_forward_pre_hook(entered) for layer in layers.values()]
    hooks += [layer.router.register_forward_hook(routed) for layer in layers.values()]
    hooks += [layer.experts.register_forward_pre_hook(partial(chosen, name)) for name, layer in layers.items()]
    try:
        yield found
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


def of_rows(logits: Tensor, ids: Tensor, spec: ModelSpec) -> Tensor:
    """Return both losses of a layer with logits [b,s,E] and chosen experts [b,s,k], times their coefficients: means
    over the rows."""
    scores = logits.softmax(-1)
    if spec.experts.sigmoid is not None:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = one_hot(ids, spec.experts.num_experts).to(scores.dtype).sum(2)
    shares, means = chosen.mean(1), scores.mean(1)  # [b,E]
    auxiliary = spec.experts.num_experts * (shares * means).sum(1).mean()
    of_loads, of_logits = spec.experts.router_losses
    return of_loads * auxiliary + of_logits * logits.logsumexp(-1).square().mean()
