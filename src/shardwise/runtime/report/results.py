"""What is measured of a run and its report keeps. No torch here: reports are read where nothing is trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Validation:
    """Sums over all ranks: nats of loss, supervised tokens, and the bytes of text that they stand for."""

    nats: float
    tokens: int
    text_bytes: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else math.nan

    def facts(self) -> dict[str, float]:
        """Return the figures that a run's events and its trackers get."""
        return {"nats_per_token": self.loss, "bits_per_byte": self.bits_per_byte}

    def __str__(self) -> str:
        return f"{self.loss:.3f} nats per token, {self.bits_per_byte:.3f} bits per byte"


@dataclass(frozen=True)
class Preference:
    """Means over the held-out pairs of all ranks: the loss, the share of pairs whose margin is positive, and the
    margin between the rewards, which are beta * (log p - log p of the reference)."""

    loss: float
    accuracy: float
    reward_margin: float
    pairs: int

    def facts(self) -> dict[str, float]:
        """Return the figures that a run's events and its trackers get."""
        return asdict(self)

    def __str__(self) -> str:
        said = f"loss {self.loss:.4f}, accuracy {self.accuracy:.1%}, reward margin {self.reward_margin:+.3f}"
        return f"{said} ({self.pairs:,} pairs)"


@dataclass(frozen=True)
class Memory:
    """Bytes of torch's allocations on one rank. ``state`` by category at the step's start, ``peak_bytes`` at its worst;
    ``resident_bytes``: the whole process (RSS)."""

    state: dict[str, int]
    peak_bytes: int
    resident_bytes: int

    def categories(self) -> dict[str, int]:
        """Memory at the peak. Apart from weights and moments, allocations cannot be divided into categories
        (activations, gradients, gathered weights, logits)."""
        return self.state | {"the rest": self.peak_bytes - sum(self.state.values())}
