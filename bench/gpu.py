"""Tokens a second and MFU of a 1 B and an 8 B Llama at 4,096 tokens, under the plan that the planner chooses.

    python bench/gpu.py [--model llama-3.2-1b ...] [--micro-batch 1] [--steps 10] [--compile]
    torchrun --nproc-per-node 8 bench/gpu.py            # all GPUs of a machine

Random weights and random tokens, each row one document; median of the steps after three to warm up. MFU counts the
arithmetic of the model, recomputation not included, over the bf16 peak of the device. ``memory`` is the most that torch
had allocated, beside what was predicted. A model that does not fit is said not to and left out; without a CUDA device
nothing is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.methods import pretrain
from shardwise.models.config import ModelSpec
from shardwise.models.load import load_spec
from shardwise.planner.price import CUDA_RESERVE_BYTES
from shardwise.planner.search import choose
from shardwise.runtime.build import build
from shardwise.runtime.metrics import flops_per_token
from shardwise.runtime.step import Rules, step
from shardwise.runtime.world import device_of, process, world
from shardwise.spec.cluster import local_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

WARM_UP = 3
SEQ_LEN = 4096


def main() -> None:
    """Measure every model asked for and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-3.2-1b", "llama-3.1-8b"])
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    cluster = local_cluster(nproc=process().world_size, device="cuda")
    for name in asked.model:
        spec = load_spec(name)
        train = {"seq_len": SEQ_LEN, "micro_batch_size": asked.micro_batch, "gradient_accumulation_steps": 1}
        recipe = Recipe.model_validate(
            {"model": {"path": name, "init": "random"}, "train": train, "compile": asked.compile}
        )
        plan = choose(recipe, spec, cluster)
        line = f"{name}: {cluster}, {plan.shard.strategy}, recompute {plan.remat.mode}, {plan.precision.compute}"
        if plan.estimate.peak_bytes > plan.estimate.capacity_bytes:
            say(f"{line}: does not fit, {gib(plan.estimate.peak_bytes)} of {gib(plan.estimate.capacity_bytes)}")
            continue
        with world(plan.layout, "cuda", 600.0) as mesh:
            seconds, peak = measure(recipe, spec, plan, mesh, asked.steps)
        rate = plan.batch.global_batch_size(plan.layout.dp) * SEQ_LEN / seconds
        mfu = rate * flops_per_token(spec, plan) / (cluster.device.bf16_flops * plan.layout.world or float("nan"))
        predicted = plan.estimate.peak_bytes - CUDA_RESERVE_BYTES
        say(f"{line}: {rate:,.0f} tokens/s, MFU {mfu:.1%}, {seconds * 1e3:,.0f} ms a step")
        say(f"    memory {gib(predicted)} predicted, {gib(peak)} measured ({peak / predicted - 1:+.1%})")


def measure(recipe: Recipe, spec: ModelSpec, plan: Plan, mesh: Any, steps: int) -> tuple[float, int]:
    """Median seconds of a step, and the most bytes allocated, on this rank."""
    device = device_of("cuda")
    shape = (plan.batch.micro_batch_size, plan.batch.seq_len)

    def loss(model: Any, batch: MicroBatch, denominator: float) -> Tensor:
        return pretrain.loss(model, batch, plan.batch.loss_chunk_tokens, denominator)

    state = build(recipe, spec, plan, mesh, device)
    rules = Rules(plan, recipe.optim, WARM_UP + steps, loss)
    ids = torch.randint(spec.vocab_size, shape, device=device)
    positions = torch.arange(shape[1], device=device).expand(shape).contiguous()
    batches = [MicroBatch(ids, ids.roll(-1, 1), positions, None, shape[1])] * plan.batch.accumulation
    supervised = plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len
    times = []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        step(state, batches, supervised, rules)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:]), torch.cuda.max_memory_allocated(device)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def say(line: str) -> None:
    """Once, not once a rank."""
    if process().rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
