"""Dtypes: which one a module computes in and a weight is stored in (precision's facts, which shard reads too), and
torch's names."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from shardwise.models.roles import is_adapter, is_counted, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Dtype, Plan, Precision
from shardwise.spec.recipe import Recipe

if TYPE_CHECKING:
    import torch


def chosen_dtype(recipe: Recipe, cluster: Cluster) -> tuple[Dtype, str]:
    """The compute dtype, and why: the recipe's, else the fastest that a GPU has; on a CPU, which may have bf16
    instructions and still be slower with them, fp32."""
    asked = recipe.precision.compute
    if asked != "auto":
        return asked, "pinned"
    if not cluster.device.computes_bf16:
        return "fp16", "derived: the device has no bf16 instructions"
    if cluster.kind == "cpu":
        return "fp32", "default on CPUs"
    return "bf16", "derived: the device computes in bf16"


def compute_dtype(precision: Precision, module: str) -> Dtype:
    """The dtype a module computes in; the first pattern that matches its name decides."""
    for pattern, dtype in precision.modules:
        if fnmatch(module, pattern):
            return dtype
    return precision.compute


def stored_dtype(plan: Plan, name: str) -> Dtype:
    """The dtype in which the parameter with this canonical name is stored; with adapters, the model's own weights have
    one of their own (``lora.frozen``), but for those of an end that is trained whole: beside an embedding a table of
    positions, beside an output layer the norm before it. What follows from counts is in fp32 at least."""
    if is_counted(name):
        return "fp64" if plan.precision.weights == "fp64" else "fp32"
    if plan.lora is None or is_adapter(name):
        return plan.precision.weights
    if name.startswith("layers."):
        return plan.lora.frozen
    last = name.startswith("head.") or role(name) in ("norm", "bias")
    return plan.precision.weights if plan.lora.saves("head" if last else "embed") else plan.lora.frozen


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``, and so on."""
    import torch

    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
