"""The optimizer on the host: when it is taken, what it holds and takes by hand, what is said where it does not fit, and
the copies themselves on a module of two weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.cli import decide
from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec, parameter_count, parameter_shapes
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import TIGHT, fits, peak_share, seconds
from shardwise.planner.price import price
from shardwise.planner.remedy import remedies
from shardwise.planner.search import Search, choose
from shardwise.planner.seconds.step_seconds import timed
from shardwise.prove import certify
from shardwise.prove.fake_run import SMALL
from shardwise.prove.pool import RankPool
from shardwise.prove.shrink import shrink
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.explain import memory_lines, verdict
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe, read_recipe
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Data, Recipe
from shardwise.spec.units import show_bytes
from shardwise.techniques.offload import check, host_weights
from shardwise.techniques.offload.host_copies import HostWeights, _add
from shardwise.techniques.offload.legal import leave_early
from shardwise.techniques.offload.rooms import Rooms
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import SUM_BUFFERS
from tests.parity.cases import UNTIED
from tests.said import refuses, shows

ONE_B, EIGHT_B = load_spec("meta-llama/Llama-3.2-1B"), load_spec("meta-llama/Llama-3.1-8B")
H100 = parse_cluster("1xH100")
P = parameter_count(EIGHT_B)
WEIGHTS = len(parameter_shapes(EIGHT_B))
SHAPES = {name: shape for name, shape in parameter_shapes(EIGHT_B).items() if name.startswith("layers.0.")}
BLOCK, BLOCK_WEIGHTS = sum(map(prod, SHAPES.values())), len(SHAPES)
MATRICES = sum(prod(shape) for shape in SHAPES.values() if len(shape) == 2)
"""Of a block: what is in bf16 on a device that computes in it, where the fp32 weights are on the host. Where weights
are cut over ranks, and gathered in bf16, that is all of the block."""


def planned(spec: ModelSpec, asked: str, cluster: Cluster = H100, *words: str) -> Plan:
    rows = ["train.seq_len=4096", "train.global_batch_size=2", *words]
    return choose(load_recipe(None, [f"offload.optimizer={asked}", *rows]), spec, cluster)


def test_auto_leaves_on_the_device_what_fits() -> None:
    chosen = planned(ONE_B, "auto")
    assert chosen.offload == Offload() and "offload.optimizer" not in chosen.why
    assert not chosen.estimate.host and chosen.estimate.host_capacity_bytes == 0


def test_auto_takes_the_host_where_nothing_else_fits() -> None:
    """Of no more blocks than have to leave: of half the rest of the device is too little."""
    chosen, all_of_it = planned(EIGHT_B, "auto"), planned(EIGHT_B, "host")
    assert chosen.offload == Offload("host", optimizer_fraction=0.75) and fits(chosen)
    assert shows(chosen.why["offload.optimizer"], "searched", "no plan fits")
    assert chosen.why["offload.optimizer_fraction"].startswith("searched")
    assert all_of_it.offload == Offload("host") and seconds(chosen).step_s < 0.9 * seconds(all_of_it).step_s
    less = planned(EIGHT_B, "host", H100, "offload.optimizer_fraction=0.5")
    assert less.why["offload.optimizer_fraction"] == "pinned" and peak_share(less) > TIGHT
    without = planned(EIGHT_B, "none")
    assert peak_share(without) > 1.5 and without.estimate.host == {}


@pytest.mark.prove
def test_auto_takes_the_host_where_a_step_is_shorter() -> None:
    """Without it, cards of 24 GiB without peer-to-peer have to cut every layer, and wait for one another."""
    found = {
        asked: planned(EIGHT_B, asked, parse_cluster("8xRTX-4090"), "global_batch=32") for asked in ("none", "auto")
    }
    assert all(map(fits, found.values())) and found["none"].layout.tp > 1
    assert found["auto"].offload.optimizer == "host" and found["auto"].layout.tp == 1
    assert seconds(found["auto"]).step_s < 0.7 * seconds(found["none"]).step_s


@pytest.mark.parametrize(("spec", "asked"), [(ONE_B, "host"), (EIGHT_B, "none")], ids=["host", "none"])
def test_a_pin_is_kept(spec: ModelSpec, asked: str) -> None:
    """Where the planner would choose otherwise; and a plan of one is no plan of a recipe that says the other."""
    chosen = planned(spec, asked)
    assert chosen.offload == Offload(asked)  # type: ignore[arg-type]
    assert chosen.why.get("offload.optimizer", "pinned") == "pinned"
    assert techniques.pins(Recipe(), chosen)["offload.optimizer"] == (asked, "none")


def test_nothing_is_offloaded_where_a_recipe_does_not_say_so() -> None:
    assert Recipe().offload.optimizer == "none" and Plan().offload == Offload()


def test_a_host_that_is_too_small() -> None:
    """16 bytes a parameter are 119.7 GiB: of 149 they are tight, in 100 they do not fit. Then the plan that is told is
    the one that holds least of the device, which is not what is named."""
    tight, small = (replace(H100, host_memory_bytes=gib * 2**30) for gib in (149, 100))
    assert 0.8 < peak_share(planned(EIGHT_B, "host", tight)) < 0.81
    chosen = planned(EIGHT_B, "host", small)
    assert peak_share(chosen) == pytest.approx(1.197, abs=1e-3) and chosen.estimate.peak_bytes < 40 * 2**30
    recipe = load_recipe(None, ["offload.optimizer=host", "train.seq_len=4096", "train.global_batch_size=2"])
    with pytest.raises(ConfigError) as raised:
        decide.plan_of(recipe, EIGHT_B, small, None)
    [problem] = raised.value.problems
    assert problem.code == "PLAN010"
    assert shows(problem.what, "119.7 GiB", "100.0 GiB")


@pytest.mark.parametrize("cluster", ["1xH100", "1xRTX-A6000"])
def test_the_remedy_is_named_and_fits_when_it_is_typed(cluster: str) -> None:
    """On 48 GB it fits with one micro-batch, whose gradients leave as they are made, and not with two smaller ones."""
    machines, words = parse_cluster(cluster), ["train.seq_len=4096", "train.global_batch_size=2"]
    recipe = load_recipe(None, ["model=meta-llama/Llama-3.1-8B", *words])
    found = {each.change: each for each in remedies(recipe, EIGHT_B, machines, choose(recipe, EIGHT_B, machines))}
    remedy = found["offload.optimizer=auto"]
    assert shows(remedy.price, "AdamW", "on the host")
    assert remedy.plan.offload.optimizer == "host" and peak_share(remedy.plan) <= 1
    again = planned(EIGHT_B, "auto", machines)
    assert again.batch == remedy.plan.batch and seconds(again) == seconds(remedy.plan)


def of_ranks(ranks: int, **more: object) -> Plan:
    layout = Layout(dp_shard=ranks, ranks_per_node=ranks)
    settings = {"precision": Precision("bf16"), "remat": Remat("full"), "offload": Offload("host"), **more}
    plan = Plan(layout, Batch(1, 1, 4096, 512), Shard("zero3" if ranks > 1 else "ddp"), model=EIGHT_B.name)
    return replace(plan, **settings)  # type: ignore[arg-type]


def test_bytes_on_both_tiers_by_hand() -> None:
    """Of each of P parameters a weight stays on the device, of 2 bytes where it computes with no more, and else 4; the
    fp32 weight, its gradient and two moments are on the host, with a step count of each of the weights."""
    found = price(EIGHT_B, of_ranks(1), H100).estimate
    assert found.host == {"weights": 4 * P, "gradients": 4 * P, "moments": 8 * P + 4 * WEIGHTS}
    assert found.host_bytes == 16 * P + 4 * WEIGHTS and found.host_capacity_bytes == H100.host_memory_bytes
    assert found.memory["weights"] == 4 * P - 2 * 32 * MATRICES
    assert "moments" not in {key for key, size in found.memory.items() if size}
    for precision in (Precision(), Precision("bf16", modules=(("*norm", "fp32"),))):
        assert price(EIGHT_B, of_ranks(1, precision=precision), H100).estimate.memory["weights"] == 4 * P
    waiting = price(EIGHT_B, of_ranks(1, offload=Offload("host", weights="host")), H100).estimate
    assert waiting.memory["weights"] == 4 * (P - 32 * BLOCK) and waiting.host["weights"] == 4 * P
    embedding = 4 * EIGHT_B.vocab_size * EIGHT_B.hidden_size
    assert found.memory.get("gradients", 0) <= embedding, "at most that which leaves is there"
    without = price(EIGHT_B, of_ranks(1, offload=Offload()), H100).estimate
    assert found.peak_bytes < 40 * 2**30 and without.peak_bytes > 120 * 2**30
    twice = price(EIGHT_B, of_ranks(1, batch=Batch(1, 2, 4096, 512)), H100).estimate
    assert twice.memory["gradients"] == 4 * P, "of two micro-batches the first one's stay until the second is done"


@pytest.mark.parametrize(
    ("more", "host"),
    [
        ({"optim": Optim(moments="bf16")}, {"weights": 4, "gradients": 4, "moments": 4}),
        ({"precision": Precision("bf16", "bf16")}, {"weights": 2, "gradients": 2, "moments": 4}),
    ],
    ids=["moments in bf16", "weights in bf16"],
)
def test_bytes_a_parameter_in_other_dtypes(more: dict[str, object], host: dict[str, int]) -> None:
    found = price(EIGHT_B, of_ranks(1, **more), H100).estimate.host
    assert {name: size // P for name, size in found.items()} == host


@pytest.mark.parametrize(("fraction", "blocks"), [(0.4, 12), (0.5, 16), (0.04, 1), (0.99, 31)])
def test_a_fraction_by_hand(fraction: float, blocks: int) -> None:
    """So many of 32 blocks, rounded down, have on the host what all have there otherwise; the device has the rest, and
    updates it at the same time. Half of that is longer on the host, at 110 GB/s, than the rest on the device."""
    outside = Offload("host", optimizer_fraction=fraction)
    plan, without = of_ranks(1, offload=outside), of_ranks(1, offload=Offload())
    moved, counts = blocks * BLOCK, 4 * blocks * BLOCK_WEIGHTS
    found = price(EIGHT_B, plan, H100).estimate
    assert found.host == {"weights": 4 * moved, "gradients": 4 * moved, "moments": 8 * moved + counts}
    assert found.memory["moments"] == 8 * (P - moved) + 4 * (WEIGHTS - blocks * BLOCK_WEIGHTS)
    assert found.memory["weights"] == 4 * P - 2 * blocks * MATRICES
    part, whole = (seconds(timed(EIGHT_B, each, H100)) for each in (plan, without))
    assert part.optimizer_s == pytest.approx(max(40 * moved / 1.1e11, whole.optimizer_s * (P - moved) / P), rel=0.01)
    assert part.copied_s == pytest.approx((2 * 4 * moved - 2 * blocks * MATRICES) / (0.8 * 63e9))


def test_blocks_on_the_host_are_spread_evenly() -> None:
    moved = [number for number in range(20) if Offload("host", optimizer_fraction=0.3).moves(number)]
    assert moved == [3, 6, 9, 13, 16, 19]
    for fraction in (0.29, 0.57, 0.58):  # whose product with 100 is a little less than what it stands for
        assert sum(map(Offload("host", optimizer_fraction=fraction).moves, range(100))) == round(100 * fraction)
    assert not any(map(Offload(optimizer_fraction=0.3).moves, range(20))) and all(map(Offload("nvme").moves, range(20)))


@pytest.mark.parametrize(
    ("outside", "says", "fix"),
    [
        (Offload("host", optimizer_fraction=0.02), "0.02 of 32 blocks", "at least 0.032"),
        (Offload("nvme", optimizer_fraction=0.5), "not on NVMe", "`offload.optimizer=host`"),
        (Offload("host", weights="host", optimizer_fraction=0.5), "on the host", "leave it out"),
    ],
    ids=["less than a block", "on NVMe", "weights that wait"],
)
def test_a_fraction_that_cannot_be(outside: Offload, says: str, fix: str) -> None:
    [problem] = check(EIGHT_B, of_ranks(1, offload=outside), H100)
    assert (problem.code, problem.where) == ("PLAN028", "offload.optimizer_fraction")
    assert says in problem.what and fix in (problem.fix or "")


def test_a_fraction_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        load_recipe(None, ["offload.optimizer_fraction=0.5"])
    [problem] = raised.value.problems
    assert refuses(problem, "CFG008", "`offload.optimizer: none`")


@pytest.mark.parametrize(
    ("words", "planned", "kept"),
    [
        (["optimizer=auto", "optimizer_fraction=0.5"], Offload(), True),
        (["optimizer=auto", "optimizer_fraction=0.5"], Offload("host", optimizer_fraction=0.5), True),
        (["optimizer=auto", "optimizer_fraction=0.5"], Offload("host", optimizer_fraction=0.25), False),
        (["optimizer=auto"], Offload("host", optimizer_fraction=0.25), True),
        (["optimizer=host"], Offload("host", optimizer_fraction=0.25), False),
    ],
)
def test_a_plan_keeps_the_fraction_that_a_recipe_pins(words: list[str], planned: Offload, kept: bool) -> None:
    recipe = load_recipe(None, [f"offload.{word}" for word in words])
    has, asked = techniques.pins(recipe, Plan(offload=planned))["offload.optimizer_fraction"]
    assert (asked in ("auto", has)) is kept


def test_of_stages_each_is_priced_and_the_host_that_holds_most_is_told() -> None:
    """Of 8 stages of 4 blocks with 0.29 of the optimizer on the host, the seventh alone has two blocks there: no first,
    middle or last one."""
    pipeline = Pipeline("1f1b", 1, (4,) * 8)
    plan = of_ranks(1, layout=Layout(pp=8, ranks_per_node=8), batch=Batch(1, 8, 4096, 512), pipeline=pipeline)
    plan = replace(plan, offload=Offload("host", optimizer_fraction=0.29))
    blocks = [sum(map(plan.offload.moves, range(4 * stage, 4 * stage + 4))) for stage in range(8)]
    assert blocks == [1, 1, 1, 1, 1, 1, 2, 1]
    found = price(EIGHT_B, plan, parse_cluster("8xH100")).estimate
    assert found.host["weights"] == found.host["gradients"] == 4 * 2 * BLOCK


def test_stages_whose_inputs_wait_are_not_ruled_out() -> None:
    """The bound of what the first rank holds leaves them out."""
    words = [
        "parallel.pp=16",
        "parallel.schedule=1f1b",
        "seq_len=65536",
        "global_batch=32",
        "micro_batch_size=1",
        "recompute=full",
    ]
    words += ["precision.weights=bf16", "offload.optimizer=host", "offload.activations=host"]
    spec, cluster = load_spec("meta-llama/Llama-3.1-70B"), parse_cluster("2x8xH100")
    search = Search(load_recipe(None, words), spec, cluster)
    able = [plan for plan in search.all if peak_share(price(spec, plan, cluster)) <= TIGHT]
    assert able and all(search.known.bounds.may_fit(plan, TIGHT) for plan in able)


@pytest.mark.parametrize("fraction", [0.04, 0.25, 0.5])
def test_a_proof_of_a_fraction_has_a_block_on_the_host(fraction: float) -> None:
    small = shrink(EIGHT_B, of_ranks(1, offload=Offload("host", optimizer_fraction=fraction)))
    assert 0 < sum(map(small.plan.offload.moves, range(len(small.blocks)))) < len(small.blocks)


def test_ranks_of_a_node_share_its_memory() -> None:
    cluster = parse_cluster("8xH100")
    found = price(EIGHT_B, of_ranks(8), cluster).estimate
    assert found.host["weights"] == found.host["gradients"] == P // 2
    assert found.memory["weights"] == (4 * P - 2 * 32 * BLOCK) // 8
    assert found.host_bytes == pytest.approx(16 * P, rel=1e-6)


def test_frozen_weights_have_nothing_on_the_host() -> None:
    found = price(EIGHT_B, of_ranks(1, lora=Lora(16, 32.0)), H100).estimate
    adapters = found.host["weights"] // 4
    assert found.host_bytes < 16.1 * adapters and adapters < 0.01 * P


def test_on_a_cpu_the_device_is_the_host() -> None:
    plan = Plan(batch=Batch(1, 1, 32, 32), offload=Offload("host"))
    found = price(UNTIED, plan, parse_cluster("1xCPU"))
    trained = parameter_count(UNTIED)
    assert found.estimate.memory["offloaded"] == 16 * trained + 4 * len(parameter_shapes(UNTIED))
    assert found.estimate.host == {} and found.estimate.host_bytes == 0


@pytest.mark.usefixtures("by_table")
@pytest.mark.parametrize("ranks", [1, 8])
def test_seconds_by_hand(ranks: int) -> None:
    """4 bytes a parameter cross a bus of 63 GB/s at four fifths of that, and of what is narrow 2 come back. The update
    reads the gradient for its norm, scales it in memory, and reads and writes weight and moments: 40 bytes a parameter,
    at 110 GB/s for all ranks of a node, so that more of them are no faster."""
    cluster = parse_cluster(f"{ranks}xH100")
    found, without = (
        seconds(timed(EIGHT_B, of_ranks(ranks, offload=each), cluster)) for each in (Offload("host"), Offload())
    )
    way_s = 4 * P / ranks / (0.8 * 63e9)
    narrow = 32 * (MATRICES if ranks == 1 else BLOCK)
    assert found.copied_s == pytest.approx(way_s * (2 - narrow / P / 2), rel=1e-3)
    assert found.optimizer_s == pytest.approx(40 * P / 1.1e11, rel=1e-3)
    assert without.copied_s == without.offload_s == 0
    end_s = 4 * EIGHT_B.vocab_size * EIGHT_B.hidden_size / ranks / (0.8 * 63e9)
    ends_s = 3 * end_s  # both come back before anything runs, and the gradient of one leaves last
    cast_s = 6 * narrow / 1.1e11
    assert ends_s < 1.001 * found.offload_s < ends_s + cast_s, "others leave in backward, and come in forward"
    cast_once_s = without.compute_s - found.compute_s
    assert (cast_once_s > 0.01) is (ranks == 1), "a device that has all of a weight casts it in every forward"
    longer_s = found.step_s - without.step_s + cast_once_s
    waited_s = found.offload_s + sum(found.exposed_s.values()) - sum(without.exposed_s.values())
    assert longer_s == pytest.approx(waited_s + found.optimizer_s - without.optimizer_s, rel=1e-2)


@pytest.mark.parametrize("rows", [4, 16])
def test_new_weights_of_blocks_come_behind_the_forward(rows: int) -> None:
    """Where a block computes for longer than its weights take, all but those of the first one."""
    plan = of_ranks(1, batch=Batch(rows, 1, 4096, 512))
    found, end = seconds(timed(EIGHT_B, plan, H100)), 4 * EIGHT_B.vocab_size * EIGHT_B.hidden_size
    first_s = 2 * MATRICES / (0.8 * 63e9)
    assert 3 * end / (0.8 * 63e9) < found.offload_s < 3 * end / (0.8 * 63e9) + 1.01 * first_s
    in_fp32 = replace(plan, precision=Precision("bf16", modules=(("*norm", "fp32"),)))  # as wide as they are updated
    assert seconds(timed(EIGHT_B, in_fp32, H100)).offload_s > found.offload_s


def test_from_stages_all_gradients_leave_when_backward_is_over() -> None:
    stages = Pipeline("1f1b", 1, (16, 16))
    plan = of_ranks(1, layout=Layout(pp=2, ranks_per_node=2), batch=Batch(1, 4, 4096, 512), pipeline=stages)
    found = seconds(timed(EIGHT_B, plan, parse_cluster("2xH100")))
    assert found.offload_s == pytest.approx(found.copied_s), "and new weights are waited for"
    rounded_s = 6 * 32 * MATRICES / 1.1e11  # of both ranks, by one host: it takes longer than the copies of all
    assert found.offload_s == pytest.approx(4 * P / 2 / (0.8 * 63e9) + rounded_s, rel=0.02)


def test_accumulated_gradients_leave_beside_the_last_backward_alone() -> None:
    """Of many micro-batches too, of which a few are played."""
    once, *others = (seconds(timed(EIGHT_B, of_ranks(1, batch=Batch(1, m, 4096, 512)), H100)) for m in (1, 2, 5, 32))
    for each in others:
        assert once.copied_s == each.copied_s and once.optimizer_s == each.optimizer_s
        assert once.offload_s == pytest.approx(each.offload_s, rel=0.01)


WAITING = Offload("none", "host")


def test_inputs_wait_where_a_recipe_says_so() -> None:
    """Wherever the optimizer is; and nothing but full recomputation is tried."""
    for asked in ("none", "auto", "host"):
        chosen = planned(ONE_B, asked, H100, "offload.activations=host")
        assert chosen.offload == Offload("host" if asked == "host" else "none", "host")
        assert chosen.remat.mode == "full" and chosen.why["offload.activations"] == "pinned"
        assert techniques.pins(Recipe(), chosen)["offload.activations"] == ("host", "none")


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ({"remat": Remat("selective")}, "`recompute=full`"),
        ({"remat": Remat()}, "`recompute=full`"),
    ],
    ids=["selective", "none"],
)
def test_inputs_wait_alone(more: dict[str, object], fix: str) -> None:
    plan = of_ranks(1, offload=WAITING)
    assert check(EIGHT_B, plan, H100) == []
    [problem] = check(EIGHT_B, replace(plan, **more), H100)  # type: ignore[arg-type]
    assert (problem.code, problem.where) == ("PLAN028", "offload.activations") and fix in (problem.fix or "")
    assert check(EIGHT_B, replace(plan, offload=Offload(), **more), H100) == []  # type: ignore[arg-type]


INPUT = 4096 * EIGHT_B.hidden_size * 2
"""Bytes of a row in bf16, of which 31 wait: that of the last of 32 blocks stays."""


@pytest.mark.parametrize(("every", "count"), [(1, 31), (2, 15), (5, 6)])
def test_bytes_of_inputs_by_hand(every: int, count: int) -> None:
    """Of two micro-batches they are not there together. On the device are that of the last block and one more."""
    plan = of_ranks(1, offload=WAITING, remat=Remat("full", every), batch=Batch(1, 2, 4096, 512))
    found, without = (price(EIGHT_B, replace(plan, offload=each), H100).estimate for each in (WAITING, Offload()))
    assert found.host == {"activations": count * INPUT}
    if every == 1:
        assert without.memory["activations"] - found.memory["activations"] == pytest.approx(count * INPUT, rel=0.1)


def test_blocks_without_a_backward_keep_no_input() -> None:
    plan = of_ranks(1, offload=WAITING, frozen=("embed.*", "layers.[0-7].*"))
    assert price(EIGHT_B, plan, H100).estimate.host == {"activations": (31 - 8) * INPUT}


@pytest.mark.parametrize("optimizer", ["none", "host"])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_seconds_of_inputs_by_hand(optimizer: str, m: int) -> None:
    """They cross the bus beside what is computed, once each way; a bus that is too slow is waited for, both ways."""
    plan = of_ranks(1, batch=Batch(1, m, 4096, 512))
    slow = replace(H100, device=replace(H100.device, host_link_bytes_per_s=63e5))
    for cluster, rate in ((H100, 0.8 * 63e9), (slow, 0.8 * 63e5)):
        found, without = (
            seconds(timed(EIGHT_B, price(EIGHT_B, replace(plan, offload=each), cluster), cluster))
            for each in (Offload(optimizer, "host"), Offload(optimizer))  # type: ignore[arg-type]
        )
        copied_s = m * 31 * 2 * INPUT / rate
        assert found.copied_s - without.copied_s == pytest.approx(copied_s)
        assert found.compute_s == pytest.approx(without.compute_s, rel=1e-3) and not found.exposed_s
        parts = found.compute_s + found.optimizer_s + found.host_s + found.offload_s
        assert found.step_s == pytest.approx(parts)
        waits_s = copied_s if cluster is slow and optimizer == "none" else 0.0
        if cluster is H100 or optimizer == "none":
            assert found.offload_s - without.offload_s == pytest.approx(waits_s, rel=0.02, abs=1e-3)


NAMES = {
    "zero_optimization: {offload_optimizer: {device: cpu}}": "host",
    "zero_optimization: {offload_optimizer: {device: none}}": "none",
    "deepspeed_config: {offload_optimizer_device: cpu}": "host",
    "offload_optimizer_device: cpu": "host",
    "offload_optimizer_device: none": "none",
    "optimizer_cpu_offload: true": "host",
    "optimizer_cpu_offload: false": "none",
    "offload: host": "host",
    "offload: {optimizer: auto}": "auto",
}


@pytest.mark.parametrize("line", NAMES)
def test_it_is_read_by_the_names_that_others_give_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(line)
    assert read_recipe(tmp_path / "r.yaml", ()).recipe.offload.optimizer == NAMES[line]


@pytest.mark.parametrize("line", ["offload_params: true", "cpu_offload: true"])
def test_of_what_is_not_there_the_answer_names_what_is(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(line)
    with pytest.raises(ConfigError) as raised:
        read_recipe(tmp_path / "r.yaml", ())
    assert "`offload.optimizer: host`" in str(raised.value)


LEAVE: dict[str, tuple[bool, bool, Plan]] = {
    "one rank": (True, True, of_ranks(1)),
    "shards": (True, True, of_ranks(8)),
    "shards of moments": (True, False, replace(of_ranks(8), shard=Shard("zero1"))),
    "shards in replicas": (True, False, replace(of_ranks(8), layout=Layout(dp_replicate=2, dp_shard=4))),
    "replicas": (False, False, replace(of_ranks(1), layout=Layout(dp_replicate=2))),
    "tensor parallelism": (False, False, replace(of_ranks(2), layout=Layout(dp_shard=2, tp=2))),
    "stages": (False, False, replace(of_ranks(1), layout=Layout(pp=2))),
    "on the device": (False, False, of_ranks(1, offload=Offload())),
}
"""Whether gradients leave in backward, and in that of each micro-batch, so that the host can make sums."""


@pytest.mark.parametrize("name", LEAVE)
def test_when_gradients_leave(name: str) -> None:
    early, each, plan = LEAVE[name]
    assert leave_early(plan) is early
    found = check(EIGHT_B, replace(plan, offload=replace(plan.offload, sums="host")), parse_cluster("1xH100"))
    assert [(each.code, each.where) for each in found] == ([] if each else [("PLAN028", "offload.sums")])


class Two(nn.Module):
    """Two weights; ``second`` takes part only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found = (self.first * x).sum()
        return found + (self.second * x).sum() if both else found


