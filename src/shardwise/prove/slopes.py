"""Is the gradient of the plain loop the derivative of its loss? The plain loop of parity shares the model's modules
with the run, so that a backward that is wrong in them is wrong on both sides. Here they are judged by their forward
alone.

Along a random direction of each trained weight, and of the hidden states before each block and after the last, the
gradient is compared in float64 with two central differences of the loss, extrapolated to a step of zero. Where the loss
is not smooth (a router chooses another expert, a clamp begins) the differences themselves show it, whatever the
gradient is: then another step or another direction is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from shardwise.data.micro_batch import collate
from shardwise.models.blocks import blocks
from shardwise.models.hf_model import Model, model_of
from shardwise.prove.in_float64 import Widened
from shardwise.prove.parity import merged, plain_loss, plain_parameters
from shardwise.prove.plain_routers import plain_balance
from shardwise.prove.workload import Workload

STEPS = (1e-4, 2e-5, 5e-4)
"""Lengths of a step, for a direction whose elements are as large as the tensor's. The first serves unless the loss is
not smooth there."""
ROWS = 2
"""At most so many: more make every evaluation of the loss longer, and show nothing else."""
DIRECTIONS = 3
"""How many of one tensor are tried, of which one must be smooth."""
SMOOTH = 1e-4
"""By how much the two differences, and what the loss bends within them, may differ: a token that goes to another expert
makes a thousandth or more."""
TOLERANCE = 1e-7
"""Relative to the length of the gradient. Right models show less than a hundredth of it."""
ROUNDING = 16 * torch.finfo(torch.float64).eps
"""Of the loss, by which its differences may be wrong: it is all that is left where gradients are small."""
FLOOR = 1e-4
"""Of the loss: a gradient is taken to be at least so long. One that is zero by symmetry (of the biases of keys) would
be compared with rounding alone."""
NOISE = 1e-3
"""Of their size, added to hidden states throughout: equal tokens would be ties, whose order within the capacity of an
expert is decided by rounding."""


@dataclass(frozen=True)
class Slope:
    """A tensor's derivative: how the loss changes along a direction, by its differences (``expected``) and by the
    gradient (``found``). ``judged`` is False where the loss was smooth along no direction."""

    what: str
    expected: float = math.nan
    found: float = math.nan
    error: float = 0.0
    allowed: float = TOLERANCE
    judged: bool = True

    def __str__(self) -> str:
        return (
            f"gradient of {self.what}: along a random direction {self.expected:.9g} expected from the loss, "
            f"{self.found:.9g} found (relative error {self.error:.1e}, at most {self.allowed:.0e})"
        )


def prove(job: Workload) -> list[Slope]:
    """A slope for each tensor, in the order in which backward comes to them: the first that is wrong is the nearest to
    the cause."""
    landscape = Landscape(replace(job, rows=min(ROWS, job.rows), compute="fp64", weights="fp64", figures=()))
    loss, gradients = landscape.gradients()
    return [
        _slope(landscape, loss, name, gradients[name]) for name in reversed(landscape.order) if name in landscape.wanted
    ]


def prove_on_rank(rank: int, world: int, job: Workload) -> list[Slope]:
    """Run :func:`prove` on a rank of a pool, which computes in one thread: with more, small tensors take several times
    as long."""
    return prove(job)


class Landscape:
    """The loss of the first step as a function of a point: the weights, and what is added to hidden states."""

    def __init__(self, job: Workload) -> None:
        self.job, self.batch = job, collate(job.batch(0))
        self.model = model_of(job.spec).double()
        parameters = plain_parameters(job)
        self.order, self.edges = _in_order(self.model, parameters)
        self.wanted = {*self.edges, *(name for name, value in parameters.items() if value.requires_grad)}
        self.weights = {name: value.detach() for name, value in parameters.items()}
        self.sizes = {name: _size(value) for name, value in self.weights.items()}
        nothing = torch.zeros(*self.batch.ids.shape, job.spec.hidden_size, dtype=torch.float64)
        self.point = self.weights | dict.fromkeys(self.edges, nothing)
        if job.spec.predictors:  # the last block gives the output layer two of each token
            self.point[self.edges[-1]] = torch.cat([nothing, nothing], -1)
        with torch.no_grad():
            self.loss(self.point)
        self.point |= {name: NOISE * self.direction(name, -1) for name in self.edges}

    def direction(self, name: str, attempt: int) -> Tensor:
        """Return a random direction, as large as the tensor itself. It leaves out the row of the padding token, to
        which the embeddings of transformers send no gradient."""
        draw = torch.Generator().manual_seed(xxh3_64_intdigest(f"{name}/{attempt}".encode()))
        found = torch.randn(self.point[name].shape, generator=draw, dtype=torch.float64) * self.sizes[name]
        embed = self.model.embed
        if name == "embed.weight" and isinstance(embed, nn.Embedding) and embed.padding_idx is not None:
            found[embed.padding_idx] = 0.0
        return found

    def loss(self, point: Mapping[str, Tensor]) -> Tensor:
        """Return the loss at a point, with those of routers. The norms by which magnitudes divide, through which no
        gradient goes, stay. Modules of transformers compute norms and softmax in fp32, in which differences would
        drown: that is widened."""
        whole = merged({name: point[name] for name in self.weights}, self.job, self.weights)
        wide = nullcontext() if self.job.spec.hf_model is None else Widened()
        with wide, self._adding(point), plain_balance(self.model) as balance:
            return plain_loss(self.model, whole, self.batch, self.job) + balance.added()

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """The loss and its gradients, of what is not used zeros."""
        point = {name: value.clone().requires_grad_(name in self.wanted) for name, value in self.point.items()}
        wanted, loss = {name: point[name] for name in self.wanted}, self.loss(point)
        found = torch.autograd.grad(loss, [*wanted.values()], materialize_grads=True)
        return loss.item(), dict(zip(wanted, found, strict=True))

    @torch.no_grad()
    def at(self, name: str, change: Tensor) -> float:
        """The loss where one tensor is changed."""
        return self.loss(self.point | {name: self.point[name] + change}).item()

    @contextmanager
    def _adding(self, point: Mapping[str, Tensor]) -> Iterator[None]:
        """Have the point's hidden states added within the block: the first before the model's first block, and each
        other after a block. How large hidden states are is noted the first time."""
        first, *rest = self.edges

        def joined(edge: str, hidden: Tensor) -> Tensor:
            self.sizes.setdefault(edge, _size(hidden.detach()))
            return hidden + point[edge]

        def given(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (joined(first, args[0]), *args[1:]), named
            return args, named | {"hidden_states": joined(first, named["hidden_states"])}

        members = blocks(self.model)
        hooks = [members[0].register_forward_pre_hook(given, with_kwargs=True)]
        for edge, block in zip(rest, members, strict=True):
            hooks.append(block.register_forward_hook(lambda _, args, out, edge=edge: joined(edge, out)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _in_order(model: Model, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Weights, adapters beside their layers, and hidden states, in the order of the forward pass; and the latter alone,
    each named for the weight after it."""
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    order = sorted(names, key=lambda name: places[re.sub(r"lora_.*", "weight", name)])
    blocks_of = [name.split(".")[1] if name.startswith("layers.") else "" for name in order]
    starts = [blocks_of.index(number) for number in dict.fromkeys(filter(None, blocks_of))]
    starts.append(max(place for place, number in enumerate(blocks_of, 1) if number))
    edges = [f"hidden states before {[*order, 'the output layer'][start]}" for start in starts]
    for start, edge in zip(reversed(starts), reversed(edges), strict=True):
        order.insert(start, edge)
    return order, edges


def _size(value: Tensor) -> float:
    return float(value.square().mean().sqrt()) or 1.0


def _slope(landscape: Landscape, loss: float, name: str, gradient: Tensor) -> Slope:
    length = float(gradient.norm()) * landscape.sizes[name]
    if not math.isfinite(length + loss):
        return Slope(name, found=length, error=math.inf)
    for attempt, step in product(range(DIRECTIONS), STEPS):
        direction = landscape.direction(name, attempt)
        ahead, behind, far, farther = (landscape.at(name, way * step * direction) for way in (1, -1, 2, -2))
        near, wide = (ahead - behind) / (2 * step), (far - farther) / (4 * step)
        bend, twice = (ahead + behind - 2 * loss) / step, (far + farther - 2 * loss) / (2 * step)
        scale = max(length, abs(near), FLOOR * abs(loss))
        if max(abs(near - wide), abs(twice - 2 * bend)) <= SMOOTH * scale:
            expected, found = (4 * near - wide) / 3, float((gradient * direction).sum())
            allowed = TOLERANCE + ROUNDING * abs(loss) / (step * scale)
            return Slope(name, expected, found, abs(expected - found) / scale, allowed)
    return Slope(name, judged=False)
