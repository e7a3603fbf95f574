"""Does a plan compute the right thing? The same training on N ranks and, as a plain loop, on one process, compared.

The plain loop shares with the run only the model's modules and its initial weights: no technique, no runtime, full
logits, torch's own AdamW (or what the optimizer's module has as the plain one) and clipping, the whole batch at once.
In float64 correct code agrees to 1e-9 after five AdamW steps; in fp32 it does not (a gradient near zero may change its
sign, which Adam makes a full step of), so there the loss and the first gradients are what counts, and in bf16 the
direction of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributions import Categorical
from torch.nn import functional
from torch.optim import Optimizer

from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import IGNORE, Sample
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.slices import kept, local_slice
from shardwise.methods.pairs import Answers, losses_of
from shardwise.models.blocks import each_named
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.hf_model import Model, model_of
from shardwise.models.roles import is_adaptable, is_adapter, is_counted, is_stacked
from shardwise.prove.distance import Worst, apart, differences, digest, directions, farthest, worst
from shardwise.prove.plain_linear import adapted, as_stored, gain, plain_narrow
from shardwise.prove.plain_routers import plain_balance
from shardwise.prove.pool import Ranks
from shardwise.prove.predicted import logits_of
from shardwise.prove.regimes import scaled
from shardwise.prove.workload import MAX_STEPS, STEPS, Setting, Workload, job_of
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import accumulate, step
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection, Recipe, Run
from shardwise.spec.records import ENTROPY, FURTHER, TOKEN_ACCURACY
from shardwise.techniques import lora
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.nf4.fourbit import restore
from shardwise.techniques.optim import dealt, program
from shardwise.techniques.quantised import FLOAT8_PARTS, NF4_PARTS, matrices

CPU = torch.device("cpu")
TOLERANCE = 1e-9
"""In float64, relative: what sums in another order come to after its steps is a thousandth of it."""
FP16_SCALE = 256.0
"""Of the loss in fp16: a run begins with more and finds by skipped steps what does not overflow."""
STORED_PARTS = (*NF4_PARTS, *FLOAT8_PARTS)
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trace:
    """The results of a training run: per step the mean loss and the gradient's norm before clipping; every full
    gradient of step 1, before clipping; every full weight after the last step. ``held``: after each step, of each piece
    of a weight that this rank holds, by name and place, a digest of its bits. ``figures``: per step what is reported
    beside the loss."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    held: tuple[dict[str, list[int]], ...] = ()
    figures: tuple[Mapping[str, float], ...] = ()


COMPARED = ("gradient", "loss", "norm", "weight", "figure")
"""What is compared in float64, the cause first."""


@dataclass(frozen=True)
class Parity:
    """A run's distance from the plain loop, at worst over its ranks. Errors are relative: the largest difference within
    a tensor over its largest element. ``turn`` is 1 - cosine of a gradient with the right one. ``apart``: what two
    ranks hold of the same piece of a weight, and is not the same. ``figure``: of what is reported beside the loss, the
    largest difference."""

    loss: Worst
    norm: Worst
    gradient: Worst
    turn: Worst
    weight: Worst
    apart: tuple[str, ...] = ()
    figure: Worst = Worst(0.0, "figures")

    def wrong(self, most: float, compared: Sequence[str] = COMPARED) -> list[str]:
        """Return what is not within the tolerance, the cause first, and what ranks do not hold alike."""
        first = "first gradient of "
        words = {"gradient": first, "turn": first, "norm": "gradient ", "weight": "weight "}
        lines = []
        for key in compared:
            each: Worst = vars(self)[key]
            if not each.error <= most:
                error = f"{'1 - cosine' if key == 'turn' else 'relative error'} {each.error:.1e}, at most {most:g}"
                lines.append(f"{words.get(key, '')}{each.what}: {each.values} ({error})")
        return [*lines, *self.apart]

    def __str__(self) -> str:
        return (
            f"loss {self.loss}, norm {self.norm}, first gradients {self.gradient}, 1 - cosine {self.turn}, "
            f"weights {self.weight}"
        )


def prove(
    pool: Ranks, spec: ModelSpec, plans: Sequence[Plan], steps: int = STEPS, setting: Setting | None = None
) -> list[Parity]:
    """Train under each plan on as many ranks of ``pool`` as it asks for and compare: plans of one size in one run."""
    found: dict[int, Parity] = {}
    for world in sorted({plan.layout.world for plan in plans}):
        chosen = [index for index, plan in enumerate(plans) if plan.layout.world == world]
        given = spec, [plans[i] for i in chosen], steps, setting
        answers = pool.run(train_on_rank, *given, world=world)
        for place, index in enumerate(chosen):
            right = plain(job_of(spec, plans[index], steps, setting))
            found[index] = compare(right, [traces[place] for traces in answers], staged=plans[index].layout.pp > 1)
    return [found[index] for index in range(len(plans))]


