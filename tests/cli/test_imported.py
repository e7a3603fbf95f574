"""Other systems' files in a recipe's place: planned beside their own split, written as a recipe, trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Parallel
from tests.interop.test_imports import ACCELERATE, AXOLOTL, SAMPLES, TRL
from tests.interop.test_nemo import HYDRA
from tests.interop.test_programs import PROGRAM
from tests.said import shows

MACHINES = ("--cluster", "8xH100")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a file of each system, a tiny model and conversations."""
    monkeypatch.chdir(tmp_path)
    for name, (file, text) in SAMPLES.items():
        (tmp_path / f"{name}{Path(file).suffix}").write_text(text)
    (tmp_path / "split.yaml").write_text(ACCELERATE)
    with Path("talks.jsonl").open("w") as lines:
        for i in range(60):
            talk = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} " * 6}]
            lines.write(json.dumps({"messages": talk, "text": f"said {i} " * 20}) + "\n")
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    tokens.train_tokenizer(["say it again " * 50], 300, tiny)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 16}
    config |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tiny / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_page_shows_their_split_and_the_best(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("trl.yaml").write_text(TRL + "my_own_key: 3\n")
    assert main(["plan", "trl.yaml", "split.yaml", *MACHINES]) == 0
    out = capsys.readouterr().out
    assert "not read: my_own_key" in out
    theirs = next(line for line in out.splitlines() if line.startswith("split by Accelerate and TRL"))
    best = next(line for line in out.splitlines() if line.startswith("best, and learns the same"))
    assert "ZeRO-3 over 8" in theirs and "fits" in theirs and "tokens/s" in best
    again = next(line for line in out.splitlines() if line.startswith("next: "))
    assert "plan trl.yaml split.yaml" in again


def test_a_plan_is_printed_in_the_terms_of_another_system(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is, so that it may go to a file, which is read again."""
    assert main(["plan", "trl.yaml", "split.yaml", *MACHINES, "parallel.strategy=zero3", "--emit", "deepspeed"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["zero_optimization"], written["bf16"]) == ({"stage": 3}, {"enabled": True})
    assert main(["plan", "trl.yaml", *MACHINES, "--emit", "horovod"]) == 2
    assert "one of deepspeed, accelerate, megatron, torchtitan" in capsys.readouterr().err


@pytest.mark.prove
def test_theirs_that_is_illegal_is_told_and_the_plan_made(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tp.yaml").write_text(AXOLOTL.replace("adapter: qlora\n", "") + "tensor_parallel_size: 3\n")
    assert main(["plan", "tp.yaml", *MACHINES]) == 0
    assert shows(capsys.readouterr().out, "split", "axolotl")


def test_an_imported_recipe_says_where_each_line_came_from(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "axolotl.yaml", *MACHINES, "-o", "mine.yaml", "optim.beta2=0.98"]) == 0
    text = Path("mine.yaml").read_text()
    assert "learning_rate: 0.0002  # axolotl.yaml:9 learning_rate: 0.0002" in text
    recipe = load_recipe("mine.yaml")
    assert recipe.parallel == Parallel() and recipe.train.micro_batch_size is None
    assert (recipe.train.global_batch_size, recipe.optim.beta2, recipe.lora.frozen) == (64, 0.98, "nf4")
    assert main(["import", "axolotl.yaml", *MACHINES, "--pinned"]) == 0
    assert "micro_batch_size: 2" in capsys.readouterr().out
    assert main(["import", "axolotl.yaml", *MACHINES, "-o", "mine.yaml"]) == 73


def test_what_is_wrong_is_said_at_once(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("half.yaml").write_text(TRL.replace("model_name_or_path: meta-llama/Llama-3.2-1B\n", "") + "optim: sgd\n")
    for words, codes, code in [
        (["plan", "half.yaml", *MACHINES], ("IMP001",), 78),
        (["plan", "deepspeed.json", *MACHINES], ("IMP006",), 78),
        (["train", "torchtitan.toml", "nproc=1"], ("IMP006",), 78),
        (["plan", "trl.yaml", "--from", "nobody"], ("IMP003",), 78),
        (["plan", "trl.yaml", "--set", "RATE"], ("CLI001",), 2),
        (["plan", "trl.yaml", "--set", "nosuch=3"], ("CLI001",), 2),
        (["import"], ("CLI001",), 2),
        (["import", "axolotl.yaml", *MACHINES, "--strict"], ("IMP005",), 78),
        (["plan", "talks.jsonl", "trl.yaml"], ("CLI001",), 2),
        (["plan", "model=tiny", *MACHINES, "--set", "train.global_batch_size=8"], ("CLI001",), 2),
    ]:
        assert main([*words, "--json"]) == code, words
        told = json.loads(capsys.readouterr().out)
        assert {problem["code"] for problem in told.get("error", {}).get("problems", [])} == set(codes), words


def test_what_a_message_asks_for_can_be_set(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the file spells it in another way: a keyword of a program, a reference relative to its place."""
    Path("own.py").write_text(PROGRAM.replace("steps=10 * 20", "steps=int(sys.argv[1])"))
    Path("hydra.yaml").write_text(HYDRA.replace("${.hidden_size}", "${.width}"))
    for file, name, told in (
        ("own.py", "training.steps", "max_steps: 64"),
        ("hydra.yaml", "model.width", "Imported from hydra.yaml"),
    ):
        assert main(["import", file, *MACHINES]) == 78
        assert f"--set {name}=VALUE" in capsys.readouterr().err
        assert main(["import", file, *MACHINES, "--set", f"{name}=64"]) == 0
        assert told in capsys.readouterr().out
        assert main(["import", file, *MACHINES, "--set", f"{name}s=64"]) == 2
        assert shows(capsys.readouterr().err, f"`--set {name}s`", file)


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_file_of_each_system_is_trained(there: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{name}{Path(SAMPLES[name][0]).suffix}"
    words = ["model=tiny", "model.init=random", "data=talks.jsonl", "seq_len=64", "run.nproc=2", "run.device=cpu"]
    words += [
        "train.max_steps=3",
        "optim.warmup_steps=0",
        f"run.name={name}",
        "data.validation_share=0",
        "compute=fp32",
    ]
    words += ["data.chat_template=zephyr"] if name in ("axolotl", "trl", "llamafactory", "torchtune") else []
    words += ["optim.learning_rate=1e-3"] if name in ("deepspeed", "accelerate") else []
    words += ["lora.frozen=auto"] if name == "axolotl" else []
    words += ["precision.weights=fp32"] if name == "torchtune" else []
    assert main(["train", file, *words, "train.global_batch_size=4"]) == 0, capsys.readouterr()
    lines = [json.loads(line) for line in (there / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) >= 3 and losses[-1] < losses[0] + 0.5
