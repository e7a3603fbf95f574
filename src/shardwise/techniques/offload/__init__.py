"""Offloading: what is kept outside the memory of the device.

    offload.optimizer   where                                            what is copied a step, of each trained weight
    none                all on the device                                nothing
    host                moments, the weights that are updated, and       its gradient to the host, as it becomes whole
                        gradients in memory of the host                  in backward; its new value back, of blocks
                                                                         within the next forward
    nvme                the same, but moments and weights in a file      the same, piece by piece; and the file is read
                        (scratch.py, streamed.py)                        and written

    offload.optimizer_fraction
    0.4                 the optimizer of two blocks in five is on        of these blocks
                        the host; the device updates the others,
                        at the same time, and both ends of the model

    offload.activations
    host                what full recomputation keeps, the inputs    each to the host, while its block computes; back,
                        of blocks, in memory of the host             while backward computes the block after it
    nvme                the same, in a file                          the same, through the host to the file, and back

    offload.weights
    host                the weights of blocks, frozen ones, and      each to the device, while the block before it
                        trained ones that the host updates, in       computes, in forward and in backward
                        memory of the host
    nvme                the same in a file, trained ones if their    the same, read from the file a block ahead
                        optimizer is there

The optimizer is the same, torch's fused AdamW or one of ours, on tensors of the host (host_copies.py): the numbers do
not change. Of blocks that compute in 16 bits the device has no more than those (narrow.py). The host waits for the
gradient norm before it updates, so that clipping and the skip of a bad step stay exact. A gradient leaves while
backward still runs where no sum over ranks comes after it: under a sharded strategy, or on one rank, without tp and pp;
others leave when backward is over. It pays where moments do not fit: all that is trained crosses the bus twice a step,
and is updated at the rate of the host's memory. What blocks are given (activations.py) crosses it while they compute,
and pays where rows are long; so do weights that wait (weights.py), in every micro-batch, which pays where they do not
fit: those of a large model on few devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.blocks import each_named, numbered
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import BYTES, Offload, Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import Sheet
from shardwise.techniques.offload.legal import leave_early, problems, return_beside
from shardwise.techniques.offload.narrow import narrowed, narrows
from shardwise.techniques.offload.sizes import BLOCK_BYTES, SUM_BUFFERS
from shardwise.techniques.offload.tiers import staying

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.distributed.meshes import Meshes
    from shardwise.techniques.offload.activations import MovedInputs
    from shardwise.techniques.offload.host_copies import HostWeights
    from shardwise.techniques.offload.weights import WaitingWeights

SETTINGS = {"offload": Offload()}
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""That are tried where ``auto`` puts the optimizer on the host, without stages: a search of both takes too long."""

_HOST_WEIGHTS: WeakKeyDictionary[nn.Module, HostWeights] = WeakKeyDictionary()
_MOVED_INPUTS: WeakKeyDictionary[nn.Module, MovedInputs] = WeakKeyDictionary()
_WAITING: WeakKeyDictionary[nn.Module, WaitingWeights] = WeakKeyDictionary()


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with what the recipe says; for ``auto``, with the optimizer on the device, and on the host, or on
    NVMe where weights wait there."""
    asked, fraction = recipe.offload.optimizer, recipe.offload.optimizer_fraction
    others = Offload("none", recipe.offload.activations, recipe.offload.weights)
    pinned = {f"offload.{what}": "pinned" for what in ("activations", "weights") if vars(others)[what] != "none"}
    plan = replace(plan, offload=others, why={**plan.why, **pinned})
    if asked in ("auto", "none"):
        yield plan
    if asked != "none":
        why = {"offload.optimizer": "searched" if asked == "auto" else "pinned"}
        there = asked if asked != "auto" else "nvme" if others.weights == "nvme" else "host"
        tried = FRACTIONS if asked == "auto" and others.weights == "none" and plan.layout.pp == 1 else (1.0,)
        told = "pinned" if fraction else "searched"
        for each in tried if fraction is None else (fraction,):
            both = {**why, "offload.optimizer_fraction": told} if each < 1 else why
            outside = replace(plan, offload=replace(others, optimizer=there, optimizer_fraction=each))
            if narrows(outside):
                kept = f"recipe: of what the host updates, whose blocks the device has in {plan.precision.compute}"
                both = {**both, "precision.weights": kept}
            yield replace(outside, why={**plan.why, **both})


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    planned, asked = plan.offload, recipe.offload
    free = asked.optimizer == "auto" and (asked.optimizer_fraction is None or planned.optimizer == "none")
    fraction = "auto" if free else asked.optimizer_fraction or 1.0
    return {
        "offload.optimizer": (planned.optimizer, asked.optimizer),
        "offload.optimizer_fraction": (planned.optimizer_fraction, fraction),
        "offload.activations": (planned.activations, asked.activations),
        "offload.weights": (planned.weights, asked.weights),
    }


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    return problems(plan, spec.num_hidden_layers)


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Blocks whose optimizer is elsewhere than others', sums that take turns in buffers, pieces of what is filed."""
    moved = {plan.offload.moves(block) for block in range(spec.num_hidden_layers)}
    largest = max((prod(shape) for shape in trained.values()), default=0) * BYTES[plan.precision.weights]
    return {
        "blocks that the device updates beside others": len(moved) > 1,
        "sums of more gradients than buffers": plan.offload.sums == "host" and plan.batch.accumulation > SUM_BUFFERS,
        "a weight that is updated in several pieces of a file": plan.offload.optimizer == "nvme"
        and largest > BLOCK_BYTES,
    }


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Mark the units that the device updates, where the host updates others, and give the blocks of these their narrow
    weights. What is on the host tiers.py says, and paper.py when gradients leave and weights come."""
    if plan.offload.optimizer == "none":
        return sheet
    compute, sharded = plan.precision.compute, plan.sharded
    moved = tuple(narrowed(one, compute, sharded=sharded) for one in sheet.blocks) if narrows(plan) else sheet.blocks
    if plan.offload.optimizer_fraction == 1:
        return replace(sheet, blocks=moved)
    each = zip(sheet.order, sheet.rank_kind.blocks, strict=True)
    order = tuple(kind if plan.offload.moves(number) else kind + len(sheet.blocks) for kind, number in each)
    blocks = (*moved, *map(staying, sheet.blocks))
    return replace(sheet, embedding=staying(sheet.embedding), blocks=blocks, order=order, head=staying(sheet.head))


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Have the inputs of blocks leave; copies of weights are made when these have memory (:func:`host_weights`)."""
    if plan.offload.activations != "none":
        from shardwise.techniques.offload.activations import MovedInputs

        for part in parts:
            blocks = numbered(part)
            again = [block for number, block in blocks if plan.remat.treats(number)]
            first = blocks[0][0] if blocks else 0
            stays = first > 0 and plan.remat.treats(first)  # a later stage's pipeline holds what the stage is given
            directory = Path(gettempdir()) if plan.offload.activations == "nvme" else None
            _MOVED_INPUTS[part] = MovedInputs(again, directory, stays=int(stays))
    return parts


