"""A step over two stages against a plain loop of torch's own pipeline, on two gloo ranks of one thread each, and how
much of it ranks idle beside what the plan draws.

    python bench/pipeline.py [--pairs 20] [--micro-batches 8] [--json FILE]

The model, the optimizer and the rounds are those of bench/step.py, in fp32 under 1f1b. The plain loop has the same
modules (the decoder's parts, from the same weights) in a ``PipelineStage`` each, under ``Schedule1F1B``, with
cross-entropy of full logits, clipping by the norm of both stages, and AdamW(fused=True). Shardwise runs the plan that
the planner chooses, through techniques.apply and runtime.step.

A rank idles while it waits for what the other sends: from the phases that the runtime tells, over so many steps. Drawn
is the idle share that ``plan --explain schedule`` shows, of a replay with the planner's seconds of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import step
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import meshes
from shardwise.models import init
from shardwise.models.attention import MaskSpec
from shardwise.models.hf_model import model_of
from shardwise.planner.search import choose
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.seconds.stages import pipeline_times
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.step import step as train_step
from shardwise.spec.cluster import local_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import stages_of
from shardwise.spec.recipe import Method, Parallel, PrecisionSection, Recipe, Recompute, Run, Train

Phases = list[tuple[float, str]]
"""When a rank began what."""


def plan_of(micro_batches: int) -> Plan:
    recipe = Recipe(
        run=Run(device="cpu", nproc=step.WORLD),
        train=Train(seq_len=step.SEQ_LEN, micro_batch_size=1, gradient_accumulation_steps=micro_batches),
        optim=step.OPTIM,
        parallel=Parallel(pp=step.WORLD, schedule="1f1b"),
        precision=PrecisionSection(compute="fp32", matmul="highest"),
        recompute=Recompute(mode="none"),
        compile=False,
    )
    return choose(recipe, step.SPEC, local_cluster(step.WORLD, "cpu"))


def labels_of(ids: Tensor) -> Tensor:
    return functional.pad(ids[:, 1:], (0, 1), value=-100)


def batches_of(ids: Tensor, plan: Plan) -> list[MicroBatch]:
    size, length = plan.batch.micro_batch_size, ids.shape[1]
    positions = torch.arange(length).expand(size, length)
    return [MicroBatch(each, labels_of(each), positions, None, size * length) for each in ids.split(size)]


def shardwise(plan: Plan, phases: Phases | None = None) -> step.Step:
    """The product: the runtime's step over the parts that the techniques made."""
    groups = meshes(plan.layout, "cpu")
    state = build(Recipe(optim=step.OPTIM), step.SPEC, plan, groups, torch.device("cpu"))

    def enter(phase: str) -> None:
        if phases is not None:
            phases.append((time.perf_counter(), phase))

    rules = StepRules(plan, groups, step.OPTIM, 10_000, finish_of(Method(), plan), enter)

    def train(ids: Tensor) -> float:
        batches = batches_of(ids, plan)
        supervised, _ = reduce.count_supervised(groups, sum(batch.supervised_tokens() for batch in batches))
        return train_step(state, batches, supervised, rules).loss

    return train


