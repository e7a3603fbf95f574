"""Modules that cast to a narrower type, in float64 all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Widened(TorchDispatchMode):
    """A mode in which tensors that a module casts to, or makes in, a narrower floating point type are float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if isinstance(dtype := given.get("dtype"), torch.dtype) and dtype.is_floating_point:
            given["dtype"] = torch.float64
        return func(*args, **given)
