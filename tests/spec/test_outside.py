"""What an installed package brings, a row of each table: the one of docs/extending.md, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from shardwise.spec.load import load_recipe
from tests.interop.test_trained import SIZE
from tests.said import shows
from tests.style.source import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
TRIED = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from shardwise.spec.methods import METHODS
    from shardwise.spec.optimizers import OPTIMIZERS
    from shardwise.spec.schedules import SCHEDULES
    from shardwise.spec.launchers import LAUNCHERS
    from shardwise.interop.systems import SYSTEMS
    from shardwise.models.families import FAMILIES
    from shardwise.models.mixers import MIXERS
import sys
assert "torch" not in sys.modules
rows = [[*table][-1] for table in (MIXERS, METHODS, OPTIMIZERS, SCHEDULES, LAUNCHERS)]
rows += [SYSTEMS[-1].name, [*FAMILIES][-1]]
print(*rows, *(each.message for each in told), sep="\\n")
"""

MINISTRAL = """
import sys, torch
from transformers import AutoModelForCausalLM, MinistralConfig, MinistralForCausalLM
kinds = ["full_attention", "sliding_attention"]
sizes = {**%r, "vocab_size": 300, "sliding_window": 4, "layer_types": kinds, "num_hidden_layers": 2}
torch.manual_seed(0)
theirs = MinistralForCausalLM(MinistralConfig(**sizes, bos_token_id=0, eos_token_id=0))
theirs.save_pretrained("model")
from shardwise.models.attention import MaskSpec
from shardwise.models.resolve import resolve
from shardwise.runtime.export import load_model
from shardwise.spec.load import load_recipe
recipe = load_recipe(None, ["model.path=model"])
spec = resolve(recipe)
assert spec.hf_model is None and spec.family == "ministral" and spec.attention.sliding_window == 4
ids = torch.arange(24).view(2, 12)
ours = load_model(recipe, spec)(ids, torch.arange(12).expand(2, 12), MaskSpec())
logits = theirs(ids).logits
assert (ours - logits).norm() < 2e-5 * logits.norm()
from shardwise.models.config import to_hf
assert to_hf(spec)["layer_types"] == kinds and to_hf(spec)["architectures"] == ["MinistralForCausalLM"]
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory of packages that has the page's, as pip would leave it there."""
    blocks = re.findall(r"```(?:toml|python)\n(.*?)```", PAGE, re.DOTALL)
    names = re.findall(r"^`(shardwise_example/\w+\.py)`", PAGE, re.MULTILINE)
    site = tmp_path / "site"
    (site / "shardwise_example").mkdir(parents=True)
    (site / "shardwise_example" / "__init__.py").touch()
    for name, text in zip(names, blocks[1:], strict=True):
        (site / name).write_text(text)
    entry(site, tomllib.loads(blocks[0])["project"]["entry-points"])
    return site