def steps(module: Two, host: HostWeights, both: Sequence[bool]) -> list[list[bool]]:
    """Steps of AdamW on the copies; after each, which of the copies had a gradient."""
    optimizer, had = torch.optim.AdamW([host.of(each) for each in module.parameters()], lr=0.1), []
    for number, each in enumerate(both, 1):
        module(torch.tensor([float(number), -1.0]), each).backward()
        host.take_rest()
        had.append([host.of(parameter).grad is not None for parameter in module.parameters()])
        assert not any(parameter.grad is not None for parameter in module.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        host.give_back()
    return had


@pytest.mark.parametrize("early", [False, True])
def test_a_weight_without_a_gradient_is_left_alone(early: bool) -> None:
    """Its room has the gradient of the step before, which must not be applied again: the result is that of AdamW on the
    module itself, bit by bit."""
    module, plain, both = Two(), Two(), [True, False, False, True]
    host = HostWeights(module.parameters(), early=early, cut=False)
    assert steps(module, host, both) == [[True, each] for each in both]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number, each in enumerate(both, 1):
        plain(torch.tensor([float(number), -1.0]), each).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for parameter, right in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, right) and torch.equal(host.of(parameter), right)


def left(host: HostWeights, module: Two) -> list[bool]:
    return [host.of(parameter).grad is not None for parameter in module.parameters()]


