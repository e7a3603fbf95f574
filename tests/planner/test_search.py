"""What is chosen, pins, and what a plan says of itself; without torch. That the choice is the best of all plans,
test_exhaustive.py shows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest

from shardwise import techniques
from shardwise.errors import ConfigError
from shardwise.methods.loss_memory import forward_tensors
from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import MARGIN, fits, kind, peak_share, seconds, smallest_ones
from shardwise.planner.price import price
from shardwise.planner.search import Search, best_of_kinds, choose
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster, Kind, parse_cluster
from shardwise.spec.devices import Device
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import LoraSection, OffloadSection, Parallel, PrecisionSection, Recipe, Recompute, Train
from shardwise.techniques.shard.degrees import STRATEGIES
from tests.said import shows

EIGHT_B = load_spec("meta-llama/Llama-3.1-8B")
ONE_B = load_spec("meta-llama/Llama-3.2-1B")
SEVENTY_B = load_spec("meta-llama/Llama-3.1-70B")
A100S = parse_cluster("8xA100")
H100S = parse_cluster("8xH100")


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"train": Train(seq_len=4096, global_batch_size=64), **sections})


def families(asked: Recipe, spec: ModelSpec, cluster: Cluster) -> dict[str, Plan]:
    """The best plan of each kind, by seconds."""
    return {kind(plan): plan for plan in best_of_kinds(Search(asked, spec, cluster, pinned=False))}


@pytest.mark.usefixtures("by_table")
def test_where_all_fit_the_fastest_is_chosen() -> None:
    """Bytes a weight, times 7/8: ddp's all-reduce 8; zero1 gathers 2 in bf16 and scatters 4; zero2 scatters 4 in each
    micro-batch, and zero3 gathers twice in each. gloo's reduce-scatter is an all-reduce: on CPUs ddp sends least."""
    asked = recipe(parallel=Parallel(tp=1, pp=1))
    plan, found = choose(asked, ONE_B, H100S), families(asked, ONE_B, H100S)
    assert (plan.shard.strategy, plan.batch.accumulation) == ("zero1", 4)
    assert seconds(plan).step_s == min(seconds(other).step_s for other in found.values())
    assert plan.why["shard.strategy"].startswith("searched: ") and "; ddp over 8: " in plan.why["shard.strategy"]
    assert [each for each in found if each in STRATEGIES] == ["zero1", "ddp", "zero2", "zero3"]
    cpus = replace(parse_cluster("2xCPU"), device=Device("CPU", 200 * 2**30))
    plan = choose(asked, ONE_B, cpus)
    assert (plan.shard.strategy, plan.layout.dp_replicate) == ("ddp", 2)


def test_of_what_takes_as_long_the_simplest_is_chosen() -> None:
    """With weights in bf16, which ddp need not cast, and many micro-batches a step hardly depends on the sharding."""
    asked = recipe(train=Train(seq_len=1024, global_batch_size=1024), precision=PrecisionSection(weights="bf16"))
    plan, found = choose(asked, ONE_B, H100S), families(asked, ONE_B, H100S)
    fastest = min(found.values(), key=lambda other: seconds(other).step_s)
    assert (plan.shard.strategy, fastest.shard.strategy) == ("ddp", "zero1")
    assert seconds(fastest).step_s < seconds(plan).step_s <= 1.02 * seconds(fastest).step_s
    assert "more than zero1 over 8 (" in plan.why["shard.strategy"]


