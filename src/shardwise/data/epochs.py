"""How much an epoch is: from samples to windows to steps, and what to set where that is little."""

from __future__ import annotations

from shardwise.data.pack import Packs, Windows
from shardwise.data.stream import steps_per_epochs
from shardwise.spec.recipe import Train

FEW_STEPS = 20
"""In an epoch: with fewer, a mean over many samples moves the weights a few times."""
_ENOUGH_STEPS = 100
_MULTIPLE = 8


def epoch(windows: Windows | Packs, batch: int, total_steps: int) -> str:
    """``105 samples -> 22 windows of 2,048 -> 6 steps an epoch``, and how often the run reads them."""
    split, steps = windows.store.split, steps_per_epochs(windows, batch, 1)
    number, noun = (split.documents // 2, "pairs") if split.pairs else (split.documents, "samples")
    noun = noun if isinstance(windows, Packs) else "documents"
    made = f"{number:,} {noun} -> {len(windows):,} windows of {windows.seq_len:,} tokens -> {steps:,} steps an epoch"
    return f"data    {made} (global batch {batch:,}); {total_steps:,} steps are {total_steps / steps:.3g} epochs"


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
    if total_steps < _ENOUGH_STEPS:
        choices.append(f"train.num_epochs={-(-_ENOUGH_STEPS // steps)} ({_ENOUGH_STEPS} steps or more)")
    choices.append("more data")
    found = (
        f"an epoch is only {steps} step{'s' * (steps != 1)}: reading all data once updates the weights no more often"
    )
    return f"warning[DATA017]: {found}\nfix:   {', or '.join(choices)}"
