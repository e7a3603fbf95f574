"""Adapters from end to end: two ranks train them on a directory's weights, another run goes on, the export merges."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.app import main
from shardwise.data.tokens import train_tokenizer
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes
from shardwise.models.tensorfile import entries
from tests.runtime.small_run import MODEL, write_text
from tests.said import shows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names


def write_tokenizer(texts: list[Path], directory: Path) -> None:
    train_tokenizer((text.read_text() for text in texts), 320, directory)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text"))
    spec = from_hf(MODEL, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec))
    settings = "model.path=model data.path=text data.cache=cache data.tokenizer.vocab_size=320 train.seq_len=16"
    more = "train.global_batch_size=4 optim.learning_rate=0.05 lora.rank=2 evaluate.max_batches=2 run.timeout_s=60"
    return ["train", *settings.split(), *more.split(), "precision.compute=fp32", "--nproc", "2", "--run", "a"]


@pytest.mark.prove
def test_train_go_on_merge(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Only adapters are saved; PEFT reads what the run leaves; merged, transformers computes what PEFT does."""
    assert main([*words, "parallel.strategy=zero3", "--max-steps", "3", "train.num_epochs=null"]) == 0
    saved = entries(next(Path("runs/a/checkpoints").glob("step-00000003/model-00000-*.safetensors")))
    assert saved and all(".lora_" in name for name in saved)
    config = json.loads(Path("runs/a/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4.0, "model")
    assert main(["export", "runs/a"]) == 0
    said = capfd.readouterr().out
    assert "14 adapters merged" in said
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained("model")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("runs/a/hf")(ids).logits
        fresh = AutoModelForCausalLM.from_pretrained("model")
        theirs = peft.PeftModel.from_pretrained(fresh, "runs/a/adapter")(ids).logits
    assert (merged - theirs).norm() < 1e-5 * theirs.norm()
    assert (merged - plain).norm() > 1e-3 * plain.norm()
    assert main(["export", "runs/a", "--adapter", "--step", "3", "-o", "again"]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert Path("again", name).read_bytes() == Path("runs/a/adapter", name).read_bytes(), name
    assert main(["export", "runs/a", "--adapter", "--dtype", "bf16"]) == 2
    # Generation reads the checkpoint where nothing was exported.
    assert main(["generate", "runs/a", "line 3", "--tokens", "4"]) == 0


@pytest.mark.prove
def test_a_second_run_begins_from_the_adapter(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--max-steps", "2"]) == 0
    second = [*words[:-1], "b", "lora.path=runs/a/adapter", "--max-steps", "1", "optim.learning_rate=1e-9"]
    assert main(second) == 0
    before, after = (entries(Path(f"runs/{name}/adapter/adapter_model.safetensors")) for name in "ab")
    assert before.keys() == after.keys()
    for name, entry in before.items():
        assert torch.allclose(entry.read(), after[name].read(), atol=1e-6), name
    capfd.readouterr()
    assert main([*words[:-1], "c", "lora.path=runs/a/adapter", "lora.rank=4", "--max-steps", "1"]) == 65
    assert shows(capfd.readouterr().err, "r 2", "recipe 4")
    assert not Path("runs/c").exists(), "told before any process starts"
    alone = [word for word in [*words[:-1], "d", "lora.path=runs/a/adapter", "--max-steps"] if "lora.rank" not in word]
    assert main([*alone, "2"]) == 0, "rank, alpha and targets are the adapter's"
    assert entries(Path("runs/d/adapter/adapter_model.safetensors")).keys() == before.keys()
    assert main([*alone, "3", "--resume"]) == 0
    assert shows(capfd.readouterr().err, "runs/d", "step 2", "train.max_steps 3", 2)


@pytest.mark.prove
def test_ends_that_are_trained_whole(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Trained ends are in checkpoints, in what PEFT reads, in the merged model and in what another run begins from; a
    run goes on with them under another strategy. Every step tells token accuracy, and entropy since that is asked
    for."""
    ends = ["lora.modules_to_save=[embed_tokens,lm_head]", "method.entropy=true", "train.num_epochs=null"]
    assert main([*words, *ends, "parallel.strategy=zero3", "--max-steps", "2"]) == 0
    names = entries(next(Path("runs/a/checkpoints").glob("step-00000002/model-00000-*.safetensors")))
    whole = {"embed.weight", "head.weight"} & parameter_shapes(from_hf(MODEL, "tiny")).keys()
    assert {name for name in names if ".lora_" not in name and name.startswith("model.")} == {
        f"model.{n}" for n in whole
    }
    assert main([*words, *ends, "parallel.strategy=ddp", "--max-steps", "4", "--resume"]) == 0
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["mean_token_accuracy"] <= 1 and 0 < row["entropy"] < 6 for row in rows)
    assert main(["export", "runs/a"]) == 0
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained("model")
        plain = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("runs/a/hf")
        theirs = peft.PeftModel.from_pretrained(base, "runs/a/adapter")(ids).logits
    assert (merged(ids).logits - theirs).norm() < 1e-5 * theirs.norm() < 1e-2 * (theirs - plain).norm()
    begun = [word for word in words[:-1] if not word.startswith("lora.rank")]
    again = [*begun, "b", "lora.path=runs/a/adapter", "--max-steps", "1", "optim.learning_rate=1e-9"]
    assert main([*again, "train.num_epochs=null"]) == 0
    before, after = (entries(Path(f"runs/{name}/adapter/adapter_model.safetensors")) for name in "ab")
    assert before.keys() == after.keys()
    for name, entry in before.items():
        assert torch.allclose(entry.read(), after[name].read(), atol=1e-6), name
    capfd.readouterr()


@pytest.mark.prove
def test_added_tokens(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """A model learns tokens that it did not have: under tp with adapters, and whole under zero3; transformers and PEFT
    read both, and another run, generation and the export go on from an adapter without being told."""
    write_tokenizer([*Path("text").glob("*.txt")], Path("model"))
    own = [word for word in words if not word.startswith("data.tokenizer")]
    asked = ["data.add_tokens=[<a>,<b>,<|endoftext|>]", "--max-steps", "2", "train.num_epochs=null"]
    ends = ["lora.modules_to_save=[embed_tokens,lm_head]", "parallel.tp=2"]
    assert main([*own, *asked, *ends]) == 0
    values = "vocabulary 322", "2 tokens added", "`<|endoftext|>`"
    assert shows(capfd.readouterr().out, *values)
    assert main(["export", "runs/a"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("runs/a/adapter")
    assert tokenizer.encode("<a><b>") == [320, 321]
    ids = torch.arange(298, 322).view(2, 12)
    base = AutoModelForCausalLM.from_pretrained("model")
    before = base.get_input_embeddings().weight.detach().clone()
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("runs/a/hf")(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, "runs/a/adapter")(ids).logits
    assert merged.shape[-1] == 322 and (merged - theirs).norm() < 1e-5 * theirs.norm()
    assert main(["generate", "runs/a/adapter", "--prompt", "line 3", "--tokens", "2"]) == 0
    begun = [word for word in own[:-1] if not word.startswith("lora.rank")]
    again = [*begun, "b", "lora.path=runs/a/adapter", "--max-steps", "1", "train.num_epochs=null"]
    assert main([*again, "optim.learning_rate=1e-9"]) == 0
    first, second = (entries(Path(f"runs/{name}/adapter/adapter_model.safetensors")) for name in "ab")
    assert all(torch.allclose(entry.read(), second[name].read(), atol=1e-6) for name, entry in first.items())
    whole = [word for word in own[:-1] if not word.startswith("lora.")]
    assert main([*whole, "c", *asked, "parallel.strategy=zero3", "optim.learning_rate=1e-9"]) == 0
    embed = AutoModelForCausalLM.from_pretrained("runs/c/hf").get_input_embeddings().weight
    assert torch.allclose(embed[:320], before, atol=1e-6)
    assert torch.allclose(embed[320:], before.mean(0).expand(2, -1), atol=1e-6)
    capfd.readouterr()


@pytest.mark.prove
def test_four_bits_from_end_to_end(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """QLoRA: learns under zero3, goes on under ddp, generates from the bytes, merges into what they were made of."""
    spec = from_hf(MODEL | {"hidden_size": 64, "intermediate_size": 128}, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec))
    words += ["lora.frozen=nf4", "parallel.strategy=zero3"]
    assert main([*words, "--max-steps", "3"]) == 0
    assert main([*words[:-1], "parallel.strategy=ddp", "--resume", "--max-steps", "6"]) == 0
    assert "frozen weights nf4 and fp32" in capfd.readouterr().out
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert main(["generate", "runs/a", "--prompt", "line 3", "--tokens", "4"]) == 0
    assert main(["export", "runs/a"]) == 0
    assert "14 adapters merged" in capfd.readouterr().out
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("runs/a/hf")(ids).logits
        fresh = AutoModelForCausalLM.from_pretrained("model")
        theirs = peft.PeftModel.from_pretrained(fresh, "runs/a/adapter")(ids).logits
    assert (merged - theirs).norm() < 1e-5 * theirs.norm()
