"""Small tables of numbers that kernels read: copied to a device once, because each copy would make the host wait."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_KEPT: dict[tuple[Hashable, torch.device], Tensor] = {}


def constant(like: Tensor, name: Hashable, numbers: Any) -> Tensor:
    """The table ``numbers`` (nested lists), cached as ``name``, in fp32, on the device of ``like``. For a fake tensor
    it is created anew and not cached."""
    key = (name, like.device)
    if key in _KEPT and not isinstance(like, FakeTensor):
        return _KEPT[key]
    made = torch.tensor(numbers, dtype=torch.float32, device=like.device)
    if not isinstance(made, FakeTensor):
        _KEPT[key] = made
    return made