@pytest.mark.parametrize("early", [False, True])
def test_gradients_leave_in_backward_or_after_it(early: bool) -> None:
    module, x = Two(), torch.ones(2)
    host = HostWeights(module.parameters(), early=early, cut=False)
    module(x, both=True).backward()
    assert left(host, module) == [early, early]
    assert [parameter.grad is None for parameter in module.parameters()] == [early, early]
    host.take_rest()
    assert left(host, module) == [True, True]
    assert host.copied == {("device", "host"): 16}
    host.give_back()
    assert host.copied["host", "device"] == 16


def test_a_gradient_that_leaves_is_held_until_the_next_one_does() -> None:
    """A copy on a GPU may still read it: its memory must not be used again before."""
    module = Two()
    host = HostWeights(module.parameters(), early=False, cut=False)
    module(torch.ones(2), both=True).backward()
    gradients = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    first, second = module.parameters()
    host._take(first)
    assert first.grad is None and gradients[0]() is not None
    host._take(second)
    assert gradients[0]() is None and gradients[1]() is not None
    host.take_rest()
    assert gradients[1]() is None


def test_of_several_micro_batches_the_sum_leaves() -> None:
    module, x = Two(), torch.ones(2)
    host = HostWeights(module.parameters(), early=True, cut=False)
    for host.last in (False, False, True):
        assert left(host, module) == [False, False]
        module(x, both=True).backward()
    gradient = host.of(module.first).grad
    assert gradient is not None and gradient.tolist() == [3.0, 3.0]
    assert host.copied == {("device", "host"): 16}, "once"


