"""Rows of published measurements are read as the plan that they describe, or skipped with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.accuracy.fit import replaced
from bench.accuracy.rows import Measurement, habits_of, read, said
from bench.accuracy.score import groups_of, predicted_s
from shardwise.models.config import parameter_count
from shardwise.spec.devices import find_device
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Precision, Remat, Shard
from tests.bench.accuracy.published import ROW, changed


def reading(**values: str) -> Measurement:
    found = read(changed(**values))
    assert isinstance(found, Measurement), found
    return found


def test_a_row_by_hand() -> None:
    """16 GPUs, tp 2: eight data-parallel ranks; 64 sequences are 2 x 4 x 8. All logits at once: 2 x 2048 tokens."""
    row = reading()
    assert row.plan.layout == Layout(dp_shard=8, tp=2, ranks_per_node=8)
    assert row.plan.batch == Batch(2, 4, 2048, 4096)
    assert row.plan.shard == Shard("zero3") and row.plan.remat == Remat("full")
    assert row.plan.precision == Precision("bf16", "fp32", "fp32") and row.plan.optim == Optim()
    assert (row.cluster.nodes, row.cluster.devices_per_node) == (2, 8)
    assert row.cluster.device == find_device("A100-SXM-80GB")
    assert row.cluster.network_bytes_per_s == 4 * 100e9 / 8
    assert parameter_count(row.spec) == pytest.approx(6.74e9, rel=1e-3)
    assert (row.habits.era, row.guessed, row.source) == ("fsdp2", (), "a")


def test_what_is_blank_is_guessed_and_named() -> None:
    """64 sequences over eight ranks are eight each. torchtitan recomputes some, and shards everything."""
    row = reading(mbs="", ac="", zero_stage="", interconnect="")
    assert row.guessed == ("sharding", "mbs", "recompute")
    assert row.plan.batch == Batch(8, 1, 2048, 8 * 2048)
    assert row.plan.remat.mode == "selective" and row.plan.shard.strategy == "zero3"
    assert row.cluster.network_bytes_per_s == 8 * 25e9, "what the table says of a node of A100"


@pytest.mark.parametrize("named", ["fp8", "mxfp8"])
def test_products_in_8_bits(named: str) -> None:
    """What another system multiplies in 8 bits is its own to say."""
    node = {"gpu": "H100", "num_gpus": "8", "tp": "1"}  # where it waits for no network, and ranks compare no maxima
    row, plain = reading(precision=named, **node), reading(**node)
    precision = Precision("bf16", "fp32", "fp32", products="float8", scales="row")
    assert row.plan == replace(plain.plan, precision=precision)
    task, name = said(row.text, "task"), "float8" if named == "fp8" else "mxfp8"
    assert task == "pretrain" and groups_of(row) == [f"dense_{name}"] and groups_of(plain)[0] == "dense_16bit"
    slow, fast = predicted_s(plain), predicted_s(row)
    with replaced({"float8 product": 1.0, "float8 casts": 0.0}):
        assert predicted_s(row) == pytest.approx(slow, rel=1e-6), "nothing else differs"
    assert slow is not None and fast is not None and 1.1 * fast < slow


@pytest.mark.parametrize(
    ("virtual", "framework", "pipeline", "sequence"),
    [
        ("", "torchtitan", Pipeline("1f1b", 1, (8, 8, 8, 8)), True),
        ("2", "Megatron-Core", Pipeline("interleaved", 2, (4,) * 8), True),
        ("3", "Megatron-LM", Pipeline("interleaved", 3), False),
        ("", "Megatron-Core; vpp 4 per its text", Pipeline("interleaved", 4, (2,) * 16), True),
    ],
)
def test_a_pipeline(virtual: str, framework: str, pipeline: Pipeline, sequence: bool) -> None:
    """Of 32 blocks, as many a stage as come out even. ZeRO-2 reduces once too, and Megatron of 2021 had no sequence
    parallelism."""
    framework, _, notes = framework.partition("; ")
    row = reading(pp="4", vpp=virtual, framework=framework, notes=notes, zero_stage="2", gbs="64", mbs="2")
    assert row.plan.layout == Layout(dp_shard=2, pp=4, tp=2, ranks_per_node=8) and row.plan.shard == Shard("zero1")
    assert replace(row.plan.pipeline, split=()) == replace(pipeline, split=())
    assert (row.plan.pipeline.split == pipeline.split) is (virtual != "3") and sum(row.plan.pipeline.split) == 32
    assert row.plan.batch.accumulation == 16 and row.plan.sequence_parallel is sequence


def test_rows_of_tokens_on_several_ranks() -> None:
    """Of 16 GPUs two groups of four have a row each, in rings; all eight cut the weights. 2 x 2048 / 4 tokens of
    logits."""
    row = reading(cp="4")
    assert row.plan.layout == Layout(dp_shard=2, cp=4, tp=2, ranks_per_node=8) and row.plan.cp_kind == "ring"
    assert row.plan.batch == Batch(2, 16, 2048, 1024) and row.plan.shard == Shard("zero3")


@pytest.mark.parametrize(
    ("stage", "sharding", "shards", "layout"),
    [
        ("0", "", "ddp", Layout(dp_replicate=8, tp=2, ranks_per_node=8)),
        ("1", "ZeRO-1 over 4 ranks", "zero1", Layout(dp_replicate=2, dp_shard=4, tp=2, ranks_per_node=8)),
        ("", "SHARD_GRAD_OP", "zero2", Layout(dp_shard=8, tp=2, ranks_per_node=8)),
        ("", "NO_SHARD(ddp)", "ddp", Layout(dp_replicate=8, tp=2, ranks_per_node=8)),
        ("", "DDP (distributed optimizer = ZeRO-1 default)", "zero1", Layout(dp_shard=8, tp=2, ranks_per_node=8)),
    ],
)
def test_how_weights_are_sharded(stage: str, sharding: str, shards: str, layout: Layout) -> None:
    row = reading(zero_stage=stage, sharding=sharding)
    assert (row.plan.shard.strategy, row.plan.layout) == (shards, layout)


@pytest.mark.parametrize(
    ("links", "bytes_per_s"),
    [
        ("1600 Gbps/node RoCE", 200e9),
        ("8x200Gb/s HDR IB per node", 200e9),
        ("NVLink 4 NICs OmniPath 100Gb/s each per node", 50e9),
        ("NVLink; 400 Gb/s RDMA per GPU", 8 * 50e9),
        ("2 Tb/s RoCE per node", 250e9),
    ],
)
def test_links_between_nodes(links: str, bytes_per_s: float) -> None:
    assert reading(interconnect=links).cluster.network_bytes_per_s == bytes_per_s


def test_gpus_by_their_other_names() -> None:
    """An A800 is an A100 with slower links; the memory tells which A100; PCIe has no NVLink."""
    assert reading(gpu="A100", gpu_mem_gb="40").cluster.device.name == "A100-SXM-40GB"
    assert reading(gpu="A100-80GB", gpu_mem_gb="", interconnect="PCIe").cluster.device.name == "A100-PCIe-80GB"
    export = reading(gpu="A800", gpu_mem_gb="80").cluster
    assert (export.device.memory_bytes, export.link_bytes_per_s) == (find_device("A100").memory_bytes, 200e9)


def test_a_block_without_a_gate_has_as_many_weights() -> None:
    """GPT-2's 4 h = 16384, two matrices, are 10944 = 171 x 64 wide with three: 0.2 % more."""
    row = reading(mlp_gated="0", ffn="16384", model="GPT", params_b="6.7", tp="1")
    assert row.spec.intermediate_size == 10944
    assert 3 * row.spec.intermediate_size == pytest.approx(2 * 16384, rel=3e-3)


