"""What the commands print, without starting a rank."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.cli import start
from shardwise.cli.app import main
from shardwise.cli.decide import plan_of
from shardwise.errors import ConfigError, OutputError, Problem
from shardwise.launch import local, rundir, service_keys
from shardwise.launch.local import Ended
from shardwise.models.resolve import resolve
from shardwise.runtime import owner
from shardwise.runtime.faults.outcome import Exit, read_exit, write_exit
from shardwise.runtime.report.report import Report
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import label
from shardwise.spec.keys import keys_of
from shardwise.spec.load import load_plan, load_recipe, recipe_schema
from shardwise.spec.plan import Plan
from shardwise.spec.units import show_bytes
from tests.said import refuses, shows

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shardwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_print_config_is_a_recipe(shardwise: Run) -> None:
    code, out, _ = shardwise("train", "--print-config", "--lr", "1e-3", "recompute=full", "--max-steps", "5")
    assert code == 0
    Path("r.yaml").write_text(out)
    recipe = load_recipe("r.yaml")
    assert (recipe.optim.learning_rate, recipe.recompute.mode, recipe.train.max_steps) == (1e-3, "full", 5)
    assert list(Path().iterdir()) == [Path("r.yaml")]
    _, out, _ = shardwise("train", "--print-config", "--json", "r.yaml")
    assert json.loads(out) == recipe.model_dump(mode="json")


def test_flags_and_settings_are_the_same_thing(shardwise: Run) -> None:
    ways = (
        ["seq_len=64"],
        ["train.seq_len=64"],
        ["--seq-len", "64"],
        ["--seq_len=64"],
        ["--train.seq-len=64"],
        ["--sequence-len", "64"],
    )
    found = {shardwise("train", "--print-config", *words)[1] for words in ways}
    assert len(found) == 1 and "seq_len: 64" in found.pop()
    _, out, _ = shardwise("train", "--print-config", "--compile", "--nproc", "1", "--checkpoint.asynchronous", "false")
    assert "compile: true" in out and "nproc: 1" in out and "asynchronous: false" in out


@pytest.mark.parametrize("word", ["-o", "--out", "--output"])
def test_where_to_write_is_one_word_in_every_command(shardwise: Run, word: str) -> None:
    for command in (["train"], ["plan"], ["export"], ["data", "prepare"]):
        code, out, _ = shardwise(*command, "--help")
        assert code == 0 and {"-o", "--out", "--output"} <= set(re.split(r"[\s,]+", out)), command
    code, out, _ = shardwise("train", "--print-config", "--json", word, "elsewhere")
    assert code == 0 and json.loads(out)["run"]["out"] == "elsewhere"
    code, _, _ = shardwise("plan", "--cluster", "2xCPU", "recompute=full", word, "plan.yaml")
    assert code == 0 and load_plan("plan.yaml").remat.mode == "full"


def test_schema(shardwise: Run) -> None:
    code, out, _ = shardwise("schema")
    assert code == 0 and json.loads(out)["properties"]["train"]
    _, out, _ = shardwise("schema", "--keys")
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == sorted(keys_of(recipe_schema()).leaves)
    (told,) = [
        line
        for line in lines
        if line.startswith("train.seq_len: a whole number ≥ 2 and ≤ 16,777,216 (default 2048); also ")
    ]
    assert "sequence_len" in told.partition("; also ")[2].split(", ")


@pytest.mark.prove
def test_plan_of_the_sketch(shardwise: Run) -> None:
    words = ("--model", "meta-llama/Llama-3.1-70B", "--cluster", "2x8xRTX-PRO-6000+200Gb/node", "--seq-len", "4096")
    code, out, err = shardwise("plan", *words, "--global-batch-size", "64", "-o", "plan.yaml")
    assert (code, err) == (0, "")
    first, assumed = out.splitlines()[:2]
    assert shows(first, "Llama-3.1-70B", "70.6 B", "2 nodes", 8, "RTX Pro 6000", "95.0 GiB")
    assert assumed.startswith("assumed: 200 Gb/s")
    for setting in ("DDP over 16", "ZeRO-1 over 16", "ZeRO-2 over 16", "ZeRO-3 over 16", "ZeRO-3 over 8, 2 replicas"):
        assert setting in out
    lines = out.splitlines()
    head = next(
        i for i, line in enumerate(lines, 1) if line.startswith("the best plan of each kind, by the time of a ")
    )
    assert [cell[:4] for cell in lines[head].split("  ")[-2:]] == ["sent", "over"]
    assert "does not fit" in out and "fullest rank" in out and "all-gather" in out
    plan = load_plan("plan.yaml")
    assert lines[3].startswith(f"It fits: {label(plan)}, ") and lines[5].startswith("a step  ")
    assert any(line.startswith(">  ") and label(plan) in line for line in lines[head:])
    assert (plan.layout.world, plan.batch.seq_len, plan.batch.global_batch_size(plan.layout.dp)) == (16, 4096, 64)
    _, shown, _ = shardwise("plan", "--plan", "plan.yaml")
    assert label(plan) in shown and show_bytes(plan.estimate.peak_bytes) in shown
    for more in ("recipe.yaml", "--cluster=8xH100", "--seq-len=9"):
        code, _, err = shardwise("plan", "--plan", "plan.yaml", more)
        assert code == 2 and "unchanged" in err


@pytest.mark.prove
def test_a_plan_in_json_is_the_one_that_is_written(shardwise: Run) -> None:
    words = ("--model", "meta-llama/Llama-3.2-1B", "--cluster", "8xH100", "--seq-len", "4096")
    code, text, err = shardwise("plan", *words, "-o", "plan.yaml", "--json")
    assert (code, err) == (0, "")
    facts, plan = json.loads(text), load_plan("plan.yaml")
    assert facts["model"]["parameters"] == 1_235_814_400
    assert facts["plan"]["estimate"]["peak_bytes"] == plan.estimate.peak_bytes > 0
    assert len(facts["settings"]) >= 5


@pytest.mark.prove
def test_a_tight_plan_ends_with_what_leaves_more_room(shardwise: Run) -> None:
    words = ("--model", "meta-llama/Llama-3.1-70B", "--lora", "16", "--seq-len", "32768")
    code, out, _ = shardwise("plan", *words, "--cluster", "8xH100", "parallel.tp=1", "parallel.cp=1")
    assert code == 0 and shows(out, "tight", "75.9 GiB", "79.1 GiB", "96%")
    assert "leaves more room\n" in out and "makes it fit" not in out


@pytest.mark.prove
def test_what_does_not_fit_ends_with_a_remedy(shardwise: Run) -> None:
    words = ("--model", "meta-llama/Llama-3.1-70B", "--lora", "16", "--seq-len", "4096")
    code, out, _ = shardwise("plan", *words, "--cluster", "1xH100")
    assert code == 0 and "does not fit" in out
    rows = out[out.index("any one of these changes makes it fit\n") :].splitlines()[1:4]
    assert rows[0].split("  ")[1] == "offload.weights=host" and shows(rows[0], "fits", "62.1 GiB", "79.1 GiB", "79%")
    assert shows(rows[0], "on the host")
    assert rows[1].split("  ")[1] == "lora.frozen=nf4" and shows(rows[1], "fits", "63.2 GiB", "79.1 GiB", "80%")
    assert rows[1].endswith("less exact")
    assert rows[2].split()[:2] == ["--cluster", "1x2xH100-SXM-80GB"] and rows[2].endswith("2 devices instead of 1")
    _, text, _ = shardwise("plan", *words, "--cluster", "1xH100", "--json")
    assert json.loads(text)["remedies"][0]["change"] == "offload.weights=host"
    _, out, _ = shardwise("plan", *words, "--cluster", "8xH100")
    assert "would fit" not in out and "closest" not in out


@pytest.mark.prove
def test_train_says_what_would_fit() -> None:
    for words, cluster, fix in (
        (
            ["lora=16"],
            "1xH100",
            ("`offload.weights=host`", "62.1 GiB", "`lora.frozen=float8`", "76.0 GiB", "`lora.frozen=nf4`", "63.2 GiB"),
        ),
        (
            ["seq_len=512"],
            "1x3090",
            ("no single change",),
        ),
    ):
        recipe = load_recipe(None, ["model=meta-llama/Llama-3.1-70B", *words])
        with pytest.raises(ConfigError) as caught:
            plan_of(recipe, resolve(recipe), parse_cluster(cluster), None)
        (problem,) = caught.value.problems
        assert problem.code == "PLAN010" and shows(problem.fix, *fix) and problem.fix.startswith(fix[0])
        assert "`shardwise plan`" in problem.fix


@pytest.mark.prove
def test_what_fine_tuning_assumes_stands_under_why(shardwise: Run) -> None:
    words = ("plan", "--model", "meta-llama/Llama-3.2-1B", "--cluster", "8xH100", "method=sft")
    why = shardwise(*words)[1].split("\nwhy\n")[1]
    for key in ("train.num_epochs", "optim.learning_rate", "optim.warmup_steps"):
        assert re.search(rf"^  {key} +assumed: ", why, re.M)


@pytest.mark.prove
def test_the_keys_that_plan_prints_can_be_typed(shardwise: Run) -> None:
    """Under ``why`` stand the recipe's keys; those of plan.yaml are understood as well."""
    _, out, _ = shardwise("plan", "--model", "meta-llama/Llama-3.2-1B", "--cluster", "8xH100", "--explain", "why")
    rows = [line.split() for line in out.split("\nwhy\n")[1].split("\n\n")[0].splitlines()]
    settings = [f"{row[0]}={row[1]}" for row in rows if row[0] != "tokens"]
    assert {"parallel.strategy=zero1", "recompute.mode=none", "compile=true"} < {*settings} and len(settings) == len(
        rows
    ) - 1
    typed = load_recipe(None, settings)
    assert (typed.parallel.strategy, typed.compile, typed.train.global_batch_size) == ("zero1", True, 32)
    theirs = [
        "shard.strategy=zero1",
        "layout.dp_shard=4",
        "remat.mode=full",
        "batch.accumulation=3",
        "batch.seq_len=8k",
    ]
    found = load_recipe(None, theirs)
    assert (found.parallel.strategy, found.parallel.dp_shard, found.recompute.mode) == ("zero1", 4, "full")
    assert (found.train.gradient_accumulation_steps, found.train.seq_len) == (3, 8192)
    Path("r.yaml").write_text("remat: {mode: selective, every: 2}\nshard:\n  strategy: zero2\n")
    written = load_recipe("r.yaml")
    assert (written.recompute.mode, written.recompute.every, written.parallel.strategy) == ("selective", 2, "zero2")


