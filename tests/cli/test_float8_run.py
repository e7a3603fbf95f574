"""From a directory in float8 to an export in bf16: each of two ranks reads its own slices and their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.cli.app import main
from shardwise.data.tokens import train_tokenizer
from shardwise.models import hf
from tests.models.test_float8 import NAME, deepseek
from tests.runtime.small_run import write_text
from tests.said import refuses, shows

WORDS = "model.path=model data.path=text data.cache=cache train.seq_len=16 train.global_batch_size=4 run.timeout_s=90"
STILL = "precision.compute=fp32 optim.learning_rate=1e-12 optim.weight_decay=0 evaluate.max_batches=1 --max-steps 1"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text"))
    deepseek(Path("model"), fused=False, vocab_size=320)
    train_tokenizer((text.read_text() for text in Path("text").iterdir()), 320, Path("model"))
    return ["train", *WORDS.split(), *STILL.split(), "train.num_epochs=null", "--nproc", "2", "--run", "a"]


@pytest.mark.prove
@pytest.mark.parametrize("split", [["parallel.strategy=zero3", "parallel.ep=2"], ["parallel.tp=2"]])
def test_what_two_ranks_read_is_what_transformers_reads(
    words: list[str], split: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """After a step of 1e-12, which moves only zeros, its export is the model as transformers loads it in bf16."""
    assert main([*words, *split]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert shows(said, "read from float8, with", "scale for 128 x 128")
    assert main(["export", "runs/a", "--dtype", "bf16"]) == 0
    exported = AutoModelForCausalLM.from_pretrained("runs/a/hf")
    assert exported.dtype == torch.bfloat16 and "quantization_config" not in exported.config.to_dict()
    theirs = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).state_dict()
    matrices = [name for name, value in theirs.items() if value.dim() > 1]
    assert len(matrices) > 10
    for name in matrices:
        moved = (exported.state_dict()[name].double() - theirs[name].bfloat16().double()).abs().max()
        assert moved <= 2e-12, (name, moved)


@pytest.mark.prove
def test_an_export_in_float8_is_the_run_in_8_bits(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """What was read from float8, after a step that moves nothing, goes back into float8 with other scales: no value
    moves by more than what the format tells apart."""
    assert main(words) == 0
    assert main(["export", "runs/a", "--dtype", "float8", "-o", "eight"]) == 0
    held = load_file(Path("eight") / hf.SINGLE)
    assert held[NAME].dtype == torch.float8_e4m3fn and held[f"{NAME}_scale_inv"].dtype == torch.float32
    exported, theirs = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).state_dict() for name in ("eight", "model")
    )
    matrices = [name for name, value in theirs.items() if value.dim() > 1]
    assert len(matrices) > 10
    for name in matrices:
        off = (exported[name] - theirs[name]).abs()
        worst = float((off / (theirs[name].abs() / 16 + theirs[name].abs().max() * 2.0**-16)).max())
        assert worst <= 1, (name, worst)


def test_float8_without_scales_starts_no_process(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    held = load_file(Path("model") / hf.SINGLE)
    del held[f"{NAME}_scale_inv"]
    save_file(held, Path("model") / hf.SINGLE, {"format": "pt"})
    assert main(words) == 65
    said = " ".join(capfd.readouterr().err.split())
    assert refuses(said, "CKPT004", "1 tensors", "float8 without scales", "_scale_inv", "_scale", NAME)
    assert not Path("runs").exists()
