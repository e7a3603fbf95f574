"""Does a plan, in its own dtypes, round as little as one process does? In bf16 a right gradient is wrong by a
hundredth, so that nothing absolute can be asked. But how far the plain loop of parity is from float64, in the same
dtypes, is what rounding comes to; a run that is clearly farther rounds where it should not.

All weights begin at values that the coarsest dtype has, so that what differs is what is computed. Losses and gradients
are of several steps' rows, before any update. Then come two updates, which are compared with those that float64 makes
of the run's own gradients: clipping, the loss's scale and moments in few bits are seen for themselves. Last, a step of
which one rank's gradient is infinite, after which everything has to be as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.micro_batch import collate
from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import kept, local
from shardwise.models import init
from shardwise.models.config import ModelSpec
from shardwise.models.hf_model import model_of
from shardwise.models.init import Draw
from shardwise.models.roles import is_counted
from shardwise.prove import parity
from shardwise.prove.distance import apart, digest
from shardwise.prove.plain_linear import plain_narrow
from shardwise.prove.plain_routers import plain_balance
from shardwise.prove.pool import Ranks
from shardwise.prove.regimes import scaled
from shardwise.prove.workload import MAX_STEPS, Setting, Workload, job_of
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import accumulate, step
from shardwise.spec.plan import Dtype, Plan
from shardwise.spec.recipe import Recipe, Run
from shardwise.spec.records import FURTHER
from shardwise.techniques import quantised
from shardwise.techniques.dtypes import torch_dtype

DRAWS, UPDATES, COUNTED = 6, 2, 4
"""Steps' rows of which gradients are taken, and updates that are compared. So many of the smaller errors count: where
rounding sends a token to another expert, or two keys are nearly alike to a query, gradients change by much more."""


class Times(NamedTuple):
    """The limits of a run's distance from float64, in distances of one process in the same dtypes: over all gradients,
    of any one, and of the loss, which is one number a draw."""

    together: float
    alone: float
    loss: float


WHOLE, SHARED = Times(1.3, 2.0, 2.0), Times(1.5, 3.0, 4.0)
"""Where each row is computed as one process does it, and rounds alike; and where ranks share one, or adapters are apart
from the weights that they belong to. Right runs show at most 1.0, 1.1 and 1.0; and 1.2, 2.0 and 2.1."""
UPDATE, MOMENTS = 1e-4, {"bf16": 0.01, "8 bits": 0.05}
"""Relative, of an update, with moments in the dtype of fp32 weights or in fewer bits, or with products in bf16. Right
runs show a third of it."""
PRODUCTS = 1 / 3
"""Of how far an update with products in bf16 is from one in float64: these iterate, and increase a number's rounding to
the other of two values. Right runs show a fifth."""
ROUNDS: dict[Dtype, float] = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 2**-11, "bf16": 2**-8}
"""Relative, of a gradient: in small models, whose weights are drawn large, so much may come of the order of sums, and
of adapters that stand beside their weights."""
NORM = 1e-5
"""Relative, of the norm before clipping, of the gradients that it is of."""
SMALL, TINY = 1e-4, 1e-30
"""Of the longest gradient, as which a shorter one counts: of one that is zero, rounding would be all."""
COARSER: list[Dtype] = ["fp64", "fp32", "fp16", "bf16"]
"""By bits of mantissa, the most first."""
PACKED = 64
"""Elements of the smallest matrix whose moments are in 8 bits, where no rank has a part of a row's block."""


