"""A run that trains the layer which predicts a further token: read, trained, reported, exported, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.cli.app import main
from shardwise.data.tokens import train_tokenizer
from shardwise.errors import ConfigError
from shardwise.models import hf
from shardwise.models.hf_names import copies
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.predictor import with_predictor
from shardwise.models.resolve import resolve
from shardwise.runtime.export import kept_of
from tests.models.families import config_of, random_model
from tests.runtime.small_run import directory, recipe, train_here, write_text

TOKENS = 320
FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text")
OWN = dict.fromkeys(("qwen3_next", "qwen3_5_text"), "mtp.fc.weight")
COUNT = {"qwen3_5_text": "mtp_num_hidden_layers"}


def write_model(path: Path, family: str) -> dict[str, torch.Tensor]:
    """A model with such a layer, its copies included, and a tokenizer; returns what the files have."""
    write_text(path.parent / "text")
    given = config_of(family, 1) | {"vocab_size": TOKENS, "tie_word_embeddings": False}
    spec = with_predictor(read_spec(given, "tiny"), 0.1)
    hf.write_weights(path, spec, random_model(spec).state_dict().__getitem__)
    train_tokenizer((text.read_text() for text in (path.parent / "text").iterdir()), TOKENS, path)
    return load_file(path / hf.SINGLE)


def beginning(root: Path, name: str = "a", **model: Any) -> Any:
    asked = {"path": str(root / "model"), "config": None, "mtp": {"weight": 0.5}} | model
    data = {"tokenizer": {"path": str(root / "model")}}
    return recipe(root, name, model=asked, data=data, train={"max_steps": 2}, optim={"warmup_steps": 1})


def metrics(made: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory(made) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_read_trained_and_written_under_the_names_of_the_files(tmp_path: Path, family: str) -> None:
    """The loss of the first step is that of a run without it. What is written is read as it was, bit for bit."""
    before = write_model(tmp_path / "model", family)
    made, plain = beginning(tmp_path), beginning(tmp_path, "plain", mtp={})
    train_here(made)
    train_here(plain)
    (first, _), (alone, _) = metrics(made), metrics(plain)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-6) and "mtp_loss" not in alone
    assert first["mtp_loss"] > 1.0
    exported = directory(made) / "hf"
    after, kept = load_file(exported / hf.SINGLE), load_file(directory(plain) / "hf" / hf.SINGLE)
    assert after.keys() == before.keys() == kept.keys()
    layers = load_spec(str(tmp_path / "model")).num_hidden_layers
    own = OWN.get(family, f"model.layers.{layers}.eh_proj.weight")
    assert torch.equal(kept[own], before[own]) and not torch.equal(after[own], before[own])
    assert json.loads((exported / "config.json").read_text())[COUNT.get(family, "num_nextn_predict_layers")] == 1
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == layers
    spec = with_predictor(load_spec(str(exported)), 0.5)
    parts = {name: [slice(0, n) for n in value.shape] for name, value in random_model(spec).state_dict().items()}
    read = dict(hf.read_weights(exported, parts, spec))
    hf.write_weights(tmp_path / "again", spec, read.__getitem__)
    again = load_file(tmp_path / "again" / hf.SINGLE)
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)
    for copy, parameter in copies(spec).items():
        assert torch.equal(after[copy], read[parameter])
    assert kept_of(made, spec)[0] == hf.NOTHING


def test_a_checkpoint_is_exported_and_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", "glm4_moe")
    made = beginning(tmp_path)
    train_here(made)
    assert main(["export", str(directory(made)), "-o", str(tmp_path / "out")]) == 0
    own, out = load_file(directory(made) / "hf" / hf.SINGLE), load_file(tmp_path / "out" / hf.SINGLE)
    assert own.keys() == out.keys() and all(torch.equal(own[name], out[name]) for name in own)


def test_where_the_files_have_none_it_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run says so. A file that lacks a part of it is another model's."""
    before = write_model(tmp_path / "model", "qwen3_next")
    bare = {name: value for name, value in before.items() if not name.startswith("mtp.")}
    save_file(bare, tmp_path / "model" / hf.SINGLE, {"format": "pt"})
    made = beginning(tmp_path)
    train_here(made)
    assert "with random weights" in capsys.readouterr().out
    assert load_file(directory(made) / "hf" / hf.SINGLE).keys() == before.keys()
    save_file(bare | {"mtp.fc.weight": before["mtp.fc.weight"]}, tmp_path / "model" / hf.SINGLE, {"format": "pt"})
    with pytest.raises(Exception, match="CKPT003"):
        train_here(beginning(tmp_path, "b"))


LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 2}
BARRED: dict[str, dict[str, Any]] = {
    "another family": {"model": {"config": LLAMA, "mtp": {"weight": 0.1}}},
    "tied": {"model": {"config": config_of("glm4_moe") | {"tie_word_embeddings": True}, "mtp": {"weight": 0.1}}},
    "adapters": {"lora": {"rank": 2}},
    "frozen": {"model": {"frozen": ["embed.*"]}},
    "pairs": {"method": {"name": "dpo"}},
}


@pytest.mark.parametrize("name", BARRED)
def test_what_does_not_go_with_it(tmp_path: Path, name: str) -> None:
    model = {"config": config_of("glm4_moe") | {"tie_word_embeddings": False}, "mtp": {"weight": 0.2}}
    sections = {"model": model, **BARRED[name]}
    sections["model"] = model | sections["model"]
    with pytest.raises(ConfigError) as error:
        resolve(recipe(tmp_path, **sections))
    assert [(one.code, one.where) for one in error.value.problems] == [("CFG008", "model.mtp.weight")]


def test_the_recipe_says_whether_and_how_much(tmp_path: Path) -> None:
    config = config_of("glm4_moe") | {"tie_word_embeddings": False}
    plain, asked = (
        resolve(recipe(tmp_path, model={"config": config, **more})) for more in ({}, {"mtp": {"weight": 0.1}})
    )
    assert (plain.predictors, asked.predictors, asked.predictor_weight) == (0, 1, 0.1)
    assert asked.num_hidden_layers == plain.num_hidden_layers + 1
