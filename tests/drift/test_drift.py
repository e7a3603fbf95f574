"""Every admissible subset of techniques: what it sends, holds and saves in a fake world is what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec, model_spec
from shardwise.planner.price import along_pipeline, price
from shardwise.prove.drift import drift
from shardwise.prove.fake_run import measure
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Offload, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.events import EventLog
from shardwise.techniques.shard.paper import Gathers
from tests.covering import pairwise

# Sizes that 8 and 512 do not divide, so that padding is at work.
SPEC = model_spec("drift", 600, 48, 100, 2, 6, 2, 8)
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "hsdp-zero1", "hsdp-zero2", "hsdp-zero3")
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision("bf16"),
    "bf16, reduced in bf16": Precision("bf16", reduce="bf16"),
    "bf16 weights": Precision("bf16", "bf16"),
}
REMATS = {"none": Remat(), "selective": Remat("selective"), "full": Remat("full"), "every 2": Remat("full", 2)}


def layout(sharding: str, world: int) -> Layout:
    if sharding == "ddp":
        return Layout(dp_replicate=world)
    if sharding.startswith("hsdp"):
        return Layout(dp_replicate=2, dp_shard=world // 2)
    return Layout(dp_shard=world)


def check(plan: Plan, spec: ModelSpec = SPEC, ranks: tuple[int, ...] = (0,)) -> None:
    for rank in ranks:
        found = drift(spec, plan, rank)
        assert not found.differences(), f"rank {rank} of {plan}"


def plan_of(sharding: str, world: int, **settings: object) -> Plan:
    strategy = sharding.removeprefix("hsdp-")
    plan = Plan(layout(sharding, world), Batch(2, 1, 32, 64), Shard(strategy, bucket_bytes=100_000))  # type: ignore[arg-type]
    return replace(plan, **settings)  # type: ignore[arg-type]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("sharding", "precision", "remat", "accumulation"), pairwise(SHARDINGS, PRECISIONS, REMATS, (1, 2))
)
def test_every_subset_of_techniques(sharding: str, precision: str, remat: str, accumulation: int) -> None:
    check(subset(sharding, precision, remat, accumulation), ranks=(7,))


@pytest.mark.matrix(7)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_fake_tensors_show_what_real_ones_show(sharding: str) -> None:
    """The peak too; large models are measured on fake tensors alone."""
    turn = SHARDINGS.index(sharding)
    plan = subset(sharding, list(PRECISIONS)[turn % 4], list(REMATS)[(turn + 1) % 4], 2)
    assert measure(SPEC, plan, 7, fake=True) == measure(SPEC, plan, 7, fake=False)


@pytest.mark.big
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_subset_with_and_without_accumulation(sharding: str, precision: str, remat: str) -> None:
    for accumulation in (1, 3):
        check(subset(sharding, precision, remat, accumulation), ranks=(7,))


def subset(sharding: str, precision: str, remat: str, accumulation: int) -> Plan:
    batch = Batch(2, accumulation, 32, 64)
    return plan_of(sharding, 8, batch=batch, precision=PRECISIONS[precision], remat=REMATS[remat])


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("sharding", "world", "rank"), pairwise(SHARDINGS, (4, 8, 512), ("first", "middle", "last")))
def test_first_middle_and_last_rank(sharding: str, world: int, rank: str) -> None:
    plan = plan_of(sharding, world, batch=Batch(2, 2, 32, 64), precision=PRECISIONS["bf16"], remat=REMATS["full"])
    check(plan, ranks=({"first": 0, "middle": world // 2, "last": world - 1}[rank],))


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("sharding", "precision", "accumulation"), pairwise(("ddp", "zero1", "zero3", "hsdp-zero2"), PRECISIONS, (1, 3))
)
def test_tied_embeddings(sharding: str, precision: str, accumulation: int) -> None:
    plan = plan_of(sharding, 8, batch=Batch(2, accumulation, 32, 40), precision=PRECISIONS[precision])
    check(plan, replace(SPEC, tie_word_embeddings=True))


@pytest.mark.parametrize("k", [2, 4])
def test_reshard_to_part_of_the_ranks(k: int) -> None:
    for accumulation in (1, 3):
        shard = Shard("zero3", k)
        check(plan_of("zero3", 8, shard=shard, batch=Batch(2, accumulation, 32, 64), precision=PRECISIONS["bf16"]))


def test_no_reshard_after_forward() -> None:
    check(plan_of("zero3", 8, shard=Shard("zero3", False), batch=Batch(2, 3, 32, 64)))


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("ahead", "kind", "remat", "accumulation"),
    pairwise((0, 2, 5, 40), ("even", "tied", "pieces", "norms apart"), REMATS, (1, 3)),
)
def test_units_gathered_ahead_in_backward(ahead: int, kind: str, remat: str, accumulation: int) -> None:
    plan = plan_of("hsdp-zero3", 8, batch=Batch(2, accumulation, 32, 64), precision=PRECISIONS["bf16"])
    spec = model_spec("deep", 600, 48, 100, 12, 6, 2, 8, tie_word_embeddings=kind == "tied")
    if kind == "norms apart":
        plan = replace(plan, precision=Precision("bf16", modules=PATTERNS["norms"]))  # type: ignore[arg-type]
    shard = Shard("zero3", 2 if kind == "pieces" else True, ahead)
    check(replace(plan, shard=shard, remat=REMATS[remat]), spec)


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("sharding", "precision", "remat", "accumulation", "tied"),
    pairwise(("zero3", "hsdp-zero3"), PRECISIONS, REMATS, (1, 2, 3), (False, True)),
)
def test_gradients_reduced_after_the_last_micro_batch(
    sharding: str, precision: str, remat: str, accumulation: int, tied: bool
) -> None:
    plan = replace(subset(sharding, precision, remat, accumulation), shard=Shard("zero3", sync_each_batch=False))
    check(plan, replace(SPEC, tie_word_embeddings=tied), ranks=(7,))


def test_what_is_not_synchronised_is_sent_once_and_kept_whole() -> None:
    """By hand: a reduction a unit, of four units, instead of three; all numbers, padded to eighths, in fp32."""
    plan = plan_of("zero3", 8, batch=Batch(2, 3, 32, 64), precision=PRECISIONS["bf16"])
    each, once = (drift(SPEC, replace(plan, shard=Shard("zero3", sync_each_batch=sync))) for sync in (True, False))
    sums = [
        {key[2]: calls for key, calls in found.measured.sent.items() if key[1] == "reduce_scatter"}
        for found in (each, once)
    ]
    assert sums[0].keys() == sums[1].keys() and sum(sums[1].values()) == 4
    assert all(sums[0][size] == 3 * calls for size, calls in sums[1].items())
    assert each.measured.state == once.measured.state
    # Rows of 600 and 48 are eighths as they are; of 100 in gate and up four are added.
    block = 48 * 48 * 2 + 16 * 48 * 2 + 104 * 48 * 2 + 48 * 100 + 2 * 48
    whole_bytes = 4 * (2 * block + 2 * 600 * 48 + 48)
    assert sum(size * calls for size, calls in sums[1].items()) == whole_bytes


@pytest.mark.prove
@pytest.mark.parametrize("sync", [False, True])
def test_peaks_of_a_gigabyte_with_and_without_synchronised_batches(sync: bool) -> None:
    spec = model_spec("sync", 4096, 1024, 8192, 8, 8, 8, 128)
    plan = plan_of("zero3", 8, batch=Batch(1, 2, 64, 64), precision=PRECISIONS["bf16"])
    found = drift(spec, replace(plan, shard=Shard("zero3", sync_each_batch=sync)))
    assert not found.differences() and abs(found.peak_error) < 1e-3


@pytest.mark.prove
@pytest.mark.parametrize("tied", [False, True])
def test_each_unit_gathered_ahead_is_a_blocks_weights_more(tied: bool) -> None:
    """Counted by hand: the four projections of attention, the three of the MLP and two norms, in bf16."""
    spec = model_spec("ahead", 512, 1024, 8192, 8, 8, 8, 128, tie_word_embeddings=tied)
    block_bytes = 2 * (4 * 1024 * 1024 + 3 * 1024 * 8192 + 2 * 1024)
    plan = plan_of("zero3", 8, batch=Batch(1, 2, 64, 64), precision=PRECISIONS["bf16"])
    found = [drift(spec, replace(plan, shard=Shard("zero3", True, ahead))) for ahead in (1, 2, 3)]
    for one in found:
        assert not one.differences() and abs(one.peak_error) < 1e-4
    for peaks in ([one.measured.peak_bytes for one in found], [one.predicted.peak_bytes for one in found]):
        assert peaks == [peaks[0] + number * block_bytes for number in range(3)]


IN_STAGES = Plan(
    Layout(pp=2, dp_shard=4), Batch(1, 2, 64), Shard("zero3"), Precision("bf16"), pipeline=Pipeline("1f1b", 1, (4, 4))
)
SMALL_STAGES = replace(SPEC, num_hidden_layers=8)
FROM_HOST = replace(IN_STAGES, remat=Remat("full"), offload=Offload("host", weights="host"))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("plan", "ahead"),
    [(IN_STAGES, 2), (FROM_HOST, 2), (replace(FROM_HOST, layout=Layout(dp_shard=8)), 40)],
    ids=("stages", "stages, host", "host"),
)
def test_peaks_of_what_is_gathered_ahead_in_stages_and_from_the_host(plan: Plan, ahead: int) -> None:
    spec = model_spec("ahead", 512, 1024, 8192, 8, 8, 8, 128)
    found = drift(spec, replace(plan, shard=replace(plan.shard, backward_prefetch=ahead)), plan.layout.world - 1)
    assert not found.differences() and abs(found.peak_error) < 1e-6


@pytest.mark.parametrize(("plan", "ahead"), [(IN_STAGES, [3]), (FROM_HOST, [])], ids=("here", "host"))
def test_a_head_gathers_nothing_ahead_of_what_comes_later(plan: Plan, ahead: list[int]) -> None:
    """The last of four blocks, unless it is brought from the host when its own backward begins."""
    *_, sheet = along_pipeline(SMALL_STAGES, plan)
    gathers = Gathers(EventLog(), sheet, plan)
    gathers.begin_backward("head")
    assert gathers.buffers == ahead


@pytest.mark.parametrize("ahead", [1, 2])
def test_buffers_of_gathers_and_reductions_are_told_apart(ahead: int) -> None:
    """By hand, where backward is fullest: so many blocks in bf16 are gathered ahead of one whose gradients, in fp32,
    are being reduced. Ids, labels and positions of 64 tokens, 8 bytes each, are neither's."""
    spec = model_spec("ahead", 512, 1024, 8192, 5, 8, 8, 128)
    block = 4 * 1024 * 1024 + 3 * 1024 * 8192 + 2 * 1024
    plan = plan_of(
        "zero3", 8, batch=Batch(1, 2, 64, 64), precision=PRECISIONS["bf16"], shard=Shard("zero3", True, ahead)
    )
    priced = price(spec, plan, parse_cluster("8xCPU")).estimate
    assert priced.memory["gather buffers"] == ahead * 2 * block
    assert priced.memory["reduce buffers"] == 4 * block
    assert priced.memory["buffers"] == 2 * 3 * 64 * 8
    assert sum(priced.memory.values()) == priced.peak_bytes