@dataclass(frozen=True)
class Rounded:
    """The findings of a rank, or of the plain loop: of each draw the loss and every full gradient. ``before`` and
    ``after``: weights, around the updates, whose gradients are ``used``, of these ``norms``. ``held``: digests of what
    this rank holds, after each update. ``spoilt``: lines on what a step that is not finite changed."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    used: list[dict[str, Tensor]] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    held: list[dict[str, list[int]]] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rounding:
    """A run's distance from float64, in distances of one process: over all gradients, of each one, and of the loss.
    ``updates``: how far each is from that of float64, and may be, beyond what storing weights rounds; ``blind``: of how
    many storing rounds as much as they change. ``wrong``: lines on what is wrong beside that. ``most``: the limits."""

    together: float
    each: dict[str, float]
    loss: float
    updates: dict[str, tuple[float, float]]
    wrong: list[str]
    most: Times
    blind: int = 0

    def problems(self) -> list[str]:
        """Return a line for each thing that is not as it should be, the cause first."""
        far = "times as far from float64 as one process in the same dtypes is"
        worst = max(self.each, key=self.each.__getitem__, default="")
        found = [*self.wrong]
        if worst and not self.each[worst] <= self.most.alone:
            found.append(f"gradient of {worst}: {self.each[worst]:.2g} {far}, at most {self.most.alone:g}")
        if not self.together <= self.most.together:
            found.append(f"gradients: {self.together:.2g} {far}, at most {self.most.together:g}; most of all {worst}")
        if not self.loss <= self.most.loss:
            found.append(f"loss: {self.loss:.2g} {far}, at most {self.most.loss:g}")
        missed = {name: error for name, (error, most) in self.updates.items() if not error <= most}
        for name in sorted(missed, key=missed.__getitem__, reverse=True):
            what = f"update of {name} from what float64 makes of the run's own gradients"
            found.append(f"{what}: relative error {missed[name]:.1e}, at most {self.updates[name][1]:.1e}")
        return found


@dataclass(frozen=True)
class FewDigits:
    """First weights that have no more digits than ``dtype``."""

    draw: Draw
    dtype: Dtype

    def __call__(self, name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
        return self.draw(name, shape, part, seed, spec).to(torch_dtype(self.dtype)).float()


def on_rank(rank: int, world: int, spec: ModelSpec, plan: Plan, setting: Setting) -> Rounded:
    """Take the steps, on a rank of the pool."""
    least = PACKED if plan.layout.tp == 1 else quantised.LEAST
    with scaled(), patch.object(quantised, "LEAST", least):
        return _on_rank(rank, spec, plan, setting)


def _on_rank(rank: int, spec: ModelSpec, plan: Plan, setting: Setting) -> Rounded:
    job, groups = job_of(spec, plan, UPDATES, setting), meshes(plan.layout, "cpu")
    state = build(Recipe(optim=setting.optim, run=Run(seed=job.seed)), spec, plan, groups, parity.CPU, setting.draw)
    state.scale.value = min(state.scale.value, parity.FP16_SCALE)
    used, spoil = list[dict[str, Tensor]](), False

    def enter(phase: str) -> None:
        if phase == "clip" and not spoil:
            used.append(_gradients(state))
        elif phase == "clip":
            _spoil(state, rank)

    rules = StepRules(plan, groups, setting.optim, MAX_STEPS, finish_of(setting.method, plan), enter)

    def given(number: int) -> tuple[list[Any], int]:
        batches = parity.share_of_rank(job.batch(number), groups, plan, ahead=job.spec.predictors > 0)
        return batches, reduce.count_supervised(groups, sum(batch.terms() for batch in batches))[0]

    losses, gradients = [], []
    for number in range(DRAWS):
        loss, _ = accumulate(state, *given(number), rules)
        losses.append(float(reduce.combine(groups, torch.zeros((), dtype=torch.float64), loss.value)[1]))
        gradients.append(_gradients(state))
        state.optimizer.zero_grad(set_to_none=True)
        if state.host:
            state.host.give_back()
    before = _weights(state)
    norms, held = list[float](), list[dict[str, list[int]]]()
    for number in range(UPDATES):
        norms.append(step(state, *given(number), rules).grad_norm)
        held.append(parity.held(state))
    after, spoil = _weights(state), True
    pieces, moments = held[-1], _moments(state)
    stats = step(state, *given(0), rules)
    spoilt = []
    at = "a step of which one rank's gradient is not finite"
    if not stats.skipped:
        spoilt.append(f"{at} is not told as skipped")
    spoilt += [f"{at} changes {name}" for name, digests in parity.held(state).items() if digests != pieces[name]][:1]
    if _moments(state) != moments:
        spoilt.append(f"{at} changes moments")
    return Rounded(losses, gradients, norms, before, used, after, held, spoilt)


def _gradients(state: TrainState) -> dict[str, Tensor]:
    return {name: gradient.double() / state.scale.value for name, gradient in parity.full_gradients(state).items()}


def _weights(state: TrainState) -> dict[str, Tensor]:
    trained = {name: each for name, each in state.parameters().items() if each.requires_grad and not is_counted(name)}
    return {name: parity.full(kept(state.updated(parameter))).double() for name, parameter in trained.items()}


def _moments(state: TrainState) -> list[int]:
    """Return digests of everything that the optimizer keeps."""
    every = (value for each in state.optimizer.state.values() for value in each.values() if torch.is_tensor(value))
    return [digest(value) for value in every]


def _spoil(state: TrainState, rank: int) -> None:
    """Make one element infinite, of the last rank that counts a gradient in the norm."""
    own = [g for p in state.counted() if (g := state.updated(p).grad) is not None and local(g).numel()]
    last = torch.tensor(rank if own else -1)
    if dist.get_world_size() > 1:
        dist.all_reduce(last, dist.ReduceOp.MAX)
    if rank == last:
        local(own[0]).view(-1)[0] = math.inf


@cache
def plain(job: Workload) -> Rounded:
    """Losses and gradients of the plain loop."""
    model, parameters = model_of(job.spec).to(torch_dtype(job.weights)), parity.plain_parameters(job)
    plain_narrow(model, parameters, job)
    losses, gradients = [], []
    for number in range(DRAWS):
        for parameter in parameters.values():
            parameter.grad = None
        with plain_balance(model) as balance:
            weights = parity.merged(parameters, job)
            loss, told = parity.plain_terms(model, weights, collate(job.batch(number)), job)
        (loss + job.spec.predictor_weight * told.get(FURTHER, 0.0) + balance.added()).backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.double() for name, p in parameters.items() if p.grad is not None})
    return Rounded(losses, gradients)


def prove(ranks: Ranks, spec: ModelSpec, plan: Plan, setting: Setting) -> Rounding:
    """Run it on the ranks that ``plan`` asks for, and compare."""
    digits = max({coarsest(plan), plan.lora.frozen if plan.lora else "fp64"}, key=COARSER.index)
    setting = replace(setting, sgd=False, draw=FewDigits(setting.draw or init.fill, digits))
    answers: list[Rounded] = ranks.run(on_rank, spec, plan, setting, world=plan.layout.world)
    found = _joined(answers)
    rounded = replace(plan, precision=replace(plan.precision, compute=coarsest(plan, computed=True)))
    exact = replace(plan, precision=replace(plan.precision, compute="fp64", weights="fp64"))
    right, near = (plain(job_of(spec, one, 0, setting)) for one in (exact, rounded))
    job = job_of(spec, exact, UPDATES, setting)
    updated = _updated(job, found, plan.precision.weights)
    whole = _updated(job, found, "fp64") if plan.optim.spec.rest else updated
    return compare(plan, found, near, right, (updated, whole))


def _joined(answers: Sequence[Rounded]) -> Rounded:
    """Join the findings of all ranks: of a pipeline each has some of the tensors."""

    def joined(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: value for own in reversed(each) for name, value in own.items()}

    gradients = [joined([found.gradients[number] for found in answers]) for number in range(DRAWS)]
    used = [joined([found.used[number] for found in answers]) for number in range(UPDATES)]
    before, after = joined([found.before for found in answers]), joined([found.after for found in answers])
    spoilt = list(dict.fromkeys(line for found in answers for line in found.spoilt))
    spoilt += apart([found.held for found in answers])
    return Rounded(answers[0].losses, gradients, answers[0].norms, before, used, after, spoilt=spoilt)


def _updated(job: Workload, found: Rounded, stored: Dtype) -> Rounded:
    """Update, in float64, the weights that a run began from, with its own gradients; return them, and the norms."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in found.before.items()}
    optimizer, norms = parity.plain_optimizer(parameters, job), []
    for group in optimizer.param_groups:
        if isinstance(group.get("eps"), tuple):  # torch's Adafactor: None stands for that of the weights' dtype
            group["eps"] = (torch.finfo(torch_dtype(stored)).eps, group["eps"][1])
        if "multiplied" in group:  # Muon's products have their own dtype, whose rounding they increase
            group["multiplied"] = torch.float64 if stored == "fp64" else torch.bfloat16
    for number, gradients in enumerate(found.used):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        norms.append(parity.plain_update(optimizer, parameters, number, job.setting.optim))
    return Rounded([], [], norms, after={name: parameter.detach() for name, parameter in parameters.items()})


