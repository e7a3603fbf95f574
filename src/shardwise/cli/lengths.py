"""The lines about the length of an epoch and of the run before it starts, and what to change if it does not suit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.spec.recipe import Recipe, Train
from shardwise.spec.units import counted

if TYPE_CHECKING:
    from shardwise.data.pack import Packs, Windows
    from shardwise.data.store import Prepared

FEW_STEPS = 20
"""An epoch of fewer steps gets a warning: it updates the weights only a few times."""
_ENOUGH_STEPS = 100
MANY_EPOCHS, FEW_RECORDS = 10, 10_000
"""More epochs of fewer records get a warning: the model learns them by heart."""
_MULTIPLE = 8


def epoch(windows: Windows | Packs, batch: int, total_steps: int, read_samples: int) -> str:
    """``105 samples -> 22 windows of 2,048 -> 6 steps an epoch``, and how often the run, which reads so many of these
    windows, reads each."""
    steps, number = _steps(windows, batch), windows.store.split.records
    noun = ("pair" if windows.store.split.pairs else "sample") if _packed(windows) else "document"
    made = f"{counted(len(windows), 'window')} of {windows.seq_len:,} tokens -> {counted(steps, 'step')} an epoch"
    epochs = read_samples / len(windows)
    share = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    read = f"{counted(total_steps, 'step')} {'is' if total_steps == 1 else 'are'} {share} epoch{'s' * (epochs != 1)}"
    return f"data    {counted(number, noun)} -> {made} (global batch {batch:,}); {read}"


def few_steps(windows: Windows | Packs, batch: int, dp: int, total_steps: int, train: Train) -> str | None:
    """A warning where an epoch has few steps, with what would make more of them beside what ``train`` pins."""
    steps = _steps(windows, batch)
    if steps >= FEW_STEPS:
        return None
    choices = []
    accumulation = train.gradient_accumulation_steps
    least = dp * (train.micro_batch_size or 1) if accumulation is None else max(batch // accumulation, 1)
    smaller = max(len(windows) // FEW_STEPS // least, 1) * least
    if smaller < batch:
        said = [] if accumulation and train.global_batch_size is None else [f"train.global_batch_size={smaller}"]
        said += [f"train.gradient_accumulation_steps={smaller // least}"] if accumulation else []
        choices.append(f"{' '.join(said)} ({_steps(windows, smaller):,} steps an epoch)")
    shorter = windows.store.tokens // (FEW_STEPS * batch) // _MULTIPLE * _MULTIPLE
    longest = int(windows.store.lengths().max(initial=0)) if _packed(windows) else 1
    longest *= 1 + windows.store.split.pairs
    if longest <= shorter < windows.seq_len:
        choices.append(f"train.seq_len={shorter}")
    epochs = -(-_ENOUGH_STEPS // steps)
    if total_steps < _ENOUGH_STEPS and (epochs <= MANY_EPOCHS or not _packed(windows)):
        choices.append(f"train.num_epochs={epochs} ({_ENOUGH_STEPS} steps or more)")
    choices.append("more data")
    found = f"an epoch is only {steps} step{'s' * (steps != 1)}: a pass over the data updates the weights no more often"
    return f"warning[DATA017]: {found}\nfix:   {', or '.join(choices)}"


def many_epochs(windows: Windows | Packs, read_samples: int) -> str | None:
    """A warning where few records are read many times."""
    records, epochs = windows.store.split.records, read_samples / len(windows)
    if not _packed(windows) or epochs <= MANY_EPOCHS or records >= FEW_RECORDS:
        return None
    found = f"{counted(records, 'record')} are read {epochs:,.0f} times: after a few times a model knows them by heart"
    return f"warning[DATA018]: {found}\nfix:   train.num_epochs=3, or more data"


def validated(recipe: Recipe, prepared: Prepared, every: int | None, total_steps: int) -> list[str]:
    """Return how many records are held out and when they are read."""
    if prepared.validation is None:
        return []
    number, often = prepared.validation.split.records, every is not None and every < total_steps
    when = f"every {counted(every or 0, 'step')} and at the end" if often else "at the end"
    noun = "document" if recipe.sample_tokens is None else "pair" if recipe.pairs else "sample"
    return [f"        {counted(number, noun)} held out: validation {when}"]


def late_validation(recipe: Recipe, every: int | None, total_steps: int) -> str | None:
    """A warning where a run is too short for the validations at intervals that the recipe wants."""
    stops = recipe.evaluate.early_stopping_patience is not None
    if every is None or every + stops <= total_steps:
        return None
    key = "evaluate.eval_steps" if recipe.evaluate.eval_steps else "evaluate.evals_per_epoch"
    found = f"`{key}` means every {counted(every, 'step')}, and the run has {total_steps:,}: validation only at the end"
    more, sooner = "; it cannot stop early" * stops, max(total_steps // 4, 1)
    return f"warning[DATA019]: {found}{more}\nfix:   evaluate.eval_steps={sooner}"


def _steps(windows: Windows | Packs, batch: int) -> int:
    """Steps of an epoch."""
    from shardwise.data.epochs import steps_per_epochs

    return steps_per_epochs(windows, batch, 1)


def _packed(windows: Windows | Packs) -> bool:
    """Return whether the windows hold records."""
    return windows.store.split.packs is not None
