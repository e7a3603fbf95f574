"""The length of an epoch and of a run, from samples to windows to steps. Imports no torch: the launcher uses it before
any rank starts."""

from __future__ import annotations

from shardwise.data.pack import Packs, Windows
from shardwise.data.store import Prepared
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


def interval(steps: int | None, per_epoch: int | None, windows: Windows | Packs, global_batch_size: int) -> int | None:
    """Steps between two saves or validations, given as such or as so many while the data are read once."""
    if per_epoch is None:
        return steps
    return max(1, steps_per_epochs(windows, global_batch_size, 1) // per_epoch)


def check_held_out(recipe: Recipe, prepared: Prepared) -> str | None:
    """A warning where the recipe wants validation and nothing is held out; None if all is well. Raises DATA019 where
    the run depends on its validation, or the recipe names the data for it."""
    data = recipe.data
    if prepared.validation is not None or not (data.validation_share or data.validation_path):
        return None
    needs = [*recipe.judged, *["data.validation_path"] * (data.validation_path is not None)]
    why = f", and `{needs[0]}` needs validation" if needs else ": there is no validation"
    what = f"no record is held out of {prepared.train.split.records:,}{why}"
    if data.validation_path is not None:
        what = f"nothing in `data.validation_path` can be used{why}"
    problem = Problem("DATA019", what, "data", "more data, or data.validation_path=FILE")
    if needs:
        raise DataError(problem)
    return str(problem).replace("error", "warning", 1)


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
    """Optimizer steps in which every window has been read ``epochs`` times; the last one may read fewer than others."""
    return -(-(samples_of_epochs(windows, epochs) or 1) // global_batch_size)


def samples_of_epochs(windows: Windows | Packs, epochs: float | None) -> int | None:
    """The windows that are read in so many epochs, at least one; None without a number of epochs."""
    return None if epochs is None else max(1, round(len(windows) * epochs))
