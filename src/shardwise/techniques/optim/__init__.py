"""The optimizer, in groups by name pattern; schedules are pure functions. Each is a row of spec/optimizers.py and a
module here, which this one names nowhere.

Each rank updates the shard of weights and moments that it owns; only Adafactor and Muon send something. Weight decay
applies to every matrix, embeddings included, not to norms and biases (as in GPT-2, Llama and their descendants). A
recipe's ``optim.groups`` override learning rate and weight decay by glob; the first match counts. Moments take the
dtype and the sharding of the weights, AdamW's 2 x 4 bytes a parameter in fp32; ``adamw8bit`` keeps them in 2 x 1
(moments.py), and ``moments: bf16`` in 2 x 2, rounded stochastically (rounding.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.blocks import each_named, spec_of
from shardwise.models.config import ModelSpec
from shardwise.models.roles import role, router_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import BYTES, Dtype, Optim, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import OptimSection, Recipe
from shardwise.spec.schedules import SCHEDULES, WARMUPS
from shardwise.spec.sheet import CONTROL_BYTES, KEPT_UNITS, Collective, Sheet, Tensor, Unit
from shardwise.techniques.optim import dealt
from shardwise.techniques.optim.dealt import OnPaper, Weight, matrices, on_paper, products, weight_of
from shardwise.techniques.quantised import moment_bytes, quantised
from shardwise.techniques.states import division, division_on_paper, frozen, states, whole_shape

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor
    from torch import nn
    from torch.optim import Optimizer

    from shardwise.distributed.meshes import Meshes

UNDECAYED = frozenset({"norm", "bias", "lora_m", "sinks", "decay_log", "dt_bias"})
"""Roles without weight decay unless a group of the recipe says otherwise."""
_MESHES: WeakKeyDictionary[nn.Module, Meshes] = WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """The settings that one parameter is trained with."""

    learning_rate: float
    weight_decay: float


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with the optimizer and the moments that the recipe asks for."""
    yield dataclasses.replace(plan, optim=Optim(recipe.optim.name, moments=recipe.optim.moments))


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked = recipe.optim
    return {"optim.name": (plan.optim.name, asked.name), "optim.moments": (plan.optim.moments, asked.moments)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if not plan.optim.fused:
        what = "gradients are clipped and steps skipped inside the fused AdamW kernel, so it cannot be turned off"
        return [Problem("PLAN012", what, "optim.fused", "optim.fused: true")]
    if plan.optim.spec.rest and plan.offload.optimizer != "none":
        what = f"{plan.optim.spec.title} multiplies whole matrices, which the host does too slowly"
        return [Problem("PLAN012", what, "optim.name", "optim.name=adamw, or offload.optimizer left out")]
    if plan.optim.spec.rest and plan.lora is not None:
        what = f"adapters alone are trained, and {plan.optim.spec.title} is for matrices of linear layers"
        return [Problem("PLAN012", what, "optim.name", f"optim.name={plan.optim.spec.rest}, or lora left out")]
    packed = plan.optim.spec.packed
    if plan.optim.moments is not None and "moments" not in plan.optim.spec.options:
        what = f"`optim.moments: {plan.optim.moments}` has no effect with `optim.name: {plan.optim.name}`"
        return [Problem("PLAN012", what, "optim.moments", "leave it out")]
    if plan.optim.spec.factored and (plan.layout.tp > 1 or plan.layout.ep > 1 or plan.offload.optimizer != "none"):
        what = f"{plan.optim.spec.title} needs whole rows of weights, on the device that has their gradients: "
        what += "not tp, ep or an optimizer on the host or NVMe"
        return [Problem("PLAN012", what, "optim.name", "optim.name=adamw, or tp, ep and offload.optimizer left out")]
    copied = plan.layout.pp > 1 and spec.tie_word_embeddings and not frozen("embed.weight", plan)
    if plan.optim.spec.factored and plan.sharded and copied:
        # Each stage joins them to sums of other weights, and where a sum lies decides in which order it is added up.
        what = f"two stages have the embedding, and {plan.optim.spec.title}'s sums over sharded weights round apart"
        return [Problem("PLAN012", what, "optim.name", "optim.name=adamw, parallel.pp=1, or parallel.strategy=ddp")]
    if (packed or plan.optim.moments is not None) and plan.precision.weights not in ("fp32", "bf16"):
        kept, key = ("8 bits", "optim.name") if packed else (plan.optim.moments, "optim.moments")
        what = f"moments in {kept} need weights in fp32 or bf16, but the weights are in {plan.precision.weights}"
        return [Problem("PLAN012", what, key, "leave it out: moments then have the dtype of the weights")]
    return []


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return the regimes that the optimizer's own module states, if it does."""
    if plan.optim.spec.rest:
        how, wholes = division(spec, plan), list[Weight]()
        for name, shape in trained.items():
            if count := matrices(name, len(shape), spec.experts.num_experts):
                wholes.append(weight_of(shape, count, states(name, 2, how, plan), plan.layout))
        return dealt.regimes(wholes, plan.layout)
    own = vars(program(plan.optim)).get("regimes")
    return own(spec, plan, trained) if own else {}


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Add the two small all-reduces of a step: the counts of tokens and the wish to stop (four int64), and the squared
    norm and the loss (two fp64), with what the loss reports and what is counted of experts (runtime/reduce.py); and one
    for the targets of what predicts a further token."""
    if plan.layout.world == 1:
        return sheet
    votes, axes = Collective("all_reduce", "world", "control", 32), plan.layout.axes()
    further = sheet.per_token - 1
    size = 16 + 8 * (len(plan.loss_figures) + further + sheet.counts)
    figures = dataclasses.replace(votes, bytes=size)
    if size > CONTROL_BYTES:  # of a single axis, the group of all ranks is the axis's own
        figures = Collective("all_reduce", axes[0][0] if len(axes) == 1 else "world", "counts", size)
    counted = (dataclasses.replace(votes, bytes=8),) * further
    sums = (*_sums(sheet, plan), *_on_paper(sheet, plan).sent)
    return dataclasses.replace(sheet, step=(*sheet.step, votes, *counted, figures, *sums))


def _sums(sheet: Sheet, plan: Plan) -> Iterator[Collective]:
    """Yield the sums over ranks that hold other rows: of each trained weight a number a column and two, then one."""
    if plan.optim.spec.factored and plan.sharded:
        trained = [(each.shape, times) for unit, times in sheet.repeated() for each in unit.weights if each.trained]
        columns = sum(times * (2 + (int(shape[1]) if len(shape) > 1 else 1)) for shape, times in trained)
        for numbers in (columns, sum(times for _, times in trained)):
            if numbers:
                size = max(4, BYTES[plan.precision.weights]) * numbers
                yield Collective("all_reduce", "fsdp", "moments", size)


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Remember over which ranks whole matrices are gathered; nothing in the parts changes."""
    _MESHES.update(dict.fromkeys(parts, meshes))
    return parts


class WholeMatrices(NamedTuple):
    """What an update does with whole matrices: (m, n, k) of the products of ranks that others wait for, their dtype,
    and the most bytes that it takes for them at a time."""

    products: list[tuple[int, int, int]]
    dtype: Dtype
    held_bytes: int


def on_whole_matrices(sheet: Sheet, plan: Plan) -> WholeMatrices:
    """Return what an update does with whole matrices on the sheet's kind of rank; nothing by most optimizers."""
    dealt_out, dtype = _on_paper(sheet, plan), _multiplied_in(plan)
    multiplied = [each for shape in dealt_out.multiplied for each in products(*shape)]
    return WholeMatrices(multiplied, dtype, BYTES[dtype] * dealt_out.held)


def _on_paper(sheet: Sheet, plan: Plan) -> OnPaper:
    """Return what is dealt out and sent of an update on the sheet's kind of rank."""
    if not plan.optim.spec.rest:
        return OnPaper((), (), 0)
    how, found = division_on_paper(sheet, plan), list[tuple[Weight, int]]()
    for unit, times in sheet.repeated():
        for weight, count in _matrices(unit):
            of = states(weight.name, 2, how, plan)
            found.append((weight_of(whole_shape(weight, sheet, plan.layout), count, of, plan.layout), times))
    return on_paper(tuple(found), plan.layout, sheet.rank_kind.rank, BYTES[_multiplied_in(plan)])


@lru_cache(maxsize=8 * KEPT_UNITS)
def _matrices(unit: Unit) -> tuple[tuple[Tensor, int], ...]:
    """Return the trained weights of a unit that are matrices of linear layers, and how many each is."""
    shapes = {weight.name: weight.shape for weight in unit.weights if unit.name == "block"}
    experts = {name: int(shapes.get(router_of(name), (1,))[0]) for name in shapes}
    counts = {name: matrices(f"layers.0.{name}", len(shape), experts[name]) for name, shape in shapes.items()}
    return tuple((each, counts[each.name]) for each in unit.weights if each.trained and counts.get(each.name))


def _multiplied_in(plan: Plan) -> Dtype:
    """Return the dtype in which matrices are multiplied."""
    return "fp64" if plan.precision.weights == "fp64" else "bf16"


def state_bytes(sheet: Sheet, plan: Plan) -> dict[str, int]:
    """Return the bytes of weights and moments on the sheet's kind of rank, wherever moments are. FSDP2 pads weights;
    moments are not padded. Each trained weight has a step count of 4 bytes."""
    spec, found = plan.optim.spec, []
    number = spec.kept * BYTES[plan.optim.moments or plan.precision.weights]
    for unit, times in sheet.repeated():
        packed: frozenset[str] = frozenset()
        if spec.packed:
            shapes = {weight.name: whole_shape(weight, sheet, plan.layout) for weight in unit.weights}
            packed = frozenset(name for name, shape in shapes.items() if quantised(shape))
        keeps = number, number if spec.rest is None else number // spec.kept * OPTIMIZERS[spec.rest].kept
        found.append([times * size for size in _state_bytes(unit, sheet.rank_kind, keeps, packed, spec.factored)])
    weights, moments = map(sum, zip(*found, strict=True))
    return {"weights": weights, "moments": moments}


@lru_cache(maxsize=8 * KEPT_UNITS)
def _state_bytes(
    unit: Unit, rank_kind: RankKind, keeps: tuple[int, int], packed: frozenset[str], factored: bool
) -> tuple[int, int]:
    """Count the bytes of one unit; ``keeps``: bytes of the moments of an element, of matrices of linear layers and of
    everything else, but of ``packed`` weights."""
    weights = 0
    moments = 0
    own = {weight.name for weight, _ in _matrices(unit)}
    for weight in unit.weights:
        weights += weight.local_numel(rank_kind, padded=True) * BYTES[weight.dtype]
        if weight.trained:
            mine, shape = weight.local_numel(rank_kind, padded=False), tuple(map(int, weight.shape))
            if factored and len(shape) > 1:
                mine = mine // shape[1] + shape[1]
            number = keeps[weight.name not in own]
            moments += 4 + (moment_bytes(shape, mine) if weight.name in packed else mine * number)
    return weights, moments


def settings(name: str, optim: OptimSection, *, rest: bool = False) -> Settings:
    """Return the learning rate and weight decay of the parameter with this canonical ``name``; ``rest``: another
    optimizer than the recipe's updates it."""
    decay = 0.0 if role(name) in UNDECAYED else optim.weight_decay
    usual = optim.adam_learning_rate if rest and optim.adam_learning_rate is not None else optim.learning_rate
    for group in optim.groups:
        if fnmatchcase(name, group.pattern):
            rate = usual if group.learning_rate is None else group.learning_rate
            return Settings(rate, decay if group.weight_decay is None else group.weight_decay)
    return Settings(usual, decay)


Updated = Callable[["nn.Parameter"], "nn.Parameter"]
"""What is updated in place of a parameter."""


def itself(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter: nothing else is updated in its place."""
    return parameter


def grouped(
    parts: Sequence[nn.Module],
    optim: OptimSection,
    updated: Updated = itself,
    wholes: Mapping[nn.Parameter, Weight] | None = None,
) -> list[dict[str, Any]]:
    """Return the trained parameters of ``parts``, or what is ``updated`` in their place, in groups that are trained
    alike. Plain and sharded parameters are in separate ones: the fused kernel does not take both at once. Those that
    are updated themselves come first: a GPU is then at work while the host updates others. ``wholes``: those that are
    ``matrices`` for the optimizer, where another updates the rest."""
    from torch.distributed.tensor import DTensor

    groups: dict[tuple[Settings, bool, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in each_named(parts):
        if parameter.requires_grad:
            target, own = updated(parameter), wholes is None or parameter in wholes
            kind = settings(name, optim, rest=not own), isinstance(parameter, DTensor), target is not parameter, own
            groups.setdefault(kind, []).append((name, target))
    given: list[dict[str, Any]] = [
        {"params": parameters, "base_lr": chosen.learning_rate, "weight_decay": chosen.weight_decay, "matrices": own}
        for (chosen, *_, own), parameters in sorted(groups.items(), key=lambda group: group[0][2])
    ]
    if not given:  # a stage of a pipeline may have nothing to train
        rates = {"base_lr": optim.learning_rate, "weight_decay": optim.weight_decay}
        given = [{"params": [], **rates, "matrices": wholes is None}]
    return given


def build(
    parts: Sequence[nn.Module], optim: OptimSection, plan: Plan, seed: int = 0, updated: Updated = itself
) -> Optimizer:
    """Make the plan's optimizer over :func:`grouped` parameters, with what it keeps in place (zeros), so that a
    checkpoint can be read into it. ``seed`` is for stochastic rounding."""
    if plan.optim.spec.rest is None:
        made: Optimizer = program(plan.optim).build(grouped(parts, optim, updated), optim, plan, seed)
        return made
    wholes = _wholes(parts, plan)
    made = program(plan.optim).build(grouped(parts, optim, updated, wholes), optim, plan, seed)
    made.deal(wholes, _MESHES[parts[0]])  # type: ignore[attr-defined]  # as all do that have another update the rest
    return made


def _wholes(parts: Sequence[nn.Module], plan: Plan) -> dict[nn.Parameter, Weight]:
    """Return the trained matrices of linear layers, and what this rank's are pieces of."""
    spec = spec_of(parts)
    how = division(spec, plan)
    found: dict[nn.Parameter, Weight] = {}
    for name, parameter in each_named(parts):
        count = matrices(name, parameter.ndim, spec.experts.num_experts)
        if count and parameter.requires_grad:
            found[parameter] = weight_of(parameter.shape, count, states(name, 2, how, plan), plan.layout)
    return found


def program(optim: Optim) -> ModuleType:
    """Return the module that makes an optimizer: ``build(groups, section, plan, seed)``, and ``plain(groups,
    section)``, one for whole weights in one process, whose steps proofs compare. One whose row has a ``rest`` is told
    by its ``deal(wholes, meshes)`` of what weights the parameters are pieces, and over which ranks; ``matrices`` of a
    group of ``plain`` is how many each parameter is, one's rows after another's."""
    file = optim.spec.file
    return import_module(file if "." in file else f"{__name__}.{file}")


def fresh_moments(parameter: nn.Parameter) -> dict[str, TorchTensor]:
    """Return AdamW's state of one parameter before its first step, sharded as the parameter is."""
    import torch

    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
    }


def update(optimizer: Optimizer, skip: TorchTensor, factor: TorchTensor | None = None) -> None:
    """Make one update with every gradient multiplied by ``factor``, or no update where ``skip`` is true. Both stay on
    the device: the kernels read them as ``grad_scale`` and ``found_inf``."""
    optimizer.grad_scale = None if factor is None else factor.reciprocal().float()  # type: ignore[attr-defined]
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    optimizer.step()


def rehearse(optimizer: Optimizer, updates: int) -> None:
    """Make an update of size zero, for the memory that it takes, where gradients are zero: neither weights nor moments
    change, which have seen so many ``updates``."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    set_updates(optimizer, updates)


def set_learning_rate(optimizer: Optimizer, rate: float, optim: OptimSection) -> None:
    """Set every group's learning rate for this step. ``rate`` is the recipe's; a group with another base rate follows
    the same schedule."""
    for group in optimizer.param_groups:
        group["lr"] = rate * (group["base_lr"] / optim.learning_rate)


def set_updates(optimizer: Optimizer, updates: int) -> None:
    """Tell AdamW's bias correction how many updates the moments have seen (after a checkpoint was loaded)."""
    for state in optimizer.state.values():
        state["step"].fill_(float(updates))


def learning_rate(optim: OptimSection, step: int, max_steps: int) -> float:
    """The learning rate of update number ``step`` (from 0) of ``max_steps``: a warm-up, then a row of
    :data:`~shardwise.spec.schedules.SCHEDULES`.

    Below 1, ``warmup_steps`` is a share of ``max_steps``, rounded up. The warm-up reaches the full rate at its last
    step, or where it begins at ``warmup_from``, at the step after it.
    """
    schedule = SCHEDULES[optim.schedule]
    low = optim.min_learning_rate
    high = optim.learning_rate
    warmup = math.ceil(optim.warmup_steps * max_steps) if optim.warmup_steps < 1 else optim.warmup_steps
    step = max(0, step - optim.warmup_delay)
    if step < warmup:
        first, begun = (0.0, step + 1) if optim.warmup_from is None else (optim.warmup_from, step)
        return first + (high - first) * WARMUPS[optim.warmup_shape](min(1.0, begun / warmup), warmup)
    start, length = schedule.span(optim.decay_steps, warmup, max_steps)
    left = schedule.left(max(0.0, (step - start) / max(1, length)), optim.power)
    return max(low, high * left) if schedule.floor else low + (high - low) * left
