"""The experts of a training step: what their layers are told before its micro-batches, and what was counted after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import kept
from shardwise.models.blocks import numbered, spec_of
from shardwise.models.config import ModelSpec
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Tally
from shardwise.spec.plan import Plan

LOSSES = ("router_aux_loss", "router_z_loss")
"""What the losses of routers are called in the metrics; they are not in ``loss``, and not yet multiplied by their
coefficients."""
Loads = Mapping[int, Sequence[float]]
"""By the number of a layer with experts, how many tokens of a step chose each of them."""
Dropped = Mapping[int, float]
"""By the number of a layer with a capacity, which share of these choices found no room."""


def layers_of(spec: ModelSpec) -> list[int]:
    """The numbers of the layers that have experts."""
    return [layer for layer in range(spec.num_hidden_layers) if spec.has_experts(layer)]


def rows_of(batches: Sequence[MicroBatch], plan: Plan) -> int:
    """The rows of a step: every data-parallel rank has as many in its micro-batches."""
    return sum(len(batch.ids) for batch in batches) * plan.layout.dp


@contextmanager
def counting(
    parts: Sequence[nn.Module], batches: Sequence[MicroBatch], plan: Plan, scale: Tensor | None
) -> Iterator[Tensor]:
    """Within it layers with experts add the losses of their routers to the gradients, and count. ``batches``: all
    micro-batches of this rank in the step; ``scale``: by what their losses are multiplied. Yields where this rank
    counts, fp64: the sums of both losses, the loads of the whole model, layer by layer, and with a capacity what each
    layer drops, zero where other ranks have the layer; nothing of a model without experts. No host waits for a device,
    unless there is a capacity."""
    spec, device = spec_of(parts), batches[0].ids.device
    layers = layers_of(spec)
    if not layers:
        yield torch.zeros(0, dtype=torch.float64, device=device)
        return
    numbers = torch.zeros(spec.expert_counts, dtype=torch.float64, device=device)
    loads, dropped = numbers[2:].tensor_split([len(layers) * spec.experts.num_experts])
    loads = loads.view(len(layers), spec.experts.num_experts)
    rows = rows_of(batches, plan)
    factors = torch.zeros_like(numbers[:2])
    for place, coefficient in enumerate(spec.experts.router_losses):
        factors[place].fill_(coefficient / (len(layers) * rows))
    factors = factors if scale is None else factors * scale
    found = [
        (layers.index(number), module)
        for part in parts
        for number, block in numbered(part)
        for module in block.modules()
        if isinstance(module, MoE)
    ]
    for place, module in found:
        module.tally = Tally(loads[place], numbers[:2], factors, dropped[place : place + 1])
    try:
        yield numbers
    finally:
        for _, module in found:
            module.tally = None


def correct(parts: Sequence[nn.Module], numbers: Tensor, finite: Tensor) -> None:
    """After a step of which all ranks have counted these ``numbers``: raises the corrections of experts with fewer
    tokens than the mean of their layer and lowers those of others; nothing where the step was not ``finite``. The host
    waits for a device only where weights are kept on the host."""
    spec = spec_of(parts)
    routing = spec.experts.sigmoid
    layers = layers_of(spec)
    experts = spec.experts.num_experts
    if routing is None or not routing.bias_rate:
        return
    loads = numbers[2 : 2 + len(layers) * experts].view(len(layers), experts)
    changes = (loads.mean(-1, keepdim=True) - loads).sign() * finite * routing.bias_rate
    for part in parts:
        for number, block in numbered(part):
            for module in block.modules():
                if isinstance(module, MoE):
                    held = kept(module.router.correction)
                    held.add_(changes[layers.index(number)].to(held))


def share(numbers: Tensor, plan: Plan, meshes: Meshes) -> Tensor:
    """Return the numbers that this rank adds to the sum over all ranks: those that it has counted, or zeros where
    another rank adds those of the same tokens."""
    same = plan.layout.tp > 1 and not plan.sequence_parallel
    return torch.zeros_like(numbers) if same and meshes.index("tp") > 0 else numbers


@dataclass(frozen=True)
class Counts:
    """The host's view of the numbers that all ranks have counted in a step of ``rows`` rows."""

    spec: ModelSpec
    rows: int

    def losses(self, numbers: Sequence[float]) -> dict[str, float]:
        """Return the losses of routers that have a coefficient: means over rows and layers."""
        if not numbers:
            return {}
        known = zip(LOSSES, self.spec.experts.router_losses, numbers, strict=False)
        return {name: total / (self.rows * self.spec.expert_layers) for name, weight, total in known if weight}

    def loads(self, numbers: Sequence[float]) -> Loads:
        """Return by layer the tokens that went to each expert; empty of a model without experts."""
        experts = self.spec.experts.num_experts
        layers = enumerate(layers_of(self.spec) if numbers else [])
        return {layer: numbers[2 + i * experts : 2 + (i + 1) * experts] for i, layer in layers}

    def dropped(self, numbers: Sequence[float]) -> Dropped:
        """Return by layer the share of its tokens that found no room; empty of a model without a capacity."""
        loads = self.loads(numbers)
        found = numbers[2 + len(loads) * self.spec.experts.num_experts :]
        return {layer: each / max(1.0, sum(loads[layer])) for layer, each in zip(loads, found, strict=False)}


def spread(loads: Loads) -> dict[str, list[float]]:
    """Return columns with a number of each ``layer`` that has experts: ``entropy`` of the shares of its experts, 1
    where all are alike, 0 where one has all; ``fullest``: the largest share times the number of experts; ``dead``: how
    many experts got no token."""
    found: dict[str, list[float]] = {"layer": [], "entropy": [], "fullest": [], "dead": []}
    for layer, counts in loads.items():
        total, experts = max(1.0, sum(counts)), len(counts)
        shares = [count / total for count in counts if count]
        found["layer"].append(layer)
        found["entropy"].append(round(sum(-share * math.log(share, max(2, experts)) for share in shares), 4))
        found["fullest"].append(round(max(shares, default=0.0) * experts, 4))
        found["dead"].append(experts - len(shares))
    return found


def told(loads: Loads, ranks: int = 1, dropped: Dropped | None = None) -> dict[str, Any]:
    """Return the metrics of a step that tell its ``loads``: by layer, and of all layers the lowest entropy, the fullest
    expert and how many are dead; where ``ranks`` have different experts, how many times its share the fullest of them
    got; with a capacity the share that was ``dropped``. Nothing of a model without experts."""
    if not loads:
        return {}
    each = spread(loads)
    worst = {"expert_entropy": min(each["entropy"]), "expert_fullest": max(each["fullest"])}
    if dropped:
        each["dropped"] = [round(dropped[layer], 6) for layer in loads]
        worst["expert_dropped"] = round(sum(dropped.values()) / len(dropped), 6)
    if ranks > 1:
        worst["expert_imbalance"] = round(max(_imbalance(counts, ranks) for counts in loads.values()), 4)
    return {**worst, "dead_experts": sum(each["dead"]), "experts": each}


def _imbalance(counts: Sequence[float], ranks: int) -> float:
    """The tokens of the fullest of so many ranks, which have as many experts each, over an even share."""
    own = len(counts) // ranks
    return max(sum(counts[first : first + own]) for first in range(0, len(counts), own)) * ranks / max(1.0, sum(counts))
