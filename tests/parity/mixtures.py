"""Layouts of mixtures of experts that meet every pair of settings at least once: ``python -m tests.parity.mixtures``
prints them. What experts are proved beside is a field of ``Case`` and a tuple of ``AXES``."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.spec.layout import Layout, least_dp_shard
from shardwise.spec.plan import Batch, Pipeline, Plan, Remat, Shard
from tests.covering import Pair, covering, pairs
from tests.parity.cases import FP64

MIXTRAL = model_spec(
    name="tiny-mixtral",
    vocab_size=67,
    hidden_size=16,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.3,  # large, so that no gradient is lost in rounding
    num_experts=8,
    experts_per_token=2,
    expert_size=12,
)
QWEN3 = with_fields(
    MIXTRAL, name="tiny-qwen3-moe", num_hidden_layers=3, qk_norm="head", experts_per_token=3, dense_layers=(0,)
)
GPT_OSS = with_fields(
    MIXTRAL,
    name="tiny-gpt-oss",
    activation="clamped_swiglu",
    attention_bias=True,
    attention_sinks=True,
    expert_bias=True,
    router_bias=True,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
)
QWEN2 = with_fields(
    MIXTRAL,
    name="tiny-qwen2-moe",
    attention_bias=True,
    attention_output_bias=False,
    normalised_top_k=False,
    shared_expert_size=20,
    shared_expert_gate=True,
)
MODELS = {
    "Mixtral": MIXTRAL,
    "Qwen3": QWEN3,
    "Qwen3, not normalised": with_fields(QWEN3, normalised_top_k=False),
    "gpt-oss": GPT_OSS,
    "Qwen2, shared": QWEN2,
}
CP_KINDS = {"Mixtral": "ulysses", "Qwen3, not normalised": "gather"}
"""Of the others a ring."""
LENGTH, ODD_LENGTH = 16, 15
"""Of a row; without cp odd, so that ranks of tp have different numbers of tokens wherever rows are."""
AXES = (
    tuple(MODELS),
    (1, 2, 4),
    ("ddp", "zero1", "zero3", "hsdp"),
    (1, 2),
    (1, 2),
    (1, 2),
    ("none", "selective", "full"),
    (1, 2),
    (1, 2),
)
"""Of the fields of a case, in their order."""


@dataclass(frozen=True)
class Case:
    """``alike``: how many times as many ranks there are as ``ep`` asks for: so many have the same experts, or twice as
    many in a hybrid."""

    model: str
    ep: int
    strategy: str
    tp: int
    pp: int
    cp: int
    remat: str
    accumulation: int
    alike: int

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def layout(self) -> Layout | None:
        """None where it would take one rank, or more than 8, or a strategy has nothing to shard over."""
        ulysses = self.cp if CP_KINDS.get(self.model) == "ulysses" else 1
        few = Layout(pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep, ulysses=ulysses)
        shards, ddp = least_dp_shard(few), self.strategy == "ddp"
        replicas = 2 if self.strategy == "hsdp" else self.alike if ddp else 1
        found = replace(few, dp_replicate=replicas, dp_shard=shards if ddp else shards * self.alike)
        return found if 1 < found.world <= 8 and (ddp or found.fsdp > 1) else None

    @property
    def plan(self) -> Plan:
        layout = self.layout
        assert layout is not None
        length = LENGTH if self.cp > 1 else ODD_LENGTH
        plan = Plan(
            layout,
            Batch(max(1, 4 // self.accumulation // layout.dp), self.accumulation, length, loss_chunk_tokens=7),
            Shard("zero3" if self.strategy == "hsdp" else self.strategy, bucket_bytes=4096),  # type: ignore[arg-type]
            FP64,
            Remat(self.remat),  # type: ignore[arg-type]
            sequence_parallel=self.tp > 1,
            cp_kind=CP_KINDS.get(self.model, "ring"),  # type: ignore[arg-type]
        )
        split = (self.spec.num_hidden_layers - 1, 1)
        return replace(plan, pipeline=Pipeline("1f1b", 1, split)) if self.pp == 2 else plan

    @property
    def calls(self) -> int:
        """What its time grows with: ranks, and micro-batches of each."""
        assert self.layout is not None
        return self.layout.world * self.accumulation

    def pairs(self) -> set[Pair]:
        return pairs(astuple(self))


EVERY = [
    case
    for values in product(*AXES)
    if (case := Case(*values)).layout is not None and case.accumulation >= case.pp  # type: ignore[arg-type]
]
CASES = [EVERY[place] for place in covering([astuple(case) for case in EVERY], lambda place: EVERY[place].calls)]


if __name__ == "__main__":
    for case in CASES:
        print(case)
