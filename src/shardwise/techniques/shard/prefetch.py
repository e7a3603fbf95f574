"""FSDP2 is told here what units gather ahead in the backward of a sharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.models.blocks import blocks, ends
from shardwise.spec.plan import Plan

if TYPE_CHECKING:
    from torch import nn


def head_gathers_ahead(plan: Plan) -> bool:
    """Return whether a head's backward gathers the last block ahead: not where a stage is brought weights later."""
    return plan.layout.pp == 1 or plan.offload.weights == "none"


def gather_ahead(part: nn.Module, plan: Plan) -> None:
    """Say, in place of FSDP2, what each unit gathers ahead in backward, with all that is sharded in it."""
    from torch.distributed.fsdp import FSDPModule

    from shardwise.models.moe import Experts

    embedding, head = ends(part)
    last = head or [part] * (plan.layout.pp == 1)  # of a stage without a head nothing runs before its last block
    leading = [unit[0] for unit in (embedding, *([block] for block in blocks(part)), last) if unit]
    sharded = [module for module in leading if isinstance(module, FSDPModule)]
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])
    for number, module in enumerate(sharded):
        if head and module is head[0] and not head_gathers_ahead(plan):
            continue
        before = sharded[max(0, number - plan.shard.backward_prefetch) : number][::-1]
        ahead: list[FSDPModule] = [each for one in before for each in one.modules() if isinstance(each, FSDPModule)]
        if ahead:
            module.set_modules_to_backward_prefetch(ahead)
        if plan.layout.ep > 1:  # over other ranks; the host waits before it comes to them
            experts = (one for one in module.modules() if isinstance(one, Experts))
            gathered: list[FSDPModule] = [one for one in experts if isinstance(one, FSDPModule)]
            module.set_modules_to_forward_prefetch(gathered)
