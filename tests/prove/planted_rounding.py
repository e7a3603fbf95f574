"""Faults that show in few bits only: what float64 on both sides cannot see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.methods import loss
from shardwise.models import layers
from shardwise.models.config import ModelSpec
from shardwise.runtime import reduce
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Optim, Plan, Precision
from shardwise.techniques import optim
from shardwise.techniques.optim import moments
from shardwise.techniques.optim.moments import AdamW8bit
from shardwise.techniques.optim.rounding import Kept
from tests.parity.cases import UNTIED

update, clip_factor, combine, decode = optim.update, reduce.clip_factor, reduce.combine, moments.decode


def taken_all_the_same(optimizer: Optimizer, skip: Tensor, factor: Tensor | None = None) -> None:
    update(optimizer, torch.zeros_like(skip), factor)


def rounded_after(optimizer: Optimizer, skip: Tensor, factor: Tensor | None = None) -> None:
    update(optimizer, skip, factor)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.data.copy_(parameter.data.bfloat16())


def of_scaled_gradients(norm: Tensor, max_norm: float | None) -> Tensor:
    return clip_factor(norm * 256.0, max_norm)


def of_bf16_squares(meshes: Any, squares: Tensor, *rest: Tensor, counted: Tensor | None = None) -> Tensor:
    return combine(meshes, squares.bfloat16().double(), *rest, counted=counted)


def without_a_root(self: AdamW8bit, kept: Kept) -> tuple[Tensor, Tensor]:
    """As if the second moment were stored, and not its square root."""
    first, second = wide(self, kept)
    return first, second.sqrt() if "exp_avg_scale" in kept else second


def of_the_block_before(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    return decode(codes, scales.roll(1, 0), signed)


def never(optimizer: Optimizer, skip: Tensor, factor: Tensor | None = None) -> None:
    """No weight moves."""


def of_bf16(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    return norm(x, weight, eps, plus_one).bfloat16().to(x.dtype)


wide, norm = AdamW8bit.wide, layers.rms_norm
BF16 = Plan(Layout(), Batch(2, 2, 12), precision=Precision("bf16"))
EIGHT = Plan(Layout(), Batch(2, 1, 12), precision=Precision("bf16"), optim=Optim("adamw8bit"))
FP16 = Plan(Layout(), Batch(2, 1, 12), precision=Precision("fp16"))
NARROW = Plan(Layout(), Batch(2, 1, 12), precision=Precision("bf16", "bf16"))
OVER_BF16 = Plan(Layout(), Batch(2, 1, 12), precision=Precision("fp32"), lora=Lora(4, frozen="bf16"))
Planted = Callable[[], AbstractContextManager[Any]]

FAULTS: dict[str, tuple[Planted, ModelSpec, Plan, str]] = {
    "the loss is computed in bf16": (
        lambda: patch.object(loss, "accumulation_dtype", lambda dtype: dtype),
        UNTIED,
        BF16,
        "loss: ",
    ),
    "gradients are clipped before they are unscaled": (
        lambda: patch.object(reduce, "clip_factor", of_scaled_gradients),
        UNTIED,
        FP16,
        "update of ",
    ),
    "a step that is not finite is taken": (
        lambda: patch.object(optim, "update", taken_all_the_same),
        UNTIED,
        BF16,
        "not finite changes ",
    ),
    "updated weights are rounded to bf16": (
        lambda: patch.object(optim, "update", rounded_after),
        UNTIED,
        BF16,
        "update of ",
    ),
    "weights in bf16 are not updated": (lambda: patch.object(optim, "update", never), UNTIED, NARROW, "update of "),
    "norms round to bf16 over frozen weights in bf16": (
        lambda: patch.object(layers, "rms_norm", of_bf16),
        UNTIED,
        OVER_BF16,
        "gradients: ",
    ),
    "the norm is added up in bf16": (
        lambda: patch.object(reduce, "combine", of_bf16_squares),
        UNTIED,
        BF16,
        "gradient norm of step 1",
    ),
    "second moments in 8 bits are stored as they are": (
        lambda: patch.object(AdamW8bit, "wide", without_a_root),
        UNTIED,
        EIGHT,
        "update of ",
    ),
    "moments in 8 bits take the scales of the row before": (
        lambda: patch.object(moments, "decode", of_the_block_before),
        UNTIED,
        EIGHT,
        "update of ",
    ),
}
"""What plants it, the model and plan in which it shows, and what is said of it."""


def faulty(rank: int, world: int, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``fn`` with a fault planted into this rank's code."""
    with FAULTS[name][0]():
        return fn(rank, world, *args)
