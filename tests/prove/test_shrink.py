"""What is left of a plan and its model: the same kinds of everything, legal, and small."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from transformers import CONFIG_MAPPING

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.models.config import layer_kinds, parameter_count, parameter_shapes, with_fields
from shardwise.models.kinds import GroupedRouting, SigmoidRouting
from shardwise.models.lookup import load_spec, read_spec
from shardwise.prove.shrink import THEIRS, real_name, shrink
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Plan, Precision, Remat, Scales, Shard
from shardwise.techniques import float8
from shardwise.techniques.dtypes import compute_dtype
from shardwise.techniques.states import frozen
from tests.models.hf_models import CONFIGS, spec_of
from tests.prove.test_certify import COMPOSITIONS
from tests.said import refusal, shows

SPEC = load_spec("Llama-3.1-70B")


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_it_is_legal_small_and_of_the_same_kinds(name: str) -> None:
    spec, plan = COMPOSITIONS[name]
    few = shrink(spec, plan)
    assert not techniques.check(few.spec, few.plan, parse_cluster(f"{few.plan.layout.world}xCPU"))
    assert parameter_count(few.spec) < 2_000_000 and few.plan.layout.world <= 16
    for axis, degree in plan.layout.axes():
        least = min(2, degree)
        assert few.plan.layout.degree(axis) in ((least, 2 * least) if plan.layout.ep > 1 else (least,))
    assert (few.plan.shard.strategy, few.plan.remat.mode, few.plan.loss) == (
        plan.shard.strategy,
        plan.remat.mode,
        plan.loss,
    )
    assert few.plan.pipeline.schedule == plan.pipeline.schedule
    assert few.own.precision.compute == plan.precision.compute and few.plan.precision.compute == "fp64"
    assert bool(few.plan.lora) == bool(plan.lora) and few.spec.tie_word_embeddings == spec.tie_word_embeddings
    kinds, order = layer_kinds(spec)
    small_kinds, small_order = layer_kinds(few.spec)
    assert [kinds[order[block]].rotated for block in few.blocks] == [small_kinds[kind].rotated for kind in small_order]
    assert len(small_kinds) == len(kinds)
    if plan.layout.pp > 1:
        uneven = len(set(plan.pipeline.split)) > 1
        assert (len(set(few.plan.pipeline.split)) > 1) == uneven
        assert few.plan.batch.accumulation >= 2 * few.plan.layout.pp


def test_what_is_frozen_is_what_each_block_stands_for() -> None:
    plan = Plan(
        Layout(dp_shard=64), Batch(1, 1, 4096), Shard("zero3"), frozen=("embed.*", "layers.[0-9].*", "*.q.weight")
    )
    few = shrink(SPEC, plan)
    assert 0 in few.blocks and any(block > 9 for block in few.blocks)
    for name in parameter_shapes(few.spec):
        assert frozen(name, few.plan) == frozen(real_name(name, few.blocks), plan), name


def test_rules_of_dtypes_are_those_of_the_blocks() -> None:
    rules = (("layers.0", "fp32"), ("layers.79.mlp*", "fp32"), ("*_norm", "fp32"))
    plan = Plan(Layout(dp_replicate=2), Batch(1, 1, 4096), precision=Precision("bf16", modules=rules))  # type: ignore[arg-type]
    few = shrink(SPEC, plan)
    for name in parameter_shapes(few.spec):
        module, real = (each.rpartition(".")[0] for each in (name, real_name(name, few.blocks)))
        assert compute_dtype(few.own.precision, module) == compute_dtype(plan.precision, real), name


def test_four_ranks_along_each_axis() -> None:
    pipeline = Pipeline("interleaved", 2, (10,) * 8)
    plan = Plan(Layout(dp_shard=8, pp=4, tp=8), Batch(1, 16, 4096), Shard("zero1"), pipeline=pipeline)
    few = shrink(SPEC, plan, 4)
    assert (few.plan.layout.dp_shard, few.plan.layout.pp, few.plan.layout.tp) == (4, 4, 4)
    assert few.spec.attention.num_key_value_heads == 4 and few.plan.batch.accumulation == 8
    assert shows(few.unseen[0], "more than 4", "dp_shard, tp")


@pytest.mark.parametrize(("tp", "key_heads"), [(8, 2), (16, 1)])
def test_fewer_key_heads_than_ranks_stay_fewer(tp: int, key_heads: int) -> None:
    few = shrink(SPEC, Plan(Layout(tp=tp), Batch(1, 1, 4096)))
    assert few.spec.attention.num_key_value_heads == key_heads and few.spec.attention.num_attention_heads % 2 == 0
    assert few.spec.attention.num_attention_heads > few.spec.attention.num_key_value_heads


MOE = load_spec("Qwen3-30B-A3B")
SHARED = with_fields(load_spec("Qwen1.5-MoE-A2.7B"), dense_layers=(0, 5))
SPREAD = {
    "all ranks have others": (MOE, Layout(dp_shard=8, ep=8), (2, 2, 1)),
    "some have the same": (MOE, Layout(dp_shard=64, ep=8), (4, 2, 2)),
    "one expert a rank": (MOE, Layout(dp_shard=128, ep=128), (2, 2, 1)),
    "over several axes": (MOE, Layout(dp_shard=4, cp=2, tp=2, ep=16), (8, 8, 1)),
    "over some of several axes": (MOE, Layout(dp_shard=4, cp=2, tp=2, ep=4), (8, 2, 4)),
    "over tp alone": (SHARED, Layout(dp_replicate=2, tp=4, ep=4), (2, 2, 1)),
    "over half of tp": (SHARED, Layout(dp_replicate=2, tp=4, ep=2), (4, 2, 2)),
    "over half of a ring": (SHARED, Layout(cp=4, ep=2), (4, 2, 2)),
    "over half of ulysses": (SHARED, Layout(cp=4, ep=2, ulysses=4), (4, 2, 2)),
    "over more than tp, replicated": (SHARED, Layout(dp_shard=2, tp=2, ep=4), (4, 4, 1)),
    "not at all": (SHARED, Layout(dp_shard=8), (2, 1, 2)),
}
"""A model, a layout, and of what is left of it the ranks of a replica, ep, and how many have the same experts."""


@pytest.mark.parametrize("name", SPREAD)
def test_experts_can_be_shared_by_the_ranks_that_are_left(name: str) -> None:
    spec, layout, (ranks, ep, same) = SPREAD[name]
    strategy = "zero3" if layout.dp_shard > 2 else "ddp"
    kind = "ulysses" if layout.ulysses > 1 else "ring"
    plan = Plan(layout, Batch(1, 1, 4096), Shard(strategy), sequence_parallel=layout.tp > 1, cp_kind=kind)  # type: ignore[arg-type]
    few = shrink(spec, plan)
    left = few.plan.layout
    assert (left.fsdp * left.tp, left.ep, left.degree("expert_fsdp")) == (ranks, ep, same)
    assert (
        few.spec.experts.num_experts % ep == 0
        and 1 < few.spec.experts.experts_per_token < few.spec.experts.num_experts <= 8
    )
    assert {few.spec.has_experts(block) for block in range(len(few.blocks))} == {
        spec.has_experts(block) for block in range(spec.num_hidden_layers)
    }
    assert [few.spec.has_experts(place) for place in range(len(few.blocks))] == [*map(spec.has_experts, few.blocks)]
    assert (
        len(few.spec.mlp_sizes) == len(spec.mlp_sizes)
        and few.spec.experts.shared_expert_gate == spec.experts.shared_expert_gate
    )
    assert any(line.startswith("num_experts ") for line in few.changed)


@pytest.mark.parametrize(("groups", "kept", "left"), [(1, 1, (1, 1)), (8, 4, (2, 1)), (8, 8, (2, 2)), (2, 1, (2, 1))])
def test_of_groups_of_experts_as_few_are_kept(groups: int, kept: int, left: tuple[int, int]) -> None:
    spec = with_fields(MOE, sigmoid=SigmoidRouting(groups, kept, 2.5, 0.001))
    few = shrink(spec, Plan(Layout(dp_shard=8, ep=8), Batch(), Shard("zero3"))).spec.experts
    assert few.sigmoid == SigmoidRouting(*left, 2.5, 0.001)
    assert few.experts_per_token * left[0] <= few.num_experts * left[1]
    spec = with_fields(MOE, softmax_groups=GroupedRouting(groups, kept, 16.0))
    few = shrink(spec, Plan(Layout(dp_shard=8, ep=8), Batch(), Shard("zero3"))).spec.experts
    assert few.softmax_groups == GroupedRouting(*left, 16.0) and few.sigmoid is None


@pytest.mark.parametrize(("chosen", "left", "of"), [(1, 1, 4), (2, 2, 6), (8, 2, 6), (128, 4, 4)])
def test_a_token_goes_to_one_some_or_all_experts(chosen: int, left: int, of: int) -> None:
    """Of as many as it takes for one that no token chooses."""
    few = shrink(with_fields(MOE, experts_per_token=chosen), Plan(Layout(dp_shard=8, ep=8), Batch(), Shard("zero3")))
    assert (few.spec.experts.num_experts, few.spec.experts.experts_per_token) == (of, left)


@pytest.mark.parametrize(("window", "cuts"), [(512, True), (8192, False)])
def test_a_window_cuts_rows_where_it_did(window: int, cuts: bool) -> None:
    few = shrink(with_fields(SPEC, sliding_window=window), Plan(batch=Batch(1, 1, 4096)))
    assert few.spec.attention.sliding_window is not None
    assert (few.spec.attention.sliding_window < few.plan.batch.seq_len) == cuts


def test_what_is_not_shown_is_said() -> None:
    plan = Plan(
        Layout(dp_shard=8, tp=2),
        Batch(4, 4, 4096),
        Shard("zero3", reshard_after_forward=4),
        Precision("bf16"),
        compile=True,
        attention="flash",
        optim=Optim(moments="bf16"),
        lora=Lora(dropout=0.1),
    )
    told = "; ".join(shrink(SPEC, plan).unseen)
    for words in ("along dp_shard", "compiled", "attention flash", "dropout", "4 ranks keep"):
        assert words in told, told
    packed = replace(plan, optim=Optim("adamw8bit"))
    assert any("moments in 8 bits" in line for line in shrink(SPEC, packed).unseen)
    assert "dp_shard 8 -> 2" in shrink(SPEC, plan).changed and "tp" not in " ".join(shrink(SPEC, plan).changed)


def test_recomputation_of_every_third_block_becomes_every_second() -> None:
    plan = Plan(Layout(pp=2), Batch(1, 4, 4096), remat=Remat("full", 3), pipeline=Pipeline("1f1b", 1, (40, 40)))
    few = shrink(SPEC, plan)
    assert few.plan.remat == Remat("full", 2) and few.plan.pipeline.split == (2, 2)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_a_small_rank_weigh_as_much(rslora: bool) -> None:
    """Their product is multiplied by alpha / rank, or by alpha / sqrt(rank)."""
    lora = shrink(SPEC, Plan(lora=Lora(64, 16.0, rslora=rslora))).plan.lora
    assert lora is not None and lora.rank == 4
    assert lora.alpha == (16.0 / 64**0.5 * 2 if rslora else 16.0 / 64 * 4)


def test_four_bits_have_whole_blocks_of_columns() -> None:
    few = shrink(SPEC, Plan(Layout(dp_shard=8), Batch(), Shard("zero3"), lora=Lora(nf4=True)))
    shapes = parameter_shapes(few.spec)
    assert all(shape[1] % 64 == 0 for name, shape in shapes.items() if ".mlp." in name and name.endswith(".weight"))
    assert sum(map(prod, shapes.values())) < 500_000


@pytest.mark.parametrize("ranks", [1, 4])
def test_products_in_float8_have_whole_blocks_in_the_layers_that_stand_for_such(ranks: int) -> None:
    """With the first and the last block, one between them is there, in float64 as in the plan's own dtypes."""
    spec, exclude = load_spec("Llama-3.1-8B"), ("first", "last", "*.down")
    precision = Precision("bf16", products="float8", exclude=exclude)
    small = shrink(spec, Plan(Layout(dp_replicate=2, tp=ranks), Batch(1, 1, 4096), precision=precision))
    expected = {name for name in float8.layers(spec, precision) if name.startswith("layers.1.")}
    for plan in (small.plan, small.own):
        assert {real_name(name, small.blocks) for name in float8.layers(small.spec, plan.precision)} == expected
        assert not techniques.check(small.spec, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    assert (small.plan.precision.compute, small.own.precision.compute) == ("fp64", "bf16")


@pytest.mark.parametrize("scales", ["block", "row"])
def test_experts_in_float8_stay_in_it(scales: Scales) -> None:
    precision = Precision("bf16", products="float8", scales=scales, exclude=("first", "last", "*.expert_up"))
    plan = Plan(Layout(dp_shard=8, tp=2, ep=8), Batch(1, 1, 4096), Shard("zero3"), precision, sequence_parallel=True)
    small = shrink(load_spec("Qwen3-30B-A3B"), plan)
    assert not techniques.check(small.spec, small.plan, parse_cluster(f"{small.plan.layout.world}xCPU"))
    found = float8.layers(small.spec, small.plan.precision)
    assert {name.rpartition(".")[2] for name in found if ".experts." in name} == {"expert_gate", "expert_down"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_transformers_own_modules_is_of_its_own_family(kind: str) -> None:
    large = {"hidden_size": 256, "n_embd": 256, "num_hidden_layers": 6, "n_layer": 6, "vocab_size": 3000}
    given = {key: value for key, value in large.items() if key in CONFIGS[kind]}
    if "layer_types" in CONFIGS[kind]:
        given["layer_types"] = CONFIGS[kind]["layer_types"] * 2
    spec = read_spec(CONFIG_MAPPING[kind](**{**CONFIGS[kind], **given}).to_dict(), f"larger-{kind}")
    few = shrink(spec, Plan(Layout(dp_shard=8), Batch(1, 1, 32), Shard("zero3")))
    assert few.spec.hf_model is not None and few.spec.family == spec.family
    assert (few.spec.num_hidden_layers, few.spec.vocab_size, few.spec.hidden_size) == (3, 67, 64)
    assert len(layer_kinds(few.spec)[0]) == len(layer_kinds(spec)[0])
    assert few.spec.tie_word_embeddings == spec.tie_word_embeddings
    assert {name.partition(".")[2] for name in parameter_shapes(few.spec)} <= {
        name.partition(".")[2] for name in parameter_shapes(spec)
    }


def test_a_family_of_which_no_smaller_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(THEIRS, "num_attention_heads", 5)  # which do not divide its hidden size
    with pytest.raises(ConfigError, match=refusal("PLAN025", "no smaller model")):
        shrink(spec_of("gpt2"), Plan(Layout(dp_shard=2), Batch(), Shard("zero3")))
