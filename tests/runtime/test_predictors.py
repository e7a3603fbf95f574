"""Layers that predict further tokens (multi-token heads) are copied from what training began with into the export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shardwise.cli.app import main
from shardwise.data.tokens import train_tokenizer
from shardwise.models import hf
from shardwise.models.lookup import load_spec, read_spec
from shardwise.runtime.export import kept_of
from shardwise.runtime.loop import train
from shardwise.spec.recipe import Recipe
from shardwise.techniques import lora
from tests.models.families import config_of, random_model
from tests.models.test_float8 import FP8, meant, quantised
from tests.runtime.small_run import directory, plan, recipe, train_here, write_text
from tests.said import shows

TOKENS = 320
FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_next")


def predictor(layer: str, width: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Some tensors as a layer behind the last has them, in several dtypes, NaN and all: nobody here reads them."""
    torch.manual_seed(5)
    shapes = {
        "embed_tokens": (tokens, width),
        "enorm": (width,),
        "eh_proj": (width, 2 * width),
        "self_attn.o_proj": (width, 24),
        "mlp.experts.3.up_proj": (20, width),
        "shared_head.head": (tokens, width),
    }
    named = {f"{layer}.{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    named[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(8)
    named[f"{layer}.enorm.weight"][2] = torch.nan
    return named


def write_model(path: Path, family: str, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A model with such a layer, and a tokenizer."""
    write_text(path.parent / "text")
    spec = read_spec(config_of(family, 1) | {"vocab_size": TOKENS}, "tiny")
    hf.write_weights(path, spec, random_model(spec).state_dict().__getitem__, dtype)
    layer = "mtp.layers.0" if family.startswith("qwen3_") else f"model.layers.{spec.num_hidden_layers}"
    own = predictor(layer, spec.hidden_size)
    save_file(load_file(path / hf.SINGLE) | own, path / hf.SINGLE, {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1, "mtp_loss": 0.1}
    (path / "config.json").write_text(json.dumps(config))
    train_tokenizer((text.read_text() for text in (path.parent / "text").iterdir()), TOKENS, path)
    return own


def same(one: Tensor, other: Tensor) -> bool:
    """Whether every bit is."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def beginning(root: Path, **more: Any) -> Recipe:
    model = {"path": str(root / "model"), "config": None}
    data = {"tokenizer": {"path": str(root / "model")}}
    return recipe(root, "a", model=model, data=data, train={"max_steps": 1}, optim={"warmup_steps": 1}, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fine_tune_keeps_them_bit_for_bit(tmp_path: Path, family: str) -> None:
    """In several files too, whose index has them; transformers loads the export."""
    own = write_model(tmp_path / "model", family)
    made = beginning(tmp_path)
    train_here(made)
    found = load_file(directory(made) / "hf" / hf.SINGLE)
    config = json.loads((directory(made) / "hf" / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["mtp_loss"]) == (1, 0.1)
    assert all(same(found[name], value) for name, value in own.items())
    before = load_file(tmp_path / "model" / hf.SINGLE)
    assert found.keys() == before.keys()
    assert not same(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"]), "it was trained"
    spec = load_spec(str(directory(made) / "hf"))
    kept = hf.kept_beside(directory(made) / "hf", spec)
    hf.write_weights(tmp_path / "cut", spec, random_model(spec).state_dict().__getitem__, torch.bfloat16, 20_000, kept)
    index = json.loads((tmp_path / "cut" / hf.INDEX).read_text())
    assert own.keys() < index["weight_map"].keys() == before.keys()
    again = {name: entry.read() for name, entry in hf.find_weights(tmp_path / "cut").items()}
    assert all(same(again[name], value) for name, value in own.items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in again.values())
    theirs = AutoModelForCausalLM.from_pretrained(directory(made) / "hf")
    assert torch.equal(theirs.state_dict()["model.norm.weight"], found["model.norm.weight"])


def test_of_a_model_of_text_and_images_they_are_the_text_s(tmp_path: Path) -> None:
    """As Qwen3.5's: they lie beside the text part, and the config tells of them within it. Images are not kept."""
    own = write_model(tmp_path / "model", "qwen3_5_moe_text")
    held = load_file(tmp_path / "model" / hf.SINGLE)
    held = {name.replace("model.", "model.language_model.", 1): value for name, value in held.items()}
    save_file(held | {"model.visual.x": torch.ones(2)}, tmp_path / "model" / hf.SINGLE, {"format": "pt"})
    text = json.loads((tmp_path / "model" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    kept, said = kept_of(beginning(tmp_path), load_spec(str(tmp_path / "model")))
    assert not said and kept.tensors.keys() == own.keys()
    assert kept.config == {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1, "mtp_loss": 0.1}


def test_a_merge_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = write_model(tmp_path / "model", "deepseek_v3")
    made = beginning(tmp_path, lora={"rank": 2})
    train(made, replace(plan(), lora=lora.settings(made.lora, plan().precision)))
    capsys.readouterr()
    assert main(["export", str(directory(made)), "--dtype", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "adapters merged" in said and "left out" not in said
    found = load_file(directory(made) / "hf" / hf.SINGLE)
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert all(same(found[name], value) for name, value in own.items())
    assert json.loads((directory(made) / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_what_is_no_longer_there_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config then says that there is none."""
    write_model(tmp_path / "model", "glm4_moe")
    made = beginning(tmp_path)
    train_here(made)
    (tmp_path / "model" / hf.SINGLE).unlink()
    capsys.readouterr()
    assert main(["export", str(directory(made)), "-o", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert shows(said, tmp_path / "model", "left out", "no weights")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    names = load_file(tmp_path / "out" / hf.SINGLE).keys()
    assert names and not [name for name in names if ".eh_proj." in name]


def test_they_know_the_tokens_of_the_model_or_are_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "glm4_moe")
    made, spec = beginning(tmp_path), load_spec(str(tmp_path / "model"))
    assert kept_of(made, spec)[0].tensors and not kept_of(made, spec)[1]
    kept, said = kept_of(made, load_spec(str(tmp_path / "model"), None, {"vocab_size": TOKENS + 2}))
    assert not kept.tensors and shows(said, "left out", "320 tokens", 322)


@pytest.mark.parametrize("change", [{"init": "random"}, {"path": None, "config": {"model_type": "llama"}}])
def test_a_model_that_begins_at_random_has_none(tmp_path: Path, change: dict[str, Any]) -> None:
    write_model(tmp_path / "model", "glm4_moe")
    made = beginning(tmp_path)
    made = made.model_copy(update={"model": made.model.model_copy(update=change)})
    kept, said = kept_of(made, load_spec(str(tmp_path / "model")))
    assert not kept.tensors and not kept.config and not said


def test_a_family_without_them_says_nothing_of_weights_that_are_gone(tmp_path: Path) -> None:
    made = beginning(tmp_path)
    assert kept_of(made, load_spec("Qwen3-0.6B")) == (hf.KeptLayers(), "")


def test_from_float8_they_are_in_the_dtype_of_the_export(tmp_path: Path) -> None:
    """Its config says nothing of float8, so that a server would read the values without their scales."""
    own = write_model(tmp_path / "model", "deepseek_v3")
    held, values = load_file(tmp_path / "model" / hf.SINGLE), {}
    for name in [name for name in own if "_proj" in name]:
        stored, scales = quantised(held[name].float(), 16, 32)
        held |= {name: stored, f"{name}_scale_inv": scales, name.replace("weight", "input_scale"): torch.ones(1)}
        values[name] = meant(stored, scales, 16, 32).float()
    stack = f"model.layers.{load_spec(str(tmp_path / 'model')).num_hidden_layers}.mlp.experts.down_proj"
    each = [quantised(torch.randn(40, 48), 16, 32) for _ in range(3)]
    held |= {name: torch.stack([pair[i] for pair in each]) for i, name in enumerate((stack, f"{stack}_scale_inv"))}
    values[stack] = torch.stack([meant(*pair, 16, 32).float() for pair in each])
    save_file(held, tmp_path / "model" / hf.SINGLE, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"quantization_config": FP8 | {"weight_block_size": [16, 32]}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    spec = load_spec(str(tmp_path / "model"))
    kept, said = kept_of(beginning(tmp_path), spec)
    assert not said and kept.tensors.keys() == own.keys() | {stack}
    hf.write_weights(tmp_path / "out", spec, random_model(spec).state_dict().__getitem__, torch.bfloat16, kept=kept)
    found = load_file(tmp_path / "out" / hf.SINGLE)
    assert all(same(found[name], value.bfloat16()) for name, value in values.items())
    assert all(same(found[name], value) for name, value in own.items() if name not in values)
    assert not [name for name in found if "scale" in name]
    del held[f"{stack}_scale_inv"]
    save_file(held, tmp_path / "model" / hf.SINGLE, {"format": "pt"})
    assert shows(kept_of(beginning(tmp_path), spec)[1], "left out", "1 tensors", "float8", "without scales")


@pytest.mark.prove
def test_two_ranks_that_share_weights_write_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_model(tmp_path / "model", "deepseek_v3")
    monkeypatch.chdir(tmp_path)
    settings = "model.path=model data.path=text data.cache=cache train.seq_len=16 train.global_batch_size=4"
    more = "precision.compute=fp32 parallel.strategy=zero3 run.timeout_s=60 --max-steps 1 train.num_epochs=null"
    assert main(["train", *settings.split(), *more.split(), "--nproc", "2", "--run", "a"]) == 0
    found = load_file(tmp_path / "runs" / "a" / "hf" / hf.SINGLE)
    assert all(same(found[name], value) for name, value in own.items())
