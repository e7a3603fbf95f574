"""The table of methods: what each reads and what its loss asks for, all that is asked of it where torch is not there. A
method is a row of ``METHODS`` and a module of ``shardwise/methods/`` with its loss; nobody else asks for its name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardwise.spec.outside import with_others
from shardwise.spec.records import MethodSpec

_pairs = partial(MethodSpec, records=True, pairs=True, learning_rates=(1e-6, 1e-5), warmup=0.1)
_OURS = {
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
METHODS = with_others("shardwise.methods", MethodSpec, _OURS)
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


PREFERENCE = "preference"
"""The format of pairs of answers, which no other method reads."""
SFT_ONLY = {"format", "messages_key", "role_key", "content_key", "roles"}
SFT_ONLY |= {"chat_template", "train_on", "train_on_eot", "packing", "too_long"}
"""Keys of the data section that have an effect only where records are read."""
