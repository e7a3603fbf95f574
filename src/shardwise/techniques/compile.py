"""torch.compile, block by block.

Shards and sends nothing; fuses the element-wise operations of a block and drops tensors that backward can cheaply
rebuild, so that the predicted activations are an upper bound. Blocks are alike, so one compilation serves all of
them. It is on for GPUs, and pays with bf16 on a CPU in runs long enough to win back the first compilation (docs/
techniques/compile.md has the measurement). Compiled in place: no parameter changes its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.blocks import blocks, surround
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit

if TYPE_CHECKING:
    from torch import nn

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"compile": False}
RECOMPILE_LIMIT = 64
"""How many graphs of a block torch compiles before it gives up (8 by default). A run needs more, but a bounded number:
one for each kind of layer (window, rotation), for training and evaluation, and for each number of rows and
documents."""


DYNAMIC = r".*\.(documents|longest)$"
"""The fields of a block's mask that change from batch to batch, as a pattern that torch matches. They are dynamic, so
the first graph serves any documents."""
CAPABILITY = (7, 0)
"""The lowest CUDA capability for which triton makes kernels."""


NO_REGIMES = "proofs compute blocks as they are written"
"""Why no size of a model or a plan makes its code take another path."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan as the recipe has it; else on for GPUs, unless :func:`check` finds a reason against it."""
    on, reason = recipe.compile, "pinned"
    if on == "auto" and cluster.kind == "cpu":
        on, reason = False, "default: off; see docs/techniques/compile.md"
    elif on == "auto":
        bars = check(spec, replace(plan, compile=True), cluster)
        what = bars[0].what if bars else ""
        if not bars and plan.pipeline.spec.splits_backward:
            what = "the schedule makes gradients of weights apart, which compiled blocks cannot do"
        on, reason = not what, "default: on for GPUs, where fused operations read and write less memory"
        reason = f"derived: off: {what}" if what else reason
    yield replace(plan, compile=on, why={**plan.why, "compile": reason})


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {"compile": (plan.compile, recipe.compile)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Return what in the plan, the model, the devices and this machine is against compilation."""
    device, problems = cluster.device, []
    if plan.compile and plan.lora is not None and plan.lora.nf4:
        what = "nf4 does not work with compiled blocks yet"
        problems.append(Problem("PLAN018", what, "compile", "false, or `lora.frozen: float8`"))
    if plan.compile and plan.layout.ep > 1:
        what = "how many rows come to a rank's experts differs in every step, which compiled blocks cannot do"
        problems.append(Problem("PLAN027", what, "compile", "false, or `parallel.ep=1`"))
    if plan.compile and spec.experts.expert_capacity is not None:
        what = "how many rows experts have room for differs in every step, which compiled blocks cannot do"
        problems.append(Problem("PLAN027", what, "compile", "false, or leave out `model.expert_capacity`"))
    if plan.compile and device.capability is not None and device.capability < CAPABILITY:
        needed, found = (".".join(map(str, number)) for number in (CAPABILITY, device.capability))
        what = f"torch.compile needs GPUs of capability {needed} or later, and the {device.name}'s is {found}"
        problems.append(Problem("PLAN021", what, "compile", "false"))
    elif plan.compile and device.no_compiler:
        what = f"torch.compile needs {device.no_compiler}, which is not installed here"
        problems.append(Problem("PLAN021", what, "compile", "false, or install it"))
    return problems


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """The sheet counts what the compiler holds longer, and what it drops as if it were held."""
    if not plan.compile or not any(block.recompute for block in sheet.blocks):
        return sheet
    return replace(sheet, blocks=tuple(_fused(block) for block in sheet.blocks))


@lru_cache(maxsize=8 * KEPT_UNITS)
def _fused(block: Unit) -> Unit:
    """A recomputed block's gated product, of silu(gate) and up, is made in one kernel with the gradients of both: it
    lives until then, and not only until the next layer's gradients have been made of it."""
    made: dict[int, set[int]] = {}
    for op in block.forward_plain if block.recompute else ():
        for tensor in (*op.allocates, *op.writes) if op.kind == "elementwise" else ():
            made.setdefault(tensor, set()).update(op.reads)
    freed = {tensor: at for at, op in enumerate(block.backward) for tensor in op.frees}
    last = dict[int, int]()
    for tensor in made.keys() & freed.keys():
        same = [at for at, op in enumerate(block.backward) if op.kind == "elementwise" and made[tensor] & {*op.reads}]
        if max(same, default=0) > freed[tensor]:
            last[tensor] = max(same)
    if not last:
        return block
    widest = max(last, key=lambda tensor: block.tensors[tensor].bytes())
    backward = list(block.backward)
    for at, frees in (
        (freed[widest], tuple(tensor for tensor in backward[freed[widest]].frees if tensor != widest)),
        (last[widest], (*backward[last[widest]].frees, widest)),
    ):
        backward[at] = backward[at].freeing(frees)
    return replace(block, backward=tuple(backward))


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    import torch

    from shardwise.models.decoder import Decoder

    # It warns of in-place operations under selective recompute, which AOTAutograd replaces before they matter.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    torch.compiler.config.recompile_limit = RECOMPILE_LIMIT
    known = torch.compiler.config.dynamic_sources
    if DYNAMIC not in known:
        torch.compiler.config.dynamic_sources = f"{known},{DYNAMIC}".lstrip(",")
    for part in parts:
        ours = isinstance(part, Decoder)  # anyone else's blocks may break the graph
        for block in blocks(part):
            surround(block, partial(_switched, ours=ours))
    return parts


def _switched(plain: Callable[..., Any], *, ours: bool) -> Switched:
    import torch

    return Switched(plain, torch.compile(plain, fullgraph=ours))


class Switched:
    """A function that is compiled, and the same eager: a block's forward, or the loss."""

    suspended = False

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.plain, self.compiled = plain, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.plain if Switched.suspended else self.compiled)(*args, **kwargs)


@contextmanager
def suspended() -> Iterator[None]:
    """Within it what was compiled runs eagerly: each new shape would be compiled, and compiled code cannot be watched.
    What an operation compiles for itself (FlexAttention) stays compiled."""
    before, Switched.suspended = Switched.suspended, True
    try:
        yield
    finally:
        Switched.suspended = before
