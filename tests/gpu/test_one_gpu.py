"""One process on one GPU computes what a CPU computes, in the memory that the plan says."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods.loss import Output, linear_cross_entropy, losses_and_gradient
from shardwise.models import attention, blockwise, kernel_choice
from shardwise.models.attention import MaskSpec
from shardwise.models.blockwise import Rule, Saved
from shardwise.models.config import ModelSpec, model_spec
from shardwise.models.layers import RMSNorm
from shardwise.prove import parity
from shardwise.prove.drift import PEAK_FROM_BYTES, PEAK_TOLERANCE, predict
from shardwise.runtime.build import build
from shardwise.runtime.passes import finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepRules, launch, step
from shardwise.runtime.transfer import Upload
from shardwise.spec import plan as plans
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Method, OptimSection, Recipe
from tests.parity.cases import BF16, FP32, FP64, TIED, UNTIED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Of torch's compiler and its checks, about what they do themselves: as errors they end a compilation.
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]

B, H, HK, S, E = 2, 6, 2, 640, 64
DOCUMENTS = [0, 100, 101, 640, 700, 1280]
MASKS = {
    "causal": MaskSpec(),
    "full": MaskSpec(causal=False),
    "documents": MaskSpec(documents=torch.tensor(DOCUMENTS)),
    "full documents": MaskSpec(causal=False, documents=torch.tensor(DOCUMENTS), scale=0.2),
    "window": MaskSpec(window=100),
    "full window in documents": MaskSpec(causal=False, window=200, documents=torch.tensor(DOCUMENTS)),
    "sinks": MaskSpec(window=300, sinks=torch.linspace(-1, 4, H)),
    "cap": MaskSpec(soft_cap=2.0, documents=torch.tensor(DOCUMENTS)),
    "all": MaskSpec(window=100, documents=torch.tensor(DOCUMENTS), soft_cap=2.0, sinks=torch.linspace(-1, 4, H)),
}
ERRORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Of the largest element: a few roundings of the type (fp32: of its products), of probabilities above all."""
APART = [(320, 320, 320, None), (64, 512, 512, None), (640, 128, 200, None), (100, 160, 160, 120), (40, 90, 130, 100)]
"""Queries, keys, how far behind the first key the first query stands, and the window, which each query sees some of."""
REMATS = [Remat(), Remat("selective"), Remat("full")]
ONE = model_spec("gpu", 8192, 512, 1280, 6, 8, 2, 64)
LARGE = model_spec("gpu-large", 32_000, 2048, 5632, 6, 16, 4, 128)
"""A step of this takes several gibibytes, of which the workspaces of matrix libraries (tens of MiB) are little."""


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_the_reference(alone: torch.device, name: str, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients of every kernel that serves here against the reference in fp64."""
    mask = MASKS[name]
    documents = None if mask.documents is None else mask.documents.to(alone, torch.int32)
    sinks = None if mask.sinks is None else mask.sinks.to(alone)
    longest = 0 if documents is None else int(documents.diff().max())
    torch.manual_seed(0)
    shapes = [(B, S, heads, E) for heads in (H, HK, HK)]
    q, k, v = (torch.randn(shape, device=alone).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes)
    rule = Rule(documents, sinks, None, mask.causal, mask.window, longest, mask.soft_cap, mask.scale)
    wide = [x.detach().double() for x in (q, k, v)]
    right, right_lse = blockwise.forward(*wide, rule)
    if sinks is not None:
        right, right_lse = blockwise.with_sinks(right, right_lse, sinks)
    grad = torch.randn(right.shape, device=alone).to(dtype)
    right_grads = blockwise.backward(grad.double(), Saved(*wide, right, right_lse), rule)
    attention.prepare(alone, "fa3")
    case = attention.case_of(q, rule)
    serving = kernel_choice.able(case, attention.present(alone, "cudnn"))
    narrow = dtype in (torch.bfloat16, torch.float16) and case.capability >= kernel_choice.AMPERE
    assert serving[-1] == "blockwise" and len(serving) > narrow
    for kernel in serving:
        told = replace(mask, documents=documents, sinks=sinks, longest=longest, kernel=kernel)
        out, lse = attention.Attention.inner(None, q, k, v, told)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out, (q, k, v), grad)
        assert error(out, right) < ERRORS[dtype], kernel
        assert error(lse, right_lse) < min(ERRORS[dtype], 1e-3), f"{kernel}: statistics are at least fp32"
        assert all(error(ours, theirs) < ERRORS[dtype] for ours, theirs in zip(grads, right_grads, strict=True)), kernel


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(("queries", "keys", "apart", "window"), APART)
def test_attention_to_tokens_of_other_ranks(
    alone: torch.device, queries: int, keys: int, apart: int, window: int | None, dtype: torch.dtype
) -> None:
    """Every kernel that serves, for queries and keys that are not the same tokens, nor as many."""
    torch.manual_seed(0)
    shapes = [(B, queries, H, E), (B, keys, HK, E), (B, keys, HK, E)]
    q, k, v = (torch.randn(shape, device=alone).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes)
    rule = Rule(None, None, None, False, window, 0, None, apart=apart)
    wide = [x.detach().double() for x in (q, k, v)]
    right, right_lse = blockwise.forward(*wide, rule)
    grad = torch.randn(right.shape, device=alone).to(dtype)
    right_grads = blockwise.backward(grad.double(), Saved(*wide, right, right_lse), rule)
    attention.prepare(alone, "fa3")
    serving = kernel_choice.able(attention.case_of(q, rule), attention.present(alone, "cudnn"))
    assert not {"cudnn", "flex"} & {*serving} and serving[-1] == "blockwise"
    for kernel in serving:
        out, lse = attention.attention(q, k, v, *rule._replace(kernel=kernel))
        grads = torch.autograd.grad(out, (q, k, v), grad)
        assert error(out, right) < ERRORS[dtype] and error(lse, right_lse) < min(ERRORS[dtype], 1e-3), kernel
        assert all(error(ours, theirs) < ERRORS[dtype] for ours, theirs in zip(grads, right_grads, strict=True)), kernel


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_the_norm_is_that_of_a_cpu(alone: torch.device, plus_one: bool, dtype: torch.dtype) -> None:
    """Output and gradients of torch's own operator against the norm in its parts, in fp64."""
    torch.manual_seed(0)
    norm = RMSNorm(512, 1e-5, plus_one)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(2, B, S, 512).to(dtype)
    found = []
    for device, kind in ((torch.device("cpu"), torch.float64), (alone, dtype)):
        norm.to(device, dtype).to(kind)
        given = x.to(device, kind).requires_grad_()
        out = norm(given)
        found.append((out, *torch.autograd.grad(out, (given, norm.weight), grad.to(device, kind))))
    right, ours = found
    assert all(error(one.cpu(), other.detach()) < ERRORS[dtype] for one, other in zip(ours, right, strict=True))


def tiny(precision: Precision, remat: Remat, compile: bool = False, spec_seq: int = 16) -> Plan:
    return Plan(batch=Batch(4, 2, spec_seq, 24), precision=precision, remat=remat, compile=compile)


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_training_in_fp64_is_that_of_a_cpu(alone: torch.device, spec: ModelSpec, remat: Remat) -> None:
    """1e-9 after five AdamW steps, as between layouts."""
    plan = tiny(FP64, remat)
    found = parity.compare(
        parity.plain(parity.job_of(spec, plan, parity.STEPS)), [parity.take_steps(0, spec, plan, 5, alone)]
    )
    assert max(e.error for e in (found.loss, found.norm, found.gradient, found.weight)) < 1e-9, found


ON_HOST = {
    "optimizer": plans.Offload("host"),
    "half of the optimizer": plans.Offload("host", optimizer_fraction=0.5),
    "inputs": plans.Offload("none", "host"),
    "inputs in a file": plans.Offload("none", "nvme"),
    "both": plans.Offload("host", "host"),
    "weights": plans.Offload("host", weights="host"),
    "weights and sums": plans.Offload("host", weights="host", sums="host"),
    "on NVMe": plans.Offload("nvme", weights="nvme"),
}


@pytest.mark.parametrize("offload", ON_HOST.values(), ids=ON_HOST)
@pytest.mark.parametrize(
    ("precision", "steps", "limit"), [(FP64, 5, 1e-9), (FP32, 2, 1e-4), (BF16, 2, 2e-2)], ids=["fp64", "fp32", "bf16"]
)
def test_training_with_what_is_on_the_host(
    alone: torch.device, precision: Precision, steps: int, limit: float, offload: plans.Offload
) -> None:
    """Losses and norms are those with all on the device, up to how the optimizer's kernel rounds: AdamW's first update
    is the sign of a gradient, so one that is nearly zero moves its weight the other way. In fp32 another order of sums
    alone puts norms 7e-6 from those of fp64 in the second step, and 1e-2 in the fifth."""
    plan = replace(tiny(precision, Remat("full")), batch=Batch(2, 2, 64, 24))
    right, found = (parity.take_steps(0, ONE, each, steps, alone) for each in (plan, replace(plan, offload=offload)))
    assert found.losses == pytest.approx(right.losses, rel=limit) and found.norms == pytest.approx(
        right.norms, rel=limit
    )


UPDATED = [plans.Offload("host"), plans.Offload("host", optimizer_fraction=0.5), plans.Offload("nvme")]


@pytest.mark.parametrize("offload", UPDATED, ids=["host", "half", "nvme"])
def test_after_each_step_the_device_has_what_the_host_updated(alone: torch.device, offload: plans.Offload) -> None:
    """Rounded, where that is narrow; to the bit, once all has been copied."""
    found, known = list[torch.dtype](), parity.held

    def held(state: TrainState) -> dict[str, list[int]]:
        assert state.host is not None
        state.host.returning.settle()
        for parameter, copy in state.host.copies.items():
            assert torch.equal(parameter.detach().cpu(), copy.detach().to(parameter.dtype))
            found.append(parameter.dtype)
        return known(state)

    plan = replace(tiny(BF16, Remat("full")), batch=Batch(2, 2, 64, 24), offload=offload)
    with patch.object(parity, "held", held):
        parity.take_steps(0, ONE, plan, 4, alone)
    assert {*found} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("remat", [Remat(), Remat("full")], ids=str)
def test_training_with_frozen_weights_elsewhere(alone: torch.device, remat: Remat, compile: bool, tier: Any) -> None:
    """To the rounding of fp64: the same kernels on the same numbers, whose sums on a GPU may be in another order."""
    plan = replace(tiny(FP64, remat, compile), batch=Batch(2, 2, 64, 24), lora=plans.Lora(4, 8.0))
    elsewhere = replace(plan, offload=plans.Offload(weights=tier))
    right, found = (parity.take_steps(0, ONE, each, 5, alone) for each in (plan, elsewhere))
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.norms == pytest.approx(right.norms, rel=1e-9)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("remat", [Remat(), Remat("full")], ids=str)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_loss_and_gradients_are_those_of_a_cpu(
    alone: torch.device, precision: Precision, remat: Remat, compile: bool
) -> None:
    """fp32: 1e-5 and 1e-4, sums over hundreds of terms in another order; bf16: loss to 1e-2, gradients' direction."""
    plan = tiny(precision, remat, compile, 64)
    found = parity.compare(parity.plain(parity.job_of(ONE, plan, 1)), [parity.take_steps(0, ONE, plan, 1, alone)])
    if precision is FP32:
        assert found.loss.error < 1e-5 and found.gradient.error < 1e-4, found
    assert found.loss.error < 1e-2 and found.turn.error < 3e-3, found


def rules_of(plan: Plan) -> StepRules:
    return StepRules(plan, Meshes(), OptimSection(), 10, finish_of(Method(), plan))


def peak_bytes(plan: Plan, device: torch.device) -> int:
    """The most that torch had allocated in the third step."""
    gc.collect()  # what a test before this one left would go in the middle of it
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated(device)

    state = build(Recipe(), LARGE, plan, Meshes(), device)
    rules, shape = rules_of(plan), (plan.batch.micro_batch_size, plan.batch.seq_len)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(device)
        ids = torch.randint(LARGE.vocab_size, shape, device=device)
        positions = torch.arange(shape[1], device=device).expand(shape).contiguous()
        batches = [MicroBatch(ids, ids.clone(), positions, None, shape[1])] * plan.batch.accumulation
        step(state, batches, ids.numel() * len(batches), rules)
    return torch.cuda.max_memory_allocated(device) - start


@pytest.mark.parametrize("kept", [plans.Optim(), plans.Optim("adamw8bit"), plans.Optim(moments="bf16")], ids=str)
@pytest.mark.parametrize("precision", [BF16, Precision("fp16")], ids=["bf16", "fp16"])
def test_no_step_waits_for_the_device(alone: torch.device, precision: Precision, kept: plans.Optim) -> None:
    """torch raises at whatever would; the first step may fill tables and set up workspaces."""
    plan = Plan(batch=Batch(2, 2, 512, 256), precision=precision, optim=kept)

    state, rules, upload = build(Recipe(), ONE, plan, Meshes(), alone), rules_of(plan), Upload(alone)
    before = None
    for number in range(4):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            ids, positions = torch.randint(ONE.vocab_size, (2, 512)), torch.arange(512).expand(2, 512).contiguous()
            bounds = torch.tensor([0, 300, 512, 1024], dtype=torch.int32)
            launched = launch(state, upload([MicroBatch(ids, ids.clone(), positions, bounds, 512)] * 2), 2048, rules)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if before is not None:
            assert not before.wait(state).skipped
        before = launched
    assert before is not None and before.wait(state).step == 4


@pytest.mark.parametrize("remat", REMATS, ids=str)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_memory_is_what_the_plan_says(alone: torch.device, weights: Any, remat: Remat) -> None:
    """bf16 compute, whose attention runs in the flash kernel; the reference in fp32 takes blocks of scores beside."""
    precision = Precision("bf16", weights)
    plan = Plan(batch=Batch(4, 1, 2048, 1024), shard=Shard(), precision=precision, remat=remat)
    predicted = predict(LARGE, plan, device="cuda").peak_bytes
    measured = peak_bytes(plan, alone)
    assert measured > PEAK_FROM_BYTES
    assert abs(predicted / measured - 1) < PEAK_TOLERANCE, f"{predicted:,} predicted, {measured:,} measured"


@pytest.mark.parametrize("offload", ON_HOST.values(), ids=ON_HOST)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_memory_with_what_is_on_the_host(alone: torch.device, accumulation: int, offload: plans.Offload) -> None:
    """Gradients leave as they are made, or stay until the second micro-batch is done, unless the host adds them up;
    inputs leave while blocks compute, for which weights come."""
    plan = Plan(batch=Batch(4, accumulation, 2048, 1024), precision=BF16, remat=Remat("full"), offload=offload)
    found = predict(LARGE, plan, device="cuda")
    predicted, measured = found.peak_bytes - found.state["host"], peak_bytes(plan, alone)
    assert abs(predicted / measured - 1) < PEAK_TOLERANCE, f"{predicted:,} predicted, {measured:,} measured"


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("nf4", [False, True])
def test_memory_with_frozen_weights_elsewhere(alone: torch.device, nf4: bool, tier: Any) -> None:
    """A block's and the next one's are here."""
    lora = plans.Lora(16, 32.0, frozen="bf16", nf4=nf4)
    plan = Plan(batch=Batch(4, 1, 2048, 1024), precision=BF16, remat=Remat("full"), lora=lora)
    plan = replace(plan, offload=plans.Offload(weights=tier))
    found = predict(LARGE, plan, device="cuda")
    predicted, measured = found.peak_bytes - found.state["host"], peak_bytes(plan, alone)
    assert abs(predicted / measured - 1) < PEAK_TOLERANCE, f"{predicted:,} predicted, {measured:,} measured"


def test_a_compiled_loss_is_the_eager_one_in_less_memory(alone: torch.device) -> None:
    """Loss and gradients to the rounding of bf16, the last chunk shorter; peaks beyond what was there before."""
    torch.manual_seed(0)
    hidden = torch.randn(1500, 64, device=alone).bfloat16().requires_grad_()
    weight = torch.randn(32_000, 64, device=alone).mul_(0.1).bfloat16().requires_grad_()
    labels = torch.randint(32_000, (1500,), device=alone)
    labels[:100] = -100
    found, peaks = [], []
    for between in (None, torch.compile(losses_and_gradient, fullgraph=True)):
        for _ in range(2):  # the first compiles, and sets up workspaces
            before = torch.cuda.memory_allocated(alone)
            torch.cuda.reset_peak_memory_stats(alone)
            loss = linear_cross_entropy(hidden, Output(weight, between=between), labels, 512)
            gradients = torch.autograd.grad(loss, (hidden, weight))
            peaks.append(torch.cuda.max_memory_allocated(alone) - before)
            found.append([loss.detach().double(), *(gradient.double() for gradient in gradients)])
            del loss, gradients
    assert abs(float(found[3][0] / found[1][0]) - 1) < 1e-5
    assert all(error(ours, right) < ERRORS[torch.bfloat16] for ours, right in zip(found[3], found[1], strict=True))
    assert peaks[3] < peaks[1], peaks


@pytest.mark.parametrize("remat", [Remat(), Remat("full")], ids=str)
def test_compiled_memory_is_at_most_what_the_plan_says(alone: torch.device, remat: Remat) -> None:
    plan = Plan(batch=Batch(4, 1, 2048, 1024), precision=BF16, remat=remat, compile=True)
    predicted = predict(LARGE, plan, device="cuda").peak_bytes
    assert predicted > PEAK_FROM_BYTES
    assert peak_bytes(plan, alone) < (1 + PEAK_TOLERANCE) * predicted
