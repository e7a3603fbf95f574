"""What the tests of the runtime ask of the pool's ranks. Every function is told (rank, world) first."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local, local_slice, put
from shardwise.errors import DataError, ShardwiseError
from shardwise.models import blocks
from shardwise.models.config import ModelSpec
from shardwise.runtime import agree, build, export, generate, objects, reduce
from shardwise.runtime.checkpoint.host_group import HostGroup
from shardwise.runtime.end import until_asked
from shardwise.runtime.faults.guard import StopRequest
from shardwise.runtime.metrics import measure
from shardwise.runtime.passes import finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepRules, StepStats, step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Precision
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.techniques import optim
from tests.parity.cases import TIED, UNTIED

CPU = torch.device("cpu")


def mixed_step(rank: int, world: int) -> tuple[bool, bool]:
    """A sharded layer and a plain one in one optimizer: are they in separate groups, and do both move?"""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 6), "head": nn.Linear(6, 4, bias=False)})
    fully_shard(model["head"], mesh=init_device_mesh("cpu", (world,)))
    optimizer = optim.build([model], OptimSection(learning_rate=0.1), Plan())
    kinds = [{isinstance(p, DTensor) for p in group["params"]} for group in optimizer.param_groups]
    before = {name: local(p.detach()).clone() for name, p in blocks.named([model]).items()}
    model["head"](model["embed"](torch.arange(4))).square().sum().backward()
    optimizer.step()
    moved = [not torch.equal(local(p.detach()), before[name]) for name, p in blocks.named([model]).items()]
    return all(len(kind) == 1 for kind in kinds) and len(kinds) == 2, all(moved)


def slices_fit(rank: int, ranks: int, replicas: int, shape: tuple[int, ...]) -> bool:
    """Whether a fully sharded parameter, filled slice by slice, is the global tensor when gathered."""
    sizes = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = init_device_mesh(
        "cpu", sizes, mesh_dim_names=("dp_shard",) if replicas == 1 else ("dp_replicate", "dp_shard")
    )
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    put(module.weight, whole[local_slice(module.weight)])
    return torch.equal(module.weight.full_tensor(), whole)


def state_of(plan: Plan, settings: OptimSection) -> TrainState:
    """The tied tiny model, built as a run builds it."""
    recipe = Recipe.model_validate({"optim": settings.model_dump()})
    return build.build(recipe, TIED, plan, meshes(plan.layout, "cpu"), CPU)


def norm_and_clip(rank: int, ranks: int, plan: Plan, max_norm: float) -> tuple[float, dict[str, Tensor]]:
    """The global norm, and every gradient after clipping, gathered; gradients are set to those of :func:`gradient`."""
    state = state_of(plan, OptimSection())
    for name, parameter in state.parameters().items():
        whole = gradient(name, tuple(parameter.shape))
        grad = torch.empty_like(parameter)
        local(grad).copy_(whole[local_slice(parameter)])
        parameter.grad = grad
    groups = meshes(plan.layout, "cpu")
    squares = reduce.local_squares(state.trained(), groups.size("stage"))
    norm = reduce.combine(groups, squares, torch.zeros((), dtype=torch.float64))[0].sqrt()
    reduce.scale_gradients(state.trained(), reduce.clip_factor(norm, max_norm))
    grads = {name: p.grad for name, p in state.parameters().items()}
    return float(norm), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def gradient(name: str, shape: tuple[int, ...]) -> Tensor:
    """A gradient in fp64 that depends on the name alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def verdicts(rank: int, ranks: int, bad: int | None, stopping: int | None) -> tuple[bool, bool, int]:
    """What the ranks agree on when rank ``bad`` has a NaN and rank ``stopping`` wants to stop; and a count."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), torch.nan if rank == bad else 1.0)
    groups = meshes(Layout(dp_replicate=ranks), "cpu")
    squares = reduce.local_squares([weight], ranks)
    verdict = reduce.combine(groups, squares, torch.zeros(()))
    count, stop = reduce.count_supervised(groups, rank + 1, stop=rank == stopping)
    return bool(verdict.isfinite().all()), stop, count


def counted(rank: int, ranks: int, stopping: int) -> tuple[int, bool, list[float]]:
    """Two ranks of tensor parallelism read the same 10 or 11 tokens and compute the same loss, 0.25, and a figure, 3;
    each holds its own part of the norm, 1."""
    groups = meshes(Layout(dp_shard=2, tp=2), "cpu")
    tokens, stop = reduce.count_supervised(groups, 10 + groups.index("batch"), stop=rank == stopping)
    norm, loss, figure = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.25), torch.tensor(3)
    return tokens, stop, reduce.combine(groups, norm, loss, figure).tolist()


ROWS, LENGTH, STEPS = 8, 12, 4


def rows(number: int) -> MicroBatch:
    """The global batch of a step: every row has another number of supervised tokens."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(0, TIED.vocab_size, (ROWS, LENGTH), generator=draw)
    labels = ids.roll(-1, 1)
    for row in range(ROWS):
        labels[row, : row + 1] = -100
    return MicroBatch(ids, labels, torch.arange(LENGTH).expand(ROWS, LENGTH), None, LENGTH)


def part(batch: MicroBatch, start: int, length: int) -> MicroBatch:
    """Some rows of a batch."""
    some = slice(start, start + length)
    return MicroBatch(batch.ids[some], batch.labels[some], batch.positions[some], None, LENGTH)


def rules_of(plan: Plan, settings: OptimSection) -> StepRules:
    return StepRules(plan, meshes(plan.layout, "cpu"), settings, STEPS, finish_of(Method(), plan))