def test_of_several_micro_batches_the_host_makes_the_sum() -> None:
    """Each leaves; the first comes to its place, others through a buffer. A step begins anew."""
    module, host_module = Two(), Two()
    host = HostWeights(host_module.parameters(), early=True, cut=False, sums=True)
    assert [buffer.numel() for buffer in host.tensors()[-2:]] == [8, 8]
    for step in (1, 2):
        for number, host.last in enumerate((False, False, True), 1):
            x = torch.tensor([0.1 * number, 0.3 * step])
            for each in (module, host_module):
                each(x, both=number != 2).backward()
            assert not any(parameter.grad is not None for parameter in host_module.parameters())
        host.take_rest()
        for own, right in zip(host_module.parameters(), module.parameters(), strict=True):
            assert torch.equal(host.of(own).grad, right.grad) and right.grad is not None
            right.grad = host.of(own).grad = None
    assert host.copied == {("device", "host"): 2 * (3 + 2) * 8}


class Arrived:
    """A copy that is done when it is asked for a second time."""

    def __init__(self) -> None:
        self.done = Event()

    def synchronize(self) -> None:
        assert self.done.wait(10)


def test_what_has_not_been_copied_is_not_added_and_its_buffer_not_given_away() -> None:
    """As on a GPU, where copies are done later: of two buffers a third gradient waits for the first."""
    buffers, total = [torch.zeros(2) for _ in range(SUM_BUFFERS)], torch.zeros(2)
    sums, copies = Rooms(buffers, pinned=False), [Arrived() for _ in range(3)]
    for number, copied in enumerate(copies[:2]):
        sums.tell(_add, sums.room().fill_(10.0**number), total, copied)
    assert total.tolist() == [0.0, 0.0]
    timer = Timer(0.05, copies[0].done.set)
    timer.start()
    third = sums.room()
    assert total.tolist() == [1.0, 1.0]
    sums.tell(_add, third.fill_(100.0), total, copies[2])
    copies[2].done.set()
    assert total.tolist() == [1.0, 1.0], "in their order"
    copies[1].done.set()
    sums.settle()
    assert total.tolist() == [111.0, 111.0]


