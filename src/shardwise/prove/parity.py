"""Does a plan compute the right thing? The same training on N ranks and, as a plain loop, on one process, compared.

The plain loop shares with the run only the model's modules and its initial weights: no technique, no runtime, full
logits, torch's own AdamW and clipping, the whole batch at once. In float64 correct code agrees to 1e-9 after five
AdamW steps; in fp32 it does not (a gradient near zero may change its sign, which Adam makes a full step of), so there
the loss and the first gradients are what counts, and in bf16 the direction of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.data.batch import MicroBatch, collate
from shardwise.data.pack import IGNORE, Sample
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.methods.pretrain import mask
from shardwise.models import init
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.hf_model import Model, model_of
from shardwise.models.roles import is_adapter
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import step
from shardwise.spec.plan import Dtype, Lora, Plan
from shardwise.spec.recipe import Method, OptimSection, Recipe, Run
from shardwise.techniques import lora, nf4
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.nf4.fourbit import dequantise, quantise
from shardwise.techniques.quantised import NF4_PARTS

CPU = torch.device("cpu")
Tensors = Mapping[str, Tensor]
STEPS = 5
MAX_STEPS = 10
OPTIM = OptimSection(learning_rate=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)
"""Every part of the update is at work: warm-up, decay of the rate, weight decay on matrices only, clipping (the first
gradients of the tiny models have norms above 0.5)."""


@dataclass(frozen=True)
class Workload:
    """What is trained, whatever the layout: ``rows`` sequences of ``seq_len`` tokens a step, computed in ``compute``
    from master weights in ``weights``; parameters whose names match ``frozen`` stay as they are."""

    spec: ModelSpec
    rows: int
    seq_len: int
    compute: Dtype
    weights: Dtype
    steps: int = STEPS
    seed: int = 0
    frozen: tuple[str, ...] = ()
    lora: Lora | None = None


@dataclass(frozen=True)
class Trace:
    """What a training run returns: per step the mean loss and the gradient's norm before clipping; every full gradient
    of step 1, before clipping; every full weight after the last step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Worst:
    """The largest error and the tensor (or step) that has it."""

    error: float
    where: str

    def __str__(self) -> str:
        return f"{self.error:.2e} ({self.where})"


@dataclass(frozen=True)
class Parity:
    """How far a run is from the plain loop, at worst over its ranks. Errors are relative: the largest difference within
    a tensor over its largest element. ``turn`` is 1 - cosine of a gradient with the right one."""

    loss: Worst
    norm: Worst
    gradient: Worst
    turn: Worst
    weight: Worst

    def __str__(self) -> str:
        return (
            f"loss {self.loss}, norm {self.norm}, first gradients {self.gradient}, 1 - cosine {self.turn}, "
            f"weights {self.weight}"
        )


def prove(pool: RankPool, spec: ModelSpec, plans: Sequence[Plan], steps: int = STEPS) -> list[Parity]:
    """Train under each plan on as many ranks of ``pool`` as it asks for and compare: plans of one size in one run."""
    found: dict[int, Parity] = {}
    for world in sorted({plan.layout.world for plan in plans}):
        chosen = [index for index, plan in enumerate(plans) if plan.layout.world == world]
        answers = pool.run(train_on_rank, spec, [plans[i] for i in chosen], steps, world=world, timeout_s=300)
        for place, index in enumerate(chosen):
            right = plain(job_of(spec, plans[index], steps))
            found[index] = compare(right, [traces[place] for traces in answers], staged=plans[index].layout.pp > 1)
    return [found[index] for index in range(len(plans))]


def job_of(spec: ModelSpec, plan: Plan, steps: int) -> Workload:
    """What ``plan`` trains, with everything about its layout left out."""
    rows = plan.batch.global_batch_size(plan.layout.dp)
    length, precision = plan.batch.seq_len, plan.precision
    return Workload(spec, rows, length, precision.compute, precision.weights, steps, frozen=plan.frozen, lora=plan.lora)


