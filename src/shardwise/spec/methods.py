"""The table of methods: what each reads and what its loss asks for, all that is asked of it where torch is not there. A
method is a row of ``METHODS`` and a module of ``shardwise/methods/`` with its loss; nobody else asks for its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

TOKEN_ACCURACY, ENTROPY = "mean_token_accuracy", "entropy"
TOKEN_FIGURES = (TOKEN_ACCURACY, ENTROPY)
"""What training on tokens reports of each step beside its loss, by the names that TRL gives it; entropy if asked."""
PREFERENCE_FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "tokens/chosen",
    "tokens/rejected",
)
"""What methods of pairs report of each step beside their loss, by the names that TRL gives it, and how many tokens of
an answer are trained on."""


@dataclass(frozen=True)
class MethodSpec:
    """A method, and by ``loss`` what plans call its loss, which methods may share. ``records``: it reads records, not
    plain text; ``pairs``: of two answers each, whose tokens are scored before a gradient is known. ``counted``: its
    loss asks how many tokens an answer has; ``averaged``: rewards are of means over these, not of sums. ``reference``:
    it asks what the initial model says of each pair. ``options``: the keys of the recipe's section ``method`` that it
    reads, beside its name. ``learning_rates`` are the usual ones, of all weights and of adapters, and ``warmup`` a
    share of the steps."""

    name: str
    loss: str
    records: bool = False
    pairs: bool = False
    counted: bool = False
    averaged: bool = False
    reference: bool = False
    options: tuple[str, ...] = ()
    learning_rates: tuple[float, float] = (0.0, 0.0)
    warmup: float = 0.0

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what the loss always reports of each step beside itself."""
        return PREFERENCE_FIGURES if self.pairs else (TOKEN_ACCURACY,)

    @property
    def row_sums(self) -> int:
        """The fp64 numbers of a pair that are summed over ranks which have some tokens each of the same rows."""
        return self.pairs * (4 if self.counted else 2)


_pairs = partial(MethodSpec, records=True, pairs=True, learning_rates=(1e-6, 1e-5), warmup=0.1)
METHODS = {
    spec.name: spec
    for spec in (
        MethodSpec("pretrain", "cross_entropy", options=("entropy",)),
        MethodSpec(
            "sft", "cross_entropy", records=True, options=("entropy",), learning_rates=(2e-5, 2e-4), warmup=0.03
        ),
        _pairs("dpo", "dpo", reference=True, options=("beta", "label_smoothing")),
        _pairs("ipo", "ipo", reference=True, counted=True, options=("beta",)),
        _pairs("hinge", "hinge", reference=True, options=("beta",)),
        _pairs("orpo", "orpo", counted=True, averaged=True, options=("beta",)),
        _pairs("simpo", "simpo", counted=True, averaged=True, options=("beta", "gamma", "label_smoothing")),
    )
}
"""All methods by name. The rates are those of TRL (SFTConfig, DPOConfig, ORPOConfig, CPOConfig), the shares of warm-up
those of Tülu 3 (arXiv 2411.15124)."""
LOSSES = {spec.loss: spec for spec in reversed(METHODS.values())}
"""The first method that has a loss, by what plans call it."""
if TYPE_CHECKING:
    MethodName: TypeAlias = str
    LossName: TypeAlias = str
else:  # what recipes and plans may say, and their schema, follow from the table
    MethodName, LossName = Literal[tuple(METHODS)], Literal[tuple(LOSSES)]


def in_words(methods: Iterable[MethodSpec]) -> str:
    """Name methods, at least one, as in "`method: sft` and `dpo`"."""
    *others, last = (f"`{method.name}`" for method in methods)
    words = f"{', '.join(others)} and {last}" if others else last
    return words.replace("`", "`method: ", 1)
