"""A one-off probe of fp32 matrix products on a CPU: some (AMD) run twice as fast through oneDNN at fp32 accuracy,
others (AMX) would really compute in bf16. The error decides, not the name of the processor; the speed is only told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.runtime.world import from_first

Matmul = Literal["highest", "high", "medium"]
SIZE = 512
WORST_ERROR_RATIO = 8.0
"""fp32 through another order of summation differs by 2 to 3; bf16 products by more than 1,000."""
ROUNDS = 8


@dataclass(frozen=True)
class Probe:
    """Errors are the largest absolute ones against fp64; ``gain`` is how many times faster "medium" was."""

    error_highest: float
    error_medium: float
    gain: float

    @property
    def choice(self) -> Matmul:
        """By accuracy alone: two runs of one recipe on one machine must not differ because a clock was disturbed."""
        return "medium" if self.error_medium <= WORST_ERROR_RATIO * self.error_highest else "highest"

    def __str__(self) -> str:
        errors = f"error {self.error_medium:.0e} against {self.error_highest:.0e}"
        return f"{self.gain:.2f} times as fast, {errors}, {SIZE}^3 against fp64"


def probe() -> Probe:
    """Multiply two fixed matrices under "highest" and "medium". Takes some 20 ms; restores the setting."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    truth = left.double() @ right.double()
    before = torch.get_float32_matmul_precision()
    errors: dict[str, float] = {}
    seconds = {"highest": float("inf"), "medium": float("inf")}
    try:
        for _ in range(ROUNDS):  # in turn, and the best of each, so that other programs disturb both alike
            for setting in seconds:
                torch.set_float32_matmul_precision(setting)
                errors[setting] = float((left @ right - truth).abs().max())
                seconds[setting] = min(seconds[setting], product_s(left, right))
    finally:
        torch.set_float32_matmul_precision(before)
    return Probe(errors["highest"], errors["medium"], seconds["highest"] / seconds["medium"])


def settle(planned: Matmul, automatic: bool, remembered: Matmul | None = None) -> tuple[Matmul, str]:
    """Set the precision of fp32 products on every rank alike and say why. With ``automatic`` on a CPU rank 0's probe
    decides, unless an earlier start of the same run decided already (``remembered``): a resumed run must not differ."""
    choice, why = planned, "the plan"
    if remembered is not None:
        choice, why = remembered, "as when the run was started"
    elif automatic:
        measured = from_first(probe)
        choice, why = measured.choice, f"probed: medium is {measured}"
    torch.set_float32_matmul_precision(choice)
    return choice, why


def product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds that one product takes."""
    start = time.perf_counter()
    left @ right
    return time.perf_counter() - start
