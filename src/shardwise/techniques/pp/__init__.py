"""Pipeline parallelism: the ranks of a group each have some of the blocks, its *stages*, and micro-batches go through.

    sends           of each micro-batch, hidden states to the rank of the next stage, and their gradient back
    with tied ends  once a step the gradient of the embedding, between the two ranks that have a copy of it
    idle            while the first micro-batch comes and the last one leaves; schedules differ in how long, and in how
                    many micro-batches are alive meanwhile (actions.py)

A rank holds its stages' weights, gradients and moments, and sends little: it pays where a model does not fit into the
devices of a node, over links that are too slow for tensor parallelism or for gathers of weights. Micro-batches must be
several times as many as the ranks. Stages are whole blocks, under their numbers in the model; embedding and output
layer weigh in where they are split (split.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.blocks import spec_of
from shardwise.models.config import ModelSpec, layer_kinds
from shardwise.spec.cluster import Cluster
from shardwise.spec.pipelines import PIPELINES, ScheduleName
from shardwise.spec.plan import BYTES, Pipeline, Plan
from shardwise.spec.rank_kind import RankKind, rank_kind_of
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import Collective, Sheet
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.pp.actions import Lists, actions, illegal
from shardwise.techniques.pp.schedule_orders import rounds_of
from shardwise.techniques.pp.split import split
from shardwise.techniques.states import trained_stages

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardwise.distributed.meshes import Meshes
    from shardwise.techniques.pp.later import WeightGradients

SETTINGS = {"layout.pp": 1}
MOST_MICRO_BATCHES = 2**12
"""Of a step: some schedules are looked at action by action, and every rank of a run has a list of them."""
AUTOMATIC = tuple((name, stages) for name, spec in PIPELINES.items() for stages in spec.tried)
"""Schedules that are tried where none is pinned, and with how many stages a rank where that is not; simpler ones
first."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool = True) -> Iterator[Plan]:
    """Yield the plan with the pipeline that the recipe pins; else without one, unless :func:`pipelines` are asked for.
    Where the schedule is not pinned, every one that a rank's number of stages allows is tried; stages are split evenly,
    unless the recipe says how many blocks each has."""
    ranks = (recipe.parallel.pp or 1) if pinned else 1
    if ranks == 1:
        yield plan
    else:
        yield from _scheduled(recipe, spec, plan, ranks)