def test_norms_apart_do_not_keep_the_next_block_from_being_gathered_ahead() -> None:
    """What a norm in fp32 gathers by itself comes with its block."""
    spec = model_spec("apart", 512, 1024, 8192, 4, 8, 8, 128)
    precision = Precision("bf16", modules=PATTERNS["norms"])  # type: ignore[arg-type]
    found = drift(spec, plan_of("zero3", 8, batch=Batch(1, 1, 64, 64), precision=precision))
    assert not found.differences() and abs(found.peak_error) < 0.02


PATTERNS = {
    "norms": (("*norm", "fp32"),),
    "one layer of each block": (("*.down", "fp32"),),
    "the first block": (("layers.0.*", "fp32"),),
    "the embedding": (("embed", "fp32"),),
    "several": (("*norm", "fp32"), ("*.q", "fp32"), ("layers.1.*", "fp32"), ("embed", "fp32")),
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("modules", "sharding", "remat"), pairwise(PATTERNS, ("ddp", "zero2", "zero3"), ("none", "full"))
)
def test_types_by_module(modules: str, sharding: str, remat: str) -> None:
    precision = Precision("bf16", modules=PATTERNS[modules])  # type: ignore[arg-type]
    check(plan_of(sharding, 8, precision=precision, remat=REMATS[remat]))


