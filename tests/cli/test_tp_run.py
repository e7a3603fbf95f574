"""A run over two tensor-parallel ranks from end to end, beside one of one process: losses, validation, the sample, the
exported model; what is printed and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.models.tensorfile import entries
from shardwise.prove.pool import RankPool
from shardwise.runtime.report.sample import shown
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Plan, Precision, Shard
from tests.cli import moved_ranks
from tests.runtime.small_run import write_text
from tests.said import shows

MODEL = {
    "model_type": "llama",
    "vocab_size": 321,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

PROMPT = "line 1"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text"))
    settings = "data.path=text data.cache=cache data.tokenizer.vocab_size=321 train.seq_len=16"
    more = "train.global_batch_size=4 train.max_steps=3 optim.learning_rate=0.01 evaluate.max_batches=2"
    words = [
        *settings.split(),
        *more.split(),
        "precision.compute=fp32",
        "run.device=cpu",
        "run.timeout_s=60",
        f"evaluate.sample_prompt={PROMPT}",
    ]
    return lambda *given, model=MODEL: main(["train", f"model.config={json.dumps(model)}", *words, *given])


def lines(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.prove
def test_a_run_is_that_of_one_process(train: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """Losses and norms within 1e-5, validation too: sums are taken in another order, in fp32. The sample is what one
    process writes from the exported weights with the same draws (two tokens, all that these ranks write)."""
    assert train("--nproc", "1", "--run", "one") == 0
    capfd.readouterr()
    assert train("--nproc", "2", "--run", "two", "parallel.tp=2") == 0
    told = capfd.readouterr().out
    assert shows(told, "plan", "tp 2", "sp")
    report = told[told.index("predicted") :]
    assert "reduce-scatter over tp" in report and "all-gather over tp" in report
    assert load_plan("runs/two/plan.yaml").layout.tp == 2
    for mine, theirs in zip(lines("two"), lines("one"), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert mine.get(key) == (None if theirs.get(key) is None else pytest.approx(theirs[key], rel=1e-5)), key
    ours, others = (entries(Path(f"runs/{name}/hf/model.safetensors")) for name in ("two", "one"))
    assert ours.keys() == others.keys()
    for name, entry in others.items():
        assert (ours[name].read() - entry.read()).abs().max() < 1e-4, name
    settings = ["--tokens", "2", "--temperature", "0.6", "--seed", "0", "--json"]
    assert main(["generate", "runs/two", "--prompt", PROMPT, *settings]) == 0
    text = json.loads(capfd.readouterr().out)["text"]
    assert text and f"sample  {shown(f'{PROMPT}|{text}')}\n" in told


LAYOUTS = {
    "one process": (1, Layout(), "ddp"),
    "zero3": (2, Layout(dp_shard=2), "zero3"),
    "ddp": (2, Layout(dp_replicate=2), "ddp"),
    "tp": (2, Layout(tp=2), "ddp"),
    "tp x zero3": (4, Layout(dp_shard=2, tp=2), "zero3"),
}


@pytest.mark.prove
def test_an_export_and_a_text_are_the_same_from_any_layout(
    train: Callable[..., int], ranks: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    """What two tensor-parallel ranks saved is loaded into each of the layouts, and exported from there: every file is
    the run's own, bit by bit. So is that of the command, which loads it whole; and the text, of greedy choices."""
    assert train("--nproc", "2", "--run", "a", "parallel.tp=2") == 0
    run = Path("runs/a").absolute()
    expected = contents(run / "hf")
    assert "model.safetensors" in expected and "config.json" in expected
    assert main(["export", "runs/a", "--out", "whole"]) == 0
    assert {name: data for name, data in contents(Path("whole")).items() if name != "README.md"} == expected
    capfd.readouterr()
    assert main(["generate", "whole", "--prompt", PROMPT, "--tokens", "24", "--json"]) == 0
    text = json.loads(capfd.readouterr().out)["text"]
    assert text
    for name, (world, layout, strategy) in LAYOUTS.items():
        plan = Plan(layout, shard=Shard(strategy), precision=Precision("fp32"), sequence_parallel=layout.tp > 1)  # type: ignore[arg-type]
        target = Path(name).absolute()
        arguments = str(run), plan, str(target), PROMPT, 24
        assert ranks.run(moved_ranks.load_and_export, *arguments, world=world) == [text] * world, name
        assert contents(target) == expected, name


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a model's directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


