"""What would make a plan fit: every change that is named does what it says when it is typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import MARGIN, TIE, TIGHT, seconds, tokens_per_s
from shardwise.planner.remedy import (
    MUCH_FASTER,
    _cluster_changes,
    _other_machines,
    _recipe_changes,
    _replanned,
    alternatives,
    remedies,
)
from shardwise.planner.search import Search, best_of_kinds, choose, could_fit
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.devices import Device, rented
from shardwise.spec.load import load_recipe
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Plan
from tests.said import shows

SEVENTY_B = load_spec("meta-llama/Llama-3.1-70B")
ONE_B = load_spec("meta-llama/Llama-3.2-1B")
MODEL = "model=meta-llama/Llama-3.1-70B"


def share(plan: Plan) -> float:
    return plan.estimate.peak_bytes / plan.estimate.capacity_bytes


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("words", "cluster", "expected"),
    [
        (
            ["seq_len=4096", "global_batch=64"],
            "8xH100",
            [
                "offload.optimizer=auto",
                "lora.rank=16",
                "lora.rank=16 lora.frozen=float8",
                "lora.rank=16 lora.frozen=nf4",
                "--cluster 2x8xH100-SXM-80GB+3200Gb/node",
                "--cluster 1x8xH200-SXM",
            ],
        ),
        (
            ["seq_len=4096", "global_batch=64", "recompute=none", "strategy=zero3", "parallel.tp=1"],
            "2x8xRTX-PRO-6000",
            [
                "parallel.strategy=auto parallel.tp=null",
                "recompute.mode=full",
                "lora.rank=16 lora.frozen=float8",
                "lora.rank=16 lora.frozen=nf4",
                "--cluster 2x8xB200-SXM+3200Gb/node",
            ],
        ),
        (
            ["lora=16", "seq_len=4096"],
            "1xH100",
            ["offload.weights=host", "lora.frozen=nf4", "--cluster 1x2xH100-SXM-80GB", "--cluster 1x1xB200-SXM"],
        ),
    ],
)
def test_what_is_named_fits_when_it_is_typed(words: list[str], cluster: str, expected: list[str]) -> None:
    machines = parse_cluster(cluster)
    asked = load_recipe(None, [MODEL, *words])
    chosen = choose(asked, SEVENTY_B, machines)
    assert share(chosen) > 1
    found = remedies(asked, SEVENTY_B, machines, chosen)
    assert [remedy.change for remedy in found] == expected
    for remedy in found:
        assert remedy.plan.layout.pp in (1, chosen.layout.pp)
        more, other = remedy.change.split(), machines
        if more[0] == "--cluster":
            other, more = parse_cluster(more[1]), []
        again = choose(load_recipe(None, [MODEL, *words, *more]), SEVENTY_B, other)
        assert share(again) <= 1
        if share(remedy.plan) <= TIGHT:  # other numbers of stages are tried as well
            assert seconds(again).step_s <= (1 + TIE) * seconds(remedy.plan).step_s
        if again.layout.pp == remedy.plan.layout.pp:
            assert again.estimate == remedy.plan.estimate
        assert remedy.price


@pytest.mark.prove
def test_where_no_single_change_is_enough_the_closest_are_named() -> None:
    asked = load_recipe(None, [MODEL, "seq_len=4096"])
    cluster = parse_cluster("1x4090,host=1000GB")
    found = remedies(asked, SEVENTY_B, cluster, choose(asked, SEVENTY_B, cluster))
    closest = ["offload.optimizer=nvme offload.weights=nvme", "--cluster 4x8xRTX-4090+100Gb/node,host=1000GiB"]
    assert [remedy.change for remedy in found[:2]] == closest and len(found) == 3
    assert 1 < share(found[0].plan) <= share(found[1].plan) <= share(found[2].plan)


@pytest.mark.parametrize(
    "words", [[], ["model.frozen=[layers.0.*]"], ["lora.rank=16"]], ids=["all", "some", "adapters"]
)
@pytest.mark.parametrize("tier", ["none", "host", "nvme"])
def test_no_change_is_named_twice(tier: str, words: list[str]) -> None:
    asked = load_recipe(None, [MODEL, f"offload.optimizer={tier}", *words])
    changes = [str(change[0]) for each in _recipe_changes(asked, parse_cluster("1x4090")) for change in each]
    assert len(changes) == len(set(changes)) and sum("offload.weights" in change for change in changes) >= 1


def test_more_of_the_optimizer_on_the_host_is_a_remedy() -> None:
    words = ["model=meta-llama/Llama-3.1-8B", "seq_len=4096", "global_batch=2", "offload.optimizer=host"]
    recipe = load_recipe(None, [*words, "offload.optimizer_fraction=0.25"])
    spec, cluster = load_spec("meta-llama/Llama-3.1-8B"), parse_cluster("1xH100")
    chosen = choose(recipe, spec, cluster)
    assert share(chosen) > 1
    named = {remedy.change: remedy.plan for remedy in remedies(recipe, spec, cluster, chosen)}
    assert share(named["offload.optimizer_fraction=null"]) <= MARGIN
    assert share(named["offload.optimizer_fraction=null offload.weights=host"]) <= MARGIN


def test_all_blocks_are_no_more_of_the_optimizer() -> None:
    """Where a recipe says 1, it has them; and where nothing is on the host, 1 is no contradiction."""
    asked = load_recipe(None, [MODEL, "offload.optimizer=host", "offload.optimizer_fraction=1.0"])
    changes = [change[0] for each in _recipe_changes(asked, parse_cluster("1x4090")) for change in each]
    assert not any("offload.optimizer_fraction" in change for change in changes)
    assert load_recipe(None, ["offload.optimizer_fraction=1.0"]).offload.optimizer == "none"


@pytest.mark.prove
def test_pins_that_stand_in_the_way() -> None:
    """On two devices a model of 1.2 B parameters: as replicas; with eight rows at a time."""
    words = ["model=meta-llama/Llama-3.2-1B", "seq_len=4096", "precision=bf16", "parallel.tp=1"]
    for pin, gib, change in (
        (["strategy=ddp"], 15, "parallel.strategy=auto parallel.tp=null"),
        (["micro_batch_size=8", "global_batch=16", "recompute=full"], 13, "train.micro_batch_size=1"),
        (["micro_batch_size=8"], 13, "train.micro_batch_size=1 train.gradient_accumulation_steps=8"),
        (["recompute=none"], 16, "recompute.mode=full"),
    ):
        cluster = replace(parse_cluster("2xCPU"), device=Device("CPU", gib * 2**30))
        asked = load_recipe(None, [*words, *pin])
        chosen = choose(asked, ONE_B, cluster)
        assert share(chosen) > 1
        names = [remedy.change for remedy in remedies(asked, ONE_B, cluster, chosen)]
        assert change in names and not any(name.startswith("--cluster") for name in names)


@pytest.mark.big
def test_where_it_is_close_only_what_stays_below_the_margin_is_a_remedy() -> None:
    words = [MODEL, "seq_len=4096", "global_batch=64", "parallel.tp=1"]
    cluster = parse_cluster("2x8xRTX-PRO-6000+200Gb/node")
    asked = load_recipe(None, words)
    chosen = choose(asked, SEVENTY_B, cluster)
    assert MARGIN < share(chosen) <= 1
    found = remedies(asked, SEVENTY_B, cluster, chosen)
    assert "optim.name=adamw8bit" in [remedy.change for remedy in found]
    assert all(share(remedy.plan) <= MARGIN for remedy in found)


@pytest.mark.prove
def test_the_glance_never_hides_what_fits() -> None:
    for cluster in ("8xH100", "4xH100", "2x4xA100-40GB"):
        machines = parse_cluster(cluster)
        for words in (["lora=16"], ["seq_len=512"], ["lora=16", "lora.frozen=nf4"]):
            asked = load_recipe(None, [MODEL, *words])
            assert (
                could_fit(Search(asked, SEVENTY_B, machines), MARGIN)
                or share(choose(asked, SEVENTY_B, machines)) > MARGIN
            )


@pytest.mark.prove
def test_a_much_faster_plan_that_is_tight_is_told_of() -> None:
    """The one that is chosen is below the margin, 80 % of the memory, and ten times as slow as one just above it. What
    the recipe pins of the split gives way."""
    machines = parse_cluster("2x8xH100-96GB-HBM2e+400Gb/node")
    without = "parallel.dp_shard=null parallel.tp=1 parallel.pp=1 parallel.strategy=zero3 parallel.dp_replicate=1"
    told = {(): "parallel.tp=4 parallel.pp=4", ("parallel.tp=8", "parallel.dp_shard=2"): without}
    for pins, change in told.items():
        asked = load_recipe(None, [MODEL, *pins])
        search = Search(asked, SEVENTY_B, machines)
        others = best_of_kinds(replace(search, pinned=False))
        first = next(alternatives(asked, SEVENTY_B, machines, search.chosen, others))
        assert {*first.change.split()} == {*change.split()}
        assert share(search.chosen) <= MARGIN < share(first.plan) <= TIGHT
        assert MUCH_FASTER * seconds(first.plan).step_s < seconds(search.chosen).step_s
        typed = choose(load_recipe(None, [MODEL, *pins, *first.change.split()]), SEVENTY_B, machines)
        assert typed.estimate == first.plan.estimate


@pytest.mark.parametrize("cluster", ["8xH100", "2x8xA100", "1xL40S", "4xH200", "8xRTX-4090"])
def test_gpus_that_cannot_be_rented_come_last(cluster: str) -> None:
    """Nor are there more of one kind in a node than its nodes have."""
    machines = parse_cluster(cluster)
    larger = [change[1].device for change in list(_cluster_changes(machines))[-1]]
    common = [device.name in rented() for device in larger]
    assert common[0] and common == sorted(common, reverse=True)
    assert all(device.per_node >= machines.devices_per_node for device in larger)
    faster = [change[1].device for change in _other_machines(machines) if change[1].device != machines.device]
    assert all(device.name in rented() for device in faster)


def test_more_gpus_in_a_node_have_their_own_network_and_host() -> None:
    [more] = [each for _, each, words in _other_machines(parse_cluster("2x3090")) if "devices instead" in words]
    assert str(more) == "1x4xRTX-3090" and more == parse_cluster("4x3090")
    for changes in (
        list(_other_machines(parse_cluster("1xGH200"))),
        next(_cluster_changes(parse_cluster("1xGH200"))),
    ):
        assert {each.devices_per_node for _, each, _ in changes} == {1}, "nodes of theirs have one"


def test_other_gpus_have_no_rates_that_were_measured_on_these() -> None:
    machines = replace(parse_cluster("8xH100"), measured=Measured(launch_s=1e-6))
    assert [c.measured for _, c, _ in _other_machines(machines) if c.device != machines.device] == [None]


@pytest.mark.parametrize("cluster", ["1xH100", "2xRTX-4090"])
def test_where_the_host_makes_a_step_shorter_the_remedy_says_why(cluster: str) -> None:
    """Its larger micro-batches, beside the one of what does not fit; where it is slower, nothing is said of speed."""
    words = ["model=meta-llama/Llama-3.1-8B", "seq_len=4096", "global_batch=64", "recompute=full"]
    asked = load_recipe(None, words)  # else results of the smaller ones would be saved
    spec, machines = load_spec("meta-llama/Llama-3.1-8B"), parse_cluster(cluster)
    chosen = choose(asked, spec, machines)
    change = {"offload.optimizer": "auto"}
    found = _replanned((change, machines, "moved"), asked, spec, None, chosen)
    assert found is not None and share(chosen) > 1 >= share(found.plan)
    sizes = found.plan.batch.micro_batch_size, chosen.batch.micro_batch_size
    faster = tokens_per_s(found.plan) > tokens_per_s(chosen)
    assert faster is (cluster == "1xH100")
    assert shows(found.price, f"micro-batches of {sizes[0]}", sizes[1]) is faster
    assert found.price == "moved" or faster


@pytest.mark.parametrize(
    ("cluster", "change"),
    [
        ("1xRTX-4090", "offload.optimizer=host offload.weights=host"),
        ("1xRTX-4090,host=64GB", "offload.optimizer=nvme offload.weights=host"),
        ("1xRTX-4090,host=48GB,disk=2TB@3GB/s", "offload.optimizer=nvme offload.weights=nvme"),
        ("1xRTX-4090,host=48GB,disk=80GB@3GB/s", None),
    ],
)
def test_where_the_host_is_too_small_files_are_proposed(cluster: str, change: str | None) -> None:
    """And where the disk is, nothing of the kind."""
    spec, machines = load_spec("meta-llama/Llama-3.1-8B"), parse_cluster(cluster)
    asked = load_recipe(None, ["model=meta-llama/Llama-3.1-8B", "seq_len=2048", "global_batch=16"])
    chosen = choose(asked, spec, machines)
    choices = [each for each in _recipe_changes(asked, machines) if any("offload.optimizer" in c[0] for c in each)]
    [tried] = choices
    found = (_replanned(each, asked, spec, 1.0, chosen) for each in tried)
    fitting = [remedy.change for remedy in found if remedy and remedy.plan.estimate.share <= 1]
    assert fitting[:1] == [change] * (change is not None)


def test_a_run_in_fp32_is_told_what_bf16_would_bring() -> None:
    """More than four times the tokens a second on a GPU with tensor cores; nothing on one that has no bf16."""
    spec, words = load_spec("Qwen/Qwen3-0.6B"), ["seq_len=2048", "global_batch=8", "precision.compute=fp32"]
    asked = load_recipe(None, ["model=Qwen/Qwen3-0.6B", *words])
    for name, told in (("1xH100", True), ("1xV100", False)):
        machines = parse_cluster(name)
        chosen = choose(asked, spec, machines)
        found = [
            each for each in alternatives(asked, spec, machines, chosen, []) if each.change == "precision.compute=bf16"
        ]
        assert bool(found) is told and all(tokens_per_s(each.plan) > 4 * tokens_per_s(chosen) for each in found), name
