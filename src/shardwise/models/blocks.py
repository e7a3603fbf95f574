"""Which pieces of a model are its blocks, what is gathered, recomputed and compiled as one, and which its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of any model, in order: the members of each outermost list of modules of one class that have
    parameters. A decoder's are its ``layers``; a model without such a list has none. A ModuleList of torch's own
    single layers (heads of several tasks, embedding tables) is none: they are small, and often not all of them run."""
    from torch import nn

    members = list(module.children())
    alike = len({type(member) for member in members}) == 1
    single = all(type(member).__module__.startswith("torch.nn.") and not [*member.children()] for member in members)
    chained = isinstance(module, nn.Sequential) and len(members) > 1
    listed = chained or (isinstance(module, nn.ModuleList) and not single)
    if listed and alike and all(next(member.parameters(), None) is not None for member in members):
        return members
    return [block for member in members for block in blocks(member)]


def with_head(parts: Sequence[nn.Module]) -> nn.Module:
    """The part of a model that has the output layer."""
    return next(part for part in parts if "head" in dict(part.named_children()))


def ends(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Of a decoder, what has parameters before its blocks (embedding) and after them (last norm, output layer), in the
    order in which they run, each in every pass. None of any other model, nor where the two ends share a weight, or what
    is before the blocks is more than tables, so that backward reads it."""
    from torch import nn

    from shardwise.models.layers import Head

    named = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    if not isinstance(named.get("head"), Head):
        return [], []
    names = list(named)
    middle = names.index("layers")
    stem, tail = [named[name] for name in names[:middle]], [named[name] for name in names[middle + 1 :]]
    tables = all(isinstance(module, nn.Embedding) for module in stem)
    shared = {p for one in stem for p in one.parameters()} & {p for one in tail for p in one.parameters()}
    return (stem, tail) if tables and not shared else ([], [])