def coarsest(plan: Plan, *, computed: bool = False) -> Dtype:
    """The dtype with the fewest bits of mantissa that gradients meet, or that something is ``computed`` in."""
    met: set[Dtype] = {plan.precision.compute, *(dtype for _, dtype in plan.precision.modules)}
    if not computed:
        met |= {plan.precision.reduce, plan.precision.weights}
    return max(met, key=COARSER.index)


def compare(
    plan: Plan, found: Rounded, rounded: Rounded, exact: Rounded, updates_of: tuple[Rounded, Rounded]
) -> Rounding:
    """Compare what ranks ``found`` with the plain loop, ``rounded`` to the plan's dtypes and ``exact``, and with the
    weights of its ``updates_of`` the run's own gradients: with products as the optimizer has them, and in float64."""
    updated, whole = updates_of
    longest = [max(float(gradient.norm()) for gradient in right.values()) for right in exact.gradients]

    def typical(errors: Iterable[float]) -> float:
        return math.hypot(*sorted(errors)[:COUNTED]) / COUNTED**0.5

    def away(draws: list[dict[str, Tensor]], name: str) -> float:
        both = zip(draws, exact.gradients, longest, strict=True)
        return typical(_apart(each.get(name), right.get(name), SMALL * most) for each, right, most in both)

    def of_losses(losses: list[float]) -> float:
        return typical(abs(one - right) / abs(right) for one, right in zip(losses, exact.losses, strict=True))

    names = sorted({name for draws in (found, exact) for name in draws.gradients[0]})
    least = _least(plan)
    own, plains = ({name: away(draws, name) for name in names} for draws in (found.gradients, rounded.gradients))
    each = {name: own[name] / (plains[name] + least) for name in names}
    together = math.hypot(*own.values()) / math.hypot(*(error + least for error in plains.values()))
    wrong = [*found.spoilt]
    for number, (norm, known) in enumerate(zip(found.norms, updated.norms, strict=True), 1):
        if not (error := abs(norm - known) / known) <= NORM:
            wrong.append(
                f"gradient norm of step {number}: {known:.9g} expected of the run's own gradients, {norm:.9g} "
                f"found (relative error {error:.1e}, at most {NORM:g})"
            )
    updates = dict[str, tuple[float, float]]()
    blind = 0
    allowed = _moments_most(plan)
    for name, right in updated.after.items():
        change, room = right - found.before[name], UPDATES * _unit(plan.precision.weights) * right.abs()
        length = max(float(change.norm()), TINY)
        beyond = [
            float((apart_.abs() - room).clamp_min(0.0).norm()) / length
            for apart_ in (found.after[name] - right, change)
        ]
        products = _apart(updated.after[name] - found.before[name], whole.after[name] - found.before[name])
        most = max(allowed, PRODUCTS * min(products, 1.0))
        updates[name] = beyond[0], most
        blind += not beyond[1] > most
    loss = of_losses(found.losses) / (of_losses(rounded.losses) + least / 16)
    return Rounding(together, each, loss, updates, wrong, _most(plan), blind)


def _most(plan: Plan) -> Times:
    layout = plan.layout
    return WHOLE if max(layout.tp, layout.cp, layout.ep) == 1 and plan.lora is None else SHARED


def _apart(found: Tensor | None, right: Tensor | None, least: float = TINY) -> float:
    """Return how far a tensor is from the right one, relative to its length, or the ``least``; infinity for one that is
    missing or too many."""
    if found is None or right is None or found.shape != right.shape:
        return math.inf
    return float((found - right).norm()) / max(float(right.norm()), least)


def _least(plan: Plan) -> float:
    """Return by how much a gradient may be off where one process rounds less: some units of what is computed in, and
    what a sum over ranks and micro-batches rounds in a coarser dtype."""
    computed, every = coarsest(plan, computed=True), coarsest(plan)
    return ROUNDS[computed] + (4 * _unit(every) if every != computed else 0.0)


def _moments_most(plan: Plan) -> float:
    if plan.optim.spec.packed:
        return MOMENTS["8 bits"]
    kept = "bf16" if plan.optim.spec.rest else plan.optim.moments or plan.precision.weights
    return MOMENTS.get(kept, UPDATE)


def _unit(dtype: Dtype) -> float:
    return float(torch.finfo(torch_dtype(dtype)).eps)