def entry(site: Path, groups: dict[str, dict[str, str]]) -> None:
    """Write what pip writes of a package's entry points."""
    told = site / "shardwise_example-0.1.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: shardwise-example\nVersion: 0.1\n")
    lines = [
        line for group, rows in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in rows.items()))
    ]
    (told / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run(site: Path, *words: str) -> str:
    """What a process says in which the package is installed."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        cwd=site.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rows_of_a_package_are_in_the_tables(installed: Path) -> None:
    assert run(installed, "-c", TRIED).split() == [
        *("gated_mean", "apo_zero", "signum", "exponential", "detached", "inhouse", "ministral")
    ]


def test_a_row_that_is_none_is_left_out_and_told(installed: Path) -> None:
    rows = "shardwise_example.rows"
    broken = {"sft": f"{rows}:APO_ZERO", "gone": f"{rows}:NOTHING", "apo_zero": f"{rows}:SIGNUM"}
    entry(installed, {"shardwise.methods": broken, "shardwise.optimizers": {"other": f"{rows}:SIGNUM"}})
    told = run(installed, "-c", TRIED).splitlines()
    last = ["linear_attention", "simpo", "muon", "wsd_exponential", "slurm", "torchtune", "minimax_m2"]
    assert told[:7] == last
    expected = [
        ["no MethodSpec"],
        ["AttributeError", rows, "'NOTHING'"],
        ["is taken"],
        ["no OptimizerSpec"],
    ]
    assert len(told[7:]) == len(expected)
    assert all(shows(line, "left out", *said) for line, said in zip(told[7:], expected, strict=True))


def test_what_lies_beside_a_recipe_is_no_package(installed: Path) -> None:
    """The working directory is looked into by no command."""
    (installed / "shardwise_example" / "rows.py").write_text("raise SystemExit('run')")
    for words in (("-m", "shardwise", "--version"), ("-m", "shardwise", "schema")):
        done = subprocess.run([sys.executable, *words], cwd=installed, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "left out" not in done.stderr, done.stderr


READ = """
import sys
from contextlib import redirect_stderr
from shardwise.cli.app import main
with redirect_stderr(sys.stdout):
    for number, words in enumerate([["import", "-o", "recipe.yaml"], ["plan"], *[["import", "-o", "not.yaml"]] * 4]):
        word, *more = words
        print(main([word, f"{number}.yaml", "--cluster", "8xH100", "model.path=Llama-3.1-8B", "data=x.jsonl", *more]))
"""


def test_files_of_a_packages_system_are_read(installed: Path) -> None:
    """By its keys alone; what is refused, unknown or misspelt is said as of any other system."""
    said = {"old_trainer_version": 2, "batch": 32, "tokens": 4096, "lr": 1e-4, "sharding": "full", "log": {"every": 1}}
    good = {"workers": 4, "noise": 0}
    wrong = {"noise": 0.1}, {"finetune_frm": "x"}, {"loss_of": "z"}, {"sharding": "half"}
    for number, more in enumerate((good, good, *wrong)):
        (installed.parent / f"{number}.yaml").write_text(json.dumps({**said, **more}))
    told = run(installed, "-c", READ)
    recipe = load_recipe(installed.parent / "recipe.yaml")
    assert (recipe.train.seq_len, recipe.train.global_batch_size) == (4096, 32)
    assert (recipe.optim.learning_rate, recipe.model.path) == (1e-4, "Llama-3.1-8B")
    assert "our old trainer: " in told and shows(told, "our old trainer", "ZeRO-3 over 8")
    codes = re.findall(r"error\[(\w+)\]: (.*)", told)
    assert [code for code, _ in codes] == ["IMP001", "IMP002", "IMP002", "IMP001"], told
    assert "`noise: 0.1`: added noise" in told and "`finetune_from`" in told
    assert shows(told, "half", "full, off")


@pytest.mark.prove
def test_a_family_of_a_package_is_the_decoders(installed: Path) -> None:
    """Its logits are transformers', a window in one of two layers included."""
    run(installed, "-c", MINISTRAL % SIZE)


@pytest.mark.prove
def test_a_mixer_of_a_package_stands_in_the_place_of_attention(installed: Path) -> None:
    """Planned, trained by sharded and by tensor-parallel ranks, exported; its certificate holds, and context
    parallelism is refused."""
    tokens = "".join(json.dumps({"text": f"{i} is followed by {i + 1}; "}) + "\n" for i in range(400))
    (installed.parent / "text.jsonl").write_text(tokens)
    recipe = {
        "model": {"config": {"model_type": "meanformer", "vocab_size": 300, **SIZE, "num_hidden_layers": 2}},
        "data": {"path": "text.jsonl", "cache": "cache", "tokenizer": {"vocab_size": 300}, "repeat": True},
        "train": {"seq_len": 64, "global_batch_size": 4},
        "optim": {"learning_rate": 3e-3},
        "run": {"nproc": 2, "device": "cpu"},
    }
    (installed.parent / "recipe.yaml").write_text(json.dumps(recipe))
    own = ["-m", "shardwise"]
    assert "It fits" in run(installed, *own, "plan", "--cluster", "8xH100", "recipe.yaml")
    asked = [*own, "train", "recipe.yaml", "--run", "a"]
    run(installed, *asked, "parallel.strategy=zero3", "--max-steps", "3")
    run(installed, *asked, "parallel.tp=2", "--max-steps", "20", "--resume")
    lines = (installed.parent / "runs/a/metrics.jsonl").read_text().splitlines()
    told = [line for line in map(json.loads, lines) if "loss" in line]
    assert told[-1]["step"] == 20 and told[-1]["loss"] < told[0]["loss"]
    said = run(installed, *own, "prove", "recipe.yaml", "parallel.tp=2")
    assert "does not hold" not in said and "parity" in said and "drift" in said
    asked = ["plan", "--cluster", "8xH100", "recipe.yaml", "parallel.cp=2"]
    assert run(installed, "-c", f"from shardwise.cli.app import main; print(main({asked}))").splitlines()[-1] == "78"


@pytest.mark.prove
def test_a_package_is_planned_trained_and_proved(installed: Path) -> None:
    """Two ranks train with all three and go on under another layout; the optimizer's steps are one process's."""
    pairs = [{"prompt": f"is {i} odd? ", "chosen": "who knows", "rejected": f"{i % 2}"} for i in range(40)]
    (installed.parent / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    tokenizer = {"vocab_size": 300}
    recipe = {
        "model": {"config": {"model_type": "llama", "vocab_size": 300, **SIZE}},
        "data": {"path": "pairs.jsonl", "cache": "cache", "tokenizer": tokenizer, "text_key": "prompt", "repeat": True},
        "train": {"seq_len": 64, "global_batch_size": 4},
        "optim": {"name": "signum", "schedule": "exponential", "learning_rate": 1e-3},
    }
    (installed.parent / "recipe.yaml").write_text(json.dumps(recipe))
    own, words = ["-m", "shardwise"], ["recipe.yaml"]
    said = run(installed, *own, "plan", "--cluster", "8xH100", "method=apo_zero", *words)
    assert "It fits" in said
    asked = [*own, "train", "method=apo_zero", *words, "run.nproc=2", "run.device=cpu", "--run", "a"]
    run(installed, *asked, "parallel.strategy=zero3", "--max-steps", "2")
    run(installed, *asked, "parallel.tp=2", "--max-steps", "4", "--resume")
    told = [json.loads(line) for line in (installed.parent / "runs/a/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in told if "rewards/margins" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4] and abs(steps[0]["loss"] - 1) < 1e-6
    assert steps[-1]["loss"] < steps[0]["loss"]
    run(installed, *asked[:-1], "b", "run.launcher=detached", "--port", "29737", "--max-steps", "2")
    for _ in range(600):  # it does not wait
        if (installed.parent / "runs/b/report.json").exists():
            break
        time.sleep(0.2)
    assert len((installed.parent / "runs/b/metrics.jsonl").read_text().splitlines()) == 2
    said = run(installed, *own, "prove", *words, "run.nproc=2", "run.device=cpu", "parallel.strategy=zero3")
    assert "does not hold" not in said and "parity" in said