def test_one_process() -> None:
    for precision in PRECISIONS.values():
        check(plan_of("ddp", 1, precision=precision))


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_fp16_and_fp64(sharding: str) -> None:
    for precision in (Precision("fp16"), Precision("fp64", "fp64", "fp64")):
        check(plan_of(sharding, 8, precision=precision))


@pytest.mark.matrix(14)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_peak_of_a_gigabyte(sharding: str, remat: str) -> None:
    """In fp32 and bf16 by turns: every strategy and every recomputation meets both."""
    turn = SHARDINGS.index(sharding) + ["none", "selective", "full"].index(remat)
    check_peak(
        model_spec("drift-large", 32_000, 2048, 5632, 3, 16, 4, 128), sharding, remat, "bf16" if turn % 2 else "fp32"
    )


@pytest.mark.big
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_peak_of_a_gigabyte_and_eight_blocks(sharding: str, remat: str, precision: str) -> None:
    check_peak(model_spec("drift-large", 32_000, 1024, 2816, 8, 16, 4, 64), sharding, remat, precision)


def check_peak(spec: ModelSpec, sharding: str, remat: str, precision: str) -> None:
    plan = plan_of(sharding, 8, batch=Batch(4, 2, 1024, 1024), precision=PRECISIONS[precision], remat=REMATS[remat])
    plan = replace(plan, shard=Shard(plan.shard.strategy))
    found = drift(spec, plan, 0)
    assert found.measured.peak_bytes > 2**30
    assert not found.differences()
    assert abs(found.peak_error) < 0.03


@pytest.mark.parametrize("chunk", [3072, 3584])
def test_peak_of_a_gigabyte_with_chunks_of_unequal_sizes(chunk: int) -> None:
    """4,096 tokens: the first chunk of the loss is the larger, and makes the peak."""
    spec = model_spec("logits", 49_152, 576, 1536, 2, 9, 3, 64, tie_word_embeddings=True)
    found = drift(spec, Plan(batch=Batch(2, 2, 2048, chunk), precision=PRECISIONS["bf16"]))
    assert found.measured.peak_bytes > 2**30
    assert abs(found.peak_error) < 0.001 and not found.differences()