def test_between_nodes_the_weights_of_adapters_stay_in_the_node() -> None:
    """ZeRO-3 over 16 gathers 558 GB a step, 10 s of the network; replicas of two nodes send 0.1 GB over it."""
    asked = Recipe(train=Train(seq_len=8192), lora=LoraSection(rank=16), parallel=Parallel(tp=1, pp=1))
    cluster = parse_cluster("2x8xH100+400Gb/node")
    plan = choose(asked, SEVENTY_B, cluster)
    assert (plan.shard.strategy, plan.layout.dp_replicate, plan.layout.dp_shard) == ("zero3", 2, 8)
    assert sum(t.bytes for t in plan.estimate.traffic if t.link == "network") < 0.11e9
    assert "; zero3 over 16" in plan.why["shard.strategy"]
    pinned = choose(asked.model_copy(update={"parallel": Parallel(strategy="zero3", tp=1, pp=1)}), SEVENTY_B, cluster)
    assert pinned.layout.dp_shard == 16 and pinned.why["shard.strategy"] == "pinned"


def test_an_illegal_setting_is_passed_over_where_another_fits() -> None:
    """Sharded modules of their own type stand in the way of selective recompute, replicas do not."""
    asked = recipe(precision=PrecisionSection(modules={"*norm*": "fp32"}), recompute=Recompute(mode="selective"))
    assert choose(asked, ONE_B, H100S).shard.strategy == "ddp"
    with pytest.raises(ConfigError) as error:
        choose(asked, SEVENTY_B, H100S)
    assert [problem.code for problem in error.value.problems] == ["PLAN016"]


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("cluster", "expected"), [("8xH100", "bf16"), ("8xV100-32GB", "fp16"), ("8xT4", "fp16")])
def test_auto_computes_in_what_the_device_has(cluster: str, expected: str) -> None:
    plan = choose(recipe(), ONE_B, parse_cluster(cluster))
    assert plan.precision.compute == expected and plan.precision.loss_scaling == (expected == "fp16")


@pytest.mark.parametrize(
    ("cluster", "pin", "served"),
    [
        ("1xH100", "cudnn", None),
        ("1xH100", "flex", None),
        ("1xA100", "cudnn", "flash, efficient, flex, blockwise"),
        ("1xT4", "flash", "efficient, blockwise"),
        ("1xMI300X", "efficient", "flash, flex, blockwise"),
        ("1xCPU", "flex", "flash, blockwise"),
    ],
)
def test_a_pinned_kernel_of_attention_serves_or_is_refused(cluster: str, pin: str, served: str | None) -> None:
    asked = recipe(attention=pin)
    if served is None:
        plan = choose(asked, ONE_B, parse_cluster(cluster))
        assert plan.attention == pin and plan.why["attention"].startswith("pinned")
        return
    with pytest.raises(ConfigError) as caught:
        choose(asked, ONE_B, parse_cluster(cluster))
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("PLAN020", "attention")
    assert set(problem.fix.removeprefix("attention=auto, or one of ").split(", ")) == set(served.split(", "))


def test_a_cpu_computes_in_fp32_unless_another_type_is_pinned() -> None:
    cpu = Cluster(Device("CPU", 2**40), kind="cpu")
    plan = choose(recipe(), ONE_B, cpu)
    assert (plan.precision.compute, plan.precision.matmul) == ("fp32", "highest")
    assert plan.why["precision.compute"].startswith("default")
    for asked in ("fp32", "bf16"):
        assert choose(recipe(precision=PrecisionSection(compute=asked)), ONE_B, cpu).precision.compute == asked  # type: ignore[arg-type]


@pytest.mark.prove
def test_what_is_faster_than_the_choice_does_not_fit() -> None:
    """8 B parameters: 96 GB of fp32 state do not fit 80 GB, whatever the activations; a stage that cuts them does."""
    plan, found = choose(recipe(), EIGHT_B, H100S), families(recipe(), EIGHT_B, H100S)
    assert plan.shard.strategy != "ddp" and fits(plan) and not fits(found["ddp"])
    for other in found.values():
        assert seconds(other).step_s >= seconds(plan).step_s / 1.02 or not fits(other)


def test_recomputation_and_smaller_micro_batches_come_after_sharding() -> None:
    plan = choose(recipe(), EIGHT_B, parse_cluster("8xRTX-5090"))
    assert (plan.shard.strategy, plan.batch.global_batch_size(plan.layout.dp)) == ("zero3", 64)
    assert plan.remat.mode != "none"


