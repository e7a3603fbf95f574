"""The table of optimizers: what each reads of a recipe and keeps of a weight, all that is asked where torch is not. An
optimizer is a row of ``OPTIMIZERS`` and a module of ``shardwise/techniques/optim/`` that makes it; nobody else asks for
an optimizer's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer, ``title`` in words; ``file`` is the module that makes it. ``options``: the keys of the recipe's
    section ``optim`` that it reads and others may not. ``kept``: numbers that it keeps of each trained one; ``packed``:
    of large matrices in 8 bits (techniques/quantised.py). ``streamed``: it can go through files, block by block
    (offload/streamed.py). ``factored``: of a matrix it keeps a number a row and one a column, for whose means it asks
    ranks that hold other rows; columns are not cut, nor does the host update. ``passes``: how often it reads or writes
    a number of the weights' dtype where it is no ``fused`` kernel, which does so once, clipping included. ``smaller``:
    one whose updates are nearly the same and which keeps less. ``exact``: the one whose updates it rounds; None: it
    rounds nothing."""

    name: str
    title: str
    file: str
    options: tuple[str, ...]
    kept: int
    passes: int
    fused: bool = False
    packed: bool = False
    streamed: bool = False
    factored: bool = False
    smaller: str | None = None
    exact: str | None = None


_BETAS = ("beta1", "beta2", "eps")
OPTIONS = (*_BETAS, "moments")
"""The keys that not every optimizer reads."""
OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec("adamw", "AdamW", "adamw", OPTIONS, 2, 23, fused=True, streamed=True, smaller="adamw8bit"),
        OptimizerSpec("adamw8bit", "AdamW", "moments", _BETAS, 2, 23, fused=True, packed=True, exact="adamw"),
        OptimizerSpec("sgd", "SGD", "sgd", ("beta1",), 1, 20),
        OptimizerSpec("lion", "Lion", "lion", ("beta1", "beta2"), 1, 22),
        OptimizerSpec("adafactor", "Adafactor", "adafactor", (), 1, 43, factored=True),
    )
}
"""All optimizers by name. Of the passes of AdamW clipping (a norm, a product) is 3, decay 2, the moments 8, the square
root, its correction and epsilon 6, the update 4; those of others are counted likewise."""
if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
else:  # what recipes and plans may say, and their schema, follow from the table
    OptimizerName = Literal[tuple(OPTIMIZERS)]
