"""The length of a whole run of a plan: steps, tokens, time, GPU-hours and dollars."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from shardwise.errors import ConfigError, Problem, UsageError
from shardwise.models.config import ModelSpec, active_parameter_count
from shardwise.models.mixers import mixer_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.devices import begins, find_device
from shardwise.spec.plan import Plan

SetBy = Literal["--tokens", "train.max_steps", "train.num_epochs", "the default", "counted", "unknown"]
PER_TOKENS = 10**9
"""Where the length of a run is unknown, it is told for so many tokens."""
_MOST_TOKENS = 10**18
_AMOUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?) ?([kKmMbBtT]?)")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Length:
    """A run of ``steps`` optimizer steps, which ``set_by`` decides, and what they take: start, validation and
    checkpoints are not counted; where data are not prepared, their ``records`` are; ``reference_s`` of it are the
    pass of the method's reference, if it has one. What rests on seconds is None for a plan that has none, ``gpu_hours``
    on CPUs too, and ``dollars`` without a price. Four runs in five are expected between ``low_s`` and ``high_s``."""

    set_by: SetBy
    steps: int
    tokens: int
    seconds: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    gpu_hours: float | None = None
    dollars_per_gpu_hour: float | None = None
    dollars: float | None = None
    reference_s: float | None = None
    records: int | None = None


def with_reference(length: Length, plan: Plan, spec: ModelSpec, passes: float) -> Length:
    """The length with the pass of the initial model, where the method has a reference, over what is read, ``passes``
    times as often as training reads it: a forward, whose share of a step is that of its operations."""
    found, batch = plan.estimate.seconds, plan.batch
    if not plan.method.reference or found is None or length.seconds is None or not plan.estimate.flops_per_step:
        return length
    tokens = batch.global_batch_size(plan.layout.dp) * batch.seq_len
    mixers = [mixer_of(spec, layer) for layer in range(spec.num_hidden_layers)]
    scores = sum(batch.seq_len * mixer.scores(spec) + 2 * mixer.state(spec) for mixer in mixers)
    share = tokens * (2 * active_parameter_count(spec) + scores) / plan.estimate.flops_per_step
    reference_s = length.steps * passes * share * (found.compute_s + sum(found.exposed_s.values()))
    factor = 1 + reference_s / length.seconds
    keys = ("seconds", "low_s", "high_s", "gpu_hours", "dollars")
    longer = {key: value * factor for key in keys if (value := vars(length)[key]) is not None}
    return replace(length, **longer, reference_s=reference_s)


def length_of(
    plan: Plan, cluster: Cluster, set_by: SetBy, steps: int | None = None, tokens: int = 0, price: float | None = None
) -> Length:
    """Return the length of a run of so many ``steps``; if None, of as many as read ``tokens``. ``price`` is in dollars
    a GPU-hour."""
    in_a_step = plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len
    steps = max(1, -(-tokens // in_a_step)) if steps is None else steps
    found = plan.estimate.seconds
    if found is None:
        return Length(set_by, steps, steps * in_a_step, dollars_per_gpu_hour=price)
    low_s, high_s = (steps * bound or None for bound in (found.low_s, found.high_s))
    seconds = steps * found.step_s
    gpu_hours = seconds * cluster.world / 3600 if cluster.kind == "cuda" else None
    dollars = None if price is None or gpu_hours is None else gpu_hours * price
    return Length(set_by, steps, steps * in_a_step, seconds, low_s, high_s, gpu_hours, price, dollars)


def read_amount(text: str) -> Fraction:
    """``10B``, ``1.5T``, ``50k`` or ``2e9``; letters stand for powers of ten. 0 for what is no number."""
    match = _AMOUNT.fullmatch(text.strip())
    return Fraction(re.sub("[_,]", "", match[1])) * _SCALES[match[2].lower()] if match else Fraction(0)


def read_tokens(text: str) -> int:
    """``10B``, ``1.5T``, ``300M`` or ``2e9`` tokens. Raises UsageError (CLI001)."""
    tokens = read_amount(text)
    if not 1 <= tokens <= _MOST_TOKENS or tokens.denominator != 1:
        what = f"`{text}` is not a number of tokens, from 1 to 1,000,000 T"
        raise UsageError(Problem("CLI001", what, "--tokens", "write 10B, 1.5T, 300M or 2e9"))
    return int(tokens)


def read_prices(texts: Iterable[str], *clusters: Cluster) -> dict[str, float]:
    """Dollars a GPU-hour by the device's name, from ``H100=2.5`` or several of them with commas between; ``A100=2``
    serves all of that name, but for those that are named more closely. Raises UsageError (CLI001), also where no GPU of
    ``clusters`` has a price among them."""
    own = list(dict.fromkeys(cluster.device.name for cluster in clusters if cluster.kind != "cpu"))
    named = " and ".join(map(str, clusters))
    prices = dict[str, float]()
    wide = dict[str, float]()
    for text in (part.strip() for given in texts for part in given.split(",")):
        if not own:
            fix = "leave out --price, or name GPUs: --cluster 8xH100"
            raise _wrong(f"`{text}` is a price for a GPU, and {named} has none", fix)
        fix = f"--price {own[0].replace(' ', '-')}=2.5"
        name, _, amount = text.partition("=")
        try:
            dollars = float(amount.strip().removeprefix("$"))
        except ValueError:
            raise _wrong(f"`{text}` is not a GPU with its price in dollars an hour", fix) from None
        if not (dollars > 0 and math.isfinite(dollars)):
            raise _wrong(f"`{text}`: a price is a number of dollars above 0", fix)
        known = _device_name(name, own)
        served = [(wide, gpu) for gpu in own if gpu != known and begins(name, gpu)]
        for into, gpu in [*served, *([(prices, known)] if known in own or not served else [])]:
            if into.setdefault(gpu, dollars) != dollars:
                raise _wrong(f"two prices for the {gpu}: ${into[gpu]:g} and ${dollars:g} an hour", "drop one of them")
    prices = wide | prices
    if prices and not prices.keys() & own:
        what = f"a price for the {next(iter(prices))}, and the GPUs of {named} are of another kind"
        raise _wrong(what, f"--price {own[0].replace(' ', '-')}=2.5")
    return prices


def _device_name(text: str, own: list[str]) -> str:
    """The device that ``text`` names; of its ``own``, a GPU of this machine may be one that the table does not have."""
    try:
        return text.strip() if text.strip() in own else find_device(text).name
    except ConfigError as error:
        raise _wrong(error.problems[0].what, error.problems[0].fix) from None


def _wrong(what: str, fix: str) -> UsageError:
    return UsageError(Problem("CLI001", what, "--price", fix))
