"""Plans in which the inputs of blocks wait on the host or on NVMe, in layouts that meet every pair of settings at least
once: ``python -m tests.parity.waiting`` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.models.config import ModelSpec
from shardwise.spec.plan import Offload, Plan, Remat
from tests.covering import pairwise
from tests.parity.offloading import LAYOUTS, PRECISIONS
from tests.parity.offloading import MODELS as TWO_BLOCKS
from tests.parity.offloading import Case as Offloaded

PLACES = {name: each for name, each in LAYOUTS.items() if name != "pp"}
MODELS: dict[str, ModelSpec] = {name: replace(spec, num_hidden_layers=4) for name, spec in TWO_BLOCKS.items()}
EVERY = (1, 2)


@dataclass(frozen=True)
class Case:
    layout: str
    model: str
    precision: str
    every: int
    accumulation: int
    optimizer: str
    tier: str

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def possible(self) -> bool:
        return (self.layout == "ep") == (self.model == "experts")

    @property
    def plan(self) -> Plan:
        like = Offloaded(self.layout, self.model, self.precision, "adamw", self.accumulation, "host").plan
        offload = Offload(self.optimizer, self.tier)  # type: ignore[arg-type]
        return replace(like, remat=Remat("full", self.every), offload=offload)


AXES = PLACES, MODELS, PRECISIONS, EVERY, (1, 2), ("none", "host"), ("host", "nvme")
"""Of the fields of a case, in their order."""
CASES = [Case(*values) for values in pairwise(*AXES, legal=lambda *values: Case(*values).possible)]


if __name__ == "__main__":
    print(*CASES, len(CASES), sep="\n")
