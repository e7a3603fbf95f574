"""Layouts of context parallelism that meet every pair of settings at least once: ``python -m tests.parity.rings``
prints them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product

from shardwise.models.config import ModelSpec, RopeScaling, with_fields
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Remat, Shard
from tests.covering import Pair, covering, pairs
from tests.parity.cases import FP64
from tests.parity.dpo_ranks import SEQ_LEN as PAIRS_LEN
from tests.parity.pairwise import CAPPED, DENSE, LORA

LENGTH = 48
"""Of a row: with 8 ranks of a ring, 3 tokens in each of 16 pieces."""
MODELS = {
    "dense": DENSE,
    "capped, windowed": with_fields(CAPPED, sliding_window=7),
    "one key head": with_fields(DENSE, num_key_value_heads=1),
    "all key heads": with_fields(DENSE, num_key_value_heads=8),
    "normed heads": with_fields(DENSE, qk_norm="head", norm_placement="both", norm_plus_one=True),
    "by length": with_fields(DENSE, rope_scaling=RopeScaling("dynamic", 2.0, original_max_position_embeddings=16)),
    "adapters": with_fields(DENSE, attention_bias=True, mlp_bias=True),
    "pairs": replace(DENSE, vocab_size=301),
}
KINDS = ("ring", "ulysses", "nested", "gather")
STRATEGIES = ("ddp", "zero1", "zero3", "hsdp")


@dataclass(frozen=True)
class Case:
    kind: str
    model: str
    cp: int
    strategy: str
    tp: int
    pp: int
    remat: str
    accumulation: int

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def layout(self) -> Layout | None:
        """None where it would take more than 8 ranks, or heads cannot be shared."""
        exchanging = {"ulysses": self.cp, "nested": 2}.get(self.kind, 1)
        if self.kind == "nested" and self.cp == 2:
            return None
        replicas = 2 if self.strategy == "hsdp" else 1
        shards = 2 if self.strategy == "zero3" and self.cp * self.tp * self.pp <= 4 else 1
        found = Layout(replicas, shards, self.pp, self.cp, self.tp, ulysses=exchanging)
        return (
            found if found.world <= 8 and self.spec.attention.num_attention_heads // self.tp % exchanging == 0 else None
        )

    @property
    def plan(self) -> Plan:
        layout = self.layout
        assert layout is not None
        dpo = self.model == "pairs"
        rows = max(1, 4 // self.accumulation // layout.dp)
        plan = Plan(
            layout,
            Batch(rows, self.accumulation, PAIRS_LEN if dpo else LENGTH, loss_chunk_tokens=7),
            Shard("zero3" if self.strategy == "hsdp" else self.strategy, bucket_bytes=4096),  # type: ignore[arg-type]
            FP64,
            Remat(self.remat),  # type: ignore[arg-type]
            sequence_parallel=self.tp > 1,
            cp_kind=self.kind,  # type: ignore[arg-type]
            lora=LORA.get(self.model),
            loss="dpo" if dpo else "cross_entropy",
        )
        return replace(plan, pipeline=Pipeline("1f1b", 1, (1, 1))) if self.pp == 2 else plan

    @property
    def calls(self) -> int:
        """What its time grows with: ranks, and micro-batches of each."""
        assert self.layout is not None
        return self.layout.world * self.accumulation

    def pairs(self) -> set[Pair]:
        return pairs(astuple(self))


EVERY = [
    case
    for values in product(KINDS, MODELS, (2, 4, 8), STRATEGIES, (1, 2), (1, 2), ("none", "selective", "full"), (1, 2))
    if (case := Case(*values)).layout is not None and case.accumulation >= case.pp  # type: ignore[arg-type]
]
CASES = [EVERY[place] for place in covering([astuple(case) for case in EVERY], lambda place: EVERY[place].calls)]


if __name__ == "__main__":
    for case in CASES:
        print(case)