def scratch_in(parts: Iterable[nn.Module], directory: Path) -> None:
    """Have inputs of blocks that wait in a file do so in this directory, and not where temporary files are."""
    for part in parts:
        if part in _MOVED_INPUTS and _MOVED_INPUTS[part].directory is not None:
            _MOVED_INPUTS[part].directory = directory


def allocate_waiting(part: nn.Module, plan: Plan, device: torch.device, directory: Path | None = None) -> None:
    """Allocate a part on the meta device whose weights are to wait on the host: block by block they get memory on the
    device, and give it up; on NVMe they wait in a file in ``directory``, or where temporary files are."""
    from shardwise.distributed.slices import local
    from shardwise.techniques.offload.weights import StagedBlocks, WaitingWeights

    trained = plan.offload.optimizer != "none"
    file = None
    blocks = [block for _, block in numbered(part)]
    if plan.offload.weights == "nvme":
        each = ([p for p in block.parameters() if trained or not p.requires_grad] for block in blocks)
        sizes = [[local(parameter.detach()).nbytes for parameter in waiting] for waiting in each]
        file = StagedBlocks(directory or Path(gettempdir()), sizes, pinned=device.type == "cuda")
    _WAITING[part] = WaitingWeights(trained=trained, stays=plan.layout.pp == 1, file=file)
    for block in blocks:
        block.to_empty(device=device)
        _WAITING[part].add(block)


def moved(parts: Iterable[nn.Module]) -> list[MovedInputs | WaitingWeights]:
    """Return all that moves inputs of blocks, or their weights, of these parts."""
    return [found[part] for found in (_MOVED_INPUTS, _WAITING) for part in parts if part in found]


def host_weights(parts: Sequence[nn.Module], plan: Plan, directory: Path | None = None) -> HostWeights | None:
    """Make copies of the trained weights of parts that have memory, if the optimizer is to update those; on NVMe in a
    file in ``directory``, or where temporary files are. Of weights that are filled later they take the values when they
    are told so (``read``)."""
    if plan.offload.optimizer == "none":
        return None
    from shardwise.techniques.offload.host_copies import HostWeights

    trained = [parameter for _, parameter in each_named(parts) if parameter.requires_grad]
    if plan.offload.optimizer_fraction < 1:
        blocks = [block for part in parts for number, block in numbered(part) if plan.offload.moves(number)]
        moved = {parameter for block in blocks for parameter in block.parameters()}
        trained = [parameter for parameter in trained if parameter in moved]
    on_disk = plan.offload.optimizer == "nvme"
    where = (directory or Path(gettempdir())) if on_disk else None
    early, sums = leave_early(plan), plan.offload.sums == "host"
    places = {one: place for part in parts if part in _WAITING for one, place in _WAITING[part].places.items()}
    found = HostWeights(trained, early=early, cut=plan.sharded, sums=sums, directory=where, places=places)
    if return_beside(plan):
        found.returning.come_beside([block for part in parts for _, block in numbered(part)])
    _HOST_WEIGHTS.update(dict.fromkeys(parts, found))
    return found


def before_micro_batch(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Note whether this micro-batch is the ``last`` of a step: of several, a gradient is whole after that one."""
    for part in parts:
        if part in _HOST_WEIGHTS:
            _HOST_WEIGHTS[part].last = last


def weights_filled(parts: Sequence[nn.Module]) -> None:
    """Write the weights that wait in a file, once they have been filled."""
    for part in parts:
        if part in _WAITING and (file := _WAITING[part].file):
            file.scratch.settle()


def after_micro_batch(parts: Sequence[nn.Module], plan: Plan) -> None:
    """Let go of the waiting weights that its backward read last."""
    for part in parts:
        if part in _WAITING:
            _WAITING[part].rest()
