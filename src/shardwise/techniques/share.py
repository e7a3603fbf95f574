"""Which part of a layer a rank computes with: tp says it, and what changes the layer's product reads it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class MatrixPiece:
    """Which piece of a larger matrix in 4 bits these codes and scales are: its first row, its first block in a row, and
    how many blocks a whole row has."""

    row: int
    block: int
    blocks: int


@dataclass(frozen=True)
class LayerShare:
    """This rank's part of a layer under tensor parallelism. ``rows``: the rows of the layer, and of what an adapter
    adds to it, that are used; None: all that this rank holds. ``place`` and ``group``: this rank's number and its
    group, where ranks hold columns of the layer: their inputs differ, the norms of rows are summed over the group, and
    the bias is added later. ``piece``: its piece of a matrix in 4 bits."""

    rows: slice = field(default_factory=lambda: slice(None))
    place: int | None = None
    group: ProcessGroup | None = None
    piece: MatrixPiece | None = None


WHOLE = LayerShare()
