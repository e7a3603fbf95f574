"""Plans in which weights wait on the host or on NVMe, in layouts that meet every pair of settings at least once:
``python -m tests.parity.fetching`` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.models.config import ModelSpec
from shardwise.spec.plan import Lora, Offload, Pipeline, Plan, Remat
from tests.covering import pairwise
from tests.parity.offloading import LAYOUTS, MODELS, PRECISIONS
from tests.parity.offloading import Case as Offloaded

PLACES = {name: each for name, each in LAYOUTS.items() if name not in ("zero1", "zero2")}
DENSE = replace(MODELS["adapters"], num_hidden_layers=4)
EXPERTS = replace(MODELS["experts"], num_hidden_layers=4)
UNEVEN = replace(DENSE, hidden_size=66, intermediate_size=509)  # of which two ranks hold different numbers of rows
FROZEN: dict[str, tuple[ModelSpec, Lora | None, tuple[str, ...]]] = {
    "adapters over 4 bits": (DENSE, Lora(4, 8.0, nf4=True), ()),
    "uneven": (UNEVEN, Lora(4, 8.0), ()),
    "some weights": (DENSE, None, ("embed.*", "layers.0.*", "layers.2.*", "layers.*.norm*")),
    "experts": (EXPERTS, None, ("layers.*.experts.*",)),
    "nothing": (DENSE, None, ()),
}
KEPT = {"none": Remat(), "selective": Remat("selective"), "full": Remat("full")}
"""Of the last, inputs of blocks wait too, where they may."""


@dataclass(frozen=True)
class Case:
    layout: str
    frozen: str
    precision: str
    remat: str
    accumulation: int
    optimizer: str
    weights: str

    @property
    def spec(self) -> ModelSpec:
        return EXPERTS if self.layout == "ep" else FROZEN[self.frozen][0]

    @property
    def possible(self) -> bool:
        if (self.optimizer, self.weights) == ("host", "nvme"):
            return False  # refused
        if self.frozen == "uneven" and self.layout not in ("one rank", "zero3"):
            return False
        if self.layout == "pp" and self.accumulation == 1:
            return False
        if self.frozen == "nothing":
            return self.optimizer != "none"
        return (self.layout == "ep") == (self.frozen == "experts")

    @property
    def plan(self) -> Plan:
        like = Offloaded(self.layout, "tied", self.precision, "adamw", self.accumulation, "host").plan
        _, lora, frozen = FROZEN[self.frozen]
        activations = "host" if self.remat == "full" and self.layout != "pp" else "none"
        offload = Offload(self.optimizer, activations, self.weights)  # type: ignore[arg-type]
        plan = replace(like, remat=KEPT[self.remat], lora=lora, frozen=frozen, offload=offload)
        if self.layout != "pp":
            return plan
        return replace(plan, shard=replace(plan.shard, strategy="zero3"), pipeline=Pipeline("1f1b", 1, (2, 2)))


AXES = PLACES, FROZEN, PRECISIONS, KEPT, (2, 1), ("none", "host", "nvme"), ("host", "nvme")
"""Of the fields of a case, in their order."""
CASES = [Case(*values) for values in pairwise(*AXES, legal=lambda *values: Case(*values).possible)]


if __name__ == "__main__":
    print(*CASES, len(CASES), sep="\n")
