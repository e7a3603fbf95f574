"""``shardwise plan`` says how long a run takes and what it costs, and corrects it by what earlier runs took."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from shardwise.cli import work
from shardwise.cli.app import main
from shardwise.cli.decide import by_history, cluster_of_ranks
from shardwise.cli.length import Asked, known_count, length_lines, run_length, show_duration
from shardwise.cli.start import How
from shardwise.data import rough
from shardwise.data.prepare import already_prepared, prepare
from shardwise.launch.worker import state_directory
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.lookup import load_spec
from shardwise.models.resolve import data_of, resolve
from shardwise.planner import comparison
from shardwise.planner.length import Length
from shardwise.planner.seconds.history import FILE, past_runs, remember
from shardwise.runtime import loop
from shardwise.runtime.report.report import Report
from shardwise.spec.cluster import Cluster, local_cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, load_plan, load_recipe
from shardwise.spec.plan import Batch, Estimate, Plan, Seconds, Shard
from tests.said import refuses, shows

Run = Callable[..., tuple[int, str, str]]
QUICK = ["train.global_batch_size=8"]
SECONDS = Seconds(step_s=2.0, compute_s=2.0, low_s=1.5, high_s=2.6, basis="the table")


@pytest.fixture
def shardwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, in an empty directory, where every step is predicted to take 2 s: (exit code,
    stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def in_two_seconds(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Plan:
        return replace(plan, estimate=replace(plan.estimate, seconds=SECONDS))

    monkeypatch.setattr(comparison, "timed", in_two_seconds)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_the_lines() -> None:
    whole = Length("--tokens", 2385, 10_003_415_040, 11_520.0, 10_200.0, 13_200.0, 25.6, 2.5, 64.0)
    [line] = length_lines(whole)
    assert shows(
        line, "10.0 B tokens", "2,385 steps", "3 h 12 min", "2 h 50 min", "3 h 40 min", "25.6 GPU-hours", "$64"
    )
    assert line.endswith("$2.5 a GPU-hour")
    bare = {"low_s": None, "high_s": None, "gpu_hours": None, "dollars": None}
    [line] = length_lines(replace(whole, set_by="train.max_steps", steps=1, **bare))  # type: ignore[arg-type]
    assert shows(line, "1 step", "train.max_steps", "10.0 B tokens", "3 h 12 min") and line.endswith(" min")
    cheap = replace(whole, set_by="train.num_epochs", gpu_hours=0.02, dollars=0.05)
    assert shows(length_lines(cheap)[0], "all epochs", "2,385 steps", "10.0 B tokens", "3 h 12 min")
    assert shows(length_lines(cheap)[0], "0.020 GPU-hours", "$0.05", "$2.5")
    assert shows(length_lines(Length("unknown", 239, 10**9)), "not known", "1.0 B tokens", "239 steps")
    assert shows(length_lines(Length("the default", 1000, 2_000_000)), "1,000 steps", "the default", "2.0 M tokens")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.004, "4.0 ms"),
        (59.4, "59.4 s"),
        (59.6, "1 min 0 s"),
        (200.0, "3 min 20 s"),
        (3599.6, "1 h 0 min"),
        (11_520.0, "3 h 12 min"),
        (172_770.0, "2.0 days"),
        (1_062_720.0, "12.3 days"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert show_duration(seconds) == words


def test_a_plan_says_what_the_recipes_steps_take(shardwise: Run) -> None:
    flags = ["--cluster", "8xH100", "--price", "h100=2.5"]
    code, out, _ = shardwise("plan", *QUICK, *flags, "train.max_steps=900")
    [again] = [line for line in out.splitlines() if line.startswith("next: ")]
    assert all(flag in shlex.split(again) for flag in flags), "what was asked is asked again"
    assert code == 0  # 900 steps of 2 s are half an hour, on 8 GPUs 4 GPU-hours
    assert shows(out, "900 steps", "train.max_steps", "1.8 M tokens", "30 min 0 s", "22 min 30 s", "39 min 0 s")
    assert shows(out, "900 steps", "4.0 GPU-hours", "$10", "$2.5")


def test_the_same_for_tokens_as_an_object(shardwise: Run) -> None:
    words = ["--cluster", "8xH100", "train.seq_len=256", "--tokens", "2e6", "--price", "A100=1,H100=2", "--json"]
    code, out, _ = shardwise("plan", *QUICK, *words)
    assert code == 0
    assert json.loads(out)["length"] == {
        "set_by": "--tokens",
        "steps": 977,  # 2,000,000 / (8 x 256), rounded up
        "tokens": 977 * 8 * 256,
        "seconds": 1954.0,
        "low_s": 1465.5,
        "high_s": pytest.approx(2540.2),
        "gpu_hours": pytest.approx(977 * 2 * 8 / 3600),
        "dollars_per_gpu_hour": 2.0,
        "dollars": pytest.approx(977 * 2 * 8 / 3600 * 2),
        "reference_s": None,
        "records": None,
    }


@pytest.mark.parametrize(
    ("words", "values", "fix"),
    [
        (("--price", "A100=2"), ["A100-SXM-80GB", "1x8xH100-SXM-80GB"], "--price H100-SXM-80GB=2.5"),
        (("--price", "H100"), ["`H100`", "price", "dollars"], "--price H100-SXM-80GB=2.5"),
        (("--price", "H100=1", "--price", "H100=nan"), ["`H100=nan`", "above 0"], "--price H100-SXM-80GB=2.5"),
        (("--price", "H101=1"), ["`H101`"], "H100-SXM-80GB"),
        (("--tokens", "many"), ["`many`", 1, "1,000,000 T"], "10B, 1.5T, 300M or 2e9"),
        (("--tokens", "-1B"), ["`-1B`", 1, "1,000,000 T"], "10B, 1.5T, 300M or 2e9"),
    ],
)
def test_bad_prices_and_tokens(shardwise: Run, words: tuple[str, ...], values: list[object], fix: str) -> None:
    code, out, err = shardwise("plan", "--cluster", "8xH100", *QUICK, *words)
    assert (code, out) == (2, "")
    assert refuses(err, "CLI001", *values, where=words[0], fix=fix) and err.count("error") == 1


def test_a_plan_that_is_only_shown_takes_neither(shardwise: Run) -> None:
    assert shardwise("plan", *QUICK, "--cluster", "2xCPU", "-o", "plan.yaml")[0] == 0
    for words in (("--tokens", "1B"), ("--price", "H100=2")):
        code, _, err = shardwise("plan", "--plan", "plan.yaml", *words)
        assert code == 2 and refuses(err, "CLI001", f"`{words[1]}`")


def test_epochs_are_known_once_the_data_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 3000)
    words = ["data.path=text.txt", "data.cache=cache", "data.num_proc=1", "train.seq_len=32"]
    words += ["data.tokenizer.vocab_size=300"]
    recipe = load_recipe(None, [*words, "train.num_epochs=2"])
    plan = Plan(batch=Batch(4, 1, 32), estimate=Estimate(seconds=SECONDS))
    cluster = parse_cluster("8xH100")

    def length(*more: str) -> Length:
        return run_length(load_recipe(None, [*words, *more]), LLAMA, plan, cluster, Asked())

    about = length("train.num_epochs=2")
    assert (about.set_by, about.records) == ("counted", 1)  # 81,000 bytes but for 5 % are 601 windows of 32 tokens
    assert about.steps == -(-2 * 601 // 4)
    assert length("train.num_epochs=2", "train.max_steps=5").set_by == "train.max_steps"
    assert not Path("cache").exists(), "planning prepares nothing"
    prepared = prepare(data_of(recipe), sample_tokens=recipe.sample_tokens)
    windows = -(-(prepared.train.split.tokens - 1) // 32)
    found = length("train.num_epochs=2")
    assert (found.set_by, found.steps) == ("train.num_epochs", -(-2 * windows // 4))
    assert found.seconds == 2.0 * found.steps
    assert length("train.num_epochs=2", "train.max_steps=5").steps == 5
    assert (length().set_by, length().steps) == ("the default", 1000)
    Path("text.txt").write_text("another text\n" * 3000)
    assert length("train.num_epochs=2").set_by == "counted"
    Path("text.txt").unlink()  # `train` says what is wrong
    unknown = length("train.num_epochs=2")
    assert (unknown.set_by, unknown.steps) == ("unknown", 7_812_500)  # 10^9 / (4 x 32)


def test_a_plan_counts_the_records_of_data_that_are_not_prepared(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 1913}]})
    Path("talks.jsonl").write_text(f"{turn}\n" * 60)  # of 2,000 bytes each: 500 tokens, 57 of them train 14 windows
    words = ["method=sft", "data.path=talks.jsonl", "train.seq_len=2048", "train.max_steps=null"]
    words += ["data.tokenizer.path=none", "data.chat_template=zephyr", "train.global_batch_size=null"]
    code, out, _ = shardwise("plan", *words, "--cluster", "1xH100")
    assert code == 0 and len(turn) + 1 == 2000
    assert shows(out, "about all epochs", "57 records", "4 bytes", "42 steps", "86,016 tokens"), out
    monkeypatch.setattr(rough, "SAMPLE_BYTES", 20_000)
    assert rough.roughly(load_recipe(None, words)) == rough.Rough(57, 14)
    assert rough.roughly(load_recipe(None, [*words, "data.path=s3://bucket/talks.jsonl"])) is None


def test_other_formats_are_not_converted_to_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pyarrow.table({"text": ["def f(x):\n    return x + 1\n"] * 300}), "text.parquet")
    data = load_recipe(None, ["data.path=text.parquet", "data.cache=cache", "data.tokenizer.vocab_size=300"]).data
    assert already_prepared(data, None) is None and not Path("cache").exists()
    prepared = prepare(data)
    again = already_prepared(data, None)
    assert again is not None and again.manifest == prepared.manifest
    mixed = data.model_copy(update={"path": ["text.parquet", "https://example.org/text.jsonl"]})
    assert already_prepared(mixed, None) is None
    assert already_prepared(data.model_copy(update={"streaming": True}), None) is None


TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
REPORT = Report(Path("runs/a"), 8, 1024, 24.0, 3.0, Estimate())
HERE = local_cluster(2, "cpu", memory_bytes=2**33)
LLAMA = load_spec("meta-llama/Llama-3.2-1B")
PLAN = Plan(layout=Layout(dp_shard=2), model="llama", estimate=Estimate(seconds=SECONDS))


def with_history(plan: Plan, cluster: Cluster, spec: ModelSpec, like: Plan | None = None) -> Plan:
    """The plan with seconds as earlier runs correct them: those that resemble it, or ``like``."""
    return by_history(like or plan, cluster, spec)(plan)


def test_earlier_runs_correct_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_history(PLAN, HERE, LLAMA) == PLAN
    assert not state_directory().exists(), "looking leaves nothing"
    for measured_s in (2.9, 3.0, 3.3):
        remember(PLAN, HERE, 2.0, measured_s, state_directory())
    remember(replace(PLAN, shard=Shard("zero3")), HERE, 2.0, 8.0, state_directory())
    found = with_history(PLAN, HERE, LLAMA).estimate.seconds
    assert found is not None and found.step_s == pytest.approx(3.0) and found.compute_s == pytest.approx(3.0)
    assert shows(found.basis, 3, "this machine", "1.5 x")
    other = replace(PLAN, shard=Shard("zero3"))
    alone, beside = (with_history(other, HERE, LLAMA, like).estimate.seconds for like in (None, PLAN))
    assert alone is not None and alone.step_s == pytest.approx(8.0)
    assert beside is not None and beside.step_s == pytest.approx(3.0), "in a table, as the chosen one"
    assert with_history(PLAN, replace(HERE, devices_per_node=4), LLAMA) == PLAN
    assert with_history(replace(PLAN, estimate=Estimate()), HERE, LLAMA).estimate == Estimate()


def test_a_history_that_cannot_be_read_stops_no_plan() -> None:
    (state_directory() / FILE).mkdir(parents=True)
    found = with_history(PLAN, HERE, LLAMA).estimate.seconds
    assert found is not None and found.step_s == 2.0
    assert shows(found.basis, "the table", "cannot be read")


def test_a_torn_history_corrects_by_what_is_whole_and_says_so() -> None:
    for measured_s in (3.0, 3.0, 3.0):
        remember(PLAN, HERE, 2.0, measured_s, state_directory())
    file = state_directory() / FILE
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[0][:40])
    found = with_history(PLAN, HERE, LLAMA).estimate.seconds
    assert found is not None and found.step_s == pytest.approx(3.0)
    assert shows(found.basis, 3, "1 line", FILE)
    file.write_text(whole[:40])
    assert with_history(PLAN, HERE, LLAMA) == PLAN


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "named"))
    assert state_directory() == tmp_path / "named" / "shardwise"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert state_directory() == tmp_path / ".local" / "state" / "shardwise"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_directory() == tmp_path / ".local" / "state" / "shardwise"


@pytest.mark.prove
def test_a_run_leaves_what_it_took_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a plan's seconds were multiplied by is taken out again: predictions are compared, not corrections."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 300)
    words = [f"model.config.{key}={value}" for key, value in TINY.items()]
    words += ["data.path=text.txt", "data.cache=cache", "data.num_proc=1", "data.tokenizer.vocab_size=300"]
    words += ["train.seq_len=32", "train.global_batch_size=4", "train.max_steps=8", "run.nproc=2"]
    assert main(["plan", *words, "-o", "plan.yaml"]) == 0
    plan = load_plan("plan.yaml")
    corrected = replace(SECONDS, scale=4.0, basis="5 earlier runs")
    timed = replace(plan, estimate=replace(plan.estimate, seconds=corrected))
    Path("plan.yaml").write_text(dump_plan(timed))
    assert load_plan("plan.yaml") == timed
    assert main(["train", *words, "--plan", "plan.yaml", "--run", "a"]) == 0, capfd.readouterr()

    cluster = local_cluster(2, "cpu")
    (kept,) = past_runs(cluster, state_directory()).runs
    row = re.search(
        r"\| step time \| 2.000 s \| (\d\.\d{3}) s \| (-\d\d\.\d %) \|", Path("runs/a/report.md").read_text()
    )
    assert row is not None
    assert f"{kept.measured_s:.3f}" == row[1] and f"{100 * (kept.measured_s / 2 - 1):+.1f} %" == row[2]
    assert (kept.predicted_s, kept.strategy, kept.tp, kept.model) == (0.5, plan.shard.strategy, 1, plan.model)
    found = with_history(timed, cluster, LLAMA).estimate.seconds
    assert found is not None and found.step_s == pytest.approx(kept.measured_s)
    assert shows(found.basis, 1, "this machine")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_keeps_it_and_a_run_survives_a_disk_that_does_not(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The directory's name is taken by a file."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "shardwise").write_text("")
    monkeypatch.setattr(work, "plan_of", lambda *given: PLAN)
    monkeypatch.setattr("shardwise.runtime.loop.train", lambda *given, **named: replace(REPORT, step_s=3.0))
    work._train(load_recipe(None, ["model.path=Llama-3.1-8B", "run.device=cpu"]), How(Path("plan.yaml")), None)
    assert refuses(capfd.readouterr().out, "REP001", "step's time", "failed", as_warning=True) == (rank == 0)


def test_a_run_is_remembered_with_what_it_measured_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train", lambda *given, **named: replace(REPORT, expert_imbalance=1.75))
    sizes = ", ".join(f"{key}: {size}" for key, size in TINY.items())
    recipe = load_recipe(None, [f"model.config={{model_type: llama, {sizes}}}", "run.device=cpu", "run.nproc=1"])
    work._train(recipe, How(), None)
    [run] = past_runs(cluster_of_ranks(recipe), state_directory()).runs
    assert (run.measured_s, run.expert_imbalance) == (REPORT.step_s, 1.75)
    assert (run.family, run.parameters) == ("llama", parameter_count(resolve(recipe)))


def test_data_that_a_recipe_does_not_name_are_not_counted() -> None:
    """The batch of a plan is not an eighth of Python's own sources, which nobody asked for."""
    named = ["model=meta-llama/Llama-3.2-1B", "lora.rank=16", "seq_len=32768"]
    assert known_count(load_recipe(None, named), about=True) is None
    assert known_count(load_recipe(None, [*named, "data.path=stdlib"]), about=True) is not None
