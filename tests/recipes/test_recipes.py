"""Every recipe that ships is short, says what it is, and can be planned for machines that it is meant for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise import techniques
from shardwise.cli.app import main
from shardwise.models.config import to_hf
from shardwise.models.resolve import resolve
from shardwise.planner.comparison import fits
from shardwise.planner.search import choose
from shardwise.prove import certify
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting
from shardwise.runtime.loop import train
from shardwise.runtime.report.results import Preference
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Offload
from shardwise.spec.shipped import recipes_directory
from tests.prove.test_certify import NoRanks
from tests.said import shows

MEANT_FOR = {
    "quickstart": "2xCPU",
    "pretrain-small": "1xH100",
    "continue-8b": "8xH100",
    "llama-70b-zero3": "4x8xH100+400Gb/node",
    "llama-8b-hsdp": "2x8xH100+400Gb/node",
    "llama-405b-3d": "16x8xH100",
    "sft-8b": "8xH100",
    "full-8b-host": "1xH100",
    "full-13b-24gb": "1xRTX-4090",
    "lora-7b": "1xH100",
    "lora-70b": "8xH100",
    "dpo-8b": "1xH100",
    "orpo-8b": "1xH100",
    "qlora-7b": "1xV100-SXM2-16GB",
    "qlora-70b": "2xRTX-A6000",
    "qlora-70b-24gb": "2xRTX-4090",
    "full-70b-host": "2x8xRTX-PRO-6000+200Gb/node",
    "sft-tiny": "2xCPU",
    "long-8b": "2x8xH100",
    "long-8b-1m": "8xH100",
    "lora-8b-long": "8xRTX-4090",
    "mixtral-8x7b": "4x8xH100",
    "lora-moe-30b": "8xH100",
    "qlora-gpt-oss-20b": "1xRTX-4090",
    "sft-qwen3-next-80b": "2x8xH100",
    "lora-glm-4.5-air": "8xH100",
    "lora-qwen3.5-9b": "1xH100",
    "lora-deepseek-v3": "4x8xH100",
    "deepseek-v3": "256x8xH100",
}
FILES = sorted(recipes_directory().glob("*.yaml"))


def test_the_list_is_complete() -> None:
    assert {path.stem for path in FILES} == set(MEANT_FOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_begins_with_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("# ") and len(lines[0]) > 40
    assert max(map(len, lines)) <= 130


def quickstart_model(directory: Path) -> str:
    """What a quickstart leaves in hf/, as far as a plan needs it."""
    spec = resolve(load_recipe(recipes_directory() / "quickstart.yaml"))
    (directory / "config.json").write_text(json.dumps(to_hf(spec)))
    return f"model.path={directory}"


@pytest.mark.matrix(4)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_can_be_planned_and_fits(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [quickstart_model(tmp_path)] if path.stem == "sft-tiny" else [])
    cluster = parse_cluster(MEANT_FOR[path.stem])
    plan = choose(recipe, resolve(recipe), cluster)
    assert plan.layout.world == cluster.world
    pins = techniques.pins(recipe, plan).items()
    assert not [key for key, (planned, asked) in pins if asked not in ("auto", planned)], "it is a plan of this recipe"
    assert plan.estimate.peak_bytes <= plan.estimate.capacity_bytes
    if path.stem == "llama-70b-zero3":
        assert (plan.shard.strategy, plan.layout.dp_shard, plan.remat.mode) == ("zero3", 32, "full")
    if path.stem == "full-8b-host":
        assert (plan.offload, plan.batch.accumulation) == (Offload("host"), 1) and fits(plan)
        assert plan.estimate.host_bytes < 128e9 * 1.01
    if path.stem == "deepseek-v3":
        layout = plan.layout
        assert (layout.tp, layout.ep, layout.pp, layout.dp_shard, plan.remat.mode) == (1, 64, 16, 128, "full")
    if path.stem == "llama-8b-hsdp":
        assert (plan.layout.dp_replicate, plan.layout.dp_shard, plan.batch.seq_len) == (2, 8, 8192)


@pytest.mark.parametrize(("nodes", "pp", "rows"), [(8, 8, 64), (16, 16, 64), (2048, 16, 2048)])
def test_405b_on_64_128_and_16384(nodes: int, pp: int, rows: int) -> None:
    """64 H100 have 5.0 TiB, of which 16 bytes of each of 405.9 B parameters are 5.9: no plan fits, and the one that is
    told needs more than there is. The other two fit, with tp 8 within nodes and the schedule of the recipe."""
    words = [f"parallel.pp={pp}", f"run.nodes={nodes}", f"train.global_batch_size={rows}"]
    recipe = load_recipe(recipes_directory() / "llama-405b-3d.yaml", words)
    plan = choose(recipe, resolve(recipe), parse_cluster(f"{nodes}x8xH100"))
    assert (plan.layout.world, plan.layout.tp, plan.layout.pp) == (8 * nodes, 8, pp)
    assert (plan.pipeline.schedule, plan.pipeline.stages_per_rank) == ("interleaved", 4)
    assert len(plan.pipeline.split) == 4 * pp and sum(plan.pipeline.split) == 126
    assert plan.batch.global_batch_size(plan.layout.dp) == rows
    assert (plan.estimate.peak_bytes <= plan.estimate.capacity_bytes) == (nodes > 8)


@pytest.mark.prove
def test_64_do_not_hold_405b_and_the_plan_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    path = str(recipes_directory() / "llama-405b-3d.yaml")
    main(["plan", path, "--cluster", "8x8xH100", "parallel.pp=8", "run.nodes=8"])
    told = capfd.readouterr().out
    assert shows(told, "not fit", "the smallest plan", "tp 8", "pp 8")
    assert "--cluster 16x8xH100" in told[told.index("any one of these changes makes it fit") :]


def test_preference_on_a_node_of_eight_as_its_second_line_says() -> None:
    path = recipes_directory() / "dpo-8b.yaml"
    recipe = load_recipe(path, path.read_text().splitlines()[1].split("`")[1].split())
    plan = choose(recipe, resolve(recipe), parse_cluster("8xH100"))
    assert (plan.loss, plan.batch.global_batch_size(8)) == ("dpo", 32) and plan.lora is not None
    assert plan.estimate.peak_bytes <= plan.estimate.capacity_bytes


def small_words(directory: Path, records: list[dict[str, str]]) -> list[str]:
    """What makes a run of three steps on ``records`` of a recipe: a model of a few thousand parameters that begins at
    random, on a CPU."""
    (directory / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 300, "tie_word_embeddings": True, **size}
    words = ["model.path=null", *(f"model.config.{key}={value}" for key, value in config.items())]
    words += [f"data.path={directory}/records.jsonl", f"data.cache={directory}/cache", "data.repeat=true"]
    words += ["data.tokenizer.vocab_size=300", "data.text_key=prompt", f"run.out={directory}", "run.device=cpu"]
    return [*words, "precision.compute=fp32", "train.seq_len=64", "train.max_steps=3"]


@pytest.mark.prove
def test_preference_run_small(tmp_path: Path) -> None:
    """The recipe's own settings, in this process."""
    records = [{"prompt": f"is {i} odd? ", "chosen": "who knows", "rejected": f"{i % 2}"} for i in range(40)]
    words = [*small_words(tmp_path, records), "run.name=small", "train.global_batch_size=2", "evaluate.eval_steps=2"]
    recipe = load_recipe(recipes_directory() / "dpo-8b.yaml", words)
    report = train(recipe, choose(recipe, resolve(recipe), parse_cluster("1xCPU")))
    assert isinstance(report.validation, Preference) and 0 < report.validation.loss < 0.7
    assert (tmp_path / "small" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.prove
def test_all_weights_run_small_with_the_optimizer_on_the_host(tmp_path: Path) -> None:
    """The recipe's own settings, in this process; losses and norms are to the bit what they are without."""
    records = [{"prompt": f"is {i} odd? ", "completion": f"{i % 2}"} for i in range(40)]
    words, lines = small_words(tmp_path, records), {}
    for asked in ("host", "none"):
        own = [*words, "train.global_batch_size=4", "train.micro_batch_size=4", f"run.name={asked}"]
        own += [f"offload.optimizer={asked}"] * (asked == "none")
        recipe = load_recipe(recipes_directory() / "full-8b-host.yaml", own)
        plan = choose(recipe, resolve(recipe), parse_cluster("1xCPU"))
        assert plan.offload.optimizer == asked
        train(recipe, plan)
        told = [json.loads(line) for line in (tmp_path / asked / "metrics.jsonl").read_text().splitlines()]
        lines[asked] = [(line["step"], line["loss"], line["grad_norm"]) for line in told]
    assert len(lines["host"]) == 3 and lines["host"] == lines["none"]


@pytest.mark.prove
def test_all_weights_beyond_the_gpu_run_small(tmp_path: Path) -> None:
    """The recipe's own settings, in this process; losses and norms are to the bit what they are without."""
    records, lines = [{"prompt": f"{i} is {'odd' if i % 2 else 'even'}"} for i in range(40)], {}
    words = [*small_words(tmp_path, records), "train.global_batch_size=4", "train.micro_batch_size=2"]
    words += ["data.tokenizer.path=null"]
    for asked in ("host", "none"):
        outside = [] if asked == "host" else ["offload.optimizer=none", "offload.activations=none"]
        own = [*words, f"run.name={asked}", f"offload.weights={asked}", *outside]
        recipe = load_recipe(recipes_directory() / "full-13b-24gb.yaml", own)
        plan = choose(recipe, resolve(recipe), parse_cluster("1xCPU"))
        if asked == "host":
            assert plan.offload == Offload("nvme", "host", "host", plan.offload.sums) and plan.batch.accumulation > 1
            plan = replace(plan, offload=replace(plan.offload, sums="host"))
        train(recipe, plan)
        told = [json.loads(line) for line in (tmp_path / asked / "metrics.jsonl").read_text().splitlines()]
        lines[asked] = [(line["step"], line["loss"], line["grad_norm"]) for line in told]
    assert len(lines["host"]) == 3 and lines["host"] == lines["none"]


@pytest.mark.prove
def test_adapters_over_weights_on_the_host_run_small(tmp_path: Path) -> None:
    """The recipe's own settings, in this process; losses and norms are to the bit what they are without."""
    records = [{"prompt": f"is {i} odd? ", "completion": f"{i % 2}"} for i in range(40)]
    words, lines = small_words(tmp_path, records), {}
    words += ["model.config.hidden_size=64", "train.global_batch_size=2", "train.num_epochs=null"]
    for asked in ("host", "none"):
        own = [*words, f"run.name={asked}", f"offload.weights={asked}"]
        recipe = load_recipe(recipes_directory() / "qlora-70b-24gb.yaml", own)
        plan = choose(recipe, resolve(recipe), parse_cluster("1xCPU"))
        assert plan.offload.weights == asked and plan.lora is not None and plan.lora.nf4
        train(recipe, plan)
        told = [json.loads(line) for line in (tmp_path / asked / "metrics.jsonl").read_text().splitlines()]
        lines[asked] = [(line["step"], line["loss"], line["grad_norm"]) for line in told]
    assert len(lines["host"]) == 3 and lines["host"] == lines["none"]
    assert (tmp_path / "host" / "adapter" / "adapter_model.safetensors").is_file()


def test_adapters_of_70b_on_two_nodes() -> None:
    """As the recipe's second line says."""
    words = ["parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=8", "run.nodes=2"]
    recipe = load_recipe(recipes_directory() / "lora-70b.yaml", words)
    plan = choose(recipe, resolve(recipe), parse_cluster("2x8xH100+400Gb/node"))
    assert plan.estimate.peak_bytes <= plan.estimate.capacity_bytes
    assert sum(item.bytes for item in plan.estimate.traffic if item.link == "network") < 2**30


def test_the_tiny_tuning_takes_adapters_from_its_second_line(tmp_path: Path) -> None:
    path = recipes_directory() / "sft-tiny.yaml"
    words = path.read_text().splitlines()[1].split("`")[1].split()
    recipe = load_recipe(path, [quickstart_model(tmp_path), *words])
    assert choose(recipe, resolve(recipe), parse_cluster("2xCPU")).lora is not None
    assert load_recipe(path).model.path == "runs/quickstart-1/hf"


def test_the_quickstart_is_the_model_that_it_says() -> None:
    recipe = load_recipe(recipes_directory() / "quickstart.yaml")
    spec = resolve(recipe)
    heads = spec.attention.num_attention_heads, spec.attention.num_key_value_heads, spec.attention.head_dim
    assert (spec.num_hidden_layers, spec.hidden_size, heads) == (3, 352, (4, 2, 64))
    assert spec.name == "llama-5.3m"


@pytest.mark.rare(30)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_certified(path: Path, tmp_path: Path, ranks: RankPool) -> None:
    """Its plan for the machines that it is meant for, on rows that are drawn. (Drift at its own size takes minutes for
    the largest: `make prove-big`.)"""
    words = [quickstart_model(tmp_path)] if path.stem == "sft-tiny" else []
    recipe = load_recipe(path, [*words, f"data.path={tmp_path}/none.jsonl"])
    spec = resolve(recipe)
    subject = certify.subject_of(recipe, spec, choose(recipe, spec, parse_cluster(MEANT_FOR[path.stem])), 8)
    assert subject.small is not None
    with RankPool(8) if subject.ranks > 4 else nullcontext(ranks) as pool:
        checks = [certify.run(subject, proof, 0, pool) for proof in certify.PROOFS]
    assert not [check for check in checks if check.problems]


@pytest.mark.big
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_the_first_and_the_last_rank_of_a_recipe_send_and_hold(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [quickstart_model(tmp_path)] if path.stem == "sft-tiny" else [])
    plan = choose(recipe, resolve(recipe), parse_cluster(MEANT_FOR[path.stem]))
    subject = certify.Certification(resolve(recipe), plan, None, Setting())
    ends = certify.drift_ranks(plan.layout, "quick")
    assert not [check for rank in ends if (check := certify.run(subject, "drift", rank, NoRanks())).problems]