def test_state_of_seventy_billion_parameters_is_sixteen_bytes_each() -> None:
    """1,129 GB of fp32 weights, gradients and moments; eight H100 have 640: it must not be said to fit."""
    plan = choose(recipe(), SEVENTY_B, parse_cluster("8xH100"))
    assert plan.estimate.peak_bytes > plan.estimate.capacity_bytes
    assert "no plan stays" in plan.why["shard.strategy"]
    estimate = plan.estimate.memory
    state = 8 * (estimate["weights"] + estimate["moments"])
    assert state == pytest.approx(12 * 70.55e9, rel=0.001)


@pytest.mark.parametrize(
    ("strategy", "expected"), [("zero1", "zero1"), ("zero2", "zero2"), ("fsdp", "zero3"), ("ddp", "ddp")]
)
def test_a_pin_wins(strategy: str, expected: str) -> None:
    plan = choose(recipe(parallel=Parallel(strategy=strategy)), ONE_B, parse_cluster("4xH100"))  # type: ignore[arg-type]
    assert plan.shard.strategy == expected
    assert plan.why["shard.strategy"] == "pinned"


def test_a_setting_that_has_nothing_to_act_on_is_told() -> None:
    asked = recipe(
        parallel=Parallel(strategy="zero1", reshard_after_forward=False), recompute=Recompute(mode="none", every=2)
    )
    plan = choose(asked, ONE_B, parse_cluster("4xH100"))
    assert shows(plan.why["shard.reshard_after_forward"], "not used", "zero1")
    assert shows(plan.why["remat.every"], "not used", "nothing is recomputed")
    used = recipe(parallel=Parallel(strategy="zero3", reshard_after_forward=False), recompute=Recompute(mode="full"))
    assert not {"shard.reshard_after_forward", "remat.every"} & {*choose(used, ONE_B, parse_cluster("4xH100")).why}


def test_weights_are_gathered_as_far_ahead_as_is_pinned() -> None:
    plans = [
        choose(recipe(parallel=Parallel(strategy="zero3", tp=1, pp=1, backward_prefetch=n)), ONE_B, H100S)
        for n in (0, 1, 3)
    ]
    assert [plan.shard.backward_prefetch for plan in plans] == [0, 1, 3]
    none, one, three = (seconds(plan) for plan in plans)
    assert sum(none.exposed_s.values()) > sum(one.exposed_s.values()) >= sum(three.exposed_s.values())
    pinned = recipe(parallel=Parallel(strategy="zero2", backward_prefetch=2))
    plan = choose(pinned, ONE_B, H100S)
    assert plan.why["shard.backward_prefetch"] == "not used: zero2 gathers nothing for backward"


def test_gradients_that_are_reduced_once_take_memory_and_spare_the_network() -> None:
    once, each = (
        choose(recipe(parallel=Parallel(strategy="zero3", tp=1, pp=1, sync_each_batch=sync)), ONE_B, A100S)
        for sync in (False, True)
    )
    assert (once.shard.sync_each_batch, each.shard.sync_each_batch) == (False, True)
    other = price(ONE_B, replace(each, shard=once.shard), A100S)
    reduced = [sum(t.bytes for t in plan.estimate.traffic if t.kind == "reduce_scatter") for plan in (other, each)]
    assert each.batch.accumulation > 1 and reduced[1] == each.batch.accumulation * reduced[0]
    assert other.estimate.peak_bytes > each.estimate.peak_bytes
    wrong = replace(each, shard=replace(each.shard, strategy="zero2", sync_each_batch=False))
    assert [problem.where for problem in techniques.check(ONE_B, wrong, A100S)] == ["parallel.sync_each_batch"]
    plan = choose(recipe(parallel=Parallel(strategy="zero2", sync_each_batch=False)), ONE_B, A100S)
    assert plan.why["shard.sync_each_batch"].startswith("not used")


