"""Small tables of numbers that kernels read: sent to a device once, as every copy to it would make the host wait."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_KEPT: dict[tuple[Hashable, torch.device], Tensor] = {}


def constant(like: Tensor, name: Hashable, numbers: Any) -> Tensor:
    """The ``numbers`` (nested lists) that are called ``name``, in fp32, on the device of ``like``. A fake tensor gets
    some of its own, which are not kept."""
    key = (name, like.device)
    if key in _KEPT and not isinstance(like, FakeTensor):
        return _KEPT[key]
    made = torch.tensor(numbers, dtype=torch.float32, device=like.device)
    if not isinstance(made, FakeTensor):
        _KEPT[key] = made
    return made
