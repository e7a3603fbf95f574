"""The only callers of the model, and the only place that knows the order of micro-batches and stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods import loss as token_loss
from shardwise.methods import pairs, program
from shardwise.methods.loss import Finish, Further, Loss, Output, Score, losses_and_gradient
from shardwise.models.blocks import blocks, spec_of
from shardwise.runtime.pipeline import PipelineRank
from shardwise.spec.layout import last_stage_rank
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, OptimSection
from shardwise.spec.records import FURTHER
from shardwise.techniques import pp
from shardwise.techniques.compile import Switched

Made = TypeVar("Made")
Scored = Callable[[Tensor, Output, MicroBatch], Made]
"""What is made of hidden states, the output layer and their micro-batch."""


@dataclass(frozen=True)
class StepRules:
    """The rules that are the same for all steps of a run. ``enter`` is called at every phase
    (runtime/faults/guard.py). ``watch_steps``: every so many steps layers are sampled, where a step may be."""

    plan: Plan
    meshes: Meshes
    optim: OptimSection
    max_steps: int
    finish: Finish
    enter: Callable[[str], None] = lambda phase: None
    seed: int = 0
    watch_steps: int | None = 1

    def samples(self, number: int) -> bool:
        """Return whether it is the turn of step ``number``."""
        return self.watch_steps is not None and number % self.watch_steps == 0


def finish_of(method: Method, plan: Plan) -> Finish:
    """The loss of ``method``, over as many tokens at a time as ``plan`` says, and compiled where it says so."""
    chunk = plan.batch.loss_chunk_tokens
    if method.spec.pairs:
        plain: Finish = partial(pairs.finish, method=method, chunk_tokens=chunk)
    else:
        plain = partial(program(method.spec).finish, chunk_tokens=chunk, figures=plan.loss_figures)
    if not plan.compile:
        return plain
    between = torch.compile(losses_and_gradient, fullgraph=True)

    def compiled(hidden: Tensor, head: Output, batch: MicroBatch, denominator: float) -> Loss:
        return plain(hidden, replace(head, between=between), batch, denominator)

    return Switched(plain, compiled)


def score_of(plan: Plan) -> Score:
    """The loss of each token, without gradients, over as many tokens at a time as ``plan`` says."""
    return partial(token_loss.score, chunk_tokens=plan.batch.loss_chunk_tokens)


def train(
    parts: Sequence[nn.Module],
    batches: Sequence[MicroBatch],
    rules: StepRules,
    denominator: float,
    scale: Tensor | None,
    further: Further | None = None,
) -> Loss:
    """Forward and backward of every micro-batch of a step, the loss times ``scale``: leaves gradients that are
    summed over all ranks and returns the sum of the losses and of their figures, detached."""

    def score(hidden: Tensor, head: Output, batch: MicroBatch) -> Loss:
        asked = replace(head, group=rules.meshes.groups.get("cp"), further=further)
        return rules.finish(hidden, asked, batch, denominator)

    if line := pp.line_of(parts):
        shares = PipelineRank[Loss](parts, line, partial(run_part, score=score), rules.enter).train(batches, scale)
        none = torch.zeros((), dtype=torch.float64, device=batches[0].ids.device)
        told = (*rules.plan.loss_figures, *[FURTHER] * spec_of(parts).predictors)
        shares = shares or [Loss(none, dict.fromkeys(told, none))]
    else:
        shares = _one_part_after_another(parts, batches, rules, score, scale)
    techniques.after_backward(parts, rules.plan, rules.meshes)
    return reduce(Loss.plus, shares)


def _one_part_after_another(
    parts: Sequence[nn.Module],
    batches: Sequence[MicroBatch],
    rules: StepRules,
    score: Scored[Loss],
    scale: Tensor | None,
) -> list[Loss]:
    """Forward and backward of each micro-batch of a whole model."""
    shares = []
    for index, batch in enumerate(batches):
        techniques.before_micro_batch(parts, rules.plan, last=index == len(batches) - 1)
        rules.enter("forward")
        loss = forward(parts, batch, score)
        rules.enter("backward")
        (loss.value if scale is None else loss.value * scale).backward()
        techniques.after_micro_batch(parts, rules.plan)
        shares.append(loss.detached())
    return shares


@torch.no_grad()
def infer(parts: Sequence[nn.Module], batch: MicroBatch, score: Scored[Made]) -> Made | None:
    """Forward alone. Gathered weights stay gathered until ``techniques.after_inference``. None where another rank has
    the last stage of the pipeline."""
    if line := pp.line_of(parts):
        return PipelineRank[Made](parts, line, partial(run_part, score=score)).infer(batch)
    return forward(parts, batch, score)


def forward(parts: Sequence[nn.Module], batch: MicroBatch, score: Scored[Made]) -> Made:
    """Return what ``score`` returns for the hidden states of a whole model."""
    out: Any = ()
    for part in parts:
        out = run_part(part, batch, out, score=score)
    return out


def run_part(part: nn.Module, batch: MicroBatch, before: tuple[Tensor, ...], *, score: Scored[Any]) -> Any:
    """What the next part begins with, from what the part ``before`` has made; of the last one what ``score`` returns,
    which is called within the output layer, whose weight is then gathered."""
    spec = spec_of([part])

    def finish(hidden: Tensor, weight: Tensor) -> Any:
        return score(hidden, Output(weight, spec.final_soft_cap, spec.vocab_size), batch)

    given: dict[str, Any] = {} if batch.following is None else {"following": batch.following}
    given |= {"before": before} if before else {}
    return part(batch.ids, batch.positions, token_loss.mask(batch), finish, **given)


def from_last_stage(
    parts: Sequence[nn.Module], value: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return on every rank of a pipeline the ``value`` of the rank of its last stage, in fp64; without a pipeline,
    ``value`` itself."""
    line = pp.line_of(parts)
    if line is None:
        assert value is not None
        return value
    found = torch.empty(shape, dtype=torch.float64, device=device) if value is None else value.double()
    group, source = line.meshes.groups["pp"], last_stage_rank(line.plan.layout)
    torch.distributed.broadcast(found, group=group, group_src=source)
    return found


def announce_reduce(parts: Sequence[nn.Module], enter: Callable[[str], None]) -> None:
    """Call ``enter`` when backward goes from the head to the blocks: from there on gradients are reduced."""

    def watch(block: nn.Module, args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: enter("reduce"))

    [block for part in parts for block in blocks(part)][-1].register_forward_hook(watch)
