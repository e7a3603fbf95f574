"""What fine-tuning does where the recipe leaves it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec.finetune import assumed, batch_is_open, suited_batch, with_epochs
from shardwise.spec.load import dump_recipe, load_recipe
from tests.said import shows


@pytest.mark.parametrize(
    ("words", "rate", "warmup"),
    [
        (["method=sft"], 2e-5, 0.03),
        (["method=sft", "lora=16"], 2e-4, 0.03),
        (["method=dpo"], 1e-6, 0.1),
        (["method=dpo", "lora.path=runs/a/adapter"], 1e-5, 0.1),
        (["method=sft", "model.init=random"], 3e-4, 0.03),
        (["method=sft", "optim.learning_rate=1e-3", "optim.warmup_steps=7"], 1e-3, 7),
        ([], 3e-4, 0),
    ],
)
def test_rate_and_warm_up_suit_the_method_and_what_is_trained(words: list[str], rate: float, warmup: float) -> None:
    recipe = load_recipe(None, ["model=m", *words])
    assert (recipe.optim.learning_rate, recipe.optim.warmup_steps) == (rate, warmup)


@pytest.mark.parametrize(("records", "epochs"), [(1, 3), (9_999, 3), (10_000, 2), (99_999, 2), (100_000, 1)])
def test_few_records_are_read_more_often_than_many(records: int, epochs: float) -> None:
    assert with_epochs(load_recipe(None, ["model=m", "method=dpo"]), records).train.num_epochs == epochs


@pytest.mark.parametrize("words", [["method=sft", "max_steps=9"], ["method=sft", "num_epochs=7"], []])
def test_a_length_that_is_set_stays_and_pretraining_has_none(words: list[str]) -> None:
    recipe = load_recipe(None, ["model=m", *words])
    assert with_epochs(recipe, 5) == recipe


def test_what_is_assumed_has_a_reason_and_what_is_set_has_none() -> None:
    told = assumed(load_recipe(None, ["model=m", "method=sft", "lora=8"]))
    assert shows(told["optim.learning_rate"], "assumed", "0.0002", "sft", "adapters")
    assert list(told) == ["train.num_epochs", "optim.learning_rate", "optim.warmup_steps"]
    words = ["model=m", "method=sft", "optim.learning_rate=2e-5", "optim.warmup_steps=0", "num_epochs=1"]
    assert assumed(load_recipe(None, words)) == {} == assumed(load_recipe(None, ["model=m"]))


@pytest.mark.parametrize(
    ("windows", "dp", "size"), [(25, 1, 2), (8, 1, 1), (5, 1, 1), (0, 1, 1), (256, 1, 32), (25, 3, 3), (100, 3, 12)]
)
def test_a_batch_is_at_most_an_eighth_of_an_epoch_and_at_least_a_sequence_a_rank(
    windows: int, dp: int, size: int
) -> None:
    assert suited_batch(windows, dp) == size


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        (["method=sft"], True),
        (["lora=8"], True),
        ([], False),
        (["method=sft", "train.micro_batch_size=1"], False),
        (["method=sft", "train.gradient_accumulation_steps=1"], False),
        (["method=dpo", "train.global_batch_size=1"], False),
        (["method=sft", "data.streaming=true", "max_steps=9"], False),
    ],
)
def test_only_a_batch_of_which_nothing_is_said_follows_the_data(words: list[str], is_open: bool) -> None:
    assert batch_is_open(load_recipe(None, ["model=m", *words])) is is_open


def test_a_recipe_that_is_written_whole_assumes_nothing_but_the_length(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    recipe = load_recipe(None, ["model=m", "method=sft"])
    file.write_text(dump_recipe(recipe))
    assert load_recipe(file) == recipe and list(assumed(load_recipe(file))) == ["train.num_epochs"]
