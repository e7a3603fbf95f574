"""What a plan is made from: the machines, and what a run was started with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.cli import decide
from shardwise.cli.app import main
from shardwise.cli.decide import (
    as_first,
    beyond,
    cluster_of,
    cluster_of_ranks,
    far,
    plan_of,
    slower,
    with_measured_experts,
)
from shardwise.cli.options import sort_words
from shardwise.cli.render import title
from shardwise.errors import ConfigError, UsageError
from shardwise.models.lookup import load_spec
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.planner.seconds.history import About, remember
from shardwise.spec import cluster as machines
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.cluster_file import dump_cluster
from shardwise.spec.devices import Device
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, load_recipe
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Parallel, Recipe
from tests.said import shows

RECIPE = load_recipe(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")
SPEC = resolve(RECIPE)
EIGHT_B = load_spec("Llama-3.1-8B")
CPUS = replace(parse_cluster("2xCPU"), device=Device("CPU", 2**33))


def pinned(**precision: str) -> Recipe:
    return RECIPE.model_copy(update={"precision": RECIPE.precision.model_copy(update=precision)})


def test_ranks_do_not_count_what_they_hold_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of 1,050 MiB two ranks that have loaded torch leave too little for two others; the launcher has
    looked before they were started. What the container cannot hold at all is refused by whoever started them."""
    two = RECIPE.model_copy(update={"run": RECIPE.run.model_copy(update={"nproc": 2, "device": "cpu"})})
    monkeypatch.setattr(machines, "available_memory_bytes", lambda: 450 * 2**20)
    monkeypatch.setattr(decide, "total_memory_bytes", lambda: 1050 * 2**20)
    with pytest.raises(UsageError, match="DEV001"):
        cluster_of(two)
    found = cluster_of_ranks(two)
    assert (found.world, found.device.memory_bytes, found.assumptions) == (2, 225 * 2**20, ())
    assert found.host_memory_bytes == 1050 * 2**20
    monkeypatch.setattr(decide, "total_memory_bytes", lambda: 550 * 2**20)
    with pytest.raises(UsageError, match="DEV001"):
        cluster_of_ranks(two)


