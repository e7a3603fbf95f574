"""What the layers of a model come to in a step that is sampled: the gradient norm of each parameter, and what of the
operands of products in float8 is lost. Gathered in two small all-reduces; the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.models.blocks import spec_of
from shardwise.models.config import parameter_shapes
from shardwise.runtime.reduce import local_squares
from shardwise.runtime.state import TrainState
from shardwise.runtime.transfer import Figures
from shardwise.spec.plan import Plan
from shardwise.techniques.states import frozen
from shardwise.techniques.tally import COUNTS, OPERANDS


class Lost(NamedTuple):
    """What of an operand is lost in float8: the shares of its values that are at the largest code, and that become zero
    and were not; and its ``largest`` absolute value."""

    saturated: float
    flushed: float
    largest: float


@dataclass(frozen=True)
class LayerFigures:
    """The gradient norms by parameter, and what is lost by layer and operand (input, weight, gradient)."""

    norms: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[tuple[str, str], Lost] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Return the metrics of a sampled step: the largest of each figure, and as columns what the layers have in
        which, of each operand, a figure is largest; likewise the largest gradient norms."""
        norms = sorted(self.norms, key=lambda name: -_rank(self.norms[name]))[:3]
        found: dict[str, Any] = {
            "grad_norms": {"parameter": norms, "norm": [_short(self.norms[name]) for name in norms]}
        }
        if not self.lost:
            return found
        for place, figure in enumerate(Lost._fields):
            found[f"float8_{figure}"] = _short(max((each[place] for each in self.lost.values()), key=_rank))
        worst = dict.fromkeys(self._worst())
        columns: dict[str, list[Any]] = {"layer": [layer for layer, _ in worst], "operand": [one for _, one in worst]}
        for place, figure in enumerate(Lost._fields):
            columns[figure] = [_short(self.lost[each][place]) for each in worst]
        return found | {"float8": columns}

    def _worst(self) -> Iterator[tuple[str, str]]:
        for operand in OPERANDS:
            have = [each for each in self.lost if each[1] == operand]
            for place in range(len(Lost._fields)) if have else ():
                yield max(have, key=lambda each: _rank(self.lost[each][place]))


def _rank(figure: float) -> float:
    """Return a figure to be ordered by: what is not finite comes before all others."""
    return figure if isfinite(figure) else inf


def _short(number: float) -> float | None:
    """Four digits; None, as in JSON, of what is not finite."""
    return float(f"{number:.4g}") if isfinite(number) else None


@dataclass(frozen=True)
class Sampled:
    """What all ranks have gathered, on its way to the host."""

    names: tuple[str, ...]
    layers: tuple[str, ...]
    figures: Figures

    def read(self, scale: float) -> LayerFigures:
        """Wait for it. ``scale``: by what gradients were multiplied."""
        numbers = self.figures.read()
        squares, rest = numbers[: len(self.names)], numbers[len(self.names) :]
        norms = {name: square**0.5 / scale for name, square in zip(self.names, squares, strict=True)}
        lost = dict[tuple[str, str], Lost]()
        operands = [(layer, operand) for layer in self.layers for operand in OPERANDS]
        width = 1 + len(COUNTS)
        for place, each in enumerate(operands):
            values, saturated, flushed, largest = rest[place * width : (place + 1) * width]
            if values:
                of_loss = scale if each[1] == "gradient" else 1.0
                lost[each] = Lost(saturated / values, flushed / values, largest / of_loss)
        return LayerFigures(norms, lost)


def gather(state: TrainState, plan: Plan, meshes: Meshes, device: torch.device) -> Sampled:
    """Gather what a step has left in the gradients, before they are clipped, and in the table of float8. Every rank
    calls this alike."""
    spec = spec_of(state.parts)
    every = parameter_shapes(spec) | (techniques.lora.adapters(spec, plan.lora) if plan.lora else {})
    names, layers = (
        [name for name in every if not frozen(name, plan)],
        techniques.float8.layers(spec, plan.precision),
    )
    counted, own = {id(one) for one in state.counted()}, dict[str, Tensor]()
    for name, parameter in state.parameters().items():
        if id(parameter) in counted:
            own[name] = local_squares([state.updated(parameter)], meshes.size("stage")).to(device)
    none = torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack([own.get(name, none) for name in names])
    table = torch.empty(0, len(COUNTS) + 1) if state.tally is None else state.tally.flatten(0, 1)
    table = table.to(device, torch.float64)
    sums, largest = torch.cat([squares, table[:, :-1].flatten()]), table[:, -1].contiguous()
    meshes.sum(sums, "world")
    meshes.largest(largest, "world")
    counts = sums[len(names) :].view(-1, len(COUNTS))
    found = torch.cat([sums[: len(names)], torch.cat([counts, largest[:, None]], 1).flatten()])
    return Sampled(tuple(names), tuple(layers), Figures(found))
