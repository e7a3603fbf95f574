"""torch.compile, block by block.

Shards and sends nothing; fuses the element-wise operations of a block and drops tensors that backward can cheaply
rebuild, so that the predicted activations are an upper bound. Blocks are alike, so one compilation serves all of
them. It pays on GPUs and with bf16 on a CPU in runs long enough to win back the first compilation (docs/techniques/
compile.md has the measurement behind the default). Compiled in place: no parameter changes its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.blocks import blocks
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

RECOMPILE_LIMIT = 64
"""Graphs of a block before torch gives up, 8 unless set: kinds of layers (window, rotation) times training and
evaluation times numbers of rows and documents are more in a run, and bounded."""


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    return []


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Unchanged: eager activations are the upper bound."""
    return sheet


def apply(parts: list[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> list[nn.Module]:
    import torch

    from shardwise.models.decoder import Decoder

    if plan.compile:
        torch.compiler.config.recompile_limit = RECOMPILE_LIMIT
        for part in parts:
            ours = isinstance(part, Decoder)  # anyone else's blocks may break the graph
            for block in blocks(part):
                block.forward = torch.compile(block.forward, fullgraph=ours)
    return parts