def test_what_cannot_be_gathered_ahead_is_refused() -> None:
    alone = {"strategy": "zero3", "tp": 1, "pp": 1, "backward_prefetch": 2}
    on_host = OffloadSection(optimizer="host", weights="host")
    for more, keys, fix in (({"reshard_after_forward": False}, {}, "reshard"), ({}, {"offload": on_host}, "offload.w")):
        with pytest.raises(ConfigError) as error:
            choose(recipe(parallel=Parallel.model_validate({**alone, **more}), **keys), ONE_B, H100S)
        (problem,) = error.value.problems
        assert (problem.code, problem.where) == ("PLAN015", "parallel.backward_prefetch") and fix in problem.fix


def test_hybrid_shards_in_the_node_and_replicates_across() -> None:
    plan = choose(recipe(parallel=Parallel(strategy="hsdp")), ONE_B, parse_cluster("2x8xH100"))
    assert (plan.layout.dp_replicate, plan.layout.dp_shard) == (2, 8)
    links = {(traffic.axis, traffic.kind): traffic.link for traffic in plan.estimate.traffic}
    assert links["dp_shard", "all_gather"] == "node"
    assert links["dp_replicate", "all_reduce"] == "network"


def test_degrees_alone_make_a_hybrid() -> None:
    plan = choose(recipe(parallel=Parallel(strategy="zero2", dp_shard=4)), ONE_B, parse_cluster("8xH100"))
    assert (plan.shard.strategy, plan.layout.dp_replicate, plan.layout.dp_shard) == ("zero2", 2, 4)


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(strategy="zero3", dp_shard=3),
        Parallel(strategy="hsdp", dp_replicate=2, dp_shard=2),
        Parallel(strategy="ddp", dp_shard=8),
    ],
)
def test_degrees_that_do_not_multiply_to_the_world(parallel: Parallel) -> None:
    with pytest.raises(ConfigError) as error:
        choose(recipe(parallel=parallel), ONE_B, parse_cluster("8xH100"))
    problem = error.value.problems[0]
    assert problem.code == "PLAN001"
    assert "8 devices" in problem.what
    assert problem.fix


def test_every_problem_of_the_pins_is_told() -> None:
    parallel = Parallel(strategy="zero3", reshard_after_forward=3)
    with pytest.raises(ConfigError) as error:
        choose(recipe(parallel=parallel, recompute=Recompute(mode="full", every=99)), ONE_B, parse_cluster("8xH100"))
    assert {problem.code for problem in error.value.problems} == {"PLAN013", "PLAN015"}


@pytest.mark.prove
def test_the_table_has_the_best_of_each_kind_and_what_rules_out_the_others() -> None:
    cluster = parse_cluster("2x8xRTX-PRO-6000+200Gb/node")
    plans = best_of_kinds(Search(recipe(), SEVENTY_B, cluster))
    assert {kind(plan) for plan in plans} == {"ddp", "zero1", "zero2", "zero3", "hybrid", "tp", "pp", "pp x tp"}
    able = [2 if fits(plan) else int(peak_share(plan) <= 1) for plan in plans]
    assert able == sorted(able, reverse=True) and {*able} >= {2, 0}
    for group in {*able}:
        steps = [seconds(plan).step_s for plan, of in zip(plans, able, strict=True) if of == group]
        assert steps == sorted(steps)
    for plan in plans:
        assert sum(plan.estimate.memory.values()) == plan.estimate.peak_bytes