def compare(right: Trace, traces: Sequence[Trace], *, staged: bool = False) -> Parity:
    """The worst of every rank's errors. ``staged``: each rank has some of the tensors, and all together have all."""

    def numbers(of: str, expected: Sequence[float], found: Sequence[Sequence[float]]) -> Worst:
        return worst(
            {
                f"{of} of step {index + 1}, rank {rank}": abs(value - known) / abs(known)
                for rank, values in enumerate(found)
                for index, (known, value) in enumerate(zip(expected, values, strict=True))
            }
        )

    def tensors(of: Callable[[Trace], Tensors], errors: Callable[[Tensors, Tensors], dict[str, float]]) -> Worst:
        found, known = [of(trace) for trace in traces], of(right)
        nowhere = known.keys() - {name for each in found for name in each}
        wanted = [{n: known[n] for n in known if not staged or n in each or n in nowhere} for each in found]
        pairs = enumerate(zip(wanted, found, strict=True))
        return worst({f"{n}, rank {rank}": e for rank, (want, each) in pairs for n, e in errors(want, each).items()})

    return Parity(
        numbers("loss", right.losses, [trace.losses for trace in traces]),
        numbers("norm", right.norms, [trace.norms for trace in traces]),
        tensors(lambda trace: trace.gradients, differences),
        tensors(lambda trace: trace.gradients, directions),
        tensors(lambda trace: trace.weights, differences),
    )


def worst(errors: Mapping[str, float]) -> Worst:
    """The largest value; NaN counts as larger than any."""
    where = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name])
    return Worst(errors[where], where)


