"""The fit check: before the first step one forward, backward and update at the longest packed batch, so that a run that
does not fit ends at once and not after hours. And the error when memory runs out, then or later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.slices import local
from shardwise.errors import Problem, TrainingError, no_memory
from shardwise.models.blocks import spec_of
from shardwise.runtime.passes import StepRules
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import accumulate
from shardwise.spec.plan import Plan
from shardwise.spec.units import show_bytes
from shardwise.techniques import optim


def check_fit(state: TrainState, rules: StepRules, vocab_size: int, device: torch.device) -> None:
    """Run forward and backward on rows of one document each, of the full length: two micro-batches where gradients are
    accumulated, and in a pipeline all, of which several are alive at once. Then an update, which an optimizer may need
    memory for. Weights, moments and counters stay as they are: the update's gradients and learning rate are zero."""
    count = rules.plan.batch.accumulation
    batch = longest_batch(rules.plan, vocab_size, torch.device("cpu"))
    if spec_of(state.parts).predictors:
        batch = batch.looking_ahead()
    batch = batch.cut(rules.meshes.row_share).to(device)
    batches = [batch] * (count if rules.plan.layout.pp > 1 else min(2, count))
    accumulate(state, batches, sum(batch.terms() for batch in batches), rules)
    for parameter in state.trained():
        if (gradient := state.updated(parameter).grad) is not None:
            local(gradient).zero_()
    optim.rehearse(state.optimizer, state.updates)
    state.optimizer.zero_grad(set_to_none=True)


def longest_batch(plan: Plan, vocab_size: int, device: torch.device, first: int = 0) -> MicroBatch:
    """A micro-batch whose rows are one document each: attention costs most, and every token is supervised. For pairs,
    the two halves of a row are the two answers. Tokens are counted up from ``first``."""
    rows, length = plan.batch.micro_batch_size, plan.batch.seq_len
    ids = ((torch.arange(rows * length) + first) % vocab_size).view(rows, length)
    positions = torch.arange(length).expand(rows, length).contiguous()
    documents = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = MicroBatch(ids, ids.roll(-1, 1), positions, documents, length)
    if plan.method.pairs:
        batch.answers = 2 * torch.arange(rows)[:, None] + (positions >= length // 2)
        batch.references = torch.zeros(rows, 2, dtype=torch.float64)
    return batch.to(device)


@contextmanager
def explain_memory(plan: Plan, device: torch.device, doing: Callable[[], str]) -> Iterator[None]:
    """Turn a failed allocation into TrainingError MEM001, which says what the memory was for. ``doing`` is called only
    then."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if (message := no_memory(error)) is None:
            raise
        raise TrainingError(out_of_memory(plan, device, doing(), message)) from error


def out_of_memory(plan: Plan, device: torch.device, doing: str, message: str) -> Problem:
    """The problem: what the plan predicted, by category, and which settings need less."""
    estimate = plan.estimate
    told = ", ".join(f"{name} {show_bytes(count)}" for name, count in estimate.memory.items() if count)
    held = ""
    if device.type == "cuda":
        taken = show_bytes(torch.cuda.memory_allocated(device)), show_bytes(torch.cuda.memory_reserved(device))
        held = f"; torch has allocated {taken[0]} and reserved {taken[1]}"
    fixes = []
    if plan.batch.micro_batch_size > 1:
        fixes.append(f"train.micro_batch_size={plan.batch.micro_batch_size // 2}")
    if plan.remat.mode != "full":
        fixes.append("recompute.mode=full")
    elif plan.offload.activations == "none":  # a CPU's device is the host
        fixes.append(f"offload.activations={'host' if device.type == 'cuda' else 'nvme'}")
    elsewhere = plan.lora is not None or plan.frozen or plan.offload.optimizer != "none"
    whole = plan.offload.optimizer_fraction == 1
    comes = elsewhere and whole and plan.shard.strategy in ("ddp", "zero3")  # PLAN028
    if comes and plan.offload.weights == "none" and device.type == "cuda":
        fixes.append("offload.weights=host")
    if plan.layout.dp > 1 and plan.shard.strategy != "zero3":
        fixes.append("parallel.strategy=zero3")
    if not whole:
        fixes.append("offload.optimizer_fraction=1")
    if plan.offload.optimizer == "none":
        fixes.append(f"offload.optimizer={'host' if device.type == 'cuda' else 'nvme'}")
    fixes.append(f"train.seq_len={plan.batch.seq_len // 2}")
    what = f"out of memory while {doing}: {message}{held}"
    where = f"the plan counts {show_bytes(estimate.peak_bytes)}: {told}" if told else str(device)
    return Problem("MEM001", what, where, " or ".join(fixes))