@pytest.mark.prove
def test_a_disk_that_cannot_hold_the_optimizer_is_told_before_anything_starts(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, Plan]] = []
    monkeypatch.setattr(rundir, "check_offload", lambda *given: asked.append(given))
    words = ("train", "--dry-run", "--nproc", "1", "--run", "a")
    assert shardwise(*words, "offload=host")[0] == 0 and not asked
    assert (
        shardwise(*words, "offload=nvme")[0] == 0 and shardwise(*words, "offload=nvme", "offload.directory=/d")[0] == 0
    )
    assert shardwise(*words, "offload.weights=nvme", "lora.rank=4", "offload.directory=/w")[0] == 0
    assert shardwise(*words, "offload.activations=nvme", "offload.directory=/d", "recompute=full")[0] == 0
    assert [directory for directory, *_ in asked] == [Path("runs/a"), Path("/d"), Path("/w"), Path("/d")]
    assert all(plan.estimate.disk_bytes > 2**20 for _, plan in asked)


def test_dry_run_checks_everything_and_writes_nothing(shardwise: Run) -> None:
    code, out, _ = shardwise("train", "--dry-run", "--nproc", "1")
    assert code == 0
    assert "model   llama-5.3m" in out and "plan    DDP over 1" in out and "nothing was started" in out
    assert list(Path().iterdir()) == []
    _, out, _ = shardwise("train", "--dry-run", "--nproc", "1", "--json")
    assert json.loads(out)["run"] == "runs/quickstart-1"


