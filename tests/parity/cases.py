"""The models and plans whose parity is proved."""

from __future__ import annotations

from itertools import product

from shardwise.models.config import RopeScaling, model_spec, with_fields
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard

UNTIED = model_spec(
    name="tiny",
    vocab_size=67,  # a prime, and sizes that 2 and 4 do not divide: every shard is padded somewhere
    hidden_size=20,
    intermediate_size=27,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    initializer_range=0.3,  # large, so that no gradient is lost in rounding
)
TIED = model_spec(
    name="tiny-tied",
    vocab_size=66,
    hidden_size=16,
    intermediate_size=30,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=4,
    tie_word_embeddings=True,
    attention_bias=True,
    mlp_bias=True,
    initializer_range=0.3,
    rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 16),
)

GEMMA = model_spec(
    name="tiny-gemma",
    vocab_size=66,
    hidden_size=16,
    intermediate_size=30,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    tie_word_embeddings=True,
    initializer_range=0.3,
    activation="gelu_tanh",
    norm_placement="both",
    norm_plus_one=True,
    qk_norm="head",
    attention_scale=0.6,
    attention_soft_cap=2.0,
    final_soft_cap=3.0,
    embedding_multiplier=4.0,
    sliding_window=5,
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    local_rope_theta=10.0,
    rope_scaling=RopeScaling("linear", 8.0),
)
FLASH = with_fields(UNTIED, name="tiny-flash", head_dim=16)
"""With heads that the flash kernel of GPUs serves, of which UNTIED's are too small."""
QWEN = with_fields(UNTIED, name="tiny-qwen", qk_norm="head", attention_bias=True, attention_output_bias=False)

FP64 = Precision(compute="fp64", weights="fp64", reduce="fp64")
FP32 = Precision()
BF16 = Precision(compute="bf16")

NO_REMAT = Remat()
ROWS, SEQ_LEN = 16, 12
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def layout(strategy: str, world: int) -> Layout:
    """``hsdp`` has two replicas."""
    if strategy == "ddp":
        return Layout(dp_replicate=world)
    return Layout(dp_replicate=2, dp_shard=world // 2) if strategy == "hsdp" else Layout(dp_shard=world)


def plan(strategy: str, world: int, precision: Precision, remat: Remat = NO_REMAT, accumulation: int = 1) -> Plan:
    """Sixteen rows a step however they are split; the loss takes its tokens in several chunks, the last one smaller."""
    micro_batch_size = ROWS // accumulation // layout(strategy, world).dp
    return Plan(
        layout=layout(strategy, world),
        batch=Batch(micro_batch_size, accumulation, SEQ_LEN, loss_chunk_tokens=7),
        shard=Shard("zero3" if strategy == "hsdp" else strategy, bucket_bytes=4096),  # type: ignore[arg-type]
        precision=precision,
        remat=remat,
    )


def grid(strategy: str, world: int, precision: Precision) -> list[Plan]:
    """Every way of recomputing with and without accumulation."""
    modes = (Remat("none"), Remat("selective"), Remat("full"))
    return [plan(strategy, world, precision, remat, m) for remat, m in product(modes, (1, 4))]
