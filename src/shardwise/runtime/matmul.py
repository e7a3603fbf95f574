"""A one-off probe of fp32 matrix products on a CPU: some (AMD) run twice as fast through oneDNN at fp32 accuracy,
others (AMX) would really compute in bf16, and on some (older Intel) it takes a quarter longer. Errors and times decide,
not the name of the processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.runtime.widened import widen_bf16
from shardwise.runtime.world import from_first
from shardwise.spec.plan import Matmul

ROWS, WIDE_IN, WIDE_OUT = 256, 512, 512
WORST_ERROR_RATIO = 8.0
"""fp32 through another order of summation differs by 2 to 3; bf16 products by more than 1,000."""
LEAST_GAIN = 1.3
"""Between processors that gain nothing (0.9 to 1.1 were seen) and those that gain (2, AMD's Zen 5): a disturbed clock
does not reach it, for two runs of one recipe on one machine must not differ."""
ROUNDS = 8


@dataclass(frozen=True)
class Probe:
    """Errors are the largest absolute ones against fp64; ``gain`` is how many times faster "medium" was."""

    error_highest: float
    error_medium: float
    gain: float

    @property
    def choice(self) -> Matmul:
        exact = self.error_medium <= WORST_ERROR_RATIO * self.error_highest
        return "medium" if exact and self.gain >= LEAST_GAIN else "highest"

    def __str__(self) -> str:
        errors = f"error {self.error_medium:.0e} against {self.error_highest:.0e}"
        return f"{self.gain:.2f} times as fast, {errors}, {ROWS} x {WIDE_IN} x {WIDE_OUT} against fp64"


def probe() -> Probe:
    """The three products of a linear layer's forward and backward under "highest" and "medium". Takes some 0.1 s;
    restores the setting."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDE_IN), (WIDE_OUT, WIDE_IN), (ROWS, WIDE_OUT))
    )
    pairs = ((x, weight.mT), (grad, weight), (grad.mT, x))
    truth = [left.double() @ right.double() for left, right in pairs]
    before = torch.get_float32_matmul_precision()
    errors: dict[str, float] = {}
    taken: dict[str, list[list[float]]] = {"highest": [], "medium": []}
    try:
        for _ in range(ROUNDS):  # in turn, the best of each, in processor time: other programs disturb neither
            for setting, rounds in taken.items():
                torch.set_float32_matmul_precision(setting)
                if not rounds:
                    found = zip(pairs, truth, strict=True)
                    errors[setting] = max(float((left @ right - exact).abs().max()) for (left, right), exact in found)
                rounds.append([product_s(*pair, time.process_time) for pair in pairs])
    finally:
        torch.set_float32_matmul_precision(before)
    highest, medium = (sum(map(min, zip(*rounds, strict=True))) for rounds in taken.values())
    return Probe(errors["highest"], errors["medium"], highest / medium)


def settle(planned: Matmul, automatic: bool, remembered: Matmul | None = None) -> tuple[Matmul, str]:
    """Set how products are computed on every rank alike and say why. With ``automatic`` on a CPU rank 0's probe
    decides, unless an earlier start of the same run decided already (``remembered``): a resumed run must not differ."""
    choice, why = planned, "the plan"
    if remembered is not None:
        choice, why = remembered, "as when the run was started"
    elif automatic:
        measured = from_first(probe)
        choice, why = measured.choice, f"probed: medium is {measured}"
    torch.set_float32_matmul_precision("highest" if choice == "widened" else choice)
    widen_bf16(choice == "widened")
    return choice, why


def product_s(left: torch.Tensor, right: torch.Tensor, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that one product takes."""
    start = clock()
    left @ right
    return clock() - start
