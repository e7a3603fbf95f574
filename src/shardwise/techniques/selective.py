"""Contexts for a checkpoint that saves the results of some operations: forward keeps them, recomputation takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Chooses = Callable[[Any], bool]
"""Called with every operation of a pass, in their order: whether its result is saved."""


class _Saving(TorchDispatchMode):
    def __init__(self, chooses: Chooses, kept: deque[Any]) -> None:
        super().__init__()
        self.chooses, self.kept = chooses, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.chooses(func):
            self.kept.append(tree_map_only(Tensor, Tensor.detach, out))  # what autograd adds to ``out`` is not kept
        return out


class _Again(TorchDispatchMode):
    def __init__(self, chooses: Chooses, kept: deque[Any]) -> None:
        super().__init__()
        self.chooses, self.kept = chooses, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kept.popleft() if self.chooses(func) else func(*args, **(kwargs or {}))


def saving(forward: Chooses, again: Chooses) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and of recomputation, whose choices must be the same. Other operations may
    differ."""
    kept: deque[Any] = deque()
    return _Saving(forward, kept), _Again(again, kept)
