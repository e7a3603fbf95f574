"""The model comes out of a loop of one's own: transformers, peft and safetensors read what was written."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.app import main
from shardwise.prove.pool import RankPool
from tests.runtime import own_model_ranks
from tests.runtime.own_model_ranks import WORDS, output
from tests.runtime.own_ranks import Model
from tests.said import refuses


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "tp"),
    [
        ("gpt2", "zero3", 1),
        ("llama", "ddp", 1),
        ("qwen3", "zero3", 1),
        ("qwen3", "zero1", 1),
        ("decoder", "zero3", 2),
        ("decoder", "zero2", 1),
    ],
)
def test_transformers_reads_what_was_written_and_what_is_exported(
    ranks: RankPool, kind: str, strategy: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks under tp, of two else. A tied output layer is in the files once. The export has, as in a process
    of its own, not imported the model's class yet."""
    world = 2 * tp
    right = ranks.run(own_model_ranks.saved, kind, strategy, str(tmp_path), tp, world=world)
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"):
        monkeypatch.delitem(vars(transformers), name, raising=False)
    assert main(["export", str(tmp_path), "--step", "1"]) == 0
    assert main(["export", str(tmp_path), "--adapter"]) == 2
    assert main(["export", str(tmp_path), "--best", "-o", str(tmp_path / "best")]) == 0
    for directory in ("saved", "hf", "best"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        found = output("llama", model)
        for logits in right:
            torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
        with safe_open(tmp_path / directory / "model.safetensors", "pt") as file:
            assert ("lm_head.weight" in file.keys()) is (kind == "llama")  # noqa: SIM118
    for directory in ("saved", "hf"):
        assert AutoTokenizer.from_pretrained(tmp_path / directory).decode([5, 7]) == f"{WORDS[5]} {WORDS[7]}"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's use of it
def test_peft_reads_the_adapter(ranks: RankPool, tmp_path: Path) -> None:
    right = ranks.run(own_model_ranks.saved, "adapter", "zero3", str(tmp_path), world=2)
    torch.manual_seed(0)
    model = peft.PeftModel.from_pretrained(own_model_ranks.llama(), tmp_path / "saved")
    torch.testing.assert_close(output("adapter", model), right[0], rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_a_module_of_ones_own_is_a_file_of_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    right = ranks.run(own_model_ranks.saved, "module", "zero3", str(tmp_path), world=2)
    model = Model()
    load_model(model, tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(output("module", model), right[0], rtol=1e-6, atol=1e-6)


def test_generate_continues_with_what_was_exported(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(own_model_ranks.saved, "llama", "zero3", str(tmp_path), world=2)
    asked = ["generate", str(tmp_path), "--prompt", "5 7", "--tokens", "4"]
    assert main(asked) == 66
    assert f"shardwise export {tmp_path}" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == main(asked) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = model.generate(torch.tensor([[6, 8]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0]
    right = AutoTokenizer.from_pretrained(tmp_path / "saved").decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out.splitlines()[-1].replace(" ", "") == right.replace(" ", "")


@pytest.mark.parametrize("kind", ["adapter", "module"])
def test_what_transformers_cannot_make_is_not_exported(
    ranks: RankPool, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(own_model_ranks.saved, kind, "ddp", str(tmp_path), world=1)
    assert main(["export", str(tmp_path)]) == 66
    told = " ".join(capsys.readouterr().err.split())
    assert "transformers does not" in told and "shardwise.save_pretrained(model, directory)" in told


def test_every_rank_hears_of_a_disk_that_fails(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for told in ranks.run(own_model_ranks.full_disk, str(tmp_path / "file"), world=2):
        assert refuses(told, "OUT002", "model")