def compare(right: Trace, traces: Sequence[Trace], *, staged: bool = False) -> Parity:
    """The worst of every rank's errors. ``staged``: each rank has some of the tensors, and all together have all."""

    def numbers(of: str, expected: Sequence[float], found: Sequence[Sequence[float]]) -> Worst:
        pairs = {
            (f"{of} of step {index + 1}", rank): (known, value)
            for rank, values in enumerate(found)
            for index, (known, value) in enumerate(zip(expected, values, strict=True))
        }
        return worst({at: abs(value - known) / abs(known) for at, (known, value) in pairs.items()}, pairs.__getitem__)

    def tensors(of: Callable[[Trace], Tensors], errors: Callable[[Tensors, Tensors], dict[str, float]]) -> Worst:
        found, known = [of(trace) for trace in traces], of(right)
        nowhere = known.keys() - {name for each in found for name in each}
        wanted = [{n: known[n] for n in known if not staged or n in each or n in nowhere} for each in found]
        pairs = enumerate(zip(wanted, found, strict=True))
        every = {(n, rank): e for rank, (want, each) in pairs for n, e in errors(want, each).items()}
        return worst(every, lambda at: farthest(known.get(at[0]), found[at[1]].get(at[0])))

    told = {
        (f"{name} of step {index + 1}", rank): (value, figures.get(name, math.nan))
        for rank, trace in enumerate(traces)
        for index, (known, figures) in enumerate(zip(right.figures, trace.figures, strict=False))
        for name, value in known.items()
    }
    return Parity(
        numbers("loss", right.losses, [trace.losses for trace in traces]),
        numbers("norm", right.norms, [trace.norms for trace in traces]),
        tensors(lambda trace: trace.gradients, differences),
        tensors(lambda trace: trace.gradients, directions),
        tensors(lambda trace: trace.weights, differences),
        tuple(apart([trace.held for trace in traces])),
        worst({at: abs(value - known) for at, (known, value) in told.items()}, told.__getitem__)
        if told
        else Parity.figure,
    )


def train_on_rank(
    rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int, setting: Setting | None = None
) -> list[Trace]:
    """Train as a rank of the pool: under one plan after another, through the techniques and the runtime's step."""
    traces = []
    for plan in plans:
        try:
            traces.append(take_steps(rank, spec, plan, steps, setting=setting))
        except Exception as error:
            error.add_note(f"while training under {plan}")
            raise
    return traces


def take_steps(
    rank: int, spec: ModelSpec, plan: Plan, steps: int, device: torch.device = CPU, setting: Setting | None = None
) -> Trace:
    """One training under ``plan`` in the default process group, on ``device``; the trace is on the CPU."""
    with scaled():
        return _take_steps(rank, spec, plan, steps, device, setting)


def _take_steps(
    rank: int, spec: ModelSpec, plan: Plan, steps: int, device: torch.device, setting: Setting | None
) -> Trace:
    job = job_of(spec, plan, steps, setting)
    optim, groups = job.setting.optim, meshes(plan.layout, device.type)
    recipe = Recipe(optim=optim, run=Run(seed=job.seed))
    state = build(recipe, spec, plan, groups, device, job.setting.draw)
    state.scale.value = min(state.scale.value, FP16_SCALE)
    gradients: dict[str, Tensor] = {}

    def enter(phase: str) -> None:
        if phase == "clip" and state.step == 0:
            gradients.update({name: grad / state.scale.value for name, grad in full_gradients(state).items()})

    rules = StepRules(plan, groups, optim, MAX_STEPS, finish_of(job.setting.method, plan), enter)
    losses = []
    norms = []
    pieces = []
    figures = []
    for number in range(job.updates):
        shares = share_of_rank(job.batch(number), groups, plan, ahead=spec.predictors > 0)
        batches = [batch.to(device) for batch in shares]
        terms, _ = reduce.count_supervised(groups, sum(batch.terms() for batch in batches))
        if number < steps:
            stats = step(state, batches, terms, rules)
            losses.append(stats.loss)
            norms.append(stats.grad_norm)
            figures.append(stats.figures)
        else:
            accumulate(state, batches, terms, rules)
            if trained := [state.updated(each) for each in state.trained()]:  # of which a stage may have none
                torch.optim.SGD(trained, optim.learning_rate, foreach=False).step()
            state.optimizer.zero_grad(set_to_none=True)
            if state.host:
                state.host.give_back()
        pieces.append(held(state))
    weights = whole({name: full(kept(parameter)) for name, parameter in state.parameters().items()})
    return Trace(tuple(losses), tuple(norms), gradients, weights, tuple(pieces), tuple(figures))


