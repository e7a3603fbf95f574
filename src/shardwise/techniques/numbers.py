"""Number types: which one a module computes in (precision's one fact, which shard reads too), and torch's names."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from shardwise.spec.plan import Number, Precision

if TYPE_CHECKING:
    import torch


def compute_type(precision: Precision, module: str) -> Number:
    """The type a module computes in; the first pattern that matches its name decides."""
    for pattern, number in precision.modules:
        if fnmatch(module, pattern):
            return number
    return precision.compute


def torch_type(number: Number) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``, and so on."""
    import torch

    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[number]