def test_this_machine_is_asked_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where machines are described: what they lack is asked there, when the run starts."""
    gpu = ("NVIDIA H100 80GB HBM3", 79 * 2**30, (9, 0))
    monkeypatch.setattr(machines, "gpus", lambda: [gpu])
    monkeypatch.setattr(decide, "compiler_lacks", lambda kind: f"a compiler for {kind}")
    assert shows(cluster_of(RECIPE).device.no_compiler, "compiler", "cuda")
    assert cluster_of(RECIPE, "8xH100").device.no_compiler == ""
    here = cluster_of(RECIPE)
    first = replace(here, device=replace(here.device, no_compiler="what rank 0 lacks"))
    first = replace(first, measured=Measured(launch_s=5e-6), link_bytes_per_s=1e9, host_memory_bytes=1)
    monkeypatch.setattr("shardwise.runtime.world.told_by_first", lambda make: json.dumps(asdict(first)))
    assert as_first(here) == replace(first, host_memory_bytes=here.host_memory_bytes), "memory is each machine's own"
    plan = plan_of(RECIPE, SPEC, cluster_of(RECIPE), None)
    assert not plan.compile and shows(plan.why["compile"], "derived", "off", "compiler", "cuda", "not installed")


def test_a_run_that_goes_on_keeps_its_compute_dtype(tmp_path: Path) -> None:
    """Whatever the default is now; a pin wins."""

    def resumed(recipe: Recipe, cluster: Cluster) -> Plan:
        return plan_of(recipe, SPEC, cluster, None, tmp_path)

    begun = plan_of(pinned(compute="bf16"), SPEC, CPUS, None)
    (tmp_path / "plan.yaml").write_text(dump_plan(begun))
    again = resumed(RECIPE, CPUS)
    assert again.precision.compute == "bf16" and shows(again.why["precision.compute"], "was started")
    assert resumed(pinned(compute="fp32"), CPUS).precision.compute == "fp32"
    assert resumed(RECIPE, parse_cluster("2xT4")).precision.compute == "bf16"
    (tmp_path / "plan.yaml").write_text("layout: [")
    assert resumed(RECIPE, CPUS).precision.compute == "fp32"


@pytest.mark.parametrize(
    ("key", "pinned", "planned"),
    [
        ("parallel.strategy", {"parallel": {"strategy": "zero1"}}, "zero3"),
        ("parallel.dp_shard", {"parallel": {"dp_shard": 2}}, "4"),
        ("parallel.dp_replicate", {"parallel": {"dp_replicate": 2}}, "1"),
        ("parallel.reshard_after_forward", {"parallel": {"reshard_after_forward": 2}}, "True"),
        ("parallel.tp", {"parallel": {"tp": 4}}, "2"),
        ("parallel.sequence_parallel", {"parallel": {"sequence_parallel": False}}, "True"),
        ("precision.compute", {"precision": {"compute": "fp32"}}, "bf16"),
        ("precision.weights", {"precision": {"weights": "bf16"}}, "fp32"),
        ("precision.reduce", {"precision": {"reduce": "bf16"}}, "fp32"),
        ("precision.modules", {"precision": {"modules": {"*norm": "fp32"}}}, "none"),
        ("precision.matmul", {"precision": {"matmul": "high"}}, "highest"),
        ("recompute.mode", {"recompute": {"mode": "selective"}}, "full"),
        ("recompute.every", {"recompute": {"every": 3}}, "2"),
        ("compile", {"compile": False}, "True"),
        ("frozen", {"model": {"frozen": ["embed.*"]}}, "none"),
        ("optim.moments", {"optim": {"moments": "bf16"}}, "none"),
        ("lora", {"lora": {"rank": 4}}, "none"),
    ],
)
def test_a_plan_that_contradicts_a_pin_is_refused(
    key: str, pinned: dict[str, dict[str, object]], planned: str, tmp_path: Path
) -> None:
    """What is not pinned may be edited in the file; what follows from no pin agrees with any."""
    cluster, file = parse_cluster("8xH100"), tmp_path / "plan.yaml"
    asked: dict[str, dict[str, object]] = {
        "parallel": {"tp": 2, "strategy": "zero3"},
        "train": {"global_batch_size": 64},
    }
    asked |= {"recompute": {"mode": "full", "every": 2}}
    file.write_text(dump_plan(choose(Recipe.model_validate(asked), EIGHT_B, cluster)))
    assert plan_of(Recipe.model_validate(asked), EIGHT_B, cluster, file).layout.tp == 2
    assert plan_of(Recipe.model_validate({"train": asked["train"]}), EIGHT_B, cluster, file).layout.tp == 2
    both = {
        **asked,
        **{
            section: {**asked.get(section, {}), **keys} if isinstance(keys, dict) else keys
            for section, keys in pinned.items()
        },
    }
    with pytest.raises(ConfigError) as refused:
        plan_of(Recipe.model_validate(both), EIGHT_B, cluster, file)
    assert [problem.code for problem in refused.value.problems] == ["PLAN019"]
    assert f"`{key}` {planned}, the recipe " in refused.value.problems[0].what


def test_a_pinned_bf16_that_is_emulated_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (plan_of(pinned(compute=dtype), SPEC, CPUS, None) for dtype in ("bf16", "fp32"))
    for has in (False, True):
        monkeypatch.setattr(decide, "cpu_has_bf16", lambda has=has: has)
        assert (slower(narrow, CPUS) is None) == has
        assert slower(wide, CPUS) is None
    assert shows(slower(narrow, parse_cluster("1xT4")), "warning", "T4", "bf16", "`precision.compute=fp16`")
    assert slower(narrow, parse_cluster("1xA100")) is None


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        (Layout(dp_shard=16, ep=16, ranks_per_node=8), 8),
        (Layout(dp_shard=12, ep=6, ranks_per_node=4), 2),
        (Layout(dp_shard=16, ep=8, ranks_per_node=8), None),
        (Layout(dp_shard=6, ep=3, ranks_per_node=8), None),
        (Layout(dp_shard=16, ranks_per_node=8), None),
    ],
)
def test_experts_on_several_nodes_are_warned_of(layout: Layout, fits: int | None) -> None:
    """With as many ranks as are on one."""
    values = f"{layout.ep} ranks", "different experts", "several nodes"
    warning = far(Plan(layout), Parallel(ep=layout.ep))
    assert warning is None if fits is None else shows(warning, *values)
    assert fits is None or f"`parallel.ep={fits}`" in str(warning)
    assert far(Plan(layout), Parallel()) is None, "what a search chose is not advised against"


def test_a_plan_tells_how_much_of_a_mixture_computes_a_token() -> None:
    """Of 47 billion parameters 13."""
    mixture, cluster = load_spec("mistralai/Mixtral-8x7B-v0.1"), parse_cluster("8xH100")
    assert shows(title(mixture, cluster), "Mixtral-8x7B-v0.1", "46.7 B", "12.9 B active", "8 x H100")
    assert "active" not in title(EIGHT_B, cluster)


def test_sequences_beyond_the_positions_are_told_with_what_to_set() -> None:
    mistral = load_spec("mistralai/Mistral-7B-v0.3")
    recipe = load_recipe(None, ["model=m", "train.seq_len=64k"])
    warning = beyond(recipe, mistral)
    assert shows(warning, "warning", "`train.seq_len`", "65,536", mistral.name, "32,768 tokens")
    assert "`train.seq_len=32768`, or stretch them: `model.rope_scaling=" in warning
    asked = load_recipe(None, ["model=mistralai/Mistral-7B-v0.3", warning.split("`")[-2]])
    stretched = resolve(asked)
    assert stretched.positions.rope_scaling is not None and stretched.positions.rope_scaling.factor == 2
    assert beyond(recipe, stretched) is None
    assert beyond(load_recipe(None, ["model=m", "train.seq_len=32k"]), mistral) is None


def test_a_new_model_is_told_to_have_more_positions() -> None:
    longer = load_recipe(None, ["model.config.model_type=llama", "train.seq_len=4096"])
    assert str(beyond(longer, replace(SPEC, max_position_embeddings=512))).endswith(
        "reach 512 tokens; `train.seq_len=512`, or `model.config.max_position_embeddings=4096`"
    )


@pytest.mark.parametrize("words", [["plan"], ["train", "--dry-run"]])
def test_both_commands_tell_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 5000)
    assert (
        main([*words, "model.config.max_position_embeddings=64", "train.seq_len=128", "data.path=a.txt", "--nproc=1"])
        == 0
    )
    assert "reach 64 tokens; `train.seq_len=64`" in capfd.readouterr().err


def test_the_machines_of_a_file_and_this_one_by_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = replace(parse_cluster("3x8xH100"), measured=Measured(launch_s=5e-6))
    (tmp_path / "cluster.yaml").write_text(dump_cluster(measured))
    monkeypatch.chdir(tmp_path)
    assert cluster_of(RECIPE, "cluster.yaml") == measured
    here, local = cluster_of(RECIPE), cluster_of(RECIPE, "local")
    assert (local.kind, local.world, local.device.name) == (here.kind, here.world, here.device.name)
    assert here.measured is None, "a file is read where it is named, never because it lies there"
    with pytest.raises(UsageError) as caught:
        sort_words(["cluster=cluster.yaml"])
    assert "run.nodes=3" in caught.value.problems[0].fix
    with pytest.raises(UsageError):
        sort_words(["cluster=local"])


@pytest.mark.prove
def test_the_imbalance_of_experts_that_a_run_measured_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next plan of the same model on the same machine, unless the recipe says what to reserve."""
    monkeypatch.setattr(decide, "state_directory", lambda: tmp_path)
    machine, mixture = parse_cluster("8xH100"), load_spec("Qwen3-30B-A3B")
    open_ = load_recipe(None, ["model.path=Qwen3-30B-A3B", "parallel.ep=8", "lora.rank=16"])
    assert with_measured_experts(open_, mixture, machine) == (open_, None)
    remember(Plan(model=mixture.name), machine, 1.0, 1.0, tmp_path, About(expert_imbalance=2.25))
    found, said = with_measured_experts(open_, mixture, machine)
    assert found.parallel.expert_imbalance == 2.25 and said is not None and "2.25 times its share" in said
    plan = choose(found, mixture, machine)
    assert plan.layout.ep == 8 and plan.expert_imbalance == 2.25
    assert choose(open_, mixture, machine).expert_imbalance == 1.5
    pinned_ = load_recipe(None, ["model.path=Qwen3-30B-A3B", "parallel.expert_imbalance=1.2"])
    assert with_measured_experts(pinned_, mixture, machine) == (pinned_, None)
    assert with_measured_experts(open_, mixture, parse_cluster("4xH100")) == (open_, None)
    assert with_measured_experts(RECIPE, EIGHT_B, machine) == (RECIPE, None)
