"""Faults to plant into the real code, each as a small patch: what the drift test and the kill proof must see. (What
parity must see stands in tests/parity/test_faults.py.)

Patches for drift touch what ``apply`` and the step do, never what ``cost`` predicts. The names are those
of docs/proofs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.fsdp as fsdp
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from shardwise.methods import pretrain
from shardwise.methods.loss import Loss
from shardwise.models import layers
from shardwise.models.config import ModelSpec, model_spec
from shardwise.runtime import reduce
from shardwise.runtime.state import TrainState
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Optim, Pipeline, Plan, Precision, Remat, SavedResult, Shard
from shardwise.techniques import optim, precision, remat, shard
from shardwise.techniques.optim import adamw
from shardwise.techniques.optim.rounding import Kept, RoundedAdamW
from shardwise.techniques.shard import replicas

Planted = Callable[[], AbstractContextManager[Any]]

SPEC = model_spec("drift", 600, 48, 100, 2, 6, 2, 8)
LARGE = model_spec("drift-large", 32_000, 1024, 2816, 8, 16, 4, 64)
"""A step of this takes more than a gibibyte, from where on peaks are compared."""

fully_shard, buckets, policy = fsdp.fully_shard, replicas.buckets, fsdp.MixedPrecisionPolicy
agree, products, chosen = reduce.combine, remat._products, remat._Chosen
fresh, fresh_moments = RoundedAdamW.fresh, optim.fresh_moments


@dataclass(frozen=True)
class Fault:
    """``seen`` is in what the drift test says of ``plan`` once the fault is ``planted``."""

    planted: Planted
    plan: Plan
    seen: str
    spec: ModelSpec = SPEC


def plan_of(sharding: str, **settings: Any) -> Plan:
    """Eight ranks, two of them replicas in a hybrid; two micro-batches."""
    strategy = sharding.removeprefix("hsdp-")
    replicas = 8 if sharding == "ddp" else 2 if sharding.startswith("hsdp") else 1
    layout = Layout(dp_replicate=replicas, dp_shard=8 // replicas)
    plan = Plan(layout, Batch(2, 2, 32, 64), Shard(strategy, bucket_bytes=100_000))  # type: ignore[arg-type]
    return replace(plan, **settings)


def sharded_with(**changed: Any) -> Planted:
    """``fully_shard`` called with other settings."""
    return lambda: patch.object(fsdp, "fully_shard", lambda module, **given: fully_shard(module, **given | changed))


def never(name: str) -> Planted:
    """A switch of FSDP2 that is not set."""
    return lambda: patch.object(fsdp.FSDPModule, name, lambda self, *given, **named: None)


def more_buckets(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    found = buckets(sizes, bucket_bytes)
    most = found.index(max(found, key=len))
    return [*found[:most], found[most][:1], found[most][1:], *found[most + 1 :]]


def reduced_in_fp32(param_dtype: Any, reduce_dtype: Any, **named: Any) -> Any:
    return policy(param_dtype, torch.float32, **named)


def with_a_copy(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {**fresh_moments(parameter), "master": parameter.detach().float().clone()}


def moments_in_fp32(self: RoundedAdamW, parameter: nn.Parameter) -> Kept:
    return {name: value.float() for name, value in fresh(self, parameter).items()}


def agree_twice(*given: Any, **counted: Any) -> Any:
    agree(*given, **counted)
    return agree(*given, **counted)


def agree_by_redistributing(meshes: Any, *given: Any, **counted: Any) -> Any:
    """With functional collectives, as DTensors do."""
    own = DTensor.from_local(torch.ones(256), meshes.mesh("dp_shard"), [Partial()], run_check=False)
    own.redistribute(placements=[Replicate()]).to_local().sum()
    return agree(meshes, *given, **counted)


def full_logits(
    hidden: Tensor, head: Any, batch: Any, denominator: float, *, chunk_tokens: int, figures: tuple[str, ...]
) -> Loss:
    logits = functional.linear(hidden, head.weight.to(hidden.dtype))
    value = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / denominator
    return Loss(value, {name: value.detach().double() for name in figures})


@contextmanager
def wide_norm() -> Iterator[None]:
    """Written plainly, so that autograd saves what each operation of the norm needs."""

    def forward(self: layers.RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight.to(x.dtype)

    with patch.object(layers.RMSNorm, "forward", forward):
        yield


@contextmanager
def gradients_stay() -> Iterator[None]:
    """``zero_grad`` that fills with zeros instead of letting go."""
    clear = torch.optim.Optimizer.zero_grad
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: clear(self, False)):
        yield


BF16 = Precision("bf16")
DRIFT: dict[str, Fault] = {
    "weights are not freed after forward": Fault(
        sharded_with(reshard_after_forward=False), plan_of("zero3"), "all_gather"
    ),
    "the root is freed after forward": Fault(sharded_with(reshard_after_forward=True), plan_of("zero3"), "all_gather"),
    "two blocks are one unit": Fault(
        lambda: patch.object(shard, "units", lambda part: [*shard.ends(part), list(part.layers), [part]]),
        plan_of("zero3"),
        "all_gather",
    ),
    "the whole model is one unit": Fault(
        lambda: patch.multiple(shard, units=lambda part: [[part]], ends=lambda part: ([], [])),
        plan_of("zero2"),
        "reduce_scatter",
    ),
    "weights are gathered for every micro-batch": Fault(
        never("set_reshard_after_backward"), plan_of("zero2"), "all_gather"
    ),
    "gradients are scattered for every micro-batch": Fault(
        never("set_requires_gradient_sync"), plan_of("zero1"), "reduce_scatter"
    ),
    "replicas are summed for every micro-batch": Fault(
        never("set_requires_all_reduce"), plan_of("hsdp-zero3"), "all_reduce"
    ),
    "a bucket too many": Fault(lambda: patch.object(replicas, "buckets", more_buckets), plan_of("ddp"), "all_reduce"),
    "a vote too many": Fault(
        lambda: patch.object(reduce, "combine", agree_twice), plan_of("zero3"), "all_reduce of 24 bytes on world"
    ),
    "a DTensor is redistributed": Fault(
        lambda: patch.object(reduce, "combine", agree_by_redistributing), plan_of("zero3"), "all_reduce of 1,024 bytes"
    ),
    "gradients travel in fp32 instead of bf16": Fault(
        lambda: patch.object(fsdp, "MixedPrecisionPolicy", reduced_in_fp32),
        plan_of("zero3", precision=Precision("bf16", reduce="bf16")),
        "reduce_scatter",
    ),
    "weights stay in fp32 instead of bf16": Fault(
        lambda: patch.object(precision, "apply", lambda parts, plan, meshes: parts),
        plan_of("zero3", precision=Precision("bf16", "bf16")),
        "weights:",
    ),
    "a copy of the weights in full precision is kept": Fault(
        lambda: patch.object(adamw, "fresh_moments", with_a_copy),
        plan_of("zero3", precision=Precision("bf16", "bf16")),
        "moments:",
    ),
    "moments in fp32 instead of bf16": Fault(
        lambda: patch.object(RoundedAdamW, "fresh", moments_in_fp32),
        plan_of("ddp", optim=Optim(moments="bf16")),
        "moments:",
    ),
    "SwiGLU saves silu(gate)": Fault(
        lambda: patch.dict(layers.GATES, silu=lambda gate, up: functional.silu(gate) * up),
        plan_of("zero3"),
        "saved for backward",
    ),
    "norms save wide copies": Fault(wide_norm, plan_of("zero3", precision=BF16), "saved for backward"),
    "all logits are kept": Fault(
        lambda: patch.object(pretrain, "finish", full_logits), plan_of("ddp"), "saved for backward"
    ),
    "nothing is recomputed": Fault(
        lambda: patch.object(torch.utils.checkpoint, "checkpoint", lambda function, *given, **named: function(*given)),
        plan_of("zero3", remat=Remat("full")),
        "saved for backward",
    ),
    "selective recompute keeps a product too many": Fault(
        lambda: patch.object(remat, "_products", lambda block: products(block) + 1),
        plan_of("zero3", remat=Remat("selective")),
        "saved for backward",
    ),
    "a budget saves the neighbouring product": Fault(
        lambda: patch.object(
            remat, "_Chosen", lambda number, of: chosen(number, " ".join(str(int(each) + 1) for each in of.split()))
        ),
        plan_of("zero3", remat=Remat("budget", 1, (SavedResult(7, 4),))),
        "saved for backward",
    ),
    "recomputation counts the blocks of a stage": Fault(
        lambda: patch.object(remat, "numbered", lambda part: enumerate(part.layers)),
        replace(
            plan_of("zero3", batch=Batch(8, 4, 512, 256), remat=Remat("full", every=2)),
            layout=Layout(pp=2, dp_shard=4),
            pipeline=Pipeline("interleaved", 2, (2, 1, 3, 2)),
        ),
        "peak:",
        LARGE,
    ),
    "gradients live on through the next forward": Fault(
        gradients_stay, plan_of("ddp", batch=Batch(4, 1, 1024, 1024), shard=Shard()), "peak:", LARGE
    ),
}


load_facts = TrainState.load_facts


def stale_cursor(self: TrainState, facts: dict[str, Any]) -> None:
    load_facts(self, {**facts, "cursor": 0})


def fresh_moments_after(self: TrainState, facts: dict[str, Any]) -> None:
    load_facts(self, facts)
    for state in self.optimizer.state.values():
        state["exp_avg"].zero_()


def schedule_from_the_start(self: TrainState, facts: dict[str, Any]) -> None:
    load_facts(self, {**facts, "updates": 0})


RESUME: dict[str, Planted] = {
    "a stale cursor after resume": lambda: patch.object(TrainState, "load_facts", stale_cursor),
    "moments are not restored": lambda: patch.object(TrainState, "load_facts", fresh_moments_after),
    "the bias correction starts again": lambda: patch.object(TrainState, "load_facts", schedule_from_the_start),
}
"""Faults of a run that goes on from a checkpoint: what the kill proof must see."""
