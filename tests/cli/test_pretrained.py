"""Going on from trained weights: the model's own tokenizer, and all that can be wrong with its files, before any rank
starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.launch import local
from shardwise.launch.local import Ended
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes

TINY = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WORDS = ["train", "model.path=model", "data.path=text", "data.cache=cache", "train.seq_len=16", "--nproc", "1"]
WORDS += ["--max-steps", "2", "train.global_batch_size=2"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A model directory with a tokenizer that no text here would make, and what would have been launched."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text").mkdir()
    for number in range(4):
        Path(f"text/{number}.txt").write_text(f"line {number} of a text\n" * 40)
    spec = from_hf(TINY, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec))
    tokens.train_tokenizer(["the model was trained on quite another text " * 20], 300, Path("model"))
    launched: list[object] = []
    monkeypatch.setattr(local, "run_ranks", lambda *words, **_: launched.append(words) or Ended(0))
    return launched


def test_its_own_tokenizer_is_used(started: list[object]) -> None:
    assert main([*WORDS, "--run", "a"]) == 0 and len(started) == 1
    own = tokens.open_directory(Path("model"))
    prepared = [json.loads(path.read_text()) for path in Path("cache/data").glob("*/manifest.json")]
    assert [manifest["tokenizer_hash"] for manifest in prepared] == [own.hash]


def test_without_a_name_the_run_is_called_after_the_model(started: list[object]) -> None:
    assert main(WORDS) == 0
    assert Path("runs/model-1/recipe.yaml").is_file()


def _pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def _cut(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1000])


def _pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")


def _config(**changes: float) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("case", "spoil", "code", "what"),
    [
        ("B-29", lambda model: (model / "model.safetensors").unlink(), 66, r"CKPT001\]: no weights"),
        ("B-29", shutil.rmtree, 66, r"MOD002\]: no model 'model'"),
        (
            "B-30",
            _config(vocab_size=301),
            65,
            r"CKPT002\]: 2 of 12 .*`embed.weight` .*\[300, 16\], .*\[301, 16\], `head",
        ),
        ("B-31", _config(num_hidden_layers=2), 65, r"CKPT003\]: 9 .*missing \(layers.1.attention_norm.weight"),
        (
            "negative epsilon",
            _config(rms_norm_eps=-1.0),
            65,
            r"MOD005\]: `rms_norm_eps` is -1.0; .*negative",
        ),
        ("B-33", _cut, 65, r"CKPT005\]: model.safetensors "),
        ("B-34", _pointer, 65, r"CKPT006\]: model.safetensors .*LFS pointer \("),
        ("B-37", _pickle, 77, r"SEC004\]: pytorch_model.bin .*pickle"),
        ("B-57", _config(vocab_size=200), 65, r"TOK001\]: tokenizer .*290 ids, model 200"),
        (
            "no tokenizer",
            lambda model: (model / "tokenizer.json").unlink(),
            66,
            r"TOK004\]: `model` .*no tokenizer.* config.json, ",
        ),
    ],
)
def test_bad_model_files_are_told_before_any_rank_starts(
    started: list[object],
    capfd: pytest.CaptureFixture[str],
    case: str,
    spoil: Callable[[Path], None],
    code: int,
    what: str,
) -> None:
    spoil(Path("model"))
    dry = main([*WORDS, "--run", "a", "--dry-run"])
    told = capfd.readouterr().err
    found = main([*WORDS, "--run", "a"])
    _, error = capfd.readouterr()
    assert (dry, told) == (found, error), "a dry run checks the same"
    first, where, fix = error.splitlines()[:3]
    assert found == code and re.match(rf"error\[{what}", first), case
    assert where.startswith("where: ") and fix.startswith("fix:   ") and "Traceback" not in error
    assert not started and not Path("runs/a").exists()


def test_a_dry_run_looks_for_the_adapter_and_tries_the_place(
    started: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--run", "a", "--dry-run", "lora.rank=2", "lora.path=adapter"]) == 66
    assert capfd.readouterr().err.startswith("error[CKPT001]: no adapter_config.json")
    Path("file").write_text("")
    assert main([*WORDS, "--run", "a", "--dry-run", "--out", "file"]) == 73
    assert capfd.readouterr().err.startswith("error[OUT002]: cannot write file")
    assert main([*WORDS, "--run", "a", "--dry-run", "--out", "deep/er"]) == 0
    assert not started and not Path("deep").exists()


def test_nothing_is_fetched_to_plan_or_to_print_the_lines_of_nodes(
    started: list[object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model whose dimensions are known, on a machine that cannot reach its files."""
    monkeypatch.setattr("shardwise.spec.hub._reachable", lambda url: False)
    words = ["train", "model.path=HuggingFaceTB/SmolLM2-135M", *WORDS[2:], "--run", "a"]
    assert main(words) == 69
    assert capfd.readouterr().err.startswith("error[MOD003]: HuggingFaceTB/SmolLM2-135M ")
    assert main([*words, "--dry-run"]) == 0
    assert main([*words, "run.nodes=2"]) == 0
    assert "torchrun" in capfd.readouterr().out and not started
