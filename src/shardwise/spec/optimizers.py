"""The table of optimizers: what each reads of a recipe and keeps of a weight, all that is asked where torch is not. An
optimizer is a row of ``OPTIMIZERS`` and a module of ``shardwise/techniques/optim/`` that makes it; nobody else asks for
an optimizer's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from shardwise.spec.outside import with_others
from shardwise.spec.records import OptimizerSpec

_BETAS = ("beta1", "beta2", "eps")
_MUON = ("momentum", "nesterov", "adjust_lr_fn", "adam_learning_rate")
OPTIONS = (*_BETAS, "moments", *_MUON)
"""The keys that not every optimizer reads."""
_OURS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            "adamw", "AdamW", "adamw", (*_BETAS, "moments"), 2, 23, fused=True, streamed=True, smaller="adamw8bit"
        ),
        OptimizerSpec("adamw8bit", "AdamW", "moments", _BETAS, 2, 23, fused=True, packed=True, exact="adamw"),
        OptimizerSpec("sgd", "SGD", "sgd", ("beta1",), 1, 20),
        OptimizerSpec("lion", "Lion", "lion", ("beta1", "beta2"), 1, 22),
        OptimizerSpec("adafactor", "Adafactor", "adafactor", (), 1, 43, factored=True),
        OptimizerSpec("muon", "Muon", "muon", (*_BETAS, *_MUON), 1, 22, rest="adamw"),
    )
}
OPTIMIZERS = with_others("shardwise.optimizers", OptimizerSpec, _OURS)
"""All optimizers by name. Of the passes of AdamW clipping (a norm, a product) is 3, decay 2, the moments 8, the square
root, its correction and epsilon 6, the update 4; those of others are counted likewise."""
if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
else:  # what recipes and plans may say, and their schema, follow from the table
    OptimizerName = Literal[tuple(OPTIMIZERS)]
