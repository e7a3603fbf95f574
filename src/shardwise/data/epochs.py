"""The length of an epoch and of a run, from samples to windows to steps, and what to change if it is short. Imports no
torch: the launcher uses it before any rank starts."""

from __future__ import annotations

from shardwise.data.pack import Packs, Windows
from shardwise.errors import DataError, Problem
from shardwise.spec import finetune
from shardwise.spec.recipe import Data, Recipe, Train
from shardwise.spec.units import counted

FEW_STEPS = 20
"""An epoch of fewer steps gets a warning: it updates the weights only a few times."""
_ENOUGH_STEPS = 100
MANY_EPOCHS, FEW_RECORDS = 10, 10_000
"""More epochs of fewer records get a warning: the model learns them by heart."""
_MULTIPLE = 8


def settled(recipe: Recipe, windows: Windows | Packs) -> Recipe:
    """``recipe`` with a number of epochs, if it sets no length and fine-tunes."""
    return finetune.with_epochs(recipe, _records(windows))


def _records(windows: Windows | Packs) -> int:
    split = windows.store.split
    return split.documents // 2 if split.pairs else split.documents


def max_steps(recipe: Recipe, windows: Windows | Packs, global_batch_size: int) -> int:
    """Optimizer steps of the whole run: ``max_steps``, or ``num_epochs`` in steps, the smaller of both; else 1,000."""
    limits = [recipe.train.max_steps] if recipe.train.max_steps else []
    if recipe.train.num_epochs:
        limits.append(steps_per_epochs(windows, global_batch_size, recipe.train.num_epochs))
    return min(limits, default=finetune.DEFAULT_STEPS)


def check_size(windows: Windows | Packs, global_batch_size: int, data: Data) -> None:
    """Raises DATA003 when the text (streamed, its first portion) does not fill one global batch; with ``data.repeat``,
    when it has no pair of tokens to learn from. Packed samples are counted in windows."""
    repeat, more = data.repeat, "a larger data.streaming_bytes" if data.streaming else "more data"
    if isinstance(windows, Packs):
        return _check_packs(windows, global_batch_size, repeat, more)
    tokens, needed = windows.store.tokens, global_batch_size * windows.seq_len
    if tokens > needed or (repeat and len(windows)):
        return
    what = f"{tokens:,} tokens, one global batch needs {global_batch_size} x {windows.seq_len} = {needed:,}"
    least = max(tokens - 1, 0)
    choices = []
    if least >= windows.seq_len:
        choices.append(f"train.global_batch_size={least // windows.seq_len}")
    if least // global_batch_size >= 2:
        choices.append(f"train.seq_len={least // global_batch_size}")
    if len(windows):
        choices.append("data.repeat=true, to read samples more than once in a step")
    choices.append(more)
    raise DataError(Problem("DATA003", f"{what} (and one more)", "data.path", ", or ".join(choices)))


def _check_packs(windows: Packs, global_batch_size: int, repeat: bool, more: str) -> None:
    if len(windows) >= global_batch_size or repeat:
        return
    documents = windows.store.split.documents
    what = (
        f"{documents:,} samples fill {len(windows):,} windows of {windows.seq_len:,} tokens, one global batch needs "
        f"{global_batch_size}"
    )
    fix = f"train.global_batch_size={len(windows)}, or data.repeat=true, to read samples more than once in a step"
    raise DataError(Problem("DATA003", what, "data.path", f"{fix}, or {more}"))


def steps_per_epochs(windows: Windows | Packs, global_batch_size: int, epochs: float) -> int:
    """Optimizer steps in which every window has been read ``epochs`` times; the last step is filled from the next
    epoch."""
    return max(1, -(-int(len(windows) * epochs) // global_batch_size))


def epoch(windows: Windows | Packs, batch: int, total_steps: int) -> str:
    """``105 samples -> 22 windows of 2,048 -> 6 steps an epoch``, and how often the run reads them."""
    steps, number = steps_per_epochs(windows, batch, 1), _records(windows)
    noun = ("pair" if windows.store.split.pairs else "sample") if isinstance(windows, Packs) else "document"
    made = f"{counted(len(windows), 'window')} of {windows.seq_len:,} tokens -> {counted(steps, 'step')} an epoch"
    epochs = total_steps / steps
    share = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    read = f"{counted(total_steps, 'step')} {'is' if total_steps == 1 else 'are'} {share} epoch{'s' * (epochs != 1)}"
    return f"data    {counted(number, noun)} -> {made} (global batch {batch:,}); {read}"


def few_steps(windows: Windows | Packs, batch: int, dp: int, total_steps: int, train: Train) -> str | None:
    """A warning where an epoch has few steps, with what would make more of them beside what ``train`` pins."""
    steps = steps_per_epochs(windows, batch, 1)
    if steps >= FEW_STEPS:
        return None
    choices = []
    accumulation = train.gradient_accumulation_steps
    least = dp * (train.micro_batch_size or 1) if accumulation is None else max(batch // accumulation, 1)
    smaller = max(len(windows) // FEW_STEPS // least, 1) * least
    if smaller < batch:
        said = [] if accumulation and train.global_batch_size is None else [f"train.global_batch_size={smaller}"]
        said += [f"train.gradient_accumulation_steps={smaller // least}"] if accumulation else []
        choices.append(f"{' '.join(said)} ({steps_per_epochs(windows, smaller, 1):,} steps an epoch)")
    shorter = windows.store.tokens // (FEW_STEPS * batch) // _MULTIPLE * _MULTIPLE
    longest = int(windows.store.lengths().max(initial=0)) if isinstance(windows, Packs) else 1
    longest *= 1 + windows.store.split.pairs
    if longest <= shorter < windows.seq_len:
        choices.append(f"train.seq_len={shorter}")
    epochs = -(-_ENOUGH_STEPS // steps)
    if total_steps < _ENOUGH_STEPS and (epochs <= MANY_EPOCHS or not isinstance(windows, Packs)):
        choices.append(f"train.num_epochs={epochs} ({_ENOUGH_STEPS} steps or more)")
    choices.append("more data")
    found = f"an epoch is only {steps} step{'s' * (steps != 1)}: a pass over the data updates the weights no more often"
    return f"warning[DATA017]: {found}\nfix:   {', or '.join(choices)}"


def many_epochs(windows: Windows | Packs, batch: int, total_steps: int) -> str | None:
    """A warning where few records are read many times."""
    records, epochs = _records(windows), total_steps / steps_per_epochs(windows, batch, 1)
    if not isinstance(windows, Packs) or epochs <= MANY_EPOCHS or records >= FEW_RECORDS:
        return None
    found = f"{counted(records, 'record')} are read {epochs:,.0f} times: after a few times a model knows them by heart"
    return f"warning[DATA018]: {found}\nfix:   train.num_epochs=3, or more data"
