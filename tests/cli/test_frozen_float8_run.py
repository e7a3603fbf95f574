"""Adapters over frozen weights in float8 from end to end, of files that are in float8 already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.cli.app import main
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes
from shardwise.models.lookup import load_spec
from tests.cli.test_lora_run import words as words
from tests.models.test_stored import everything
from tests.runtime.small_run import MODEL
from tests.said import shows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names
E4M3 = torch.float8_e4m3fn
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


def write(directory: Path) -> None:
    """A model of whole blocks in float8, with scales that are no powers of two."""
    spec = from_hf(MODEL | SIZES | {"head_dim": 32}, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    shutil.rmtree(directory)
    hf.write_weights(directory, spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec), E4M3)
    held = load_file(directory / hf.SINGLE)
    held |= {name: value * 1.37 for name, value in held.items() if name.endswith("_scale_inv")}
    save_file(held, directory / hf.SINGLE, {"format": "pt"})


@pytest.mark.prove
def test_from_end_to_end(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Learns under zero3, goes on under tp with the same bits, generates, and merges into what the files hold."""
    write(Path("model"))
    words += ["lora.frozen=float8", "parallel.strategy=zero3"]
    assert main([*words, "--max-steps", "3"]) == 0
    said = capfd.readouterr().out
    assert "frozen weights float8 and fp32" in said
    assert main([*words[:-1], "parallel.tp=2", "--resume", "--max-steps", "6"]) == 0
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert main(["generate", "runs/a", "--prompt", "line 3", "--tokens", "4"]) == 0
    assert main(["export", "runs/a"]) == 0
    assert shows(capfd.readouterr().out, "14 adapters merged", "files")
    spec = load_spec("model")
    read = dict(hf.read_weights(Path("model"), everything(spec), spec))
    hf.write_weights(Path("plain"), spec, read.__getitem__)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("runs/a/hf")(ids).logits
        fresh = AutoModelForCausalLM.from_pretrained("plain")
        theirs = peft.PeftModel.from_pretrained(fresh, "runs/a/adapter")(ids).logits
    assert (merged - theirs).norm() < 1e-5 * theirs.norm()
