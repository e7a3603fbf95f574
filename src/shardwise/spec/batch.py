"""The three batch sizes: what was given, and what follows from it."""

from __future__ import annotations

from shardwise.errors import ConfigError, Problem
from shardwise.spec.recipe import Train

DEFAULT_GLOBAL = 32
"""Sequences a step when the recipe names no batch size; the same for any number of processes that divides it."""
TOKENS_PER_MICRO_BATCH = 8192
"""Without a pin, a micro-batch holds at most this many tokens: enough to keep matrix products large."""


def batch(train: Train, dp: int, devices: int = 1) -> tuple[int, int, int]:
    """(micro-batch, accumulation, global batch), in sequences, for ``dp`` data-parallel ranks of so many ``devices``.

    Two given: the third follows. All given: they must agree (CFG008). Global alone, or nothing: the micro-batch is the
    largest that divides a rank's share and holds at most ``TOKENS_PER_MICRO_BATCH`` tokens a device. Micro alone:
    accumulation is 1.
    """
    micro = train.micro_batch_size
    accumulation = train.gradient_accumulation_steps
    whole = train.global_batch_size
    if whole is None and (micro is not None or accumulation is not None):
        micro = micro or _largest(0, train.seq_len, devices)
        accumulation = accumulation or 1
        return micro, accumulation, micro * accumulation * dp
    given = whole is not None
    whole = whole if whole is not None else -(-DEFAULT_GLOBAL // dp) * dp
    if whole % dp:
        raise _contradiction(train, dp)
    share = whole // dp
    if micro is None:
        micro = share // accumulation if accumulation else _largest(share, train.seq_len, devices)
    accumulation = accumulation if accumulation is not None else share // micro if micro else 0
    if given and micro * accumulation * dp != whole:
        raise _contradiction(train, dp)
    return micro, accumulation, whole


def batch_reasons(train: Train) -> dict[str, str]:
    """Why each size of the plan is what it is, under the plan's keys."""
    sizes = {
        "micro_batch_size": train.micro_batch_size,
        "accumulation": train.gradient_accumulation_steps,
        "global_batch_size": train.global_batch_size,
    }
    given = [name for name, value in sizes.items() if value is not None]
    reasons = dict.fromkeys(sizes, f"derived from {' and '.join(given) or 'the default batch'}")
    if len(given) < 2:
        reasons["micro_batch_size"] = f"derived: at most {TOKENS_PER_MICRO_BATCH:,} tokens per micro-batch and device"
    if given == ["micro_batch_size"]:
        reasons["accumulation"] = "default: none"
    if not given:
        whole = f"default: {DEFAULT_GLOBAL} sequences, rounded up to a multiple of the ranks"
        reasons["global_batch_size"] = whole
    reasons |= dict.fromkeys(given, "pinned")
    return {f"batch.{name}": reason for name, reason in reasons.items()}


def _largest(share: int, seq_len: int, devices: int) -> int:
    most = max(1, devices * TOKENS_PER_MICRO_BATCH // seq_len)
    return max((size for size in range(1, min(most, share) + 1) if share % size == 0), default=most)


def _contradiction(train: Train, dp: int) -> ConfigError:
    micro = train.micro_batch_size
    accumulation = train.gradient_accumulation_steps
    whole = train.global_batch_size or 0
    product = (micro or 1) * (accumulation or 1) * dp
    terms = [f"micro {micro}" if micro else "", f"accumulation {accumulation}" if accumulation else "", f"dp {dp}"]
    both = bool(micro and accumulation)
    what = f"global_batch_size {whole} {'≠' if both else 'is not a multiple of'} {' × '.join(filter(None, terms))}"
    what += f" = {product}" if both or product != dp else ""
    fixes = []
    if micro and accumulation and whole % (micro * dp) == 0:
        fixes.append(f"`train.gradient_accumulation_steps={whole // (micro * dp)}`")
    fixes.append(f"`train.global_batch_size={product if both else -(-whole // product) * product}`")
    tail = ", or drop one of the three" if both else ""
    return ConfigError(Problem("CFG008", what, "train", ", or ".join(fixes) + tail))
