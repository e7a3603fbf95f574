"""Which pieces of a model are its blocks: what is gathered, recomputed and compiled as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of any model, in order: the members of each outermost list of modules of one class that have
    parameters. A decoder's are its ``layers``; a model without such a list has none."""
    from torch import nn

    members = list(module.children())
    alike = len({type(member) for member in members}) == 1
    listed = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(members) > 1)
    if listed and alike and all(next(member.parameters(), None) is not None for member in members):
        return members
    return [block for member in members for block in blocks(member)]
