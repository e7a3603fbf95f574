"""Plans in which the inputs of blocks wait on the host or on NVMe, in layouts that meet every pair of settings at least
once: ``python -m tests.parity.waiting`` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.models.config import ModelSpec
from shardwise.spec.plan import Offload, Pipeline, Plan, Remat
from tests.covering import pairwise
from tests.parity.offloading import LAYOUTS, MODELS, PRECISIONS
from tests.parity.offloading import Case as Offloaded

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
        return replace(MODELS[self.model], num_hidden_layers=8 if self.layout == "pp" else 4)

    @property
    def possible(self) -> bool:
        if self.layout == "pp" and (self.accumulation == 1 or self.model != "tied"):
            return False
        return (self.layout == "ep") == (self.model == "experts")

    @property
    def plan(self) -> Plan:
        like = Offloaded(self.layout, self.model, self.precision, "adamw", self.accumulation, "host").plan
        offload = Offload(self.optimizer, self.tier)  # type: ignore[arg-type]
        if self.layout == "pp":
            like = replace(like, pipeline=Pipeline("1f1b", 1, (3, 5)))
        return replace(like, remat=Remat("full", self.every), offload=offload)


AXES = LAYOUTS, MODELS, PRECISIONS, EVERY, (1, 2), ("none", "host"), ("host", "nvme")
"""Of the fields of a case, in their order."""
CASES = [Case(*values) for values in pairwise(*AXES, legal=lambda *values: Case(*values).possible)]


if __name__ == "__main__":
    print(*CASES, len(CASES), sep="\n")