def few_steps(
    rank: int, ranks: int, plan: Plan, poison: int | None = None, steps: int = STEPS
) -> tuple[list[StepStats], dict[str, Tensor]]:
    """``steps`` steps on this rank's share of the global batches; during step ``poison`` the last rank has NaN for the
    weight of its last norm. Returns the stats and the whole tensors of the state."""
    settings = OptimSection(learning_rate=1e-2, max_grad_norm=0.5)
    state, rules = state_of(plan, settings), rules_of(plan, settings)
    own = ROWS // plan.layout.dp
    size = own // plan.batch.accumulation
    stats = []
    for number in range(steps):
        start = rules.meshes.index("batch") * own
        batches = [part(rows(number), start + k * size, size) for k in range(plan.batch.accumulation)]
        supervised, _ = reduce.count_supervised(rules.meshes, sum(batch.supervised_tokens() for batch in batches))
        norm_weight = local(state.parameters()["norm.weight"].detach())
        kept = norm_weight.clone()
        if number == poison and rank == ranks - 1:
            norm_weight.fill_(torch.nan)
        stats.append(step(state, batches, supervised, rules))
        if number == poison:
            norm_weight.copy_(kept)
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in state.tensors().items()}
    return stats, whole


def fp64(plan: Plan) -> Plan:
    """``plan`` with everything in fp64."""
    return replace(plan, precision=Precision("fp64", "fp64", "fp64"))


def disagree(rank: int, ranks: int, change: dict[str, Any]) -> list[str]:
    """Compare recipes when the last rank's differs; the codes and texts of the problem, or nothing."""
    recipe = Recipe.model_validate(change if rank == ranks - 1 else {})
    try:
        agree.agree(recipe, Plan())
    except ShardwiseError as error:
        return [error.problems[0].code, error.problems[0].what]
    return []


def gathered_names(rank: int, ranks: int, plan: Plan) -> tuple[list[str], bool]:
    """The names of a state's tensors on this rank, and whether head and embedding are one parameter."""
    state = state_of(plan, OptimSection())
    model = state.parts[0]
    tied = model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    dist.barrier()
    return list(state.tensors()), tied


def traffic_of_a_step(rank: int, ranks: int, plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """What the second step sends, by axis and kind."""
    settings = OptimSection()
    groups = meshes(plan.layout, "cpu")
    state = build.build(Recipe(), TIED, plan, groups, CPU)
    meter, rules = measure.Meter(groups, CPU), rules_of(plan, settings)
    for number in range(2):
        with meter.measuring(state):
            step(state, [part(rows(number), rank, 1)], 10, rules)
    return meter.traffic


def whole_weights(rank: int, ranks: int, plan: Plan) -> dict[str, Tensor]:
    """Every parameter of a fresh model, gathered."""
    return {name: export.whole(parameter) for name, parameter in state_of(plan, OptimSection()).parameters().items()}


class NoTokenizer:
    """Stands for a tokenizer that has no files."""

    directory = Path("nowhere")
    eot_id = 0

    def copy_to(self, directory: Path) -> None:
        pass


def copy_model(rank: int, ranks: int, source: str, target: str, plan: Plan, spec: ModelSpec = UNTIED) -> None:
    """Read a model's directory into this layout and export it again."""
    recipe = Recipe.model_validate({"model": {"path": source}})
    state = build.build(recipe, spec, plan, meshes(plan.layout, "cpu"), CPU)
    export.export(state.parameters(), spec, NoTokenizer(), Path(target), torch.float32)  # type: ignore[arg-type]
    dist.barrier()


def why_not_read(rank: int, ranks: int, source: str, plan: Plan) -> str:
    """What is wrong with a model's directory, as this rank tells it when a run begins."""
    recipe = Recipe.model_validate({"model": {"path": source}})
    groups = meshes(plan.layout, "cpu")
    try:
        agree.together(lambda: build.build(recipe, UNTIED, plan, groups, CPU))
    except DataError as error:
        return str(error)
    return ""


def generated(rank: int, ranks: int, plan: Plan, sampling: generate.Sampling) -> tuple[list[int], bool]:
    """What a sharded model writes after three ids, and whether its weights are afterwards the shards that they were."""
    state = state_of(plan, OptimSection())
    before = parts_of(state)
    ids = generate.generate(state.parts, [1, 2, 3], sampling, CPU)
    techniques.after_inference(state.parts, plan)
    return ids, parts_of(state) == before


def parts_of(state: TrainState) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """How each parameter is divided, and the shape of this rank's part; every one is a DTensor."""
    found = {}
    for name, parameter in state.parameters().items():
        assert isinstance(parameter, DTensor), name
        found[name] = parameter.placements, tuple(parameter.to_local().shape)
    return found


def exchange_objects(rank: int, world: int) -> tuple[Any, Any, Any]:
    """What arrives of objects whose sizes differ."""
    mine = {"of": rank, "long": "x" * (1000 - rank)}
    dealt = HostGroup.of(None).deal(lambda: [("for", number, "y" * number) for number in range(world)])
    return objects.broadcast(mine), objects.gather(mine), dealt


def validate_until_asked(rank: int, ranks: int, who: int, at: int) -> tuple[list[int], bool]:
    """The batches of 5 that are evaluated where rank ``who`` is asked to stop during batch ``at``; do all know?"""
    stop, job, log = (
        StopRequest(),
        SimpleNamespace(device=CPU, meshes=meshes(Layout(dp_replicate=ranks), "cpu")),
        Mock(),
    )
    seen: list[int] = []
    for batch in until_asked(range(5), 5, job, log, stop):  # type: ignore[arg-type]
        seen.append(batch)  # type: ignore[arg-type]
        if rank == who and batch == at:  # type: ignore[comparison-overlap]
            stop.receive(signal.SIGINT, None)
    assert [call.args[1] for call in log.progress.call_args_list][: len(seen)] == seen
    return seen, stop.everywhere
