"""A run over two stages from end to end, beside one of one process: losses, validation, the sample, the exported model;
what a plan says of it, and what is refused."""

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
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Pipeline, Plan
from shardwise.spec.shipped import recipes_directory
from tests.cli import moved_ranks
from tests.cli.test_tp_run import MODEL, PROMPT, contents, lines, train  # noqa: F401
from tests.said import shows

TIED: dict[str, Any] = MODEL | {"num_hidden_layers": 4, "tie_word_embeddings": True}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("schedule", "more"), [("1f1b", []), pytest.param("zbv", ["checkpoint.save_steps=1"], marks=pytest.mark.prove)]
)
def test_a_run_is_that_of_one_process(
    train: Callable[..., int],  # noqa: F811
    ranks: RankPool,
    capfd: pytest.CaptureFixture[str],
    schedule: str,
    more: list[str],
) -> None:
    """With tied ends. Losses and norms within 1e-5, validation too: sums are taken in another order, in fp32."""
    assert train("--nproc", "1", "--run", "one", model=TIED) == 0
    capfd.readouterr()
    words = ["parallel.pp=2", f"parallel.schedule={schedule}", "train.micro_batch_size=1", *more]
    assert train("--nproc", "2", "--run", "two", *words, model=TIED) == 0
    told = capfd.readouterr().out
    assert shows(told, "plan", "pp 2", schedule)
    report = told[told.index("predicted") :]
    sent = [row for row in report.splitlines() if "over pp" in row]
    assert len(sent) == (3 if schedule == "1f1b" else 2), "a V has both ends of the model on one rank"
    assert all(row.split()[-1] == "0" for row in sent), "as many bytes as predicted"
    assert load_plan("runs/two/plan.yaml").layout.pp == 2
    for mine, theirs in zip(lines("two"), lines("one"), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert mine.get(key) == (None if theirs.get(key) is None else pytest.approx(theirs[key], rel=1e-5)), key
    ours, others = (entries(Path(f"runs/{name}/hf/model.safetensors")) for name in ("two", "one"))
    assert ours.keys() == others.keys()
    for name, entry in others.items():
        assert (ours[name].read() - entry.read()).abs().max() < 1e-4, name
    exports_are_alike(ranks, Path("runs/two").absolute(), capfd)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "1f1b": {"layout": Layout(pp=2), "pipeline": Pipeline("1f1b", 1, (2, 2))},
    "interleaved": {"layout": Layout(pp=2), "pipeline": Pipeline("interleaved", 2, (1, 1, 1, 1))},
    "zbv": {"layout": Layout(pp=2, v_shaped=True), "pipeline": Pipeline("zbv", 2, (1, 1, 1, 1))},
}


def exports_are_alike(ranks: RankPool, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run's checkpoint, loaded into each of the layouts and exported from there, is the run's own model in every
    file, bit by bit; and so is a text of greedy choices that all ranks write."""
    expected = contents(run / "hf")
    capfd.readouterr()
    assert main(["generate", str(run / "hf"), "--prompt", PROMPT, "--tokens", "12", "--json"]) == 0
    text = json.loads(capfd.readouterr().out)["text"]
    for name, settings in LAYOUTS.items():
        plan, target = Plan(**settings), run / f"from {name}"
        arguments = str(run), plan, str(target), PROMPT, 12
        world = plan.layout.world
        assert ranks.run(moved_ranks.load_and_export, *arguments, world=world) == [text] * world, name
        assert contents(target) == expected, name


@pytest.mark.prove
def test_the_recipe_of_three_dimensions_run_small(
    train: Callable[..., int],  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    """recipes/llama-405b-3d.yaml with its schedule and stages, on 2 x 2 ranks, beside one process."""
    deep = MODEL | {"num_hidden_layers": 8}
    small = [str(recipes_directory() / "llama-405b-3d.yaml"), "model.path=null", "data.tokenizer.path=null"]
    small += ["run.nodes=1", "train.micro_batch_size=1", "optim.warmup_steps=0"]
    apart = ["run.nproc=4", "parallel.tp=2", "parallel.pp=2"]
    whole = ["run.nproc=1", "parallel.tp=1", "parallel.pp=1", "parallel.schedule=auto", "parallel.stages_per_rank=null"]
    assert train(*small, *apart, "run.name=three", model=deep) == 0, capfd.readouterr().err
    assert train(*small, *whole, "run.name=one", model=deep) == 0
    plan = load_plan("runs/three/plan.yaml")
    assert (plan.pipeline.schedule, plan.pipeline.stages_per_rank, plan.layout.tp) == ("interleaved", 4, 2)
    for mine, theirs in zip(lines("three"), lines("one"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_plan_draws_its_schedule(train: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    words = ["plan", f"model.config={json.dumps(TIED)}", "data.path=text", "train.seq_len=16", "run.device=cpu"]
    words += ["train.micro_batch_size=1", "train.global_batch_size=4", "parallel.pp=2", "--cluster", "2xCPU"]
    assert main([*words, "parallel.schedule=1f1b", "--explain", "schedule", "--plot", "step.svg"]) == 0
    told = capfd.readouterr().out
    assert "(1f1b)" in told and "rank 1" in told and "B backward" in told
    assert Path("step.svg").read_text().startswith("<svg")
    assert main([*words[:-4], "--cluster", "2xCPU", "--plot", "other.svg"]) == 2
    assert "no pipeline" in capfd.readouterr().err


GPT2 = {"model_type": "gpt2", "vocab_size": 321, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ZBV = ["parallel.pp=2", "parallel.schedule=zbv"]


@pytest.mark.parametrize(
    ("model", "words", "code", "said", "fix"),
    [
        (TIED, ["parallel.pp=3"], "PLAN001", "pp 3 .*2 devices", "1, 2"),
        (TIED | {"num_hidden_layers": 1}, ["parallel.pp=2"], "PLAN023", "has 1 blocks", "`parallel.pp=1`"),
        (TIED | {"num_hidden_layers": 3}, ZBV, "PLAN023", "2 ranks .*2 stages", "`parallel.pp=1`"),
        (
            TIED,
            [*ZBV, "parallel.stages_per_rank=3"],
            "PLAN023",
            "zbv .*2 stages.* 3",
            "`parallel.stages_per_rank=2`",
        ),
        (TIED, ["parallel.pp=2", "parallel.split=[3,2]", "parallel.schedule=1f1b"], "PLAN023", "add up to 4", "[3, 1]"),
        (
            TIED,
            ["parallel.pp=2", "parallel.schedule=1f1b", "train.micro_batch_size=4"],
            "PLAN024",
            "needs 2 micro-batches.* 1",
            "`train.gradient_accumulation_steps=2`",
        ),
        (TIED, [*ZBV, "compile=true", "train.micro_batch_size=1"], "PLAN023", "apart", "`compile=false`"),
        (GPT2, ["parallel.pp=2"], "PLAN023", "transformers' own modules", "`parallel.pp=1`"),
    ],
)
def test_what_cannot_be(
    train: Callable[..., int],  # noqa: F811
    capfd: pytest.CaptureFixture[str],
    model: dict[str, Any],
    words: list[str],
    code: str,
    said: str,
    fix: str,
) -> None:
    """Before any process starts, with the nearest value that can be."""
    assert train("--nproc", "2", "--run", "none", *words, model=model) == 78
    told = capfd.readouterr().err
    assert re.search(rf"error\[{code}\]: .*{said}", told) and fix in told, told
    assert not Path("runs/none").exists()
