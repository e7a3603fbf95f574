"""The part of a layer that a rank computes with: tp says it, and techniques that change the layer's product read it, as
``module.share``. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class MatrixPiece:
    """The place in the whole matrix at which a rank's piece begins, and how many columns a whole row has."""

    row: int
    column: int
    columns: int


@dataclass(frozen=True)
class LayerShare:
    """This rank's part of a layer under tensor parallelism. ``rows``: the rows of the layer, and of what an adapter
    adds to it, that are used of those that this rank holds. ``place``: this rank's number, where its inputs are others
    than those of its group. ``group``, where ranks hold columns of the layer: the norms of rows are summed over it, and
    the bias is added later. ``piece``: which piece of the layer's matrix these rows are; None: all of it."""

    rows: slice = field(default_factory=lambda: slice(None))
    place: int | None = None
    group: ProcessGroup | None = None
    piece: MatrixPiece | None = None

    def used(self, held: Tensor) -> Tensor:
        """The rows that are used of those that are held; where these are all, no operation that autograd would see."""
        return held if self.rows == slice(None) else held[self.rows]


WHOLE = LayerShare()
