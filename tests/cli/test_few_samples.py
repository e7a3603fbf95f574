"""What ``shardwise train`` says of few samples, before it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.cli.decide import cluster_of
from shardwise.cli.length import Asked
from shardwise.cli.options import recipe_or_quickstart
from shardwise.cli.planned import planned as planned_of
from shardwise.data import tokens
from shardwise.launch import local
from shardwise.launch.local import Ended
from shardwise.models.resolve import resolve
from shardwise.runtime.report.header import assumptions
from shardwise.spec.load import load_plan, load_recipe
from tests.said import refuses, shows

Run = Callable[..., tuple[str, str]]
OPEN = ("train.seq_len=256", "train.global_batch_size=null")
"""A recipe that says nothing of the batch."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``train`` on 105 short conversations, or with other words; no rank is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run_ranks", lambda *_, **__: Ended(0))
    with Path("talks.jsonl").open("w") as file:
        for i in range(105):
            talk = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} " * 6}]
            file.write(json.dumps({"messages": talk}) + "\n")
    tokens.train_tokenizer(["say it again " * 50], 300, Path("."))
    config = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    words = [f"model.config.{key}={value}" for key, value in config.items()]
    words += [
        "method=sft",
        "data.path=talks.jsonl",
        "data.chat_template=zephyr",
        "data.validation_share=0",
        "run.nproc=1",
    ]
    words += ["data.tokenizer.path=.", "data.cache=cache", "train.seq_len=128", "train.global_batch_size=4"]

    def run(*more: str) -> tuple[str, str]:
        assert main(["train", *words, *more]) == 0
        captured = capfd.readouterr()
        return captured.out, captured.err

    run.words = words  # type: ignore[attr-defined]
    return run


def test_samples_windows_and_steps_are_told_and_few_steps_warned_of(run: Run) -> None:
    out, err = run("--num-epochs", "3")
    found = re.search(r"^data    105 samples -> (\d+) .* 128 .*-> (\d+) steps.*?(\(.*)$", out, re.M)
    assert found is not None
    windows, steps = int(found[1]), int(found[2])
    assert steps == -(-windows // 4) < 20 and shows(
        found[3], "(global batch 4)", f"{-(-3 * windows // 4)} steps", f"{-(-3 * windows // 4) / steps:.3g} epochs"
    )
    assert refuses(err, "DATA017", "an epoch", f"{steps} steps", as_warning=True)
    fix = err.splitlines()[1]
    assert fix.startswith("fix:   train.global_batch_size=2 (") and f"train.num_epochs={-(-100 // steps)} (" in fix
    shorter = re.search(r"train\.seq_len=(\d+)", fix)
    assert shorter is not None
    for word in (f"train.seq_len={shorter[1]}", "train.global_batch_size=2"):
        out, err = run("--num-epochs", "3", word)
        found = re.search(r"-> (\d+) steps an epoch", out)
        assert found is not None and int(found[1]) >= 20 and "DATA017" not in err


@pytest.mark.parametrize(
    ("pins", "fix"),
    [
        (["train.micro_batch_size=2", "train.global_batch_size=16"], "train.global_batch_size=2"),
        (
            ["train.micro_batch_size=2", "train.gradient_accumulation_steps=4", "train.global_batch_size=null"],
            "train.gradient_accumulation_steps=1",
        ),
        (
            ["train.gradient_accumulation_steps=4", "train.global_batch_size=8"],
            "train.global_batch_size=2 train.gradient_accumulation_steps=1",
        ),
    ],
)
def test_what_to_set_agrees_with_what_is_pinned(run: Run, pins: list[str], fix: str) -> None:
    _, err = run("--num-epochs", "3", *pins)
    assert err.splitlines()[1].startswith(f"fix:   {fix} (")
    assert run("--num-epochs", "3", *pins, *fix.split())[0]


def test_enough_steps_are_not_warned_of(run: Run) -> None:
    out, err = run("train.seq_len=64", "--max-steps", "500")
    assert re.search(r"^data    105 samples -> \d+ .* 64 .*-> \d+ steps", out, re.M)
    assert "DATA017" not in err
    _, err = run("--max-steps", "500")
    assert "DATA017" in err and "num_epochs" not in err.partition("DATA018")[0]


def test_text_is_told_in_documents_and_what_was_left_out(run: Run) -> None:
    Path("a.jsonl").write_text(json.dumps({"text": "words " * 20_000}) + "\n[]\n")
    out, _ = run("method=pretrain", "data.chat_template=null", "data.path=a.jsonl", "data.on_bad_sample=skip")
    assert re.search(r"^data    1 document -> \d+ .* 128 .*-> \d+ steps", out, re.M)
    assert shows(out, "bad", "1 bad")


def test_fine_tuning_without_a_length_reads_few_records_three_times(run: Run) -> None:
    out, err = run("train.max_steps=null")
    assert re.search(r"; \d+ steps are [23](\.\d+)? epochs$", out, re.M) and "DATA018" not in err
    recipe = load_recipe("runs/quickstart-1/recipe.yaml")
    assert (recipe.train.num_epochs, recipe.train.max_steps) == (3.0, None)
    why = load_plan("runs/quickstart-1/plan.yaml").why
    assert shows(why["train.num_epochs"], "assumed", 3, "10,000")