def test_nodes_print_their_lines(shardwise: Run) -> None:
    code, out, _ = shardwise("train", "run.nodes=2", "--nproc", "1", "--run", "a")
    assert code == 0
    lines = [line.strip() for line in out.splitlines() if "torchrun" in line]
    assert len(lines) == 2 and "--node-rank 1" in lines[1]
    assert "--master-port 29500" in lines[0] and "FIRST_NODE" in out and "docs/security.md" in out
    assert lines[0].endswith("-m shardwise train runs/a/recipe.yaml --plan runs/a/plan.yaml")
    assert load_plan("runs/a/plan.yaml").layout.world == 2
    assert load_recipe("runs/a/recipe.yaml").run.nodes == 2


def test_nodes_that_resume_with_other_settings_are_told_so(shardwise: Run) -> None:
    assert shardwise("train", "--run", "a", "--max-steps", "8", "run.nodes=2", "--nproc", "1")[0] == 0
    Path("runs/a/checkpoints/step-00000005").mkdir(parents=True)
    code, out, err = shardwise("train", "--resume", "runs/a", "--max-steps", "9", "run.nodes=2", "--nproc", "1")
    assert code == 0, err
    words = "train runs/a/resumed/recipe.yaml --plan runs/a/resumed/plan.yaml"
    assert [line.strip().endswith(f"{words} --resume") for line in out.splitlines() if "torchrun" in line] == [True] * 2
    given = load_recipe("runs/a/resumed/recipe.yaml")
    assert rundir.check_standing(Path("runs/a"), given, resume=True) == 5
    with pytest.raises(OutputError, match=r"OUT001.*another recipe"):  # what each rank would say without it
        rundir.check_standing(Path("runs/a"), given, resume=False)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Replace the launch: calls are kept; how the ranks end stands in the first place of the list."""
    calls: list[tuple[object, ...]] = [(Ended(0),)]

    def launch(*arguments: object, **_: object) -> Ended:
        calls.append(arguments)
        result = calls[0][0]
        assert isinstance(result, Ended)
        return result

    monkeypatch.setattr(local, "run_ranks", launch)
    return calls


def texts() -> str:
    Path("text").mkdir(exist_ok=True)
    for number in range(8):
        (Path("text") / f"{number}.txt").write_text("some words that are tokenised \n" * 800)
    return "data.path=text"


SMALL = ("data.cache=cache", "--nproc", "1", "data.tokenizer.vocab_size=300", "model.config.vocab_size=300")


def test_train_writes_what_ranks_read_and_starts_them(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    code, _, err = shardwise("train", texts(), *SMALL, "--run", "a", "--allow-fresh-start")
    assert (code, err) == (0, "")
    words, nproc, directory = ended[1]
    assert (nproc, directory) == (1, Path("runs/a"))
    assert words == ["train", "runs/a/recipe.yaml", "--plan", "runs/a/plan.yaml", "--allow-fresh-start"]
    recipe = load_recipe("runs/a/recipe.yaml")
    assert (recipe.run.name, recipe.run.device, recipe.run.nproc) == ("a", "cpu", 1)
    assert resolve(recipe).vocab_size == 300
    assert load_plan("runs/a/plan.yaml").layout.world == 1


def test_what_a_finished_run_says_to_do_next_works(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    assert shardwise("train", texts(), *SMALL, "--run", "a")[0] == 0
    facts = SimpleNamespace(directory=Path("runs/a"), chat=False, adapter=False)
    steps = Report.next_steps(facts)  # type: ignore[arg-type]
    assert steps[1] == "shardwise train runs/a/recipe.yaml --run NEW_NAME data.path=YOUR_DATA"
    words = steps[1].replace("NEW_NAME", "b").replace("YOUR_DATA", "text").split()[1:]
    code, out, err = shardwise(*words, "--dry-run")
    assert (code, err) == (0, "") and shows(out, "dry run", "nothing")
    code, _, err = shardwise(*steps[2].split()[1:])
    assert (code, err) == (0, "")


def test_what_a_run_of_adapters_says_to_do_next_begins_with_the_merged_model() -> None:
    facts = SimpleNamespace(directory=Path("runs/a"), chat=True, adapter=True)
    steps = Report.next_steps(facts)  # type: ignore[arg-type]
    assert steps[:2] == ["shardwise export runs/a", 'shardwise generate runs/a --chat --prompt "..."']


def next_words(out: str, there: str = "") -> list[str]:
    """The words of the command that a plan says to run next, without ``shardwise``."""
    (line,) = (line for line in out.splitlines() if f"next{there}: " in line)
    return shlex.split(line.partition(f"next{there}: ")[2].partition("        more")[0])[1:]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("machines", [(), ("--cluster", "4xCPU"), ("run.nproc=1", "--cluster", "2xCPU")])
def test_what_a_plan_says_to_do_next_works(shardwise: Run, machines: tuple[str, ...]) -> None:
    """With the settings and the number of processes that were planned for."""
    cache, _, _, *vocabulary = SMALL
    code, out, _ = shardwise("plan", texts(), cache, *vocabulary, *machines)
    assert code == 0
    code, out, _ = shardwise(*next_words(out))
    assert code == 0
    code, out, err = shardwise(*next_words(out), "--dry-run")
    assert code == 0 and shows(out, "dry run", "nothing"), err


@pytest.mark.prove
def test_a_plan_for_other_machines_says_that_the_next_command_is_for_them(shardwise: Run) -> None:
    code, out, _ = shardwise("plan", "--model", "Llama-3.2-1B", "--cluster", "2x8xH100", "-o", "plan.yaml")
    words = next_words(out, ", on 2x8xH100")
    machines = ["run.device=cuda", "run.nproc=8", "run.nodes=2"]
    assert code == 0 and words == ["train", "model=Llama-3.2-1B", *machines, "--plan", "plan.yaml"]


@pytest.mark.parametrize("words", [(), ("data",)])
def test_a_group_of_commands_alone_prints_its_help(shardwise: Run, words: tuple[str, ...]) -> None:
    code, out, err = shardwise(*words)
    assert (code, err) == (0, "") and out.startswith("Usage: shardwise") and "Commands:" in out


def test_a_run_that_wandb_cannot_follow_is_refused_before_it_starts(
    shardwise: Run, ended: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "check_installed", lambda recipe: None)
    monkeypatch.setenv("HOME", str(Path().resolve()))
    for name in (*service_keys.GIVEN, "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = shardwise("train", texts(), *SMALL, "run.trackers=wandb")
    assert code == 69 and "error[TRK003]: `run.trackers` names wandb" in err and "api.wandb.ai" in err
    assert len(ended) == 1 and not Path("runs").exists()


def test_a_failure_of_a_rank_is_printed_once_with_its_code(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    ended[0] = (Ended(65, Problem("DATA004", "bad line", "x.jsonl:3 (rank 0)", "repair it")),)
    code, _, err = shardwise("train", texts(), *SMALL)
    assert code == 65 and refuses(err, "DATA004", "bad line", where="x.jsonl:3 (rank 0)", fix="repair it")
    code, out, _ = shardwise("train", texts(), *SMALL, "--json")
    assert code == 65
    assert json.loads(out)["error"] == {
        "exit_code": 65,
        "problems": [{"code": "DATA004", "what": "bad line", "where": "x.jsonl:3 (rank 0)", "fix": "repair it"}],
    }
    ended[0] = (Ended(75, Problem("STOP001", "saved at step 3 of 9", "", "shardwise train --resume runs/a")),)
    code, out, err = shardwise("train", texts(), *SMALL)
    assert (code, err) == (75, "")
    assert shows(out, "stopped", 3, 9) and shows(out.splitlines()[-1], "next", "shardwise train --resume runs/a")


def test_runs_are_numbered_and_resumed(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    for _ in range(2):
        shardwise("train", texts(), *SMALL)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["quickstart-1", "quickstart-2"]
    Path("runs/quickstart-2/checkpoints/step-00000005").mkdir(parents=True)
    for words in (
        ("--resume", *SMALL, texts()),
        ("--resume", "runs/quickstart-2"),
        ("--resume", "--run", "quickstart-2"),
    ):
        code, _, err = shardwise("train", *words)
        assert code == 0, err
        assert err == "resuming runs/quickstart-2 from step 5\n"
        assert ended[-1][2] == Path("runs/quickstart-2")


def test_a_run_is_resumed_from_its_own_directory(
    shardwise: Run, ended: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shardwise("train", "--run", "a", *SMALL, texts())[0] == 0
    Path("runs/a/checkpoints").mkdir(exist_ok=True)
    for here, named in (("runs/a", "."), (".", "../a"), ("checkpoints", ".."), ("../..", "a/")):
        monkeypatch.chdir(here)
        code, _, err = shardwise("train", "--resume", named, "--dry-run")
        assert code == 66 and "error[CKPT001]: no checkpoint in " in err and "a (" in err


def test_a_finished_run_is_resumed_within_a_second(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    """Torch alone takes longer to import."""
    Path("runs/a/checkpoints/step-00000005").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text("train: {max_steps: 5}")
    write_exit(Path("runs/a"), Exit("done", 0, "done", step=5))
    code, said, err = shardwise("train", "--resume", "runs/a")
    assert (code, err, said.count("\n")) == (0, "", 1) and shows(said, "nothing", "runs/a", 5, "train.max_steps")
    assert shardwise("train", "--resume", "runs/a", "--json")[:2] == (0, '{\n "run": "runs/a",\n "exit_code": 0\n}\n')
    code, _, err = shardwise("train", "--resume", "runs/a", "--max-steps", "4")
    assert code == 65 and refuses(err, "CKPT024", "step 5", "step 4")
    program = (
        "import sys; from shardwise.cli.app import main; main(['train', '--resume', 'runs/a']); "
        "print('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(Path(start.__file__).parents[2])}
    for more in ({}, {"RANK": "0", "WORLD_SIZE": "2"}):  # from our launcher, and from torchrun
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment | more, check=True
        )
        assert done.stdout == f"{said}False\n"
    assert len(ended) == 1 and read_exit(Path("runs/a")) is not None


def test_a_run_that_is_in_use_is_left_alone(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    """By the process that started this one, in the place of another launcher. A claim does not outlast its run."""
    other = replace(owner.me("other"), pid=os.getppid(), started=owner._started(os.getppid()))
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/.owner-5").write_bytes(owner._text(other, 0))
    Path("runs/a/recipe.yaml").write_text("{}")
    for more in ((), ("--resume",), ("--dry-run",)):
        code, _, err = shardwise("train", texts(), *SMALL, "--run", "a", *more)
        assert code == 73 and err.startswith("error[OUT005]: runs/a ") and "`--run`\n" in err
        assert refuses(err, "OUT005", os.getppid(), other.host, where="runs/a")
    assert sorted(path.name for path in Path("runs/a").iterdir()) == [".owner-5", "recipe.yaml"] and len(ended) == 1
    Path("runs/a/.owner-5").unlink()
    assert shardwise("train", texts(), *SMALL, "--run", "a")[0] == 0
    assert len(ended) == 2 and not list(Path("runs/a").glob(".owner*"))


def test_runs_without_a_name_that_start_at_once_get_a_name_each(
    shardwise: Run, ended: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes quickstart-1 while this one plans."""
    other = replace(owner.me("other"), pid=os.getppid(), started=owner._started(os.getppid()))

    def check_sources(data: object) -> None:
        if not Path("runs").exists():
            Path("runs/quickstart-1").mkdir(parents=True)
            Path("runs/quickstart-1/.owner-1").write_bytes(owner._text(other, 0))

    monkeypatch.setattr("shardwise.data.prepare.check_sources", check_sources)
    assert shardwise("train", texts(), *SMALL)[0] == 0
    assert [call[2] for call in ended[1:]] == [Path("runs/quickstart-2")]


