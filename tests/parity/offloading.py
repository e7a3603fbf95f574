"""Plans whose optimizer is on the host or on NVMe, in layouts that meet every pair of settings at least once:
``python -m tests.parity.offloading`` prints them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.models.config import ModelSpec, with_fields
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.offload.legal import leave_each
from tests.covering import pairwise
from tests.parity.cases import SEQ_LEN
from tests.parity.mixtures import MODELS as MIXTURES
from tests.parity.pairwise import DENSE

LAYOUTS = {
    "one rank": (Layout(), "ddp"),
    "ddp": (Layout(dp_replicate=2), "ddp"),
    "zero1": (Layout(dp_shard=2), "zero1"),
    "zero2": (Layout(dp_shard=2), "zero2"),
    "zero3": (Layout(dp_shard=2), "zero3"),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2), "zero3"),
    "tp": (Layout(dp_shard=2, tp=2), "zero3"),
    "cp": (Layout(cp=2), "zero3"),
    "pp": (Layout(dp_shard=2, pp=2), "zero1"),
    "ep": (Layout(dp_shard=2, ep=2), "zero3"),
}
MODELS: dict[str, ModelSpec] = {
    "tied": replace(DENSE, tie_word_embeddings=True),
    "adapters": with_fields(DENSE, hidden_size=64, intermediate_size=512, head_dim=64, initializer_range=0.1),
    "experts": next(iter(MIXTURES.values())),
}
LORA = {"adapters": Lora(4, 8.0, nf4=True)}
PRECISIONS = {"fp32": Precision(), "bf16": Precision("bf16"), "fp16": Precision("fp16")}
OPTIMIZERS = {"adamw": Optim(), "adamw8bit": Optim("adamw8bit"), "moments in bf16": Optim(moments="bf16")}
TIERS = ("host", "nvme")
ROWS = 8


@dataclass(frozen=True)
class Case:
    layout: str
    model: str
    precision: str
    optimizer: str
    accumulation: int
    tier: str
    sums: str = "device"
    fraction: float = 1.0

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def possible(self) -> bool:
        if self.tier == "nvme" and (self.optimizer != "adamw" or self.fraction < 1):
            return False
        if self.sums == "host" and (self.accumulation == 1 or not leave_each(self.plan)):
            return False
        if self.layout == "pp" and (self.accumulation == 1 or self.model != "tied"):
            return False
        if self.optimizer == "moments in bf16" and self.layout in ("tp", "cp", "pp", "hsdp"):
            return False  # by element, as others
        return (self.layout == "ep") == (self.model == "experts")

    @property
    def plan(self) -> Plan:
        layout, strategy = LAYOUTS[self.layout]
        batch = Batch(ROWS // self.accumulation // layout.dp, self.accumulation, SEQ_LEN, loss_chunk_tokens=7)
        return Plan(
            layout,
            batch,
            Shard(strategy, bucket_bytes=4096),  # type: ignore[arg-type]
            PRECISIONS[self.precision],
            sequence_parallel=layout.tp > 1,
            optim=OPTIMIZERS[self.optimizer],
            offload=Offload(self.tier, sums=self.sums, optimizer_fraction=self.fraction),  # type: ignore[arg-type]
            lora=LORA.get(self.model),
            pipeline=Pipeline("1f1b", 1, (1, 1)) if layout.pp > 1 else Pipeline(),
        )


FRACTIONS = (1.0, 0.5)
"""Of two blocks the second."""
AXES = LAYOUTS, MODELS, PRECISIONS, OPTIMIZERS, (1, 2), TIERS, ("device", "host"), FRACTIONS
"""Of the fields of a case, in their order."""
CASES = [Case(*values) for values in pairwise(*AXES, legal=lambda *values: Case(*values).possible)]


def _plan(layout: Layout, **more: object) -> Plan:
    batch = Batch(ROWS // 2 // layout.dp, 2, SEQ_LEN, loss_chunk_tokens=7)
    base = Plan(layout, batch, Shard("ddp", bucket_bytes=4096), Precision("bf16"), offload=Offload("host"))
    return replace(base, **more)  # type: ignore[arg-type]


BIASED = with_fields(DENSE, attention_bias=True, mlp_bias=True)
SHARDED = _plan(Layout(dp_shard=2), shard=Shard("zero3"))
NARROW: dict[str, tuple[ModelSpec, Plan]] = {
    "one rank": (BIASED, _plan(Layout())),
    "recomputed, summed on the host": (
        with_fields(DENSE, qk_norm="head", norm_plus_one=True),
        _plan(Layout(), remat=Remat("full"), offload=Offload("host", sums="host")),
    ),
    "on NVMe, some saved": (DENSE, _plan(Layout(), remat=Remat("selective"), offload=Offload("nvme"))),
    "replicas in fp16": (BIASED, _plan(Layout(dp_replicate=2), precision=Precision("fp16"))),
    "tp": (BIASED, _plan(Layout(tp=2), sequence_parallel=True)),
    "cp": (DENSE, _plan(Layout(cp=2))),
    "experts": (MODELS["experts"], _plan(Layout(dp_replicate=2))),
    "experts of ranks": (MODELS["experts"], _plan(Layout(dp_shard=2, ep=2))),
    "halves of a backward": (DENSE, _plan(Layout(pp=2), pipeline=Pipeline("interleaved_zb", 1, (1, 1)))),
    "some frozen": (DENSE, _plan(Layout(), frozen=("layers.0.attention.*", "embed.*"))),
    "sharded, some frozen": (DENSE, replace(SHARDED, frozen=("layers.*.mlp.*", "*norm*"))),
    "sharded, biased, gathered once": (BIASED, replace(SHARDED, shard=Shard("zero2"))),
    "shards of unlike sizes": (BIASED, replace(SHARDED, layout=Layout(dp_shard=3), batch=Batch(1, 2, SEQ_LEN, 7))),
    "sharded, reduced in bf16": (DENSE, replace(SHARDED, precision=Precision("bf16", reduce="bf16"))),
}
"""What the cases above do not have of weights that are narrow on the device."""


if __name__ == "__main__":
    print(*CASES, len(CASES), sep="\n")
