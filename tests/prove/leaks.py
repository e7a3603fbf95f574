"""Leaks between documents to plant into the ranks' code: what one document is trained to then follows the tokens of
another. Those in what every layout shares are planted where parity, which shares it too, cannot see them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from shardwise.models import attention, blockwise, delta
from shardwise.models.config import ModelSpec
from shardwise.models.layers import RMSNorm
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Routing
from shardwise.spec.plan import Plan, Shard
from shardwise.techniques import cp
from shardwise.techniques.cp import delta_states
from tests.parity.cases import FP64, GEMMA, UNTIED
from tests.parity.cases import plan as plan_of
from tests.parity.experts import MOE
from tests.parity.mixers import NETS
from tests.parity.rings import DENSE
from tests.parity.test_cp_faults import blind_to_documents, ring

kernel, visible, backward = attention._kernel, blockwise._visible, attention.attention_backward
normed, route = RMSNorm.forward, MoE.route
given, taps, across_pieces = delta.Given, delta._taps, delta_states.across
ALONE = plan_of("ddp", 1, FP64)


@dataclass(frozen=True)
class Leak:
    """``shared``: by the plain loop of parity too. ``needed``: without what the smallest layout has no leak."""

    planted: Callable[[], AbstractContextManager[Any]]
    spec: ModelSpec
    plan: Plan
    shared: bool = True
    needed: tuple[str, ...] = ()


def whole_rows(q: Tensor, rule: blockwise.Rule) -> tuple[Any, blockwise.Rule]:
    return kernel(q, rule._replace(documents=None) if rule.window is None else rule)


def across(tokens: Any, rule: blockwise.Rule, *blocks: slice) -> Tensor:
    return visible(tokens._replace(documents=None) if rule.window else tokens, rule, *blocks)


def backward_of_whole_rows(grad: Tensor, *given: Any) -> Any:
    return backward(grad, *given[:5], None, *given[6:])


def less_the_row(self: RMSNorm, x: Tensor) -> Tensor:
    """As if statistics were of a row, and not of a token."""
    return normed(self, x - 1e-6 * x.mean(1, keepdim=True)) if x.ndim == 3 else normed(self, x)


def among_tokens(self: MoE, x: Tensor) -> Routing:
    found = route(self, x)
    return found._replace(weights=found.weights * (1 + 1e-6 * found.logits.mean()))


def without_starts(*fields: Any) -> delta.Given:
    return given(*fields[:5], None)


def across_starts(found: delta.Given) -> Tensor:
    return across_pieces(found._replace(starts=None))


def over_starts(x: Tensor, starts: Tensor | None, count: int) -> Any:
    return taps(x, None, count)


LEAKS: dict[str, Leak] = {
    "full layers see the whole row": Leak(lambda: patch.object(attention, "_kernel", whole_rows), UNTIED, ALONE),
    "a window crosses into the document before": Leak(
        lambda: patch.object(blockwise, "_visible", across), GEMMA, ALONE
    ),
    "gradients of attention are those of the whole row": Leak(
        lambda: patch.object(attention, "attention_backward", backward_of_whole_rows), UNTIED, ALONE
    ),
    "a ring forgets where documents end": Leak(
        lambda: patch.object(cp.ring_attention, "parts", blind_to_documents), DENSE, ring(), False, ("cp 2",)
    ),
    "keys that are gathered forget it": Leak(
        lambda: patch.object(cp.ring_attention, "parts", blind_to_documents),
        DENSE,
        replace(ring(), cp_kind="gather", shard=Shard("zero3")),
        False,
        ("cp 2",),
    ),
    "a norm looks at the row": Leak(lambda: patch.object(RMSNorm, "forward", less_the_row), UNTIED, ALONE),
    "a state is not reset at a start": Leak(lambda: patch.object(delta, "Given", without_starts), NETS, ALONE),
    "sums reach into the document before": Leak(lambda: patch.object(delta, "_taps", over_starts), NETS, ALONE),
    "a state passes across a start": Leak(
        lambda: patch.object(delta_states, "across", across_starts), NETS, ring(), False, ("cp 2",)
    ),
    "weights of experts depend on other tokens": Leak(lambda: patch.object(MoE, "route", among_tokens), MOE, ALONE),
}


def leaking(rank: int, world: int, name: str, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """``work`` with the leak in this rank's code."""
    with LEAKS[name].planted():
        return work(rank, world, *given)
