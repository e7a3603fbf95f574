"""When a run is said to be unstable, and what is named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.runtime.layer_figures import LayerFigures, Lost
from shardwise.runtime.metrics.stability import StabilityWatch
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.plan import Plan, Precision
from shardwise.spec.recipe import Recipe
from tests.runtime import small_run
from tests.said import refuses, shows

LAYERS = ("layers.1.mlp.up", "layers.1.mlp.down", "layers.2.mlp.up")
QUIET = Lost(1e-3, 1e-2, 2.0)


def sample(changed: Mapping[tuple[str, str], Lost] | None = None, norms: Mapping[str, float] | None = None) -> Any:
    lost = {(layer, operand): QUIET for layer in LAYERS for operand in ("input", "weight", "gradient")}
    return LayerFigures({"head.weight": 1.0, "embed.weight": 2.0, **(norms or {})}, lost | dict(changed or {}))


def watched(steps: int = 40, **settings: Any) -> StabilityWatch:
    """A watch that has seen a quiet run, a sample every fifth step."""
    watch, draw = StabilityWatch(**settings), random.Random(0)
    for step in range(1, steps + 1):
        loss = 2 + 3 / step + draw.gauss(0, 0.05)
        assert not watch.add(step, loss, sample() if step % 5 == 0 else None)
    return watch


def test_noise_is_no_leap() -> None:
    """Of 20,000 losses that scatter as normal numbers do none is told, nor of a fall as steep as a run's first."""
    watch, draw = StabilityWatch(), random.Random(1)
    for step in range(1, 20_001):
        assert not watch.add(step, 1 + 9 / step + draw.gauss(0, 0.1), None)
        assert not watch._leap, step


def test_a_leap_is_told_with_the_next_sample_and_names_what_grew() -> None:
    watch = watched(exclude=("first", "last"))
    assert not watch.add(41, 9.0, None)
    assert refuses(watch.all_told()[0], "NUM003", "loss leapt", "9.000", as_warning=True)
    grown = {(LAYERS[1], "weight"): QUIET._replace(largest=400.0), (LAYERS[2], "input"): QUIET._replace(largest=4e4)}
    told = watch.add(45, 9.0, sample(grown))
    assert "at step 41, from 2." in told and shows(told, f"`{LAYERS[1]}`:", "largest weight", "200 times")
    assert f"`precision.exclude: [first, last, '{LAYERS[1]}']`" in told and "optim.learning_rate" in told
    assert watch.all_told() == [told]


def test_the_rest_is_named_by_the_growth_of_a_gradient_norm() -> None:
    """Where nothing in float8 has grown by as much as two; and if nothing has, no layer is."""
    for norms, named in (({"head.weight": 30.0}, ("`head.weight`:", "gradient norm", "30 times")), ({}, ())):
        watch = watched()
        assert not watch.add(41, 9.0, None)
        told = watch.add(45, 9.0, sample(norms=norms))
        assert shows(told, *named) and ("`" in told.partition("\n")[0]) == bool(named)
        assert "precision" not in told


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({(LAYERS[2], "weight"): QUIET._replace(largest=40.0)}, ("largest weight", "20 times")),
        ({(LAYERS[2], "input"): QUIET._replace(largest=40.0)}, ("largest input", "20 times")),
        ({(LAYERS[2], "gradient"): QUIET._replace(largest=40.0)}, ()),
        ({(LAYERS[2], "gradient"): QUIET._replace(flushed=0.4)}, ("40.0%", "gradient", "become zero", "(1.0%")),
        ({(LAYERS[2], "input"): QUIET._replace(saturated=0.3)}, ("30.0%", "input", "at the largest")),
        ({(LAYERS[2], "input"): QUIET._replace(flushed=0.03)}, ()),
    ],
)
def test_signs_without_a_leap(changed: Any, named: tuple[str, ...]) -> None:
    """Each layer is named once."""
    watch = watched()
    told = watch.add(45, 2.0, sample(changed))
    assert shows(told, *named) and bool(told) == bool(named)
    assert not told or f"`{LAYERS[2]}`" in told
    assert not watch.add(50, 2.0, sample(changed))


def test_the_first_samples_are_compared_with_nothing() -> None:
    watch = StabilityWatch()
    for step in range(1, 3):
        assert not watch.add(step, 2.0, sample({(LAYERS[0], "weight"): QUIET._replace(largest=2000.0**step)}))


def test_a_layer_whose_gradients_were_zero_has_not_grown() -> None:
    watch = watched()
    watch.add(41, 9.0, None)
    told = watch.add(45, 9.0, sample(norms={"new.weight": 5.0}))
    assert told and "`" not in told.partition("\n")[0]


# Real runs -----------------------------------------------------------------------------------------------------------


MODEL = {**small_run.MODEL, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
FLOAT8 = Precision("fp32", products="float8")
STEPS, PLANTED_AT = 75, 55


def run_of(root: Path, precision: Precision, name: str = "run", plant: str = "", steps: int = STEPS, **run: Any) -> Any:
    """The report of a small run and its metrics; the weight ``plant`` becomes 200 times as large."""
    from shardwise.runtime.loop import train

    recipe: Recipe = small_run.recipe(
        root,
        name,
        model={"config": MODEL},
        run={"watch_steps": 10, **run},
        train={"max_steps": steps, "num_epochs": None},
        checkpoint={"save_steps": 1000},
        precision={"products": precision.products, "exclude": [] if precision.products == "float8" else None},
        optim={"learning_rate": 3e-3},
    )

    def grow(state: TrainState, stats: StepStats) -> None:
        if stats.step == PLANTED_AT:
            with torch.no_grad():
                state.parameters()[plant].mul_(200)

    hooks: tuple[Callable[..., None], ...] = (grow,) if plant else ()
    plan: Plan = replace(small_run.plan(), precision=precision)
    report = train(recipe, plan, hooks)
    return report, small_run.directory(recipe)


@pytest.mark.prove
def test_a_planted_instability_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal, in the report, and in the metrics, at the first sample after it; in no other step."""
    report, directory = run_of(tmp_path, FLOAT8, plant="layers.1.mlp.up.weight")
    [note] = report.notes
    assert note.startswith("warning[NUM00") and shows(note, "`layers.1.mlp.up`:", "largest weight")
    assert "step 60" in note or "leapt" in note
    assert "`precision.exclude: ['layers.1.mlp.up']`" in note
    assert "layers.1.mlp.up" in capsys.readouterr().out and note in (directory / "report.md").read_text()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "float8" in line] == [*range(10, STEPS, 10)]
    of_it = [line["float8"] for line in lines if line["step"] in (50, 60)]
    most = [max(zip(one["largest"], one["layer"], one["operand"], strict=True)) for one in of_it]
    assert most[1][0] > 16 * most[0][0] and most[1][1].startswith("layers.1.mlp.")


@pytest.mark.prove
@pytest.mark.parametrize("precision", [FLOAT8, Precision("fp32")], ids=["float8", "fp32"])
def test_a_quiet_run_is_not_said_to_be_unstable(tmp_path: Path, precision: Precision) -> None:
    report, _ = run_of(tmp_path, precision, steps=300)
    assert not report.notes


@pytest.mark.prove
def test_no_number_is_another_where_layers_are_sampled(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, FLOAT8, f"every {steps}", steps=12, watch_steps=steps)[1] for steps in (None, 1)]
    assert small_run.numbers(runs[0]) == small_run.numbers(runs[1])
    assert small_run.weights_hash(runs[0]) == small_run.weights_hash(runs[1])
    assert ["grad_norms" in (run / "metrics.jsonl").read_text() for run in runs] == [False, True]
