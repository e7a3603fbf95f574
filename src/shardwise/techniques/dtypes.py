"""Dtypes: which one a module computes in and a weight is stored in (precision's facts, which shard reads too), and
torch's names."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from shardwise.models.roles import is_adapter
from shardwise.spec.plan import Dtype, Plan, Precision

if TYPE_CHECKING:
    import torch


def compute_dtype(precision: Precision, module: str) -> Dtype:
    """The dtype a module computes in; the first pattern that matches its name decides."""
    for pattern, dtype in precision.modules:
        if fnmatch(module, pattern):
            return dtype
    return precision.compute


def stored_dtype(plan: Plan, name: str) -> Dtype:
    """The dtype that the parameter with this canonical name is stored in: under adapters the
    model's own has one apart."""
    return plan.precision.weights if plan.lora is None or is_adapter(name) else plan.lora.frozen


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``, and so on."""
    import torch

    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