def test_a_launcher_that_lost_its_directory_says_so(
    shardwise: Run, ended: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in exit.json is of the other one."""

    def launch(*arguments: object, **_: object) -> Ended:
        Path("runs/a/.owner-9").touch()
        return Ended(0)

    monkeypatch.setattr(local, "run_ranks", launch)
    code, _, err = shardwise("train", texts(), *SMALL, "--run", "a")
    assert code == 73 and err.startswith("error[OUT005]: runs/a is no longer")


def test_data_that_cannot_be_prepared_leaves_no_run_behind(shardwise: Run, ended: list[tuple[object, ...]]) -> None:
    Path("text").mkdir()
    Path("text/a.jsonl").write_text('{"text": "x"\n')
    code, _, err = shardwise("train", "data.path=text", "data.cache=cache", "--nproc", "1")
    assert code == 65 and err.startswith("error[DATA004]")
    assert not Path("runs/quickstart-1").exists() and len(ended) == 1


def test_a_prompt_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "runs/a", "one", "--prompt", "two"]) == 2
    assert "error[CLI001]: two prompts: `two` and `one`" in capsys.readouterr().err


def test_the_keys_are_listed_with_their_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--keys"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["run.trackers"].endswith("; also report_to, log_with, loggers")
    assert shows(lines["optim.warmup_steps"], "whole number ≥ 0", "number > 0", "default 0", "warmup_ratio")


def test_what_stands_before_the_ranks_needs_no_torch(tmp_path: Path) -> None:
    """It is waited for, second by second, by whoever starts a run."""
    (tmp_path / "a.txt").write_text("one two three\n" * 4000)
    words = ["train", "--dry-run", f"data.path={tmp_path}/a.txt", "precision.compute=fp32", "precision.matmul=highest"]
    program = "import sys; from shardwise.cli.app import main; "
    program += f"code = main({words!r}); sys.exit(code or 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
