"""The memory of a row's framework: the planner's estimate, which is that of our own modules, with the few habits in
which the framework differs from them. Each of these is known or not; none is fitted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardwise.models.config import parameter_count
from shardwise.planner.accuracy.rows import Row, said
from shardwise.planner.price import price
from shardwise.spec.plan import NOT_ALLOCATED, Estimate, Plan

OWN_LOGIT_BYTES = 10
"""What a logit takes in our own loss at its fullest: fp32 twice, and twice 16 bits, of which one is freed first."""


@dataclass(frozen=True)
class Memory:
    """Predicted bytes: what torch's allocator has given out at most, and what the device is asked for in all."""

    allocated_bytes: int
    peak_bytes: int


def memory_of(row: Row, estimate: Estimate) -> Memory:
    """The memory of a row whose own plan comes to ``estimate``."""
    fullest = max(_passes_bytes(row, estimate), _update_bytes(row, estimate))
    allocated = fullest + _more_state_bytes(row)
    standing = sum(estimate.memory.get(name, 0) for name in NOT_ALLOCATED)
    return Memory(allocated, allocated + standing)


def _passes_bytes(row: Row, estimate: Estimate) -> int:
    """The highest of forward and backward. Where all logits are made at once, the step is priced again with them."""
    found, batch = _without_late_gradients(row, estimate), row.plan.batch
    if row.traits.whole_model and row.plan.sharded:
        found += 2 * parameter_count(row.spec) // row.plan.layout.tp - estimate.memory["gathered"]
    if not row.traits.logit_bytes:
        return found
    tokens = batch.micro_batch_size * batch.seq_len
    whole: Plan = replace(row.plan, batch=replace(batch, loss_chunk_tokens=tokens))
    logits = tokens * row.spec.vocab_size // row.plan.layout.tp
    other = price(row.spec, whole, row.cluster).estimate
    if other.memory["logits"] < 0.9 * OWN_LOGIT_BYTES * logits:  # the peak is elsewhere in the step
        return found
    return max(found, _without_late_gradients(row, other) + int((row.traits.logit_bytes - OWN_LOGIT_BYTES) * logits))


def _without_late_gradients(row: Row, estimate: Estimate) -> int:
    """An optimizer that updates each weight within backward leaves no gradients."""
    late = "in bwd" in said(row.text, "optimizer").lower()
    return estimate.allocated_bytes - (estimate.memory["gradients"] if late else 0)


def _update_bytes(row: Row, estimate: Estimate) -> int:
    """While the optimizer runs: weights, moments, gradients, and the copies that an unfused one makes of a moment."""
    if "in bwd" in said(row.text, "optimizer").lower():
        return 0
    weights, moments = estimate.memory["weights"], estimate.memory["moments"]
    return weights + moments + (1 + row.traits.step_copies) * moments // 2


def _more_state_bytes(row: Row) -> int:
    """What is held beside weights, gradients and moments in the dtype of the weights: as many bytes a parameter as the
    row says, else 16-bit copies of weights that are not sharded with their masters."""
    plan, detail = row.plan, said(row.text, "precision_detail")
    held = parameter_count(row.spec) // plan.layout.tp // (plan.layout.fsdp if plan.shard.strategy == "zero3" else 1)
    if plan.lora is not None:
        return 2 * held if "fp32 parameter shards" in detail and not plan.lora.nf4 else 0
    own = 16 if plan.precision.weights == "fp32" else 8
    if stated := re.search(r"(\d+) B/param", detail):
        return (int(stated[1]) - own) * held
    beside = row.traits.low_copy and plan.precision.weights == "fp32" and plan.shard.strategy in ("ddp", "zero3")
    return 2 * held if beside else 0