def held(state: TrainState) -> dict[str, list[int]]:
    """A digest of each piece of a weight that this rank holds; of two copies of a tied one, both."""
    found: dict[str, list[int]] = {}
    for name, parameter in each_named(state.parts):
        piece = ", ".join(f"{part.start}:{part.stop}" for part in local_slice(parameter))
        found.setdefault(f"{name}[{piece}]", []).append(digest(kept(parameter)))
    return found


def whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights``, with those in 4 bits and in float8 dequantised."""
    found = {name: value for name, value in weights.items() if name.rpartition(".")[2] not in STORED_PARTS}
    for (first, *more), made in ((NF4_PARTS, restore), (FLOAT8_PARTS, eightbit.restore)):
        for layer in (name.removesuffix(first) for name in weights if name.endswith(f".{first}")):
            count = matrices(f"{layer}weight", lambda other: weights[other].shape[0])
            stored = [weights[layer + word] for word in (first, *more)]
            found[f"{layer}weight"] = made(stored, torch.float64, None, count)
    return found


def full_gradients(state: TrainState) -> dict[str, Tensor]:
    """Every gradient, whole, before anything is done with it. Collective."""
    gradients = {name: state.updated(parameter).grad for name, parameter in state.parameters().items()}
    return {name: full(gradient) for name, gradient in gradients.items() if gradient is not None}


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU, whatever part this rank holds."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()


def share_of_rank(rows: Sequence[Sample], groups: Meshes, plan: Plan, *, ahead: bool = False) -> list[MicroBatch]:
    """The micro-batches of a rank: data-parallel ranks take consecutive rows; ``ahead`` as of ``collate``."""
    size, count = plan.batch.micro_batch_size, plan.batch.accumulation
    first = groups.index("batch") * size * count
    each = (rows[first + index * size : first + (index + 1) * size] for index in range(count))
    return [collate(own, ahead=ahead).cut(groups.row_share) for own in each]


@cache
def plain(job: Workload) -> Trace:
    """Train ``job`` in one process, by a loop that anyone can check."""
    model = model_of(job.spec).to(torch_dtype(job.weights))
    parameters = plain_parameters(job)
    plain_narrow(model, parameters, job)
    optimizer = plain_optimizer(parameters, job)
    losses = []
    norms = []
    figures = []
    first = {}
    for number in range(job.updates):
        optimizer.zero_grad()
        with plain_balance(model) as balance:
            loss, told = plain_terms(model, merged(parameters, job), collate(job.batch(number)), job)
        further = job.spec.predictor_weight * told.get(FURTHER, torch.zeros(()))
        (loss + further + balance.added()).backward()
        if number == job.steps:
            torch.optim.SGD([p for p in parameters.values() if p.requires_grad], job.setting.optim.learning_rate).step()
            break
        if number == 0:
            first = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norms.append(plain_update(optimizer, parameters, number, job.setting.optim))
        balance.correct(parameters)
        losses.append(loss.item())
        numbers = {name: told[name] for name in told if name in (*job.figures, FURTHER)}
        figures.append({name: torch.as_tensor(each, dtype=torch.float64).item() for name, each in numbers.items()})
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return Trace(tuple(losses), tuple(norms), first, weights, figures=tuple(figures))


def plain_optimizer(parameters: Mapping[str, nn.Parameter], job: Workload) -> Optimizer:
    """The plain program of the job's optimizer, with weight decay on matrices, and what the first group of the recipe
    says whose pattern a name matches."""
    optim = job.setting.optim
    groups: list[dict[str, Any]] = []
    for name, parameter in parameters.items():
        count = dealt.matrices(name, parameter.ndim, job.spec.experts.num_experts)
        rate = optim.learning_rate if count else optim.adam_learning_rate or optim.learning_rate
        decay = optim.weight_decay if parameter.ndim > 1 else 0.0
        for said in [one for one in optim.groups if fnmatchcase(name, one.pattern)][:1]:
            rate = rate if said.learning_rate is None else said.learning_rate
            decay = decay if said.weight_decay is None else said.weight_decay
        groups.append({"params": [parameter], "weight_decay": decay, "base": rate, "matrices": count})
    return program(job.optim).plain(groups, optim)


def plain_update(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], number: int, optim: OptimSection
) -> float:
    """Update number ``number``, counted from 0, by the gradients as they are; returns their norm before clipping."""
    assert optim.max_grad_norm is not None
    norm = float(nn.utils.clip_grad_norm_(parameters.values(), optim.max_grad_norm))
    warm = (number + 1) / optim.warmup_steps
    fallen = (number - optim.warmup_steps) / (MAX_STEPS - optim.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * min(warm, 1.0 - max(0.0, fallen))
    optimizer.step()
    return norm


def plain_parameters(job: Workload) -> dict[str, nn.Parameter]:
    """Every parameter by canonical name, whole, with its first value; adapters behind the model's own."""
    shapes = parameter_shapes(job.spec) | ({} if job.lora is None else lora.adapters(job.spec, job.lora))
    parameters: dict[str, nn.Parameter] = {}
    for name, shape in shapes.items():
        value = job.first(name, shape)
        if name.endswith(".lora_m"):
            value = parameters[f"{name.removesuffix('lora_m')}weight"].detach().norm(dim=1)
        held = is_counted(name) or any(fnmatchcase(name, glob) for glob in job.frozen)
        if job.lora is not None:
            held = not (is_adapter(name) or job.lora.saves(name))
        if job.lora is not None and held and not (name == "norm.weight" and job.lora.saves("head.weight")):
            if job.lora.codes and is_adaptable(name):
                each = value.chunk(job.spec.experts.num_experts if is_stacked(name) else 1)
                value = torch.cat([as_stored(one, job.lora) for one in each])
            else:
                value = value.to(torch_dtype(job.lora.frozen))
        parameters[name] = nn.Parameter(value.to(torch_dtype(job.weights)), requires_grad=not held)
    return parameters