GPT2 = {"model_type": "gpt2", "vocab_size": 321, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ONLY = "`parallel.tp=1`"
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


@pytest.mark.parametrize(
    ("model", "words", "code", "said", "fix"),
    [
        (MODEL, ["parallel.tp=3"], "PLAN001", "tp 3 .*2 devices", "one of 1, 2"),
        (MODEL, ["parallel.tp=0"], "CFG005", "`parallel.tp` must be", "1"),
        (
            MODEL | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
            ["parallel.tp=2"],
            "PLAN022",
            "2 .*3 query heads",
            ONLY,
        ),
        (
            MODEL | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            ["parallel.tp=2"],
            "PLAN022",
            "2 .*3 key heads",
            ONLY,
        ),
        (
            MODEL | {"intermediate_size": 49},
            ["parallel.tp=2"],
            "PLAN022",
            "2 does not divide `intermediate_size` 49",
            ONLY,
        ),
        (GPT2, ["parallel.tp=2"], "PLAN022", "transformers' own modules", "parallel.tp=1"),
        (
            WIDE,
            ["parallel.tp=2", "optim.name=adamw8bit"],
            "PLAN022",
            "blocks of 256.*`o` .*64 columns",
            ONLY,
        ),
        (
            WIDE | {"intermediate_size": 192},
            ["parallel.tp=2", "lora.rank=4", "lora.frozen=nf4"],
            "PLAN022",
            "blocks of 64.*`down` .*96 columns",
            ONLY,
        ),
        (
            WIDE,
            ["parallel.tp=2", "lora.rank=4", "lora.frozen=nf4", "compile=true"],
            "PLAN018",
            "nf4 .*compiled blocks",
            "false, or `lora.frozen: float8`",
        ),
    ],
    ids=["devices", "zero", "heads", "key heads", "intermediate", "gpt2", "moments", "nf4", "compiled nf4"],
)
def test_what_cannot_be_is_told_before_anything_starts(
    train: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    model: dict[str, Any],
    words: list[str],
    code: str,
    said: str,
    fix: str,
) -> None:
    assert train("--nproc", "2", "--run", "never", *words, model=model) == 78
    told = capfd.readouterr().err
    assert re.search(rf"error\[{code}\]: .*{said}", told) and fix in told[told.index("fix:") :]
    assert not Path("runs/never").exists()


def test_the_numbers_that_a_refusal_names_are_accepted(
    train: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each divides the devices as well as the model."""
    six = MODEL | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    words = ["--nproc", "6", "--dry-run", "train.global_batch_size=12"]
    assert train(*words, "parallel.tp=2", model=six) == 78
    assert "one of 1, 3, 6" in capfd.readouterr().err
    for legal in (1, 3, 6):
        assert train(*words, f"parallel.tp={legal}", model=six) == 0


@pytest.mark.prove
def test_a_group_over_several_nodes_is_legal_and_warned_of(
    train: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["model=meta-llama/Llama-3.1-70B", "seq_len=4096", "global_batch=64", "parallel.tp=16"]
    assert main(["plan", *words, "--cluster", "2x8xH100+400Gb/node"]) == 0
    told = capfd.readouterr()
    assert shows(told.err, "warning", "16 ranks", "tensor-parallel", "nodes", "`parallel.tp=8`")
    assert train("--nproc", "1", "--dry-run", "run.nodes=2", "parallel.tp=2") == 0
    assert shows(capfd.readouterr().err, "warning", "2 ranks", "tensor-parallel", "nodes")
    assert train("--nproc", "2", "--dry-run", "run.nodes=2", "parallel.tp=2") == 0
    assert "on several nodes" not in capfd.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "tp", "said"),
    [
        ("ulysses", 1, "8 ranks .*heads .*nodes, .* `parallel.cp_kind=nested`"),
        ("ring", 1, None),
        ("nested", 1, None),
        ("nested", 4, "2 ranks .*heads .*nodes, .* `parallel.cp_kind=ring`"),
    ],
)
def test_heads_exchanged_between_nodes_are_warned_of(
    capfd: pytest.CaptureFixture[str], kind: str, tp: int, said: str | None
) -> None:
    """With what serves instead: of ranks that fill a node with tensor parallelism no two are on one."""
    words = ["model=meta-llama/Llama-3.1-8B", "seq_len=32768", "global_batch=8", f"parallel.cp={8 if tp == 1 else 4}"]
    machines = "2x4xH100+400Gb/node" if tp == 1 else "4x4xH100+400Gb/node"
    assert main(["plan", *words, f"parallel.cp_kind={kind}", f"parallel.tp={tp}", "--cluster", machines]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "exchange tokens" in line]
    assert len(warned) == (said is not None) and all(re.search(str(said), line) for line in warned)


def test_other_systems_names_are_understood(train: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--nproc", "2", "--dry-run", "tensor_parallel_size=2") == 0
    assert "tp 2 with sp" in capfd.readouterr().out
