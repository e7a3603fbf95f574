"""The time that the run of a plan takes and what it costs, in words."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwise.data.rough import TOKEN_BYTES, roughly
from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import data_of
from shardwise.planner.length import PER_TOKENS, Length, SetBy, length_of, with_reference
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import counted, show_count, show_seconds

if TYPE_CHECKING:
    from shardwise.data.pack import Packs, Windows

HEADS: dict[SetBy, str] = {
    "--tokens": "{tokens}",
    "train.max_steps": "{steps} (train.max_steps)",
    "train.num_epochs": "all epochs",
    "the default": "{steps} (the default)",
    "counted": "about all epochs ({records} counted, {bytes} bytes a token; the data are not prepared)",
    "unknown": "the length is not known before the data are prepared; {tokens} would be",
}
"""What the rest is told for, by what sets the length."""


@dataclass(frozen=True)
class Asked:
    """The length as the command line has it: ``tokens``, and dollars a GPU-hour by the device's name."""

    tokens: int | None = None
    prices: dict[str, float] = field(default_factory=dict)


def run_length(recipe: Recipe, spec: ModelSpec, plan: Plan, cluster: Cluster, asked: Asked) -> Length:
    """The length of a run: in tokens if they were asked for, else as the recipe says it. Of several epochs the
    reference reads the pairs of one."""
    length = _of_steps(recipe, plan, cluster, asked)
    epochs = recipe.train.num_epochs or 1 if length.set_by == "train.num_epochs" else 1
    return with_reference(length, plan, spec, 1 / max(1.0, epochs))


def _of_steps(recipe: Recipe, plan: Plan, cluster: Cluster, asked: Asked) -> Length:
    price = asked.prices.get(cluster.device.name)
    if asked.tokens is not None:
        return length_of(plan, cluster, "--tokens", None, asked.tokens, price)
    train, by_epochs = recipe.train, bool(recipe.train.num_epochs) or "train.num_epochs" in finetune.assumed(recipe)
    if by_epochs and (steps := _steps_of_epochs(recipe, plan)) is not None:
        set_by: SetBy = "train.max_steps" if steps == train.max_steps else "train.num_epochs"
        return length_of(plan, cluster, set_by, steps, price=price)
    rough = roughly(recipe) if by_epochs else None
    if rough is not None:
        samples = rough.windows * (finetune.with_epochs(recipe, rough.records).train.num_epochs or 1)
        steps = -(-max(round(samples), 1) // plan.batch.global_batch_size(plan.layout.dp))
        if steps < (train.max_steps or steps + 1):
            return replace(length_of(plan, cluster, "counted", steps, price=price), records=rough.records)
    if by_epochs and not train.max_steps:
        return length_of(plan, cluster, "unknown", None, PER_TOKENS, price)
    set_by = "train.max_steps" if train.max_steps else "the default"
    return length_of(plan, cluster, set_by, train.max_steps or finetune.DEFAULT_STEPS, price=price)


def length_lines(length: Length) -> list[str]:
    """``10.0 B tokens: 2,385 steps, 3 h 12 min (2 h 50 min to 3 h 40 min), 25.6 GPU-hours, $64 at $2.5 a GPU-hour``."""
    head = length_head(length)
    parts = [part for part in _counts(length).values() if part not in head]
    if length.seconds is not None:
        parts.append(show_duration(length.seconds))
    if length.low_s and length.high_s:
        parts[-1] += f" ({show_duration(length.low_s)} to {show_duration(length.high_s)})"
    if length.reference_s is not None:
        parts[-1] += f", of which {show_duration(length.reference_s)} for the reference's scores"
    if length.gpu_hours is not None:
        parts.append(f"{show_hours(length.gpu_hours)} GPU-hours")
    if length.dollars is not None:
        parts.append(f"{show_dollars(length.dollars)} at ${length.dollars_per_gpu_hour:g} a GPU-hour")
    return [f"{head}: {', '.join(parts)}"]


def length_head(length: Length) -> str:
    """Return the length that the rest is told for: ``10.0 B tokens``, ``2,000 steps (train.max_steps)``."""
    records = counted(length.records or 0, "record")
    return HEADS[length.set_by].format(**_counts(length), records=records, bytes=TOKEN_BYTES)


def _counts(length: Length) -> dict[str, str]:
    return {"steps": counted(length.steps, "step"), "tokens": f"{show_count(length.tokens)} tokens"}


def show_hours(hours: float) -> str:
    """GPU-hours: ``25.6``, ``0.020``."""
    return f"{hours:,.{1 if hours >= 1 else 3}f}"


def show_dollars(dollars: float) -> str:
    """``$64``, ``$0.05``."""
    return f"${dollars:,.{0 if dollars >= 10 else 2}f}"


def show_duration(seconds: float) -> str:
    """``42.0 s``, ``3 min 20 s``, ``3 h 12 min``, ``12.3 days``."""
    if round(seconds) < 60:
        return show_seconds(seconds)
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{seconds / 86400:,.1f} days"


def known_windows(recipe: Recipe) -> Windows | Packs | None:
    """The windows of the recipe's data; None unless they are prepared."""
    from shardwise.data.pack import open_windows
    from shardwise.data.prepare import already_prepared

    with suppress(ShardwiseError, OSError, ValueError):  # `train` says what is wrong with the data
        prepared = already_prepared(data_of(recipe), recipe.sample_tokens)
        if prepared is not None:
            return open_windows(prepared.train, recipe.train.seq_len, recipe.data.mask_documents)
    return None


def known_count(recipe: Recipe, about: bool = False) -> int | None:
    """Return how many windows there are, where that matters for the batch; of data that are not prepared, if
    ``about`` how many will do."""
    if not finetune.batch_is_open(recipe):
        return None
    if (windows := known_windows(recipe)) is not None:
        return len(windows)
    rough = roughly(recipe) if about else None
    return None if rough is None else rough.windows


def _steps_of_epochs(recipe: Recipe, plan: Plan) -> int | None:
    """The steps of the recipe's epochs, and of no more than its max_steps; None unless its data are prepared."""
    from shardwise.data.epochs import max_steps, settled

    windows = known_windows(recipe)
    if windows is None:
        return None
    return max_steps(settled(recipe, windows), windows, plan.batch.global_batch_size(plan.layout.dp))
