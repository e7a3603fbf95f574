"""The first ten minutes on a CUDA device: what computes rightly, what takes the memory it should, and how fast it is.

    make gpu-first                                      # or: PYTHONPATH=src python bench/gpu_first.py
    python bench/gpu_first.py --only attention speed    # some sections
    python bench/gpu_first.py --rehearse                # all of them, tiny and on the CPU: does it run?

It needs one GPU, torch 2.11 or later and what the package itself depends on. Each section is a process of its own with
a limit of time, so that one that fails or hangs costs the others nothing, and stands in the file of results
(build/gpu-first.md) as soon as it is over; the file is written to go into docs/log.md as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from shardwise.methods.loss import Output, linear_cross_entropy, losses_and_gradient
from shardwise.models import attention, grouped
from shardwise.models.attention import MaskSpec
from shardwise.models.blockwise import Rule
from shardwise.models.config import model_spec, with_fields
from shardwise.models.hf_model import model_of
from shardwise.models.kernel_choice import able
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.prove import parity
from shardwise.runtime.metrics.measure import state_bytes
from shardwise.runtime.passes import finish_of
from shardwise.runtime.step import StepRules, step
from shardwise.runtime.world import world
from shardwise.spec.cluster import local_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Offload, Plan, Precision, Remat
from shardwise.techniques.pp.later import LaterProduct, WeightGradients

ONE = model_spec("gpu-first", 8192, 512, 1280, 6, 8, 2, 64)
ERRORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Of the largest element: a few roundings of the type (fp32: of its products), of probabilities above all."""
Lines = Iterator[str]


