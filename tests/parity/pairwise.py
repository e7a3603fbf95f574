"""Layouts of tensor parallelism that meet every pair of settings at least once: ``python -m tests.parity.pairwise``
prints them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Remat, Shard
from tests.covering import Pair, covering, pairs
from tests.parity.cases import FP64, ROWS, SEQ_LEN
from tests.parity.dpo_ranks import SEQ_LEN as PAIRS_LEN

DENSE = model_spec("tiny-tp", 67, 16, 32, 2, 8, 2, 4, initializer_range=0.3)
"""67 ids, which no number of ranks divides; two key heads, fewer than 4 and 8 ranks."""
CAPPED = with_fields(
    DENSE,
    attention_soft_cap=2.0,
    final_soft_cap=3.0,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_word_embeddings=True),
    "one key head": with_fields(DENSE, num_key_value_heads=1),
    "all key heads": with_fields(DENSE, num_key_value_heads=8, vocab_size=64),
    "biased": with_fields(DENSE, attention_bias=True, mlp_bias=True),
    "capped, windowed": CAPPED,
    "normed heads": with_fields(DENSE, qk_norm="head", norm_placement="both", norm_plus_one=True),
    "norms over projections": with_fields(DENSE, num_key_value_heads=8, qk_norm="projection", norm_placement="after"),
    "adapters": with_fields(DENSE, attention_bias=True, mlp_bias=True),
    "magnitudes": DENSE,
    "four bits": with_fields(DENSE, hidden_size=64, intermediate_size=512, head_dim=64, initializer_range=0.1),
    "pairs": replace(DENSE, vocab_size=301),
}
ADAPTERS = Lora(4, 8.0, frozen="fp64")
LORA = {
    "adapters": replace(ADAPTERS, rslora=True),
    "magnitudes": replace(ADAPTERS, dora=True),
    "four bits": replace(ADAPTERS, nf4=True),
}


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    strategy: str
    sequence: bool
    remat: str
    accumulation: int

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def layout(self) -> Layout | None:
        """None where it would take more than 8 ranks, or a strategy has nothing to shard over."""
        if self.tp == 8:
            return Layout(tp=8) if self.strategy == "ddp" else None
        if self.strategy == "hsdp":
            return Layout(dp_replicate=2, dp_shard=2, tp=2) if self.tp == 2 else None
        return Layout(dp_replicate=2, tp=self.tp) if self.strategy == "ddp" else Layout(dp_shard=2, tp=self.tp)

    @property
    def plan(self) -> Plan:
        layout = self.layout
        assert layout is not None
        dpo = self.model == "pairs"
        length, chunk = (PAIRS_LEN, 23) if dpo else (SEQ_LEN, 7)
        batch = Batch(ROWS // self.accumulation // layout.dp, self.accumulation, length, loss_chunk_tokens=chunk)
        shard = Shard("zero3" if self.strategy == "hsdp" else self.strategy, bucket_bytes=4096)  # type: ignore[arg-type]
        plan = Plan(layout, batch, shard, FP64, Remat(self.remat), sequence_parallel=self.sequence)  # type: ignore[arg-type]
        return replace(plan, lora=LORA.get(self.model), loss="dpo" if dpo else "cross_entropy")

    @property
    def calls(self) -> int:
        """What its time grows with: ranks, and micro-batches of each."""
        assert self.layout is not None
        return self.layout.world * self.accumulation

    def pairs(self) -> set[Pair]:
        return pairs(astuple(self))


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
EVERY = [
    case
    for values in product(MODELS, (2, 4, 8), STRATEGIES, (False, True), ("none", "selective", "full"), (1, 4))
    if (case := Case(*values)).layout is not None  # type: ignore[arg-type]
]


CASES = [EVERY[place] for place in covering([astuple(case) for case in EVERY], lambda place: EVERY[place].calls)]


if __name__ == "__main__":
    for case in CASES:
        print(case)
