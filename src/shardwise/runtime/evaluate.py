"""Validation: the mean loss in nats per token and in bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.data.stream import EvaluationBatch
from shardwise.methods import pairs
from shardwise.runtime import passes
from shardwise.runtime.job import Job
from shardwise.runtime.report.results import Preference, Validation


def scored(
    job: Job, parts: Sequence[nn.Module], batches: Iterable[EvaluationBatch], enter: Callable[[], None] = lambda: None
) -> Iterator[tuple[EvaluationBatch, MicroBatch, Tensor]]:
    """Each batch with its rows on the device and the loss of each token, where this rank has them: of a pipeline the
    rank of the last stage does. ``enter`` is called before each."""
    for batch in batches:
        enter()
        micro = batch.micro_batch.to(job.device)
        losses = passes.infer(parts, micro, passes.score_of(job.plan))
        if losses is not None:
            yield batch, micro, losses
    techniques.after_inference(parts, job.plan)


def evaluate(job: Job, parts: Sequence[nn.Module], batches: Iterable[EvaluationBatch]) -> Validation:
    """Return the validation of a model. Every rank passes its own batches, equally many; the result is the same on all.
    Changes nothing."""
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)
    for batch, _, losses in scored(job, parts, batches):
        sums[0] += losses.double().sum()
        sums[1] += batch.supervised_tokens
        sums[2] += batch.text_bytes
    job.meshes.total(sums)
    nats, tokens, text_bytes = sums.tolist()
    return Validation(nats, int(tokens), text_bytes)


def evaluate_pairs(job: Job, parts: Sequence[nn.Module], batches: Iterable[EvaluationBatch]) -> Preference:
    """As :func:`evaluate`, of pairs of answers that know what the reference says of them."""
    sums, method = torch.zeros(4, dtype=torch.float64, device=job.device), job.recipe.method
    for _, micro, losses in scored(job, parts, batches):
        answers = pairs.answers_of(losses, micro, method, job.meshes.groups.get("cp"))
        if not micro.counts:
            continue
        *_, margins, chosen_wins, _, _ = pairs.figures(answers, method)
        columns = (pairs.losses_of(answers, method), chosen_wins, margins, torch.ones_like(margins))
        sums += torch.stack([values.double().sum() for values in columns])
    job.meshes.total(sums)
    *totals, count = sums.tolist()
    loss, accuracy, margin = (total / count if count else math.nan for total in totals)
    return Preference(loss, accuracy, margin, int(count))