class Device:
    """Where the sections run, and how large they are."""

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.kind = "cpu" if rehearse else "cuda"
        self.device = torch.device(self.kind, 0) if not rehearse else torch.device("cpu")

    def wait(self) -> None:
        gpu.wait(self.device)

    def time_ms(self, work: Callable[[], Any], repeats: int = 10) -> float:
        """Milliseconds of ``work``, the median of ``repeats`` after two to warm up."""
        times = []
        for _ in range(2 + (1 if self.rehearse else repeats)):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times[2:])[len(times[2:]) // 2]

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """The most that torch had allocated while ``work`` ran, beyond what it had before; 0 on a CPU."""
        if self.rehearse:
            work()
            return 0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def machine(on: Device) -> Lines:
    """The device, its software, and two ceilings: copying and products in bf16, on random numbers."""
    python = sys.version.split()[0]
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {python}, {os.cpu_count()} cores"
    if not on.rehearse:
        is_a = torch.cuda.get_device_properties(on.device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"{is_a.name}, {is_a.total_memory / 2**30:.1f} GiB, sm{is_a.major}{is_a.minor}, NCCL {nccl}"
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        yield subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    size = 2**20 if on.rehearse else 2**30
    source = torch.randint(255, (size,), dtype=torch.uint8, device=on.device)
    target = torch.empty_like(source)
    copy_s = on.time_ms(lambda: target.copy_(source)) / 1e3
    n = 256 if on.rehearse else 8192
    a, b = (torch.randn(n, n, device=on.device).bfloat16() for _ in range(2))
    product_s = on.time_ms(lambda: a @ b) / 1e3
    copied, multiplied = 2 * size / copy_s / 1e9, 2 * n**3 / product_s / 1e12
    yield f"copy {copied:,.0f} GB/s read and written; bf16 products {multiplied:,.1f} TFLOP/s"


def masks(on: Device, s: int) -> dict[str, MaskSpec]:
    """One of every kind that a model may have, over two rows of ``s`` tokens."""
    lengths = [s // 6, 1, s - s // 6 - 1, s // 10, s - s // 10]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=on.device)
    documents: dict[str, Any] = {"documents": bounds, "longest": max(lengths)}
    return {
        "causal": MaskSpec(),
        "full": MaskSpec(causal=False),
        "documents": MaskSpec(**documents),
        "window": MaskSpec(window=s // 5),
        "documents, window": MaskSpec(window=s // 5, **documents),
        "soft cap": MaskSpec(soft_cap=20.0),
        "sinks": MaskSpec(sinks=torch.randn(6, device=on.device), window=s // 5),
    }


def attention_numbers(on: Device) -> Lines:
    """Output, log-sum-exp and gradients of every kernel, kind of mask and dtype against the reference in fp64."""
    s = 64 if on.rehearse else 640
    yield from ("| mask | kernel | dtype | output | log-sum-exp | gradients | |", "|---|---|---|---|---|---|---|")
    for name, mask in masks(on, s).items():
        for dtype, most in ERRORS.items():
            torch.manual_seed(0)
            shapes = [(2, s, heads, 64) for heads in (6, 2, 2)]
            q, k, v = (torch.randn(shape, device=on.device).to(dtype).transpose(1, 2) for shape in shapes)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
            right, right_lse = inner(wide, mask, "blockwise")
            grad = torch.randn(right.shape, device=on.device).to(dtype)
            right_grads = torch.autograd.grad(right, wide, grad.double())
            for kernel in serving(on, q, mask):
                out, lse = inner([q, k, v], mask, kernel)
                grads = torch.autograd.grad(out, (q, k, v), grad)
                found = [error(out, right), error(lse, right_lse)]
                found.append(max(error(a, b) for a, b in zip(grads, right_grads, strict=True)))
                verdict = "" if found[0] < most and found[2] < most and found[1] < min(most, 1e-3) else "WRONG"
                errors = " | ".join(f"{e:.1e}" for e in found)
                yield f"| {name} | {kernel} | {dtype} | {errors} | {verdict} |".replace("torch.", "")


def parts(on: Device) -> Lines:
    """The same for the tokens of two ranks, which are others, and not as many; and how long each takes."""
    unit = 16 if on.rehearse else 1024
    yield from ("| queries | keys | window | kernel | dtype | output | gradients | forward ms | |", "|---" * 9 + "|")
    shapes = [(unit, unit, unit, None), (unit // 2, unit, unit, None), (unit // 4, unit, unit, unit // 2)]
    for (queries, keys, apart, window), (dtype, most) in product(shapes, ERRORS.items()):
        torch.manual_seed(0)
        sizes = [(1, tokens, heads, 64) for tokens, heads in ((queries, 8), (keys, 2), (keys, 2))]
        q, k, v = (torch.randn(size, device=on.device).to(dtype).transpose(1, 2).requires_grad_() for size in sizes)
        rule = Rule(None, None, None, False, window, 0, None, apart=apart)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        right, _ = attention.attention(*wide, *rule._replace(kernel="blockwise"))
        grad = torch.randn(right.shape, device=on.device).to(dtype)
        right_grads = torch.autograd.grad(right, wide, grad.double())
        attention.prepare(on.device, "fa3")
        for kernel in able(attention.case_of(q, rule), attention.present(on.device, "cudnn")):
            run = partial(attention.attention, q, k, v, *rule._replace(kernel=kernel))
            out, _ = run()
            grads = torch.autograd.grad(out, (q, k, v), grad)
            found = error(out, right), max(error(a, b) for a, b in zip(grads, right_grads, strict=True))
            with torch.no_grad():
                taken_ms = on.time_ms(run)
            told = f"| {queries} | {keys} | {window or ''} | {kernel} | {str(dtype).removeprefix('torch.')} | "
            verdict = "" if max(found) < most else "WRONG"
            yield told + f"{found[0]:.1e} | {found[1]:.1e} | {taken_ms:.3f} | {verdict} |"


def inner(tensors: list[Tensor], mask: MaskSpec, kernel: str) -> tuple[Tensor, Tensor]:
    """Attention by one kernel."""
    return attention.Attention.inner(None, *tensors, replace(mask, kernel=kernel))  # type: ignore[arg-type]


def serving(on: Device, q: Tensor, mask: MaskSpec) -> tuple[str, ...]:
    """The kernels that compute this mask here, the one that is taken first."""
    rule = Rule(mask.documents, None, None, mask.causal, mask.window, mask.longest, mask.soft_cap)
    attention.prepare(on.device, "fa3")
    return able(attention.case_of(q, rule), attention.present(on.device, "cudnn"))


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right).abs().max() / right.abs().max())


def experts(on: Device) -> Lines:
    """Products of rows that are sorted by expert, against one product after another in fp64: values and gradients, some
    experts without rows; how long each takes, and one product of as many operations beside it."""
    shapes = (
        [(64, 4, 32, 48)]
        if on.rehearse
        else [(32_768, 128, 768, 2048), (8192, 32, 2880, 2880), (8192, 8, 14_336, 4096)]
    )
    yield from (
        "| rows | experts | n | k | dtype | served | output | gradients | grouped ms | one product ms | |",
        "|---" * 11 + "|",
    )
    for (rows, count, n, k), dtype in product(shapes, (torch.float32, torch.bfloat16)):
        torch.manual_seed(0)
        shares = torch.rand(count, device=on.device).softmax(0) * (torch.arange(count, device=on.device) != 1)
        counts = (shares / shares.sum() * rows).long()
        counts[0] += rows - counts.sum()
        x, weight = (torch.randn(size, device=on.device).to(dtype) for size in ((rows, k), (count, n, k)))
        grad = torch.randn(rows, n, device=on.device).to(dtype)
        found, right = [], []
        for values, kind in ((found, dtype), (right, torch.float64)):
            given = [each.to(kind).requires_grad_() for each in (x, weight)]
            out = grouped.grouped(*given, counts)
            values += [out.detach(), *torch.autograd.grad(out, given, grad.to(kind))]
        errors = [error(a, b) for a, b in zip(found, right, strict=True)]
        with torch.no_grad():
            taken_ms = on.time_ms(partial(grouped.grouped, x, weight, counts))
            one_ms = on.time_ms(partial(torch.matmul, x, weight[0].t()))
        fine = max(errors) < ERRORS[dtype]
        told = f"| {rows} | {count} | {n} | {k} | {str(dtype).removeprefix('torch.')} | {grouped.served(x, n)} | "
        told += f"{errors[0]:.1e} | {max(errors[1:]):.1e} | {taken_ms:.3f} | {one_ms:.3f} | "
        yield told + f"{'' if fine else 'WRONG'} |"


def numbers(on: Device) -> Lines:
    """A few steps on the device against the same on one CPU process, by a plain loop."""
    cases = {"fp64": (Precision("fp64", "fp64", "fp64"), 5), "fp32": (Precision(), 1), "bf16": (Precision("bf16"), 1)}
    yield from ("| compute | recompute | | loss | first gradients | 1 - cosine | |", "|---|---|---|---|---|---|---|")
    ways = [(Remat(), False), (Remat("selective"), False), (Remat("full"), False), (Remat(), True)]
    with world(Layout(), "cpu" if on.rehearse else "cuda", 60.0):
        for name, (precision, steps) in cases.items():
            for remat, compiled in ways[: 1 if on.rehearse else 3 if name == "fp64" else 4]:
                plan = Plan(batch=Batch(4, 2, 64, 24), precision=precision, remat=remat, compile=compiled)
                right = parity.plain(parity.job_of(ONE, plan, steps))
                found = parity.compare(right, [parity.take_steps(0, ONE, plan, steps, on.device)])
                limits = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 1e-4), "bf16": (1e-2, float("inf"))}[name]
                fine = found.loss.error < limits[0] and found.gradient.error < limits[1] and found.turn.error < 3e-3
                errors = " | ".join(f"{worst.error:.1e}" for worst in (found.loss, found.gradient, found.turn))
                how = "compiled" if compiled else "eager"
                yield f"| {name} | {remat.mode} | {how} | {errors} | {'' if fine else 'WRONG'} |"


def memory(on: Device) -> Lines:
    """Bytes at the peak of the fourth step, predicted and measured, in MiB; what is held by category."""
    yield "| recompute | weights | | predicted | allocated | | reserved | weights, moments: predicted | measured |"
    yield "|---|---|---|---|---|---|---|---|---|"
    model = gpu.REHEARSAL if on.rehearse else gpu.REHEARSAL | {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    seq_len = 64 if on.rehearse else 2048
    for mode in ("none", "selective", "full"):
        for weights, compiled in (("fp32", False), ("bf16", False), ("bf16", True)):
            if compiled and on.rehearse:
                continue
            recipe = gpu.Recipe.model_validate(
                {
                    "model": {"config": model}, "recompute": {"mode": mode}, "compile": compiled,
                    "precision": {"compute": "bf16", "weights": weights}, "run": {"device": on.kind},
                    "train": {"seq_len": seq_len, "micro_batch_size": 4, "gradient_accumulation_steps": 1},
                }
            )  # fmt: skip
            plan = choose(recipe, resolve(recipe), local_cluster(nproc=1, device=on.kind))
            most, held = steps_of(on, recipe, plan)
            predicted = plan.estimate.allocated_bytes
            off = f"{most[0] / predicted - 1:+.1%}"
            says, has = (", ".join(f"{mib(of[key])}" for key in held) for of in (plan.estimate.memory, held))
            how = "compiled" if compiled else "eager"
            row = [mode, weights, how, mib(predicted), mib(most[0]), off, mib(most[1]), says, has]
            yield f"| {' | '.join(row)} |"


def on_host(on: Device) -> Lines:
    """Losses and gradient norms of steps with the optimizer on the host, and with blocks' inputs and weights there,
    against those with all on the device: five in fp64, two in fp32, whose rounding AdamW's first updates blow up; then,
    in bf16, how long a step takes and the most that is allocated, predicted and measured."""
    with world(Layout(), "cpu" if on.rehearse else "cuda", 60.0):
        for name, steps, limit in (("fp64", 5, 1e-9), ("fp32", 2, 1e-4)):
            precision = Precision("fp64", "fp64", "fp64") if name == "fp64" else Precision()
            plan = Plan(batch=Batch(2, 2, 64, 24), precision=precision, remat=Remat("full"))
            right = parity.take_steps(0, ONE, plan, steps, on.device)
            half, outside = Offload("host", optimizer_fraction=0.5), Offload("host", weights="host", sums="host")
            filed = Offload("none", "nvme"), Offload("nvme", "nvme", "nvme")
            for offload in (Offload("host"), half, Offload("none", "host"), *filed, outside, Offload(weights="host")):
                if offload.optimizer == "none" and offload.weights != "none":
                    plan = replace(plan, lora=Lora(4, 8.0))
                    right = parity.take_steps(0, ONE, plan, steps, on.device)
                found = parity.take_steps(0, ONE, replace(plan, offload=offload), steps, on.device)
                pairs = zip(right.losses + right.norms, found.losses + found.norms, strict=True)
                off = max(abs(b / a - 1) for a, b in pairs)
                wrong = "" if off <= limit else " WRONG"
                yield f"{name}, {' and '.join(offload.words)}: losses and norms differ by {off:.1e} at most{wrong}"
    model = gpu.REHEARSAL if on.rehearse else gpu.REHEARSAL | {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    seq_len, taken = 64 if on.rehearse else 2048, list[float]()
    head = "| optimizer | activations | adapters, frozen | step ms | predicted | allocated, MiB | predicted |"
    yield from ("", head, "|---|---|---|---:|---:|---:|---:|")
    cases = [("none", "none", ""), ("host", "none", ""), ("none", "host", "")]
    for where, inputs, frozen in [*cases, ("none", "none", "none"), ("none", "none", "host")]:
        recipe = gpu.Recipe.model_validate(
            {
                "model": {"config": model}, "recompute": {"mode": "full"}, "compile": False,
                "offload": {"optimizer": where, "activations": inputs, "weights": frozen or "none"},
                "lora": {"rank": 16} if frozen else {},
                "precision": {"compute": "bf16"}, "run": {"device": on.kind},
                "train": {"seq_len": seq_len, "micro_batch_size": 4, "gradient_accumulation_steps": 1},
            }
        )  # fmt: skip
        plan = choose(recipe, resolve(recipe), local_cluster(nproc=1, device=on.kind))
        assert plan.estimate.seconds is not None
        step_ms, most = timed_steps(on, recipe, plan)
        taken.append(step_ms)
        figures = f"{step_ms:,.1f} | {1e3 * plan.estimate.seconds.step_s:,.1f} | {mib(most)}"
        yield f"| {where} | {inputs} | {frozen} | {figures} | {mib(plan.estimate.allocated_bytes)} |"
    ratios = zip(("the optimizer", "inputs", "frozen weights"), (1, 2, 4), (0, 0, 3), strict=True)
    said = (f"with {what} there {taken[one] / taken[other]:.2f}" for what, one, other in ratios)
    yield from ("", f"Times as long as with all on the device: {', '.join(said)}.")


def timed_steps(on: Device, recipe: Any, plan: Plan) -> tuple[float, int]:
    """Of six steps the milliseconds of the last four's median, and the most that was allocated in these."""
    spec, taken = resolve(recipe), list[float]()
    with world(plan.layout, "cpu" if on.rehearse else "cuda", 60.0) as mesh:
        state = gpu.random_state(recipe, spec, plan, mesh, on.device)
        rules = StepRules(plan, mesh, recipe.optim, 10, finish_of(recipe.method, plan))
        for number in range(6):
            batch = gpu.random_batch(spec, plan, None, number).to(on.device)
            if number == 2 and not on.rehearse:
                torch.cuda.reset_peak_memory_stats(on.device)
            on.wait()
            begun = time.perf_counter()
            step(state, [batch], batch.ids.numel(), rules)
            on.wait()
            taken.append(1e3 * (time.perf_counter() - begun))
        most = 0 if on.rehearse else torch.cuda.max_memory_allocated(on.device)
        del state
    if not on.rehearse:
        torch.cuda.empty_cache()
    return sorted(taken[2:])[2], most


def steps_of(on: Device, recipe: Any, plan: Plan) -> tuple[tuple[int, int], dict[str, int]]:
    """Four steps: the most allocated and reserved in the last, and what weights and moments hold."""
    spec = resolve(recipe)

    with world(plan.layout, "cpu" if on.rehearse else "cuda", 60.0) as mesh:
        state = gpu.random_state(recipe, spec, plan, mesh, on.device)
        rules = StepRules(plan, mesh, recipe.optim, 10, finish_of(recipe.method, plan))
        for number in range(4):
            if not on.rehearse:
                torch.cuda.reset_peak_memory_stats(on.device)
            batch = gpu.random_batch(spec, plan, None, number).to(on.device)
            step(state, [batch], batch.ids.numel(), rules)
        held = state_bytes(state)
    if on.rehearse:
        return (0, 0), held
    most = torch.cuda.max_memory_allocated(on.device), torch.cuda.max_memory_reserved(on.device)
    del state
    torch.cuda.empty_cache()
    return most, held


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def speed(on: Device) -> Lines:
    """bench/gpu.py: a 1 B eager and compiled, with documents and by the whole loop, then an 8 B."""
    one, eight = ["--model", "llama-3.2-1b", "--micro-batch", "1", "4"], ["--model", "llama-3.1-8b"]
    runs = [one, [*one, "--eager"], [*one[:3], "4", "--documents", "512", "--loop"]]
    runs += [[*eight, "--weights", "bf16", "--recompute", "selective"], [*eight, "--weights", "bf16"]]
    if on.rehearse:
        runs = [["--rehearse", "--steps", "2", "--documents", "40", "--loop"]]
    for words in runs:
        command = [sys.executable, str(Path(gpu.__file__)), *words]
        ended = subprocess.run(command, env=gpu.child_variables(), capture_output=True, text=True, check=False)
        yield from ("```", f"$ python bench/gpu.py {' '.join(words)}", *ended.stdout.splitlines())
        yield from (*(ended.stderr.splitlines()[-5:] if ended.returncode else ()), "```")


def one_step(on: Device) -> Lines:
    """A step of the 1 B: kernels by name, the time in which none ran, and what made the CPU wait."""
    words = ["--rehearse"] if on.rehearse else ["--model", "llama-3.2-1b"]
    asked = gpu.arguments().parse_args([*words, "--micro-batch", "1" if on.rehearse else "4"])
    recipe = gpu.recipe_of(asked.model[0], asked.micro_batch[0], asked)
    plan, spec = choose(recipe, resolve(recipe), local_cluster(nproc=1, device=on.kind)), resolve(recipe)

    with world(plan.layout, "cpu" if on.rehearse else "cuda", 60.0) as mesh:
        state = gpu.random_state(recipe, spec, plan, mesh, on.device)
        rules, batch = (
            StepRules(plan, mesh, recipe.optim, 20, finish_of(recipe.method, plan)),
            gpu.random_batch(spec, plan, None, 0).to(on.device),
        )

        def run() -> None:
            step(state, [batch], batch.ids.numel(), rules)

        step_ms = on.time_ms(run, 5)
        activities = [ProfilerActivity.CPU] if on.rehearse else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as profiler:
            run()
            on.wait()
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            if not on.rehearse:
                torch.cuda.set_sync_debug_mode("warn")
            run()
            if not on.rehearse:
                torch.cuda.set_sync_debug_mode("default")
    events, ran_on = profiler.key_averages(), DeviceType.CPU if on.rehearse else DeviceType.CUDA
    time_us = (lambda event: event.self_cpu_time_total) if on.rehearse else (lambda event: event.self_device_time_total)
    rows = [(event.key, event.count, time_us(event)) for event in events if event.device_type == ran_on]
    rows = [row for row in rows if on.rehearse or not row[0].startswith("Optimizer.step")]  # a span, not a kernel
    busy_ms = sum(us for _, _, us in rows) / 1e3
    predicted_ms = 1e3 * (plan.estimate.seconds.step_s if plan.estimate.seconds else 0.0)
    yield f"{gpu.described(plan)}: {step_ms:,.1f} ms ({predicted_ms:,.1f} predicted), a kernel runs in {busy_ms:,.1f}"
    calls = sum(event.count for event in events if "LaunchKernel" in event.key)
    waited = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits if "called a synchroniz" in str(w.message))
    yield f"{calls} launches; the CPU waits for the device at: {dict(waited) or 'nothing'}"
    yield from ("", "| kernel | calls | ms |", "|---|---:|---:|")
    for name, count, us in sorted(rows, key=lambda row: -row[2])[:25]:
        yield f"| `{name[:90]}` | {count} | {us / 1e3:,.2f} |"


def kernels(on: Device) -> Lines:
    """One layer of an 8 B, 4,096 tokens, bf16: every kernel of torch side by side, and what Shardwise takes."""
    s, h, hk, e = (64, 4, 2, 32) if on.rehearse else (4096, 32, 8, 128)
    shapes = [(1, s, heads, e) for heads in (h, hk, hk)]
    q, k, v = (torch.randn(x, device=on.device).bfloat16().transpose(1, 2).requires_grad_() for x in shapes)
    yield from ("| kernel | forward, ms | backward, ms | TFLOP/s of both |", "|---|---:|---:|---:|")

    def row(name: str, call: Callable[[], Tensor], share: float = 1.0) -> str:
        try:
            out = call()
            grad = torch.randn_like(out)
            times = [on.time_ms(call), on.time_ms(lambda: torch.autograd.grad(call(), (q, k, v), grad))]
        except (RuntimeError, NotImplementedError) as problem:
            return f"| {name} | not here: {' '.join(str(problem).split())[:80]} | | |"
        backward = times[1] - times[0]
        rate = 3.5 * 2 * s * s * e * h * share / times[1] / 1e9
        return f"| {name} | {times[0]:.3f} | {backward:.3f} | {rate:,.0f} |"

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def dense(chosen: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(chosen):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield row(f"torch {backend.name.lower()}", dense)
    ours = {name: mask for name, mask in masks(on, s // 2).items() if name in ("causal", "window", "soft cap")}
    documents = [0, *accumulate([s // 8] * 8)]
    bounds = torch.tensor(documents, dtype=torch.int32, device=on.device)
    ours["documents"] = MaskSpec(documents=bounds, longest=s // 8)
    for name, mask in ours.items():
        share = {"documents": 1 / 8, "window": 0.19}.get(name, 1.0)
        for kernel in serving(on, q, mask):
            yield row(f"shardwise, {name}, {kernel}", lambda m=mask, by=kernel: inner([q, k, v], m, by)[0], share)  # type: ignore[misc]


def loss_chunks(on: Device) -> Lines:
    """Output layer and loss of an 8 B at 4,096 tokens, by the number of tokens in a chunk, eager and compiled."""
    tokens, vocabulary, hidden_size = (64, 512, 32) if on.rehearse else (4096, 128_256, 4096)
    hidden = torch.randn(tokens, hidden_size, device=on.device).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, device=on.device).mul_(0.02).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=on.device)
    compiled = torch.compile(losses_and_gradient, fullgraph=True)
    heads = Output(weight), Output(weight, between=compiled)
    yield from ("| tokens in a chunk | ms | compiled | peak, MiB | compiled |", "|---:|---:|---:|---:|---:|")
    for chunk in (tokens // 16, tokens // 8, tokens // 4, tokens // 2, tokens):

        def work(head: Output, size: int = chunk) -> None:
            hidden.grad = weight.grad = None
            linear_cross_entropy(hidden, head, labels, size).backward()

        sides = [partial(work, head) for head in heads]
        times, peaks = [f"{on.time_ms(side):,.2f}" for side in sides], [mib(on.peak_bytes(side)) for side in sides]
        yield f"| {chunk} | {' | '.join([*times, *peaks])} |"


def halves(on: Device) -> Lines:
    """A backward in two halves, as zero-bubble pipelines make it, beside a whole one: gradients, time, and peak."""
    spec = with_fields(ONE, vocab_size=300, hidden_size=64, intermediate_size=96, head_dim=8) if on.rehearse else ONE
    rows, tokens = (1, 32) if on.rehearse else (4, 2048)
    torch.manual_seed(0)
    model = model_of(spec).to(on.device, torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(spec.vocab_size, (rows, tokens), device=on.device)
    positions = torch.arange(tokens, device=on.device).expand(rows, -1)
    out_grad = torch.randn(rows, tokens, spec.vocab_size, device=on.device).bfloat16()

    def gradients(later: WeightGradients | None) -> list[Tensor]:
        model.zero_grad()
        products: list[LaterProduct] = []
        with later.collecting(products) if later else nullcontext():
            model(ids, positions, MaskSpec()).backward(out_grad)
        if later:
            later.run(products)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    whole = gradients(None)
    whole_ms, whole_peak = on.time_ms(lambda: gradients(None)), on.peak_bytes(lambda: gradients(None))
    later = WeightGradients()
    later.watch(model)
    split = gradients(later)
    worst = max(error(found, right) for found, right in zip(split, whole, strict=True))
    wrong = "" if len(split) == len(whole) and worst <= ERRORS[torch.bfloat16] else " WRONG"
    yield f"gradients of {len(split)} weights differ by {worst:.1e} at most{wrong}"
    yield from ("| backward | ms | peak, MiB |", "|---|---:|---:|")
    yield f"| whole | {whole_ms:,.2f} | {mib(whole_peak)} |"
    split_ms, split_peak = on.time_ms(lambda: gradients(later)), on.peak_bytes(lambda: gradients(later))
    yield f"| in halves | {split_ms:,.2f} | {mib(split_peak)} |"


def real_run(on: Device) -> Lines:
    """30 steps with asynchronous saves, whole; then the same killed on its way and resumed; what both say."""
    model = gpu.REHEARSAL if on.rehearse else gpu.REHEARSAL | {
        "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    recipe = {
        "model": {"config": model}, "checkpoint": {"save_steps": 10}, "evaluate": {"max_batches": 1},
        "data": {"path": "stdlib", "tokenizer": {"vocab_size": gpu.VOCABULARY}},
        "train": {"seq_len": 128 if on.rehearse else 4096, "micro_batch_size": 2, "max_steps": 30},
        "run": {"device": on.kind, "nproc": 1},
    }  # fmt: skip
    with TemporaryDirectory() as directory:
        path = Path(directory, "first.json")
        path.write_text(json.dumps(recipe))

        def command(name: str) -> list[str]:
            return [sys.executable, "-m", "shardwise", "train", str(path), f"run.name={name}", f"run.out={directory}"]

        whole = subprocess.run(command("whole"), env=gpu.child_variables(), capture_output=True, text=True, check=False)
        yield from ("```", *whole.stdout.splitlines()[-40:], *whole.stderr.splitlines()[-10:], "```")
        cut = Path(directory, "cut")
        kill_at(15, command("cut"), cut / "metrics.jsonl")
        again = subprocess.run(
            [*command("cut"), "--resume"], env=gpu.child_variables(), capture_output=True, text=True, check=False
        )
        if whole.returncode or again.returncode:
            yield f"exit codes {whole.returncode} and {again.returncode}: {again.stdout[-1500:]}{again.stderr[-1500:]}"
            return
        right, found = (losses(Path(directory, name, "metrics.jsonl")) for name in ("whole", "cut"))
    off = max(abs(found[number] / loss - 1) for number, loss in right.items())
    same = sum(found[number] == loss for number, loss in right.items())
    yield f"Killed at step 15 and resumed: {same} of {len(right)} losses are bitwise the same, at worst {off:.1e} off."


def kill_at(number: int, command: Sequence[str], metrics: Path) -> None:
    """SIGKILL for the launcher, and so for its ranks, once ``metrics`` has ``number`` steps."""
    process = subprocess.Popen(
        command, env=gpu.child_variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= number):
        time.sleep(0.01)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def losses(metrics: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


SECTIONS: dict[str, tuple[Callable[[Device], Lines], float]] = {
    "machine": (machine, 60),
    "attention": (attention_numbers, 180),
    "parts": (parts, 45),
    "experts": (experts, 45),
    "numbers": (numbers, 120),
    "memory": (memory, 120),
    "host": (on_host, 150),
    "step": (one_step, 90),
    "kernels": (kernels, 60),
    "loss": (loss_chunks, 150),
    "halves": (halves, 60),
    "speed": (speed, 300),
    "run": (real_run, 150),
}
"""Each with the most seconds that it may take."""


def main() -> None:
    """Run the sections one after another, or, of a section's own process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for all sections together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-first.md"))
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.section:
        for line in SECTIONS[asked.section][0](Device(asked.rehearse)):
            print(line, flush=True)
        return
    if not asked.rehearse and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; `--rehearse` runs all of it, tiny, on the CPU")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    end = time.monotonic() + 60 * asked.minutes
    with asked.out.open("w", encoding="utf-8") as file:
        for name in asked.only:
            for line in section(name, asked.rehearse, end - time.monotonic(), failed):
                print(line, flush=True)
                file.write(f"{line}\n")
                file.flush()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def section(name: str, rehearse: bool, left_s: float, failed: list[str]) -> Lines:
    """What the process of one section printed, with its heading, and of one that failed its last lines. One that finds
    no time left is stopped as it begins, and so named."""
    function, limit_s = SECTIONS[name]
    limit_s = max(0.0, min(limit_s, left_s))
    command = [sys.executable, __file__, "--section", name] + ["--rehearse"] * rehearse
    begun = time.perf_counter()
    yield from (f"### {name}", "", " ".join((function.__doc__ or "").split()), "")
    process = subprocess.Popen(
        command, env=gpu.child_variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, problems = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, problems = process.communicate()
        problems += f"\nstopped after {limit_s:.0f} s"
    yield from out.splitlines()
    if process.returncode:
        failed.append(name)
        yield from ("", f"FAILED ({process.returncode}):", "```", *problems.splitlines()[-15:], "```")
    elif "WRONG" in out:
        failed.append(name)
    yield from ("", f"({time.perf_counter() - begun:.0f} s)", "")


if __name__ == "__main__":
    main()
