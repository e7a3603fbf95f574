"""All that changes while a model trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import FiniteFloat
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.distributed.slices import kept, local
from shardwise.models.blocks import each_named, named, tied_copy
from shardwise.models.roles import is_adapter
from shardwise.runtime.checkpoint.manifest import Identity
from shardwise.spec.record import Count
from shardwise.techniques import offload, optim
from shardwise.techniques.offload.host_copies import HostWeights

COUNTERS = ("step", "updates", "tokens", "supervised", "cursor", "skipped_in_row")
"""The numbers of a :class:`TrainState` that a checkpoint keeps."""


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740): halved when a step overflows, doubled
    after ``growth_steps`` good ones. ``value`` stays 1 where gradients cannot underflow.

    The next step needs the scale before the host has read what the last one found. So it lives on the device, where
    :meth:`update` changes it; ``value`` and ``good_steps`` are what the host has read, a step or so behind."""

    value: float = 1.0
    good_steps: int = 0
    growth_steps: int = 2000
    enabled: bool = False
    live: Tensor | None = field(default=None, compare=False)

    @classmethod
    def dynamic(cls) -> LossScale:
        return cls(value=2.0**16, enabled=True)

    def on(self, device: torch.device) -> Tensor:
        """[value, good steps] on ``device``, fp32."""
        if self.live is None:
            self.live = torch.tensor([self.value, float(self.good_steps)], device=device)
        return self.live

    def update(self, finite: Tensor, loss_finite: Tensor) -> Tensor:
        """Update the scale after a step whose gradients were ``finite`` or not; returns the values for the host to
        read. A smaller scale does not cure a loss that is not finite: the scale stays as it is."""
        assert self.live is not None
        if not self.enabled:
            return self.live[:0]
        value, good = self.live.unbind()
        good = torch.where(finite, good + 1, 0.0)
        grown = good == self.growth_steps
        halved = torch.where(loss_finite, value / 2, value)
        value = torch.where(finite, torch.where(grown, value * 2, value), halved).clamp(1.0, 2.0**24)
        self.live = torch.stack([value, torch.where(grown, 0.0, good)])
        return self.live

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the scale."""
        return {name: value for name, value in vars(self).items() if name != "live"}


@dataclass(frozen=True)
class _Scale:
    """A loss scale in a checkpoint."""

    value: FiniteFloat
    good_steps: Count
    growth_steps: Count
    enabled: bool


@dataclass(frozen=True, kw_only=True)
class RunFacts(Identity):
    """The facts of a checkpoint: the counters of a :class:`TrainState`, and its loss scale."""

    step: Count
    updates: Count
    tokens: Count
    supervised: Count = 0
    cursor: Count
    skipped_in_row: Count
    loss_scale: _Scale


@dataclass
class TrainState:
    """The only mutable object of a run.

    ``step``: optimizer steps done, skipped ones included; ``updates``: those that changed the weights; ``tokens``:
    input tokens that all ranks have read, padding left out, and ``supervised`` those trained on; ``cursor``: samples
    consumed, the position in the data order; ``skipped_in_row``: steps skipped since the last good one (those of a
    search for the loss scale do not count). ``host``: the copies of weights that are updated on the host, if they are.
    ``tally``: where products in float8 are counted (techniques/tally.py). ``lowest``: the lowest validation loss
    so far, and ``stale``: validations since it was found; of runs that may stop early.
    """

    parts: list[nn.Module]
    optimizer: Optimizer
    step: int = 0
    updates: int = 0
    tokens: int = 0
    supervised: int = 0
    cursor: int = 0
    skipped_in_row: int = 0
    scale: LossScale = field(default_factory=LossScale)
    host: HostWeights | None = None
    tally: Tensor | None = None
    lowest: float | None = None
    stale: int = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name; a tied one once."""
        return named(self.parts)

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates: this one, or its copy on the host."""
        return self.host.of(parameter) if self.host and parameter.requires_grad else parameter

    def trained(self) -> list[nn.Parameter]:
        """Parameters that get gradients, each once; of a tied weight that is in two parts both copies."""
        return [parameter for _, parameter in each_named(self.parts) if parameter.requires_grad]

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients the norm counts: of two copies of a tied weight the embedding's."""
        copy = tied_copy(self.parts)
        return [parameter for parameter in self.trained() if parameter is not copy]

    def weights_filled(self) -> None:
        """Call when weights, and moments, were drawn or read: what follows from them takes their values."""
        self._follow_ties()
        if self.host:
            self.host.read()
        offload.weights_filled(self.parts)

    def _follow_ties(self) -> None:
        """Give the output layer's copy of a tied weight, where this rank has both, the values and moments of the
        embedding's: those alone are drawn, read and saved."""
        copy, first = tied_copy(self.parts), self.parameters().get("embed.weight")
        if copy is None or first is None or copy is first:
            return
        with torch.no_grad():
            local(kept(copy)).copy_(local(kept(first)))
            for key, value in self.optimizer.state.get(self.updated(copy), {}).items():
                local(value).copy_(local(self.optimizer.state[self.updated(first)][key]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds, flat: ``model.<name>``, ``optim.exp_avg.<name>``,
        ``optim.exp_avg_sq.<name>``. Live tensors (DTensors where sharded), not copies. With adapters, what is trained
        alone: the rest never changes."""
        parameters = self.parameters()
        if any(map(is_adapter, parameters)):
            parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        found: dict[str, Tensor] = {f"model.{name}": kept(parameter) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            for key, value in self.optimizer.state.get(self.updated(parameter), {}).items():
                if key != "step":
                    found[f"optim.{key}.{name}"] = value
        return found

    def advance(self, tokens: int, supervised: int = 0) -> None:
        """Count an optimizer step that was launched, over ``tokens`` of which some are ``supervised``."""
        self.step += 1
        self.tokens += tokens
        self.supervised += supervised

    def book(self, skipped: bool, loss: float, scaling: Sequence[float] = ()) -> None:
        """Count its figures, once read: whether it was ``skipped``, its ``loss`` and, in fp16, the loss scale and its
        good steps after it. Gradients that overflow under a finite loss, which a smaller loss scale may cure, are part
        of the search for that scale, and no sign of a poisoned run."""
        self.updates += not skipped
        searching = self.scale.enabled and self.scale.value > 1.0 and math.isfinite(loss)
        if not searching:
            self.skipped_in_row += 1
        if not skipped:
            self.skipped_in_row = 0
        if scaling:
            self.scale.value, self.scale.good_steps = scaling[0], int(scaling[1])

    def finite(self) -> bool:
        """Return whether all weights and moments of this rank are. A loss does not show that: rows of an embedding take
        part in it only where their tokens do."""
        own = (local(tensor.detach()) for tensor in self.tensors().values())
        ends = (end for one in own if one.is_floating_point() and one.numel() for end in one.aminmax())
        return all(bool(end.isfinite()) for end in ends)

    def judge(self, validation_loss: float) -> None:
        """Count one validation, for early stopping. A loss that is not finite is no improvement."""
        if math.isfinite(validation_loss) and (self.lowest is None or validation_loss < self.lowest):
            self.lowest, self.stale = validation_loss, 0
        else:
            self.stale += 1

    def facts(self) -> dict[str, Any]:
        """The rest of a checkpoint, as JSON."""
        facts = {name: vars(self)[name] for name in COUNTERS} | {"loss_scale": self.scale.facts()}
        return facts | ({"early_stopping": [self.lowest, self.stale]} if self.lowest is not None or self.stale else {})

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Restore the facts of a checkpoint whose tensors have just been loaded."""
        for name in COUNTERS:
            setattr(self, name, facts[name])
        self.lowest, self.stale = facts.get("early_stopping", (None, 0))
        if self.scale.enabled and facts["loss_scale"]["enabled"]:
            self.scale = LossScale(**facts["loss_scale"])
        optim.set_updates(self.optimizer, self.updates)
        self.weights_filled()
