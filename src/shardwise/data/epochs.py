"""The length of an epoch and of a run, from samples to windows to steps. Imports no torch: the launcher uses it before
any rank starts."""

from __future__ import annotations

from shardwise.data.pack import Packs, Windows
from shardwise.errors import DataError, Problem
from shardwise.spec import finetune
from shardwise.spec.recipe import Data, Recipe


def settled(recipe: Recipe, windows: Windows | Packs) -> Recipe:
    """``recipe`` with a number of epochs, if it sets no length and fine-tunes."""
    return finetune.with_epochs(recipe, windows.store.split.records)


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
    what = f"{documents:,} samples fill {len(windows):,} windows of {windows.seq_len:,} tokens"
    what += f", one global batch needs {global_batch_size}"
    fix = f"train.global_batch_size={len(windows)}, or data.repeat=true, to read samples more than once in a step"
    raise DataError(Problem("DATA003", what, "data.path", f"{fix}, or {more}"))


def steps_per_epochs(windows: Windows | Packs, global_batch_size: int, epochs: float) -> int:
    """Optimizer steps in which every window has been read ``epochs`` times; the last step is filled from the next
    epoch."""
    return max(1, -(-int(len(windows) * epochs) // global_batch_size))
