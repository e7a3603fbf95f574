"""``shardwise.certify``: a module and a loop of one's own, sharded on CPU ranks, against one process.

    def rows(step, index, count):                     # the index-th of ``count`` equal parts of a step's batch
        return {"input_ids": ids[step].chunk(count)[index], "labels": ids[step].chunk(count)[index]}

    if __name__ == "__main__":                        # the ranks import this file
        print(shardwise.certify(make_model, shardwise.make_plan("zero3", processes=4), rows))

Nothing of it is about Shardwise's own models: what runs is :func:`parallelize`, ``backward`` and torch's optimizers.
What a module casts to fp32 itself (transformers' models their logits, norms and softmax) is computed in float64 too, in
both: else both would round by 1e-7, and an error of 1e-7 could not be told from that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.distributed.meshes import meshes
from shardwise.errors import Problem, UsageError
from shardwise.prove.in_float64 import Widened
from shardwise.prove.parity import TOLERANCE, Parity, Trace, compare, full
from shardwise.prove.pool import RankPool, Ranks
from shardwise.prove.shrink import EXACT
from shardwise.runtime import own
from shardwise.spec.plan import Plan

RATE = 1e-3

Rows = Callable[[int, int, int], Any]
"""(step, index, count) -> the index-th of ``count`` equal parts of the step's rows: what the module is called with, as
a dict of named arguments or a tuple."""
Scalar = Callable[[Any, Any], Tensor]
"""(what the module returned, the rows) -> the mean loss of the rows."""


@dataclass(frozen=True)
class OwnLoop:
    """A loop of a user's own: what it trains, in ``steps`` of AdamW and one of SGD; ``arguments`` are those of
    ``parallelize``."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Rows
    loss_fn: Scalar | None
    steps: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ModuleProof:
    """A proof of a module: true if the sharded module computed what one process did. ``found``: the largest errors.
    ``random``: two calls of the module with the same rows gave two losses."""

    plan: Plan
    found: Parity
    random: bool = False

    @property
    def problems(self) -> list[str]:
        """A line for each thing that is not within the tolerance, the cause first."""
        drawn = "the module draws at random: two calls with the same rows give two losses; switch its dropout off"
        return [drawn] * self.random + self.found.wrong(TOLERANCE)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        layout = self.plan.layout
        head = f"{self.plan.shard.strategy} over {layout.world} ranks" + f", tp {layout.tp}" * (layout.tp > 1)
        if self:
            errors = (self.found.gradient, self.found.loss, self.found.norm, self.found.weight)
            return f"{head}: holds, within {max(each.error for each in errors):.0e} of one process in float64"
        return "\n".join([f"{head}: does not hold", *self.problems])


def certify(
    model_fn: Callable[[], nn.Module],
    plan: Plan,
    batch_fn: Rows,
    loss_fn: Scalar | None = None,
    steps: int = 3,
    **arguments: Any,
) -> ModuleProof:
    """Trains what ``model_fn`` makes on as many CPU ranks as ``plan`` asks for, in float64: ``steps`` of AdamW and one
    of SGD; and again in this process, on all rows at once. Losses, norms, first gradients and last weights must agree
    within 1e-9. ``loss_fn``: without it the module returns its loss, or something that has it as ``loss``.
    ``arguments``: those of :func:`parallelize`, ``whole`` and ``units``. Dropout must be off. What the module casts to
    a narrower type itself stays float64.

    The functions must be ones that other processes can import: of a file, not of a notebook. Raises UsageError CLI001
    otherwise, RankFailure where a rank raises."""
    try:
        pickle.dumps((model_fn, batch_fn, loss_fn))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what, fix = f"the ranks cannot import what they are to run: {error}", "functions defined at the top of a file"
        raise UsageError(Problem("CLI001", what, "certify", fix)) from error
    loop = OwnLoop(model_fn, batch_fn, loss_fn, steps, arguments)
    with RankPool(plan.layout.world) as pool:
        return certify_on(pool, plan, loop)


def certify_on(ranks: Ranks, plan: Plan, loop: OwnLoop) -> ModuleProof:
    """Return the proof of ``loop`` under ``plan``, made by ranks that are there already."""
    plan = replace(plan, precision=replace(EXACT, weights="fp32"), compile=False)
    traces = ranks.run(_on_rank, plan, loop, world=plan.layout.world, timeout_s=600)
    proof = ModuleProof(plan, compare(_plain(loop), traces))
    return proof if proof else replace(proof, random=_draws(loop))


def _draws(loop: OwnLoop) -> bool:
    """Return True if the module gives another loss when it is called again with the same rows."""
    module = loop.model_fn().double()
    with Widened(), torch.no_grad():
        first, again = (_loss(module, loop, 0, 0, 1) for _ in range(2))
    return not torch.equal(first, again)


def _on_rank(rank: int, world: int, plan: Plan, loop: OwnLoop) -> Trace:
    groups = meshes(plan.layout, "cpu")
    torch.manual_seed(0)
    module = own.parallelize(loop.model_fn(), plan, groups, **loop.arguments)
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    losses = []
    norms = []
    gradients = {}
    for number in range(loop.steps + 1):
        with Widened():
            loss = _loss(module, loop, number, groups.index("batch"), groups.size("batch"))
            own.backward(module, loss)
        mean = loss.detach().clone()
        groups.sum(mean, "batch")
        losses.append(float(mean) / groups.size("batch"))
        norms.append(own.clip_grad_norm(module, None))
        if number == 0:
            gradients = _named(module, gradients=True)
        _update(module, optimizer, plain=number == loop.steps)
    return Trace(tuple(losses), tuple(norms), gradients, _named(module))


def _plain(loop: OwnLoop) -> Trace:
    torch.manual_seed(0)
    module = loop.model_fn().double()
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    losses = []
    norms = []
    gradients = {}
    for number in range(loop.steps + 1):
        with Widened():  # recomputation is in backward
            loss = _loss(module, loop, number, 0, 1)
            loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), torch.inf)))
        if number == 0:
            gradients = _named(module, gradients=True)
        _update(module, optimizer, plain=number == loop.steps)
    return Trace(tuple(losses), tuple(norms), gradients, _named(module))


def _update(module: nn.Module, optimizer: torch.optim.Optimizer, *, plain: bool) -> None:
    (torch.optim.SGD(module.parameters(), RATE) if plain else optimizer).step()
    optimizer.zero_grad(set_to_none=True)


def _loss(module: nn.Module, loop: OwnLoop, number: int, index: int, count: int) -> Tensor:
    """Compute the loss of the ``index``-th of ``count`` parts of a step's rows, whose floating point numbers become
    float64."""
    rows = loop.batch_fn(number, index, count)
    if isinstance(rows, dict):
        rows = {key: _wide(value) for key, value in rows.items()}
        out = module(**rows)
    else:
        rows = tuple(map(_wide, rows))
        out = module(*rows)
    if loop.loss_fn is not None:
        return loop.loss_fn(out, rows)
    return out if isinstance(out, Tensor) else out.loss


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _named(module: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter, or gradient, whole. Collective."""
    tensors = {name: p.grad if gradients else p.detach() for name, p in module.named_parameters()}
    return {name: full(tensor) for name, tensor in tensors.items() if tensor is not None}
