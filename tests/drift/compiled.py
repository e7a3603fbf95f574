"""What a rank of the pool does to measure a compiled step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.fake_run import Sent, StepBytes
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.metrics.measure import Meter, state_bytes
from shardwise.runtime.passes import finish_of
from shardwise.runtime.step import StepRules, step
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.spec.sheet import CONTROL_BYTES

CPU = torch.device("cpu")
SENDS = {"all_reduce": "all_reduce"}
if hasattr(dist, "all_gather_single"):
    SENDS |= {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
else:  # torch before 2.13
    SENDS |= {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
"""The functions of torch.distributed through which FSDP2, replicas and the runtime send."""


@contextmanager
def sends(axes: dict[str, str]) -> Iterator[Sent]:
    """Counts collectives as they are called. A dispatch mode would see them too, but would switch compilation off.
    Ranks meet before each, or one that runs ahead would hold what it sends in several."""
    sent: Sent = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            values = [*given, *named.values()]
            size = max(value.nbytes for value in values if isinstance(value, Tensor))
            group = named.get("group") or next((v for v in given if isinstance(v, dist.ProcessGroup)), dist.group.WORLD)
            axis = "world" if size <= CONTROL_BYTES else axes[group.group_name]
            sent[axis, SENDS[name], size] += 1
            dist.barrier()
            return function(*given, **named)

        return call

    with patch.multiple(dist, **{name: counted(name, vars(dist)[name]) for name in SENDS}):
        yield sent


@contextmanager
def compiler(backend: str) -> Iterator[Counter[str]]:
    """Compiles with ``backend`` and counts the graphs that it is given."""
    from torch._dynamo.backends.registry import lookup_backend

    torch._dynamo.reset()
    graphs: Counter[str] = Counter()

    def counted(graph: Any, inputs: Any) -> Any:
        graphs[backend] += 1
        return lookup_backend(backend)(graph, inputs)

    with patch.object(torch, "compile", partial(torch.compile, backend=counted)):
        yield graphs


@dataclass
class Stepped:
    """Steps of one rank: what the last one sent and held, what the run's own meter found of traffic and the lowest of
    three peaks, the loss and the gradients of the first, and how many graphs were compiled."""

    measured: StepBytes
    traffic: dict[tuple[str, str], tuple[int, int]]
    trace: parity.Trace
    graphs: int


def pair(rank: int, world: int, spec: ModelSpec, plan: Plan, backend: str) -> tuple[Stepped, Stepped]:
    """The plan compiled, and the same without compilation."""
    with compiler(backend) as graphs:
        compiled = run(rank, spec, plan)
    return replace(compiled, graphs=graphs[backend]), run(rank, spec, replace(plan, compile=False))


def run(rank: int, spec: ModelSpec, plan: Plan) -> Stepped:
    """Three meters' steps on random tokens. Tensors that a collective's thread lets go of late stand on top of a peak,
    more or less as the machine is busy: the lowest peak is the program's own."""
    groups, result = meshes(plan.layout, "cpu"), StepBytes()
    gradients: dict[str, Tensor] = {}
    losses = []

    def enter(phase: str) -> None:
        if phase == "clip" and state.step == 0:
            gradients.update(parity.full_gradients(state))
        if phase == "optimizer":
            storages = [local(p.grad).untyped_storage() for p in state.trained() if p.grad is not None]
            result.state["gradients"] = sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    state = build(Recipe(), spec, plan, groups, CPU)
    rules, meters = (
        StepRules(plan, groups, OptimSection(), 10, finish_of(Method(), plan), enter),
        [Meter(groups, CPU) for _ in range(3)],
    )
    for meter in meters:
        for _ in range(Meter.MEMORY_STEP):
            batches = random_batches(spec, plan, rank)
            with meter.measuring(state), sends(groups.called()) as sent:
                supervised, _ = reduce.count_supervised(groups, sum(b.supervised_tokens() for b in batches))
                losses.append(step(state, batches, supervised, rules).loss)
    result.sent, result.peak_bytes = sent, min(meter.memory.peak_bytes for meter in meters if meter.memory)
    result.state |= state_bytes(state)
    return Stepped(result, meter.traffic, parity.Trace((losses[0],), (1.0,), gradients, gradients), 0)


def random_batches(spec: ModelSpec, plan: Plan, rank: int) -> list[MicroBatch]:
    """Micro-batches of single documents, as the plan assumes them."""
    draw = torch.Generator().manual_seed(rank)
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    made = []
    for _ in range(plan.batch.accumulation):
        tokens = torch.randint(spec.vocab_size, (b, s + 1), generator=draw)
        positions = torch.arange(s).expand(b, s).contiguous()
        made.append(MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None, s))
    return made
