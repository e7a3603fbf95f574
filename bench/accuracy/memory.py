"""The memory of a row's framework: the planner's estimate, which is that of our own modules, with the few habits in
which the framework differs from them. Each of these is known or not; none is fitted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil, prod

from bench.accuracy.rows import CHUNK_TOKENS, Measurement, said
from shardwise.models.config import ModelSpec, parameter_count, parameter_shapes
from shardwise.models.roles import is_expert
from shardwise.planner.price import price
from shardwise.spec.plan import NOT_ALLOCATED, Estimate

OWN_LOGIT_BYTES = 10
"""What a logit takes in our own loss at its fullest: fp32 twice, and twice 16 bits, of which one is freed first."""


@dataclass(frozen=True)
class PredictedMemory:
    """Predicted bytes: what torch's allocator has given out at most, and what the device is asked for in all."""

    allocated_bytes: int
    peak_bytes: int


def memory_of(row: Measurement) -> PredictedMemory:
    """The memory of a row. A batch that is not told may be accumulated, and then gradients wait."""
    batch = row.plan.batch
    tokens, accumulation = batch.micro_batch_size * batch.seq_len, 2 if "gbs" in row.guessed else batch.accumulation
    # In as many pieces as our loss needs to take what theirs does, or nearly.
    pieces = max(1, round(OWN_LOGIT_BYTES / row.habits.logit_bytes)) if row.habits.logit_bytes else tokens
    chunk = min(batch.loss_chunk_tokens, max(CHUNK_TOKENS, ceil(tokens / pieces)))
    row = replace(row, plan=replace(row.plan, batch=replace(batch, accumulation=accumulation, loss_chunk_tokens=chunk)))
    estimate = price(row.spec, row.plan, row.cluster).estimate
    fullest = max(_passes_bytes(row, estimate, tokens), _update_bytes(row, estimate))
    allocated = fullest + _more_state_bytes(row)
    standing = sum(estimate.memory.get(name, 0) for name in NOT_ALLOCATED)
    return PredictedMemory(allocated, allocated + standing)


def _passes_bytes(row: Measurement, estimate: Estimate, tokens: int) -> int:
    """The highest of forward and backward."""
    spec, ranks, found = row.spec, row.plan.layout.tp, _without_late_gradients(row, estimate)
    own = OWN_LOGIT_BYTES / ceil(tokens / row.plan.batch.loss_chunk_tokens)
    logits = tokens * spec.vocab_size // ranks
    whole = row.plan.batch.loss_chunk_tokens > CHUNK_TOKENS or tokens <= CHUNK_TOKENS
    if whole and row.habits.logit_bytes and estimate.memory["logits"] >= 0.9 * own * logits:
        found += int((row.habits.logit_bytes - own) * logits)  # the loss is the highest moment of the step
    if row.plan.lora is not None and row.plan.sharded and "fsdp1" in said(row.text, "framework").lower():
        # Measured slopes are those of gradients of the inputs of frozen units that its hooks hold through backward.
        few = replace(row.plan, batch=replace(row.plan.batch, loss_chunk_tokens=CHUNK_TOKENS))
        backward = price(spec, few, row.cluster).estimate.allocated_bytes
        found = max(found, backward + 2 * tokens * spec.hidden_size * spec.num_hidden_layers)
    if row.habits.whole_model and row.plan.sharded:
        found += 2 * parameter_count(spec) // ranks - estimate.memory["gathered"]
    return found + tokens * spec.num_hidden_layers * _token_bytes(row) // ranks


def _token_bytes(row: Measurement) -> int:
    """What each block saves for a token more, or less, than ours."""
    spec, plan = row.spec, row.plan
    if plan.remat.mode == "selective" and row.habits.half_products:
        return -2 * (spec.attention.num_key_value_heads * spec.attention.head_dim + _width(spec))
    if plan.remat.mode != "none":
        return 0
    eager = not row.habits.fusion and not plan.compile and said(row.text, "mlp_gated") != "0"
    norms = 2 * 4 * spec.hidden_size if eager else 0  # RMS norms written out keep their input in fp32
    small = plan.lora is not None and plan.lora.nf4 and row.habits.wide_inputs
    return norms + (4 * (4 * spec.hidden_size + _width(spec)) if small else 0)


def _width(spec: ModelSpec) -> int:
    """How many numbers a token has between the matrices of its MLP, or of its experts."""
    if not spec.experts:
        return spec.intermediate_size
    return spec.experts.experts_per_token * spec.experts.expert_size + spec.experts.shared_expert_size


def _without_late_gradients(row: Measurement, estimate: Estimate) -> int:
    """An optimizer that updates each weight within backward leaves no gradients."""
    late = "in bwd" in said(row.text, "optimizer").lower()
    return estimate.allocated_bytes - (estimate.memory["gradients"] if late else 0)


def _update_bytes(row: Measurement, estimate: Estimate) -> int:
    """While the optimizer runs: weights, moments, gradients, and the copies that an unfused one makes of a moment."""
    if "in bwd" in said(row.text, "optimizer").lower():
        return 0
    weights, moments = estimate.memory["weights"], estimate.memory["moments"]
    return weights + moments + (1 + row.habits.step_copies) * moments // 2


def _more_state_bytes(row: Measurement) -> int:
    """What is held beside weights, gradients and moments in the dtype of the weights: as many bytes a parameter as the
    row says, else 16-bit copies of weights that are not sharded with their masters."""
    plan, detail = row.plan, said(row.text, "precision_detail")
    sizes = {name: prod(shape) for name, shape in parameter_shapes(row.spec).items()}
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    each = (sum(sizes.values()) - experts) // plan.layout.tp + experts // plan.layout.ep
    held = each // (plan.layout.fsdp if plan.shard.strategy == "zero3" else 1)
    if plan.lora is not None:
        return 2 * held if "fp32 parameter shards" in detail and not plan.lora.nf4 else 0
    own = 16 if plan.precision.weights == "fp32" else 8
    if stated := re.search(r"(\d+) B/param", detail):
        return (int(stated[1]) - own) * held
    beside = row.habits.low_copy and plan.precision.weights == "fp32" and plan.shard.strategy in ("ddp", "zero3")
    return 2 * held if beside else 0