def test_whether_embeddings_are_tied_follows_from_the_parameters() -> None:
    """A table of 128,256 x 2,048 is 0.26 billion."""
    sizes = {"layers": "16", "hidden": "2048", "kv_heads": "8", "ffn": "8192", "vocab": "128256", "head_dim": "64"}
    assert reading(**sizes, model="", params_b="1.24").spec.tie_word_embeddings
    assert not reading(**sizes, model="", params_b="1.5").spec.tie_word_embeddings


def test_fine_tuning() -> None:
    row = reading(
        task="qlora", tp="1", precision_detail="frozen base NF4; adapters fp32", notes="packed; LoRA r8 on q,k,v,o"
    )
    assert row.plan.lora == Lora(8, frozen="bf16", nf4=True) and row.plan.precision.weights == "fp32"
    moments = {"precision_detail": "pure bf16 weights, grads and Adam moments", "optimizer": "AdamW8bit"}
    pure = reading(task="full-ft", tp="1", **moments)
    assert pure.plan.precision.weights == "bf16" and pure.plan.optim.name == "adamw8bit"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pp": "64", "num_gpus": "64", "tp": "1"}, "stages than blocks"),
        ({"pp": "2", "notes": "zero bubble schedule"}, "overlaps other stages"),
        ({"ep": "3"}, "ep does not"),
        ({"precision": "nvfp4"}, "4-bit products"),
        ({"precision": "fp8", "num_experts": "8", "moe_ffn": "1024"}, "8-bit products"),
        ({"precision": "int4?"}, "an unknown precision"),
        ({"gpu": "H9000"}, "unknown GPU"),
        ({"gpu": ""}, "no GPU named"),
        ({"layers": ""}, "not told (layers)"),
        ({"layers": "thirty"}, "not told (layers)"),
        ({"layers": "1e9"}, "an impossible architecture"),
        ({"layers": "1e300"}, "not told (layers)"),
        ({"hidden": "nan"}, "not told (hidden)"),
        ({"heads": "33"}, "an impossible architecture"),
        ({"kv_heads": "5"}, "(PLAN008)"),
        ({"model": "Qwen3-30B-A3B"}, "not all sizes"),
        ({"num_experts": "8", "moe_ffn": "1024", "etp": "2"}, "tensor parallelism cuts"),
        ({"notes": "parallel blocks (different FLOPs!)"}, "another model"),
        ({"notes": "hybrid model"}, "other blocks"),
        ({"offload": "optimizer CPU"}, "offloading"),
        ({"verified": "reference"}, "a reference"),
        ({"kind": "reference"}, "a reference"),
        ({"task": "sft", "notes": "Alpaca unpacked"}, "not packed"),
        ({"task": "adapter"}, "than LoRA"),
        ({"task": "rlhf"}, "an unknown task"),
        ({"optimizer": "Muon (hybrid with Adam)"}, "than Adam"),
        ({"mbs": "", "gbs": ""}, "micro-batch nor batch"),
        ({"gbs": "8"}, "an impossible batch"),
        ({"mbs": "1000000", "gbs": ""}, "an impossible batch"),
        ({"seq_len": ""}, "sequence length not"),
        ({"num_gpus": ""}, "number of GPUs"),
        ({"tp": "", "zero_stage": ""}, "layout not told"),
        ({"num_gpus": "15"}, "the GPUs"),
    ],
)
def test_what_is_skipped_and_why(values: dict[str, str], reason: str) -> None:
    assert reason in str(read(changed(**values)))


@pytest.mark.parametrize("column", ROW)
def test_no_column_must_be_there(column: str) -> None:
    """Without it the row is read, with what is usual in its place, or skipped for a reason."""
    found = read({name: value for name, value in ROW.items() if name != column})
    assert isinstance(found, Measurement | str)


def test_software_by_the_words_of_its_name() -> None:
    a100, h100 = find_device("A100"), find_device("H100")
    assert habits_of("Megatron-LM", a100).era == "megatron21"
    assert habits_of("Megatron-LM", h100).era == "megatron23", "that of 2021 knows no H100"
    assert habits_of("HF SFTTrainer + foak-fast-kernels-liger", a100).logit_bytes == 0
    assert habits_of("something new", a100) == habits_of("", a100)