def differences(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor; infinite for one that is missing, new or of another shape."""
    errors = {name: float("inf") for name in found.keys() - right.keys()}
    for name, known in right.items():
        same = name in found and found[name].shape == known.shape
        scale = known.double().abs().max().clamp_min(1e-30)
        errors[name] = float((found[name].double() - known.double()).abs().max() / scale) if same else float("inf")
    return errors


def directions(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """1 - the cosine of the angle between each gradient and the right one; 2, the opposite, for one that is missing."""
    return {
        name: 1.0 - float(functional.cosine_similarity(known.double().flatten(), found[name].double().flatten(), dim=0))
        if name in found
        else 2.0
        for name, known in right.items()
    }


def train_on_rank(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int) -> list[Trace]:
    """What a rank of the pool does: one training after another, through the techniques and the runtime's step."""
    traces = []
    for plan in plans:
        try:
            traces.append(take_steps(rank, spec, plan, steps))
        except Exception as error:
            error.add_note(f"while training under {plan}")
            raise
    return traces


def take_steps(rank: int, spec: ModelSpec, plan: Plan, steps: int, device: torch.device = CPU) -> Trace:
    """One training under ``plan`` in the default process group, on ``device``; the trace is on the CPU."""
    job = job_of(spec, plan, steps)
    recipe = Recipe(optim=OPTIM, run=Run(seed=job.seed))
    groups = meshes(plan.layout, device.type)
    state = build(recipe, spec, plan, groups, device)
    gradients: dict[str, Tensor] = {}

    def enter(phase: str) -> None:
        if phase == "clip" and state.step == 0:
            gradients.update(full_gradients(state))

    rules = StepRules(plan, groups, OPTIM, MAX_STEPS, finish_of(Method(), plan), enter)
    losses, norms = [], []
    for number in range(steps):
        batches = [batch.to(device) for batch in share_of_rank(batch_rows(job, number), groups, plan)]
        supervised, _ = reduce.count_supervised(groups, sum(b.supervised_tokens() for b in batches))
        stats = step(state, batches, supervised, rules)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    weights = whole({name: full(parameter.detach()) for name, parameter in state.parameters().items()})
    return Trace(tuple(losses), tuple(norms), gradients, weights)


def whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights``, with those in 4 bits dequantised."""
    found = {name: value for name, value in weights.items() if name.rpartition(".")[2] not in NF4_PARTS}
    for layer in (name.removesuffix("codes") for name in weights if name.endswith(".codes")):
        codes, absmax, group_absmax = (weights[layer + kept] for kept in NF4_PARTS)
        found[f"{layer}weight"] = dequantise(codes, absmax, group_absmax, torch.float64)
    return found


def full_gradients(state: TrainState) -> dict[str, Tensor]:
    """Every gradient, whole, before anything is done with it. Collective."""
    return {name: full(p.grad) for name, p in state.parameters().items() if p.grad is not None}


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU, whatever part this rank holds."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()


def share_of_rank(rows: Sequence[Sample], groups: Meshes, plan: Plan) -> list[MicroBatch]:
    """The micro-batches of a rank: data-parallel ranks take consecutive rows."""
    size, count = plan.batch.micro_batch_size, plan.batch.accumulation
    first = groups.index("batch") * size * count
    return [collate(rows[first + index * size : first + (index + 1) * size]) for index in range(count)]


def batch_rows(job: Workload, number: int) -> list[Sample]:
    """The rows of step ``number``. Each holds two documents, cut at another place, and another number of supervised
    tokens: row 0 has one, the last row all."""
    draw = torch.Generator().manual_seed(1_000 * job.seed + number)
    rows = []
    for index in range(job.rows):
        tokens = torch.randint(job.spec.vocab_size, (job.seq_len + 1,), generator=draw)
        border = int(torch.randint(1, job.seq_len, (), generator=draw))
        labels = tokens[1:].clone()
        learnt = 1 + index * (job.seq_len - 1) // max(1, job.rows - 1)
        labels[torch.randperm(job.seq_len, generator=draw)[learnt:]] = IGNORE
        segments = (border, job.seq_len - border)
        positions = torch.cat([torch.arange(length) for length in segments])
        rows.append(Sample(tokens[:-1].numpy(), labels.numpy(), positions.numpy(), segments, masked=True))
    return rows


@cache
def plain(job: Workload) -> Trace:
    """The same training in one process, by a loop that anyone can check."""
    model = model_of(job.spec).to(torch_dtype(job.weights))
    parameters = plain_parameters(job)
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    losses, norms, first = [], [], {}
    for number in range(job.steps):
        loss = plain_loss(model, merged(parameters, job), collate(batch_rows(job, number)), torch_dtype(job.compute))
        optimizer.zero_grad()
        loss.backward()
        if number == 0:
            first = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        assert OPTIM.max_grad_norm is not None
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), OPTIM.max_grad_norm)))
        warm = (number + 1) / OPTIM.warmup_steps
        fallen = (number - OPTIM.warmup_steps) / (MAX_STEPS - OPTIM.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = OPTIM.learning_rate * min(warm, 1.0 - max(0.0, fallen))
        optimizer.step()
        losses.append(loss.item())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return Trace(tuple(losses), tuple(norms), first, weights)


def plain_parameters(job: Workload) -> dict[str, nn.Parameter]:
    """Every parameter by canonical name, whole, with its first value; adapters behind the model's own."""
    shapes = parameter_shapes(job.spec) | ({} if job.lora is None else lora.adapters(job.spec, job.lora))
    parameters: dict[str, nn.Parameter] = {}
    for name, shape in shapes.items():
        value = init.fill(name, shape, tuple(slice(0, size) for size in shape), job.seed, job.spec)
        if name.endswith(".lora_m"):
            value = parameters[f"{name.removesuffix('lora_m')}weight"].detach().norm(dim=1)
        held = (job.lora is not None and not is_adapter(name)) or any(fnmatchcase(name, glob) for glob in job.frozen)
        if job.lora is not None and held:
            small = job.lora.nf4 and nf4.quantised(name)
            value = dequantise(*quantise(value), value.dtype) if small else value.to(torch_dtype(job.lora.frozen))
        parameters[name] = nn.Parameter(value.to(torch_dtype(job.weights)), requires_grad=not held)
    return parameters


def merged(parameters: Mapping[str, Tensor], job: Workload) -> dict[str, Tensor]:
    """The weights that the model computes with: where there is an adapter, W + scale * B A, as one matrix."""
    whole = {}
    for name, value in parameters.items():
        layer = name.removesuffix("weight")
        if job.lora is not None and f"{layer}lora_a.weight" in parameters:
            factor = job.lora.alpha / (job.lora.rank**0.5 if job.lora.rslora else job.lora.rank)
            value = value + factor * (parameters[f"{layer}lora_b.weight"] @ parameters[f"{layer}lora_a.weight"])
            if job.lora.dora:
                norm = value.detach().norm(dim=1)
                value = value * (parameters[f"{layer}lora_m"] / norm).unsqueeze(1)
        if not is_adapter(name):
            whole[name] = value
    return whole


def plain_loss(model: Model, weights: Mapping[str, Tensor], batch: MicroBatch, compute: torch.dtype) -> Tensor:
    """Mean loss over the supervised tokens, from full logits, with every weight cast to ``compute``."""
    cast = {name: weight.to(compute) for name, weight in weights.items()}
    logits = torch.func.functional_call(model, cast, (batch.ids, batch.positions, mask(batch)))
    wide = torch.promote_types(compute, torch.float32)
    total = functional.cross_entropy(logits.flatten(0, 1).to(wide), batch.labels.flatten(), reduction="sum")
    return total / batch.supervised_tokens()