class Stage(nn.Module):
    """A part of the decoder that takes ids or hidden states, as ``PipelineStage`` asks for."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        self.first = rank == 0
        blocks = stages_of(plan.pipeline.split)[rank]
        self.part: Any = model_of(step.SPEC, blocks, embedding=self.first, head=rank == step.WORLD - 1)
        with torch.no_grad():
            for name, parameter in self.part.named_parameters():
                shape = tuple(parameter.shape)
                whole = tuple(slice(0, size) for size in shape)
                parameter.copy_(init.fill(name, shape, whole, Run().seed, step.SPEC))

    def forward(self, given: Tensor) -> Tensor:
        positions = torch.arange(step.SEQ_LEN).expand(given.shape[0], -1)
        ids, hidden = (given, None) if self.first else (torch.zeros(given.shape[:2], dtype=torch.int64), given)
        logits: Tensor = self.part(ids, positions, MaskSpec(), None, hidden)
        return logits


def plain(plan: Plan) -> step.Step:
    """What the pages of torch.distributed.pipelining say to write."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, last, optim = dist.get_rank(), step.WORLD - 1, step.OPTIM
    model = Stage(plan, rank)
    stage = PipelineStage(model, rank, step.WORLD, torch.device("cpu"))
    tokens = plan.batch.accumulation * plan.batch.micro_batch_size * (step.SEQ_LEN - 1)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    schedule = Schedule1F1B(stage, plan.batch.accumulation, loss_fn=loss_of, scale_grads=False)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = optim.beta1, optim.beta2
    optimizer = torch.optim.AdamW(groups, optim.learning_rate, betas, optim.eps, optim.weight_decay, fused=True)

    def clip() -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(squared)
        assert optim.max_grad_norm is not None
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), optim.max_grad_norm, squared.sqrt())

    def train(ids: Tensor) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels_of(ids), losses=losses)
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told = torch.stack(losses).sum().detach() if rank == last else torch.zeros(())
        dist.all_reduce(told)
        return float(told)

    return train


class Case(step.Case):
    """All rows of a step."""

    @property
    def rows(self) -> int:
        return self.plan.batch.micro_batch_size * self.plan.batch.accumulation


def times(rank: int, world: int, case: Case, rounds: int) -> dict[str, step.Times]:
    """What the steps of each side take; both ranks see the same rows."""
    step.SIDES.update({"shardwise": shardwise, "torch's 1f1b": plain})
    return step.times(0, world, case, rounds)


def idle(rank: int, world: int, case: Case, steps: int) -> float:
    """The share of its passes that a rank waits for the other."""
    torch.set_num_threads(1)
    phases: Phases = []
    train = shardwise(case.plan, phases)
    generator = torch.Generator().manual_seed(0)
    shares = []
    for number in range(step.WARMUP + steps):
        ids = torch.randint(step.SPEC.vocab_size, (case.rows, step.SEQ_LEN), generator=generator)
        dist.barrier()
        phases.clear()
        begun_s = time.perf_counter()
        train(ids)
        end_s = next(at_s for at_s, phase in phases if phase in ("clip", "reduce", "optimizer"))
        passes = [(begun_s, "waits"), *((at_s, phase) for at_s, phase in phases if at_s < end_s), (end_s, "")]
        waited = sum(after - before for (before, phase), (after, _) in pairwise(passes) if phase.startswith("waits"))
        if number >= step.WARMUP:
            shares.append(waited / (end_s - begun_s))
    return statistics.median(shares)


def drawn(plan: Plan) -> Sequence[float]:
    """What ``plan --explain schedule`` shows, of each rank."""
    cluster = local_cluster(step.WORLD, "cpu")
    return pipeline_times(step.SPEC, plan, cluster, own_traits()).step.idle_shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    plan = plan_of(chosen.micro_batches)
    case = Case("pp-fp32", plan, ("shardwise", "torch's 1f1b"))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"stages of {plan.pipeline.split} blocks, {chosen.micro_batches} micro-batches of {step.SEQ_LEN} tokens")
    result = step.Result(case.name, chosen.pairs, plan.batch.loss_chunk_tokens)
    with RankPool(step.WORLD) as pool:
        step.compare(result, case, pool.run(times, case, chosen.pairs, timeout_s=3600))
        step.line(step.HEADER)
        step.show(result, case)
        measured: Any = pool.run(idle, case, chosen.pairs, timeout_s=3600)
    for rank, (waits, draws) in enumerate(zip(measured, drawn(plan), strict=True)):
        print(f"rank {rank} idles {waits:.1%} of its passes, drawn {draws:.1%}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        told = asdict(replace(result)) | {"idle": measured, "drawn": list(drawn(plan))}
        chosen.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
