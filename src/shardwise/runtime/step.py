"""One optimizer step: the only place that knows the order of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.batch import MicroBatch
from shardwise.models.blocks import blocks
from shardwise.runtime import reduce
from shardwise.runtime.state import TrainState
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Optim
from shardwise.techniques import optim, shard

Loss = Callable[[nn.Module, MicroBatch, float], Tensor]
"""(model, micro-batch, denominator) -> the sum of its terms / denominator, a scalar that can be propagated."""


@dataclass(frozen=True)
class StepStats:
    """What a step did. ``loss`` is the mean over the supervised tokens of all ranks, ``grad_norm`` the norm before
    clipping, ``tokens`` the input tokens of all ranks. A ``skipped`` step changed no weight and no moment. ``stop``:
    some rank was asked to stop. ``pairs``: the mean is over pairs of answers, and those are ``supervised_tokens``.
    ``loss_scale``: by what the loss was multiplied in fp16."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    supervised_tokens: int
    skipped: bool
    stop: bool
    pairs: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class Rules:
    """What is the same for all steps of a run. ``enter`` is called at every phase (runtime/guard.py)."""

    plan: Plan
    optim: Optim
    max_steps: int
    loss: Loss
    enter: Callable[[str], None] = lambda phase: None
    seed: int = 0


def step(
    state: TrainState, batches: Sequence[MicroBatch], supervised: int, rules: Rules, stop: bool = False
) -> StepStats:
    """Train on this rank's micro-batches of one optimizer step.

    ``supervised`` counts the supervised tokens (or pairs) of all ranks and micro-batches: every loss is divided by it,
    so that gradients are sums and do not depend on the layout. A step with a non-finite loss or gradient is skipped by
    all ranks alike. ``stop`` is this rank's wish to stop; the one returned is everybody's.
    """
    plan, layout = rules.plan, rules.plan.layout
    if plan.lora is not None and plan.lora.dropout:
        draw_anew(rules.seed, state.step, layout)
    loss = accumulate(state, batches, supervised, rules)
    shard.finish(state.parts)
    rules.enter("clip")
    parameters = state.trained()
    squares = reduce.local_squares(parameters, layout.world // layout.pp)
    verdict = reduce.agree(squares, loss, stop)
    grad_norm = verdict.norm / state.scale.value
    if verdict.finite:
        factor = reduce.clip_coefficient(grad_norm, rules.optim.max_grad_norm) / state.scale.value
        reduce.scale_gradients(parameters, factor)
    rules.enter("optimizer")
    rate = optim.learning_rate(rules.optim, state.step, rules.max_steps)
    optim.set_learning_rate(state.optimizer, rate, rules.optim)
    if verdict.finite:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    tokens = plan.batch.global_batch_size(layout.dp) * plan.batch.seq_len
    scale = state.scale.value if state.scale.enabled else None
    state.count(tokens, skipped=not verdict.finite)
    skipped, pairs = not verdict.finite, plan.loss == "dpo"
    return StepStats(verdict.loss, grad_norm, rate, tokens, supervised, skipped, verdict.stop, pairs, scale)


def draw_anew(seed: int, number: int, layout: Layout) -> None:
    """What is dropped follows from the seed, the step and the rank, so that a resumed run drops the same."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(((seed * 1_000_003 + number) * layout.dp + layout.dp_rank(rank)) % 2**63)


def accumulate(state: TrainState, batches: Sequence[MicroBatch], supervised: int, rules: Rules) -> Tensor:
    """Forward and backward of every micro-batch: leaves the reduced gradients in place (after ``shard.finish``) and
    returns this rank's share of the mean loss, a detached scalar."""
    shares = []
    for index, batch in enumerate(batches):
        shard.synchronise(state.parts, rules.plan, last=index == len(batches) - 1)
        rules.enter("forward")
        loss = rules.loss(state.parts[0], batch, float(max(1, supervised)))
        rules.enter("backward")
        (loss * state.scale.value if state.scale.enabled else loss).backward()
        shares.append(loss.detach().double())
    return sum(shares[1:], start=shares[0])


def announce_reduce(parts: Sequence[nn.Module], enter: Callable[[str], None]) -> None:
    """Tell ``enter`` when backward leaves the head for the blocks: from there on gradients are being reduced."""

    def watch(block: nn.Module, args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: enter("reduce"))

    blocks(parts[-1])[-1].register_forward_hook(watch)