def pipelines(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield every pipeline that is tried where the recipe pins none: of GPUs, over 2, 4, 8, ... ranks that divide them,
    of which each has a block. That a CPU's processes share its memory is no measure of links. A recipe that says how
    many ranks are replicas or have slices means all ranks that tensor parallelism leaves."""
    ranks = 2
    if recipe.parallel.dp_shard or recipe.parallel.dp_replicate:
        return
    while cluster.kind == "cuda" and spec.hf_model is None and ranks <= min(cluster.world, spec.num_hidden_layers):
        if cluster.world % ranks == 0:
            yield from _scheduled(recipe, spec, plan, ranks)
        ranks *= 2


def _scheduled(recipe: Recipe, spec: ModelSpec, plan: Plan, ranks: int) -> Iterator[Plan]:
    """Yield the plan with a pipeline over so many ranks, under each schedule."""
    asked, given = recipe.parallel, recipe.parallel.pp == ranks
    tried: dict[tuple[ScheduleName, int], None] = {}
    for schedule, stages in AUTOMATIC if asked.schedule == "auto" else ((asked.schedule, 0),):
        each = asked.stages_per_rank or stages or PIPELINES[schedule].least_stages
        more = not given or (asked.schedule == "auto" and stages > PIPELINES[schedule].least_stages)
        barred = any(one.name == "stages_per_rank" for one in illegal(schedule, ranks, each, 1))
        too_many = ranks * each > spec.num_hidden_layers and more
        # Blocks that are compiled cannot have their backward in two.
        halved = PIPELINES[schedule].splits_backward and asked.schedule == "auto" and recipe.compile is not False
        if not (halved or too_many or (barred and (asked.schedule == "auto" or not given))):
            tried[schedule, each] = None
    for schedule, each in tried:
        counts = tuple(asked.split or ()) or even(spec, recipe.train.seq_len, ranks * each)
        why = {
            "layout.pp": "pinned" if given else "searched",
            "pipeline.schedule": "pinned" if asked.schedule != "auto" else "searched",
            "pipeline.split": "pinned" if asked.split else "derived: the output layer weighs in with the last stage",
        }
        yield replace(
            plan,
            layout=replace(plan.layout, pp=ranks, v_shaped=PIPELINES[schedule].shape == "v"),
            pipeline=Pipeline(schedule, each, counts),
            why={**plan.why, **why},
        )


def even(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    """Return how many blocks each stage has where nobody says it; of more stages than blocks some have none."""
    if stages > spec.num_hidden_layers:
        return (1,) * spec.num_hidden_layers + (0,) * (stages - spec.num_hidden_layers)
    return split(spec, seq_len, stages)


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked, planned = recipe.parallel, plan.pipeline
    piped = plan.layout.pp > 1
    return {
        "parallel.pp": (plan.layout.pp, asked.pp or "auto"),
        "parallel.schedule": (planned.schedule, asked.schedule if piped else "auto"),
        "parallel.stages_per_rank": (planned.stages_per_rank, (piped and asked.stages_per_rank) or "auto"),
        "parallel.split": (planned.split, tuple(asked.split) if piped and asked.split else "auto"),
    }


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    ranks, asked = plan.layout.pp, plan.pipeline
    if ranks == 1:
        return []
    if spec.hf_model is not None:
        what = f"{spec.name} runs in transformers' own modules, which are not cut into stages"
        return [Problem("PLAN023", what, "parallel.pp", "`parallel.pp=1`: the batch, or weights, are divided instead")]
    kind = PIPELINES[asked.schedule]
    name = asked.schedule
    each = asked.stages_per_rank
    stages = ranks * each
    blocks = spec.num_hidden_layers
    problems = []
    found = {one.name: one for one in illegal(name, ranks, each, plan.batch.accumulation)}
    if wrong := found.get("stages_per_rank"):
        others = [other for other in PIPELINES if not illegal(other, ranks, each, plan.batch.accumulation)]
        fix = f"`parallel.stages_per_rank={wrong.nearest}`"
        fix += f", or `parallel.schedule` {' or '.join(others)}" if others else ""
        problems.append(Problem("PLAN023", wrong.what, "parallel.stages_per_rank", fix))
    elif stages > blocks:
        most = blocks // each
        fix = f"`parallel.pp={most}` or less" if most > 1 else "`parallel.pp=1`"
        what = f"{spec.name} has {blocks} blocks, and {ranks} ranks with {each} stages each would be {stages} stages"
        problems.append(Problem("PLAN023", what, "parallel.pp", fix))
    elif len(asked.split) != stages or sum(asked.split) != blocks or min(asked.split) < 1:
        said = ", ".join(map(str, asked.split))
        what = f"split [{said}] is not {stages} numbers of blocks, each at least 1, that add up to {blocks}"
        good = ", ".join(map(str, even(spec, plan.batch.seq_len, stages)))
        problems.append(Problem("PLAN023", what, "parallel.split", f"[{good}], or leave it out"))
    elif wrong := found.get("micro_batches"):
        fix = f"`train.gradient_accumulation_steps={wrong.nearest}`, or a larger `train.global_batch_size`"
        problems.append(Problem("PLAN024", wrong.what, "train.gradient_accumulation_steps", fix))
    elif plan.batch.accumulation > MOST_MICRO_BATCHES:
        what = f"{plan.batch.accumulation:,} micro-batches a step; the limit of a pipeline is {MOST_MICRO_BATCHES:,}"
        fix = "a larger `train.micro_batch_size`, or a smaller `train.global_batch_size`"
        problems.append(Problem("PLAN024", what, "train.gradient_accumulation_steps", fix))
    if kind.splits_backward and plan.compile:
        what = f"{name} makes gradients of weights apart, which compiled blocks cannot do"
        problems.append(Problem("PLAN023", what, "compile", "`compile=false`, or schedule 1f1b or interleaved"))
    v_shaped = kind.shape == "v"
    if plan.layout.v_shaped != v_shaped:
        way = "down the ranks and back up" if v_shaped else "round the ranks"
        what = f"the stages of {name} go {way}, and v_shaped is {str(plan.layout.v_shaped).lower()}"
        problems.append(Problem("PLAN023", what, "layout.v_shaped", f"v_shaped: {str(v_shaped).lower()}"))
    return problems


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Stages that lack something that others have, and micro-batches that do not go round evenly."""
    stages, order = plan.stages(spec.num_hidden_layers), layer_kinds(spec)[1]
    kinds = [{(order[block], spec.mlp_size(block), spec.has_experts(block)) for block in stage} for stage in stages]
    trains, count = trained_stages(spec, plan), plan.batch.accumulation
    rounds = rounds_of(plan.pipeline.spec, plan.layout.pp, count) if plan.pipeline.stages_per_rank > 1 else []
    return {
        "a stage without blocks of one kind": any(own != set[object]().union(*kinds) for own in kinds),
        "stages of unequal length": len({len(stage) for stage in stages}) > 1,
        "a first stage without trained weights": not trains[0],
        "a stage without trained weights behind one that has some": False in trains[trains.index(True) :],
        "fewer micro-batches than ranks of a pipeline": count < plan.layout.pp,
        "rounds of unequal length": plan.pipeline.spec.shape != "v" and len({*rounds}) > 1,
    }


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Add the sum of the gradients of tied ends, where two ranks have one each. What a step sends between stages, the
    order of its actions says."""
    ends = [unit.weights for unit in (sheet.embedding, sheet.head) if unit.weights]
    if not sheet.copied or plan.layout.v_shaped or not ends or not (weight := ends[0][-1]).trained:
        return sheet
    cut = weight.cut(*weight.shards, ("fsdp", 0)) if plan.sharded else weight
    size = cut.local_numel(sheet.rank_kind, padded=False) * BYTES[plan.precision.reduce]
    return replace(sheet, step=(*sheet.step, Collective("all_reduce", "pp", "gradients", size)))


def orders(plan: Plan, trained: tuple[bool, ...]) -> Lists:
    """Return the actions of each rank of a pipeline in a step, in order. ``trained``: of each stage, whether any of its
    weights is (states.trained_stages)."""
    asked, ranks = plan.pipeline, plan.layout.pp
    return actions(asked.schedule, ranks, asked.stages_per_rank, plan.batch.accumulation, trained)


@dataclass(frozen=True)
class Line:
    """The pipeline that parts of a model stand in: the ``plan`` and the groups of this rank; ``later``: where gradients
    of weights are made later than those of inputs, what puts them off."""

    plan: Plan
    meshes: Meshes
    rank_kind: RankKind
    later: WeightGradients | None


_LINES: WeakKeyDictionary[nn.Module, Line] = WeakKeyDictionary()


def line_of(parts: Sequence[nn.Module]) -> Line | None:
    """Return the pipeline in which these parts are stages; None of a whole model."""
    return _LINES.get(parts[0])


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Return this rank's stages of the whole model. Where embedding and output layer are tied, each of them is a weight
    of its own stage from here on: copies, which begin alike and take the same steps."""
    import torch

    from shardwise.models.decoder import Decoder
    from shardwise.techniques.pp.later import WeightGradients

    [whole] = parts
    assert isinstance(whole, Decoder)
    rank_kind = rank_kind_of(meshes.rank, plan.layout, plan.stages(whole.spec.num_hidden_layers))
    stages: list[nn.Module] = []
    for stage in rank_kind.stages:
        with torch.device("meta"):
            part = Decoder(whole.spec, stage.blocks, embedding=stage.embedding, head=stage.head)
        part.kernel = whole.kernel
        stages.append(part)
    line = Line(plan, meshes, rank_kind, WeightGradients() if plan.pipeline.spec.splits_backward else None)
    for own in stages:
        _LINES[own] = line
        if line.later:
            line.later.watch(own)
    return stages


def after_backward(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Add the gradients of tied ends: over the two ranks that have them, or here where one has both."""
    from torch import distributed

    from shardwise.distributed.slices import local

    ends = tied_ends(parts)
    found = [local(end.grad) for end in ends if end.grad is not None]
    if len(ends) == 2 and found:
        total = found[0] if len(found) == 1 else found[0].add_(found[1])
        for end in ends:
            if end.grad is None:
                end.grad = end.detach().clone()
            local(end.grad).copy_(total)
    elif found:
        [own] = found
        wired = own.to(torch_dtype(plan.precision.reduce))
        distributed.all_reduce(wired, group=meshes.groups["ends"])
        own.copy_(wired)


def tied_ends(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of the embedding and of the output layer that these parts have, of a model with tied ends."""
    if not spec_of(parts).tie_word_embeddings:
        return []
    named = {name: value for part in parts for name, value in part.named_parameters()}
    return [named[name] for name in ("embed.weight", "head.weight") if name in named]
