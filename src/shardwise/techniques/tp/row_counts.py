"""Rows whose tokens sequence-parallel ranks share, for what is counted of them by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwise.distributed.collectives import summed
from shardwise.distributed.meshes import Meshes
from shardwise.models.moe import MoE
from shardwise.models.router_losses import RowPlaces


def share_rows(module: MoE, shape: Sequence[int], meshes: Meshes) -> None:
    """Tell a layer with experts, which is given a rank's own tokens [n,d], in which rows they are. ``shape``: [b,s] of
    the pass; of b * s tokens each rank has as many, rounded up, one rank's after another's."""
    rank, group = meshes.index("tp"), meshes.groups["tp"]

    def rows_of(x: Tensor) -> RowPlaces:
        return RowPlaces(shape[0], shape[1], rank * x.shape[0])

    def over_rows(counts: Tensor) -> Tensor:
        return summed(counts, group)

    module.rows_of, module.over_rows = rows_of, over_rows  # type: ignore[method-assign]