def test_accumulation_multiplies_what_zero3_gathers() -> None:
    """With m micro-batches zero3 gathers 2m times and reduces m times; zero2 gathers once."""
    train = Train(seq_len=2048, micro_batch_size=1, gradient_accumulation_steps=4)
    sent = {}
    for strategy in ("zero1", "zero2", "zero3"):
        pinned = Parallel(strategy=strategy)  # type: ignore[arg-type]
        plan = choose(Recipe(train=train, parallel=pinned), ONE_B, parse_cluster("8xH100"))
        sent[strategy] = {traffic.kind: traffic for traffic in plan.estimate.traffic if traffic.category != "control"}
    blocks = ONE_B.num_hidden_layers
    assert sent["zero3"]["all_gather"].count == 4 * (2 * blocks + 1)
    assert sent["zero2"]["all_gather"].count == sent["zero1"]["all_gather"].count == blocks + 1
    assert sent["zero2"]["reduce_scatter"].count == 4 * (blocks + 1)
    assert sent["zero1"]["reduce_scatter"].count == blocks + 1


def test_a_plan_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[Plan] = []
    search = Search(recipe(), ONE_B, H100S)
    made = search.known.priced
    monkeypatch.setattr(
        "shardwise.planner.comparison.price",
        lambda spec, plan, cluster, most: priced.append(plan) or price(spec, plan, cluster, most=most),
    )
    assert fits(search.chosen) and best_of_kinds(search) and made(priced[0]) == made(priced[0])
    assert len(set(priced)) == len(priced) < len(search.all)


@pytest.mark.prove
def test_convergence_settings_are_left_alone() -> None:
    for cluster in ("8xH100", "2xH100", "64xRTX-5090"):
        plan = choose(recipe(precision=PrecisionSection(weights="fp32")), ONE_B, parse_cluster(cluster))
        assert plan.batch.global_batch_size(plan.layout.dp) == 64
        assert plan.batch.seq_len == 4096
        assert plan.precision.weights == "fp32"


@pytest.mark.prove
def test_planning_a_known_model_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from shardwise.planner.search import choose\n"
        "from shardwise.models.lookup import load_spec\n"
        "from shardwise.spec.cluster import parse_cluster\n"
        "from shardwise.spec.recipe import Recipe\n"
        "choose(Recipe(), load_spec('meta-llama/Llama-3.1-8B'), parse_cluster('8xH100'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_cpu_passes_fewer_logits_at_a_time_than_a_gpu() -> None:
    """Of a vocabulary of 128,256: at most 1 GiB of fp32 logits on a GPU, on a CPU the fewest there may be."""
    chunks = [choose(recipe(), ONE_B, parse_cluster(name)).batch.loss_chunk_tokens for name in ("2xCPU", "2xH100")]
    assert chunks == [128, 2048]


@pytest.mark.prove
def test_chunks_of_the_loss_on_a_gpu_are_as_large_as_memory_allows() -> None:
    """Each chunk reads and writes the fp32 gradient of the output weight once more; its logits take 6 bytes each, and
    beside them their gradient's 2. What is chosen is priced, and never is a plan made not to fit by it."""
    plan = choose(recipe(), ONE_B, H100S)
    assert plan.batch.loss_chunk_tokens == 2048 and fits(plan)
    assert shows(plan.why["batch.loss_chunk_tokens"], "derived", "2,048 x 128,256", "1,002.0 MiB")
    assert families(recipe(), ONE_B, H100S)[kind(plan)].estimate == plan.estimate
    peaks = {}
    for chunk in (512, 1024, 2048):
        smaller = replace(plan, batch=replace(plan.batch, loss_chunk_tokens=chunk))
        peaks[chunk] = price(ONE_B, smaller, H100S).estimate.peak_bytes
    assert peaks[2048] == plan.estimate.peak_bytes and peaks[512] < peaks[1024] < peaks[2048]
    for chunk, peak_bytes in peaks.items():
        tight = replace(H100S, device=replace(H100S.device, memory_bytes=int(peak_bytes / MARGIN) + 2**20))
        asked = recipe(parallel=Parallel(strategy="zero1"), recompute=Recompute(mode=plan.remat.mode))
        found = choose(asked, ONE_B, tight)
        assert (found.batch.micro_batch_size, found.batch.loss_chunk_tokens) == (plan.batch.micro_batch_size, chunk)


