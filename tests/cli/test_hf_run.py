"""A model that only transformers has, from end to end: two ranks fine-tune it, another layout goes on, the export loads
in transformers; adapters merge and PEFT reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.cli.app import main
from shardwise.data import tokens
from tests.models.hf_models import save
from tests.runtime.small_run import write_text
from tests.said import shows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names
IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text"))
    save("gpt_neox", Path("model"))
    save("gpt2", Path("turned"))
    settings = "model.path=model data.path=text data.cache=cache train.seq_len=16 train.global_batch_size=4"
    more = "optim.learning_rate=0.01 evaluate.max_batches=2 run.timeout_s=60 precision.compute=fp32"
    return ["train", *settings.split(), *more.split(), "--nproc", "2", "--run", "a"]


def logits(directory: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory)(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.prove
def test_tune_go_on_export(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words[1:-4], "--cluster", "2xRTX-4090"]) == 0
    assert shows(capfd.readouterr().out, "gpt_neox", "transformers' own modules")
    assert main([*words, "parallel.strategy=zero3", "recompute=selective", "--max-steps", "3"]) == 0
    said = capfd.readouterr().out
    assert "transformers' own modules" in said
    assert main([*words, "parallel.strategy=ddp", "--resume", "--max-steps", "6"]) == 0
    rows = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"] - 0.1
    before, after = logits("model"), logits("runs/a/hf")
    assert (after - before).norm() > 1e-2 * before.norm()
    assert main(["generate", "runs/a", "--prompt", "line 3", "--tokens", "4"]) == 0


@pytest.mark.prove
def test_start_from_random_weights(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Drawn alike by any number of ranks: another layout begins with the same loss."""
    sizes = "model_type=gpt2 vocab_size=320 n_embd=32 n_layer=2 n_head=2 n_positions=32"
    dims = [f"model.config.{size}" for size in sizes.split()] + ["data.tokenizer.vocab_size=320"]
    shared = ["train", *words[2:-2], *dims, "--max-steps", "2"]
    assert main([*shared, "--run", "a", "parallel.strategy=zero3"]) == 0
    assert main([*shared, "--run", "b", "--nproc", "1"]) == 0
    capfd.readouterr()
    assert losses("a") == pytest.approx(losses("b"), rel=1e-5)
    assert losses("a")[0] == pytest.approx(math.log(320), rel=0.02)
    assert logits("runs/a/hf").shape == (2, 12, 320)
    assert main(["generate", "runs/a", "--prompt", "line 3", "--tokens", "99"]) == 0  # positions end at 32
    known = json.loads(Path("runs/a/hf/config.json").read_text())["eos_token_id"]
    assert known == tokens.open_directory(Path("runs/a/hf")).eot_id  # not GPT-2's 50256


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "chosen", "count"),
    [
        ("model", ["lora.targets=[query_key_value,dense]"], 6),
        ("turned", ["lora.targets=[c_proj,c_fc]", "lora.dora=true", "parallel.strategy=zero3"], 9),
    ],
)
def test_adapters(
    words: list[str], capfd: pytest.CaptureFixture[str], model: str, chosen: list[str], count: int
) -> None:
    assert main([*words, f"model.path={model}", "lora.rank=2", *chosen, "--max-steps", "3"]) == 0
    assert main(["export", "runs/a"]) == 0
    said = capfd.readouterr()
    assert f"{count} adapters merged" in said.out and "attention_mask" not in said.err  # a warning of transformers
    merged, plain = logits("runs/a/hf"), logits(model)
    fresh = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(fresh, "runs/a/adapter")(IDS).logits
    assert (merged - theirs).norm() < 1e-5 * theirs.norm() and (merged - plain).norm() > 1e-3 * plain.norm()


def losses(run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.big
@pytest.mark.parametrize("model", ["model", "turned"])
def test_conversations_then_pairs(words: list[str], capfd: pytest.CaptureFixture[str], model: str) -> None:
    """Fine-tuned on answers, then adapters are trained to prefer some."""
    asked = [(f"what is {i} and {i * i % 17}?", f"please, {i % 7}", f"no idea, {i % 5}") for i in range(120)]
    talks = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer, _ in asked]
    pairs = [{"prompt": ask, "chosen": good, "rejected": bad} for ask, good, bad in asked]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shared = [*words[:-2], f"model.path={model}", "train.seq_len=64", "parallel.strategy=zero3"]
    told = ["method=sft", "data.path=talks.jsonl", "data.chat_template=zephyr", "--max-steps", "12", "--run", "told"]
    assert main([*shared, *told]) == 0, capfd.readouterr()
    assert losses("told")[-1] < losses("told")[0] - 0.5
    chosen = ["method=dpo", "data.path=pairs.jsonl", "lora.rank=4", "--max-steps", "12", "--run", "chosen"]
    assert main([*shared, "model.path=runs/told/hf", *chosen]) == 0, capfd.readouterr()
    assert losses("chosen")[0] == pytest.approx(math.log(2), abs=1e-5) and losses("chosen")[-1] < 0.5


@pytest.mark.big
@pytest.mark.launched  # inductor's workers do not live through a fork
@pytest.mark.parametrize("model", ["model", "turned"])
def test_compiled_blocks_compute_the_same(words: list[str], capfd: pytest.CaptureFixture[str], model: str) -> None:
    """In fp32, where sums in another order change the last bits of a loss."""
    shared = [*words[:-2], f"model.path={model}", "optim.learning_rate=0.001", "--max-steps", "3"]
    for run, compiled in (("a", "true"), ("b", "false")):
        chosen = ["parallel.strategy=zero3", f"compile={compiled}", "run.timeout_s=300", "--run", run]
        assert main([*shared, *chosen]) == 0, capfd.readouterr()
    assert losses("a") == pytest.approx(losses("b"), rel=1e-5)


def test_what_it_cannot_do_is_said_beforehand(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "precision.modules={'*norm': fp32}"]) == 78
    assert "precision.modules" in capfd.readouterr().err
    assert main([*words, "lora.rank=2", "lora.targets=[q]"]) == 78
    assert "query_key_value" in capfd.readouterr().err
    assert not Path("runs").exists()