def test_the_default_batch_of_a_fine_tune_is_at_most_an_eighth_of_an_epoch(run: Run) -> None:
    """32 sequences would be more than all windows. The plan says why, the run is resumed with the same, and another
    plan made of the data is the same."""
    out, _ = run("--num-epochs", "3", *OPEN)
    found = re.search(r"-> (\d+) windows of 256 .*-> (\d+) steps", out)
    assert found is not None
    windows, steps = int(found[1]), int(found[2])
    recipe, plan = load_recipe("runs/quickstart-1/recipe.yaml"), load_plan("runs/quickstart-1/plan.yaml")
    batch = plan.batch.global_batch_size(1)
    assert windows < 32 and 8 * batch <= windows < 16 * batch and steps >= 8
    assert recipe.train.global_batch_size == batch
    assert plan.why["batch.global_batch_size"].startswith("assumed: ")
    assert shows(assumptions(plan, recipe), f"`train.global_batch_size` {batch}", 32, "eighth", windows)
    again, _ = run("--num-epochs", "3", *OPEN)
    assert "\nbatch " in out and "\nbatch " not in again, "the data were known from the start"
    assert replace(load_plan("runs/quickstart-2/plan.yaml"), estimate=plan.estimate) == plan
    run("--num-epochs", "3", *OPEN, "--plan", "runs/quickstart-2/plan.yaml")
    assert load_recipe("runs/quickstart-3/recipe.yaml").train.global_batch_size == batch


def test_a_batch_that_is_written_stays_and_is_refused_where_the_data_do_not_fill_it(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run("train.seq_len=256", "train.global_batch_size=32")
    assert "error[DATA003]" in capfd.readouterr().err


def test_what_is_planned_of_prepared_data_is_what_is_trained(run: Run) -> None:
    """Where they are not prepared yet, the plan goes by their records and their size."""
    words = [*run.words, *OPEN]  # type: ignore[attr-defined]

    def planned() -> tuple[int, str]:
        recipe = load_recipe(recipe_or_quickstart(None, words), words)
        spec, cluster = resolve(recipe), cluster_of(recipe)
        chosen = planned_of(recipe, spec, cluster, Asked(), here=False).chosen
        return chosen.batch.global_batch_size(1), chosen.why["batch.global_batch_size"]

    before = planned()
    run("--num-epochs", "3", *OPEN)
    plan = load_plan("runs/quickstart-1/plan.yaml")
    assert before[0] < 32 and shows(before[1], "assumed", 32, "eighth")
    assert planned() == (plan.batch.global_batch_size(1), plan.why["batch.global_batch_size"])


def test_more_than_ten_epochs_of_few_records_are_warned_of(run: Run) -> None:
    _, err = run("--max-steps", "500", "train.seq_len=64")
    assert re.search(r"warning\[DATA018\]: 105 .* [\d.]+ times: .*\nfix:   train.num_epochs=3", err)


def test_no_advice_asks_for_as_many_epochs_as_are_warned_of(run: Run) -> None:
    _, err = run("train.global_batch_size=20", "train.max_steps=null")
    assert "DATA017" in err and "train.num_epochs" not in err


def test_what_is_held_out_is_told(run: Run) -> None:
    out, err = run("data.validation_share=0.1", "train.max_steps=30")
    assert shows(out, "10 samples held out", "at the end") and "DATA019" not in err
    judged = ("checkpoint.keep_best=true", "evaluate.early_stopping_patience=2", "evaluate.eval_steps=5")
    out, err = run("data.validation_share=0.01", "train.max_steps=30", *judged)  # a share of which 1 is, and a batch 4
    assert shows(out, "4 samples held out", "5 steps", "at the end") and "DATA019" not in err


def test_validation_that_does_not_come_is_warned_of_or_refused(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text(Path("talks.jsonl").read_text().splitlines()[0])
    one = ("data.path=one.jsonl", "data.validation_share=0.05", "data.repeat=true", "train.max_steps=20")
    out, err = run(*one)
    assert refuses(err, "DATA019", "no record", 1, "no validation", as_warning=True) and "held out" not in out
    words = ["evaluate.eval_steps=5", "checkpoint.keep_best=true"]
    assert main(["train", *run.words, *one, *words]) == 65  # type: ignore[attr-defined]
    said = capfd.readouterr().err
    assert refuses(said, "DATA019", "no record", 1, "`checkpoint.keep_best`")
    late = ("data.validation_share=0.1", "train.max_steps=20", "evaluate.eval_steps=50")
    out, err = run(*late, "evaluate.early_stopping_patience=1")
    values = "`evaluate.eval_steps`", 50, 20, "at the end", "stop early"
    assert refuses(err, "DATA019", *values, fix="evaluate.eval_steps=5", as_warning=True)
