"""The defaults of fine-tuning, where the recipe leaves a setting open. Pretraining's would read a few records hundreds
of times, at a rate at which a trained model forgets."""

from __future__ import annotations

from typing import Any

from shardwise.spec.batch import DEFAULT_GLOBAL
from shardwise.spec.recipe import Recipe

DEFAULT_STEPS = 1000
"""The steps of pretraining, where the recipe sets neither steps nor epochs."""
EPOCHS = ((10_000, 3.0), (100_000, 2.0))
"""Fewer records than these are read so often; more are read once."""
KEYS = ("train.num_epochs", "optim.learning_rate", "optim.warmup_steps")
"""The recipe's keys that get such defaults."""
BATCH = "train.global_batch_size"
EPOCH_STEPS = 8
"""The default batch leaves an epoch at least so many steps: of a few windows, 32 a step would be no epoch at all."""


def assumed(recipe: Recipe) -> dict[str, str]:
    """Why fine-tuning takes what it does, by key, for each that the recipe does not set."""
    method, given = recipe.method.spec, recipe.optim.model_fields_set
    reasons: dict[str, str] = {}
    if not method.records:
        return reasons
    if recipe.train.max_steps is None and recipe.train.num_epochs is None:
        steps = ", ".join(f"{epochs:g} of fewer than {records:,} records" for records, epochs in EPOCHS)
        reasons["train.num_epochs"] = f"assumed: {steps}, 1 of more"
    if "learning_rate" not in given and _trained(recipe):
        what = "adapters" if _adapters(recipe) else "all weights"
        reasons["optim.learning_rate"] = f"assumed: {recipe.optim.learning_rate:g}, usual for {method.name} of {what}"
    if "warmup_steps" not in given:
        reasons["optim.warmup_steps"] = f"assumed: {recipe.optim.warmup_steps:g} of the steps"
    return reasons


def with_defaults(recipe: Recipe) -> Recipe:
    """``recipe`` with fine-tuning's learning rate and warm-up where it sets none. They do not count as set."""
    open_, method = assumed(recipe), recipe.method.spec
    if not open_:
        return recipe
    usual = {"learning_rate": method.learning_rates[_adapters(recipe)], "warmup_steps": method.warmup}
    taken = {key: value for key, value in usual.items() if f"optim.{key}" in open_}
    optim = recipe.optim.model_copy(update=taken)
    optim.model_fields_set.difference_update(taken)
    return recipe.model_copy(update={"optim": optim})


def with_epochs(recipe: Recipe, records: int) -> Recipe:
    """``recipe`` with the epochs that fine-tuning on so many ``records`` takes, if it sets neither epochs nor steps."""
    if "train.num_epochs" not in assumed(recipe):
        return recipe
    return with_values(recipe, {"train.num_epochs": next((n for most, n in EPOCHS if records < most), 1.0)})


def batch_is_open(recipe: Recipe) -> bool:
    """Return whether the batch is fine-tuning's to choose: of none of its sizes does the recipe say anything, and the
    length of an epoch can be known."""
    train, fine_tunes = recipe.train, recipe.method.spec.records or _adapters(recipe)
    sizes = train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps
    return fine_tunes and not recipe.data.streaming and sizes == (None, None, None)


def suited_batch(windows: int, dp: int) -> int:
    """The largest batch of ``dp`` times a power of two that leaves an epoch of so many ``windows`` ``EPOCH_STEPS``
    steps; at least ``dp``."""
    share = windows // (EPOCH_STEPS * dp)
    return dp << max(share.bit_length() - 1, 0)


def why_batch(windows: int | None) -> str:
    """Why the batch is what it is, where it is open."""
    epoch = "an epoch" if windows is None else f"the {windows:,} windows of an epoch"
    return f"assumed: at most {DEFAULT_GLOBAL} sequences, and an eighth of {epoch}"


def with_values(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """``recipe`` with other values of keys of the sections ``train`` and ``optim``."""
    sections = {"train": recipe.train, "optim": recipe.optim}
    for key, value in values.items():
        name, _, leaf = key.partition(".")
        sections[name] = sections[name].model_copy(update={leaf: value})
    return recipe.model_copy(update=sections)


def _adapters(recipe: Recipe) -> bool:
    return recipe.lora.rank is not None or recipe.lora.path is not None


def _trained(recipe: Recipe) -> bool:
    """Say whether a recipe starts from trained weights; others learn at the rate of pretraining."""
    return recipe.model.config is None and recipe.model.init != "random"