def merged(
    parameters: Mapping[str, Tensor], job: Workload, held: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights that the model computes with: where there is an adapter, W + scale * B A, as one matrix. No gradient
    goes through the norms by which magnitudes divide: they are those of ``held``, if given."""
    whole = {}
    for name, value in parameters.items():
        layer = name.removesuffix("weight")
        if job.lora is not None and f"{layer}lora_a.weight" in parameters:
            value = adapted(parameters, layer, job)
            if job.lora.dora:
                value = value * gain(held or parameters, parameters, layer, job).unsqueeze(1)
        if not is_adapter(name):
            whole[name] = value
    return whole


def plain_loss(model: Model, weights: Mapping[str, Tensor], batch: MicroBatch, job: Workload) -> Tensor:
    """The loss of :func:`plain_terms`, with what a layer that predicts a further token adds."""
    loss, told = plain_terms(model, weights, batch, job)
    return loss + job.spec.predictor_weight * told[FURTHER] if job.spec.predictors else loss


def plain_terms(
    model: Model, weights: Mapping[str, Tensor], batch: MicroBatch, job: Workload
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Mean loss over the supervised tokens, or the pairs of answers, from full logits, with every weight cast to the
    job's compute dtype; and of tokens what may be reported beside it, means too, of which the loss for further tokens
    leads back to the weights."""
    cast = {name: weight.to(torch_dtype(job.compute)) for name, weight in weights.items()}
    logits, told = logits_of(model, cast, batch, further=job.spec.predictors > 0)
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    if batch.references is None:
        labels, count = batch.labels.flatten(), batch.supervised_tokens()
        told |= {TOKEN_ACCURACY: (wide.argmax(-1) == labels).sum().item() / count}
        if ENTROPY in job.figures:
            told[ENTROPY] = Categorical(logits=wide.detach()).entropy()[labels >= 0].sum().item() / count
        return functional.cross_entropy(wide, labels, reduction="sum") / count, told
    losses, method = functional.cross_entropy(wide, batch.labels.flatten(), reduction="none"), job.setting.method
    assert batch.answers is not None
    answers = batch.answers.masked_fill(batch.labels == IGNORE, -1).flatten()
    each = [losses[answers == answer] for answer in range(2 * len(batch.references))]
    logps = -torch.stack([one.sum() for one in each]).view(-1, 2)
    counts = torch.tensor([len(one) for one in each]).view(-1, 2)
    return losses_of(Answers(logps, batch.references, counts), method).mean(), {}