def test_on_a_gpu_a_chunks_product_is_added_to_the_sum_as_it_is_made() -> None:
    """It would be a bf16 [V, d] beside the fp32 one."""
    plan = choose(recipe(), ONE_B, H100S)
    costed = techniques.cost(sheet_of(ONE_B, plan), plan)
    sizes = [{name: size for name, size, _ in forward_tensors(costed, plan, kind)} for kind in get_args(Kind)]
    assert sizes[0].pop("product") == 2 * 128_256 * 2048 and sizes[0] == sizes[1]


def test_a_deterministic_plan_counts_the_workspaces_that_it_takes() -> None:
    """By how much, tests/planner/test_overhead.py says."""
    train = Train(seq_len=4096, global_batch_size=64, micro_batch_size=1)
    plain, found = (choose(recipe(train=train, run={"deterministic": on}), EIGHT_B, A100S) for on in (False, True))
    assert found.deterministic and not plain.deterministic
    assert found.estimate.memory["cuBLAS workspaces"] > plain.estimate.memory["cuBLAS workspaces"]


def test_blocks_are_compiled_on_gpus_unless_something_bars_it() -> None:
    """What bars it says so under ``why``; a pin stands, or is refused."""

    def told(cluster: Cluster, **sections: object) -> tuple[bool, str]:
        plan = choose(recipe(**sections), ONE_B, cluster)
        return plan.compile, plan.why["compile"]

    bare = replace(H100S, device=replace(H100S.device, no_compiler="a C compiler (gcc or clang)"))
    cpus = replace(parse_cluster("2xCPU"), device=Device("CPU", 200 * 2**30))
    on, why = told(H100S)
    assert on and shows(why, "default", "on", "GPUs")
    assert told(H100S, compile=False) == (False, "pinned")
    on, why = told(bare)
    assert not on and shows(why, "derived", "off", "C compiler", "gcc", "clang")
    nf4 = LoraSection(rank=16, frozen="nf4")
    on, why = told(parse_cluster("1xH100"), lora=nf4)
    assert not on and shows(why, "derived", "off", "nf4")
    assert told(cpus) == (False, "default: off; see docs/techniques/compile.md")
    assert told(cpus, compile=True) == (True, "pinned")
    for cluster, sections in ((bare, {}), (parse_cluster("1xH100"), {"lora": nf4})):
        with pytest.raises(ConfigError) as refused:
            choose(recipe(compile=True, **sections), ONE_B, cluster)
        assert [problem.where for problem in refused.value.problems] == ["compile"]


def test_compiled_blocks_are_planned_with_what_eager_ones_take() -> None:
    plans = [choose(recipe(compile=compile), ONE_B, H100S) for compile in (True, False)]
    compiled, eager = (replace(plan.estimate, seconds=None) for plan in plans)
    assert compiled == eager and seconds(plans[0]).pointwise_s < seconds(plans[1]).pointwise_s


@pytest.mark.parametrize("loose", [False, True])
def test_the_smallest_is_that_of_all_however_loose_its_bound(loose: bool) -> None:
    """A 70B on eight GPUs of 24 GiB, where nothing fits: with bounds that say nothing every plan has to be priced."""
    search = Search(recipe(), SEVENTY_B, parse_cluster("8xRTX-4090"))
    known, plans = search.known, smallest_ones(search.all)
    held = [known.priced(plan) for plan in plans]
    assert all(known.bounds.share(plan) <= peak_share(one) for plan, one in zip(plans, held, strict=True))
    if loose:
        known.bounds.share = lambda plan: 0.0
    expected = min(held, key=lambda one: (peak_share(one), one.estimate.peak_bytes))
    assert known.smallest(search.all) == expected != held[0] and peak_share(expected) > 1