def test_scalars_of_cut_weights_wait_for_the_sum_over_replicas() -> None:
    for cut in (False, True):
        scalar, row = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2))
        host = HostWeights([scalar, row], early=True, cut=cut)
        (scalar * row.sum()).backward()
        assert [host.of(each).grad is not None for each in (scalar, row)] == [not cut, True]


def test_hooks_do_not_keep_what_is_gone() -> None:
    """A model that is freed is freed with its copies, without waiting for the collector of cycles."""
    from weakref import ref

    module = Two()
    host = HostWeights(module.parameters(), early=True, cut=False)
    gone = ref(host), ref(module.first)
    del host, module
    assert [each() for each in gone] == [None, None]


def test_frozen_weights_are_not_copied() -> None:
    module = Two()
    module.first.requires_grad_(False)
    found = host_weights([module], of_ranks(1))
    assert found is not None and list(found.copies) == [module.second] and len(found.tensors()) == 2
    assert host_weights([module], of_ranks(1, offload=Offload())) is None


@pytest.mark.prove
def test_drift_of_a_large_model_writes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are fake: what is in files is on the host instead, and the certificate says so."""
    spec = replace(UNTIED, hidden_size=512, intermediate_size=2048, vocab_size=4096)
    plan = Plan(Layout(), Batch(1, 2, 64), Shard(), offload=Offload("nvme", weights="nvme", sums="host"))
    assert parameter_count(spec) > SMALL
    monkeypatch.setattr(Scratch, "__init__", lambda self, *given: pytest.fail("a file"))
    both = replace(plan, offload=Offload("nvme", "nvme"), remat=Remat("full"))
    for each, told in ((plan, " and ".join(plan.offload.filed)), (both, "optimizer and activations")):
        assert certify._drift(spec, each, 0, {}) == []
        assert any(shows(line, "NVMe", "drift", told, "on the host") for line in shrink(spec, each).unseen)


@pytest.mark.big
def test_it_is_certified(ranks: RankPool) -> None:
    """What `shardwise prove` does for a plan that has it: the small plan has it too."""
    plan = Plan(Layout(dp_shard=2), Batch(2, 2, 32, 16), Shard("zero3"), Precision("bf16"), offload=Offload("host"))
    subject = certify.subject_of(Recipe(data=Data(path="nothing-here.jsonl")), UNTIED, plan, 4)
    assert subject.small is not None and subject.small.plan.offload == subject.small.own.offload == Offload("host")
    checks = [certify.run(subject, proof, 0, ranks) for proof in ("drift", "parity", "dtypes", "checkpoint")]
    assert not [problem for check in checks for problem in check.problems]


def test_on_nvme_gradients_stay_in_memory_and_the_disk_is_told() -> None:
    """12 bytes a parameter in the file; in memory 4, a count of 4 for each weight and 36 MiB of blocks, each from a
    page on. All of the file is read at 5 GB/s and written at 2.5, which takes longer than the update."""
    plan = of_ranks(1, offload=Offload("nvme"))
    found = timed(EIGHT_B, price(EIGHT_B, plan, H100), H100).estimate
    blocks = 36 * 2**20 + 3 * 4096
    assert found.host == {"gradients": 4 * P, "moments": 4 * WEIGHTS, "buffers": blocks}
    assert found.host_bytes == sum(found.host.values()) and found.disk_bytes == 12 * P
    assert found.seconds is not None
    assert found.seconds.optimizer_s == pytest.approx(12 * P / 5e9 + 12 * P / 2.5e9)
    assert found.seconds.offload_s < found.seconds.copied_s / 2, "new weights come while others are read"
    [line] = [line for line in memory_lines(found) if "TB" in line]
    assert f"{int(600e12 / (12 * P)):,} steps are 600 TB" in line
    assert f"{show_bytes(12 * P)} on its disks" in verdict(found)


@pytest.mark.parametrize(
    "more", [Optim("adamw8bit"), Optim(moments="bf16")], ids=["moments in 8 bits", "moments in bf16"]
)
def test_what_does_not_go_through_a_file_is_refused(more: Optim) -> None:
    plan = of_ranks(1, optim=more)
    assert techniques.check(EIGHT_B, plan, H100) == []
    [problem] = techniques.check(EIGHT_B, replace(plan, offload=Offload("nvme")), H100)
    assert problem.code == "PLAN028" and "`offload.optimizer=host`" in (problem.fix or "")


def test_a_directory_is_for_nvme_alone() -> None:
    assert load_recipe(None, ["offload=nvme", "offload.directory=/d"]).offload.directory == "/d"
    with pytest.raises(ConfigError) as raised:
        load_recipe(None, ["offload=host", "offload.directory=/d"])
    assert load_recipe(None, ["offload.activations=nvme", "offload.directory=/d"]).offload.directory == "/d"
    assert [problem.code for problem in raised.value.problems] == ["CFG008"]
