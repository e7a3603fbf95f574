"""What is said when memory runs out, whoever wanted it; and a fit check that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.meshes import Meshes
from shardwise.errors import TrainingError
from shardwise.models.config import model_spec
from shardwise.prove.fake_run import WorldCounter
from shardwise.runtime import fit
from shardwise.runtime.build import build
from shardwise.runtime.passes import finish_of
from shardwise.runtime.step import StepRules, step
from shardwise.spec.layout import Layout
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Plan, Precision, Remat, Shard, Strategy
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.spec.sheet import CONTROL_BYTES
from tests.said import shows

SPEC = model_spec("fit", 64, 32, 48, 2, 2, 1, 16)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)
DRIVER = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUDNN = "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
"""As ``C10D_NCCL_CHECK`` of NCCLUtils.hpp writes it; what follows is NCCL's own."""
CPU = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
)
ERRORS = [
    (torch.OutOfMemoryError(CUDA), CUDA),
    (RuntimeError(DRIVER), "CUDA error: out of memory"),
    (RuntimeError(CUBLAS), CUBLAS),
    (RuntimeError(CUDNN), CUDNN),
    (dist.DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"), "NCCL: Cuda failure 2 'out of memory'"),
    (
        dist.DistBackendError(f"{NCCL}Failed to CUDA calloc 16777216 bytes"),
        "NCCL: Failed to CUDA calloc 16777216 bytes",
    ),
    (RuntimeError(CPU), CPU),
    (MemoryError(), "MemoryError"),
]


@pytest.mark.parametrize(("error", "told"), ERRORS, ids=range(len(ERRORS)))
def test_whoever_runs_out_of_memory_is_explained(error: BaseException, told: str) -> None:
    plan, device = Plan(batch=Batch(4, 1, 16, 24)), torch.device("cpu")
    with pytest.raises(TrainingError) as raised, fit.explain_memory(plan, device, lambda: "training"):
        raise error
    [problem] = raised.value.problems
    assert problem.code == "MEM001" and raised.value.__cause__ is error
    assert shows(problem.what, "while training", told)
    assert problem.fix == "train.micro_batch_size=2 or recompute.mode=full or offload.optimizer=nvme or train.seq_len=8"


@pytest.mark.parametrize(
    "text", [NCCL + "Cuda failure 700 'an illegal memory access was encountered'", "shapes differ"]
)
def test_other_errors_stay_as_they_are(text: str) -> None:
    error = RuntimeError(text)
    with pytest.raises(RuntimeError) as raised, fit.explain_memory(Plan(), torch.device("cpu"), str):
        raise error
    assert raised.value is error


def test_on_a_gpu_it_is_told_what_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL and cuBLAS need lies beside what torch has reserved."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 78 << 30)
    problem = fit.out_of_memory(Plan(), torch.device("cuda", 1), "training", CUBLAS)
    assert shows(problem.what, "60.0 GiB", "78.0 GiB")


def test_what_full_recomputation_keeps_may_wait_on_the_host_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    fix = "offload.activations=host"
    for named, device, mode in ((True, "cuda", "full"), (False, "cuda", "none"), (False, "cpu", "full")):
        plan = Plan(remat=Remat(mode))  # type: ignore[arg-type]
        assert (fix in fit.out_of_memory(plan, torch.device(device, 0), "training", CUBLAS).fix) is named
    assert "offload.activations=nvme" in fit.out_of_memory(plan, torch.device("cpu"), "training", CUBLAS).fix
    there = Plan(remat=Remat("full"), offload=Offload("none", "host"))
    assert fix not in fit.out_of_memory(there, torch.device("cuda", 0), "training", CUBLAS).fix


def test_weights_may_wait_on_the_host_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    for named, device, plan in (
        (True, "cuda", Plan(lora=Lora())),
        (True, "cuda", Plan(frozen=("embed.*",))),
        (False, "cuda", Plan()),
        (False, "cpu", Plan(lora=Lora())),
        (False, "cuda", Plan(lora=Lora(), offload=Offload(weights="host"))),
        (True, "cuda", Plan(offload=Offload("host"))),
        (False, "cuda", Plan(offload=Offload("host", optimizer_fraction=0.5))),
        (True, "cuda", Plan(Layout(dp_shard=2), shard=Shard("zero3"), lora=Lora())),
        (False, "cuda", Plan(Layout(dp_shard=2), shard=Shard("zero2"), lora=Lora())),
    ):
        fix = fit.out_of_memory(plan, torch.device(device, 0), "training", CUBLAS).fix
        assert ("offload.weights=host" in fix) is named
        assert ("offload.optimizer_fraction=1" in fix) is (plan.offload.optimizer_fraction < 1)


KINDS = [*(Optim(name) for name in OPTIMIZERS), Optim(fused=False), Optim(moments="bf16")]


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_check_makes_an_update_that_changes_nothing(kind: Optim, weights: Any) -> None:
    plan = Plan(batch=Batch(2, 2, 16, 24), precision=Precision("bf16", weights), optim=kind)

    state = build(Recipe(), SPEC, plan, Meshes(), torch.device("cpu"))
    for parameter in state.trained():
        parameter.detach().view(-1)[:2] = torch.tensor([-0.0, 3e-39])
    updates: list[float] = []
    state.optimizer.register_step_post_hook(lambda *given: updates.append(max(g["lr"] for g in given[0].param_groups)))
    before = {name: value.clone() for name, value in state.tensors().items()}
    decays = [group["weight_decay"] for group in state.optimizer.param_groups]
    fit.check_fit(
        state,
        StepRules(plan, Meshes(), OptimSection(), 10, finish_of(Method(), plan)),
        SPEC.vocab_size,
        torch.device("cpu"),
    )
    assert updates == [0.0]
    assert any(decays) and decays == [group["weight_decay"] for group in state.optimizer.param_groups]
    for name, value in state.tensors().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
    assert all(kept["step"] == 0 for kept in state.optimizer.state.values())
    assert all(parameter.grad is None for parameter in state.trained())


@pytest.mark.parametrize(("layout", "sharding"), [(Layout(tp=2), "ddp"), (Layout(dp_shard=2, tp=2), "zero2")])
def test_the_fit_check_sends_what_a_step_sends(layout: Layout, sharding: Strategy) -> None:
    """But for the numbers of a step that all ranks share. A sum that only a step needs would be what does not fit."""
    plan = Plan(layout, Batch(2, 2, 16, 24), Shard(sharding), sequence_parallel=True)
    cpu, found = torch.device("cpu"), []
    with fake_world(plan.layout) as groups:
        state = build(Recipe(), SPEC, plan, groups, cpu)
        rules = StepRules(plan, groups, OptimSection(), 10, finish_of(Method(), plan))
        batches = [fit.longest_batch(plan, SPEC.vocab_size, cpu)] * 2
        for run in (lambda: fit.check_fit(state, rules, SPEC.vocab_size, cpu), lambda: step(state, batches, 64, rules)):
            with WorldCounter(None, groups.called()) as counter:
                run()
            found.append({key: calls for key, calls in counter.sent.items() if key[2] > CONTROL_BYTES})
    checked, stepped = found
    assert checked == stepped and any("tp" in axis and kind == "all_reduce" for axis, kind, _ in stepped)


def test_ranks_that_share_rows_try_their_own_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under cp a rank has some tokens of each row: with all of them it would need the memory of a run without."""
    plan, cpu, tried = Plan(Layout(cp=2), Batch(2, 2, 16, 24), Shard("ddp"), cp_kind="ring"), torch.device("cpu"), []
    monkeypatch.setattr(fit, "accumulate", lambda state, batches, terms, rules: tried.extend([*batches, terms]))
    with fake_world(plan.layout) as groups:
        state = build(Recipe(), SPEC, plan, groups, cpu)
        rules = StepRules(plan, groups, OptimSection(), 10, finish_of(Method(), plan))
        fit.check_fit(state, rules, SPEC.vocab_size, cpu)
    *batches, terms = tried
    assert [batch.ids.shape for batch in batches] == [(2, 8), (2, 8)] and terms == 32
    assert all(batch.row_length == 16 for batch in batches)
