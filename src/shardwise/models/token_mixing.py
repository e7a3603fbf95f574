"""Find blocks that mix tokens in other ways than by attention: by a state that is carried on, by convolutions, by
products of what tokens made. Documents that are packed into a row would run into each other there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_MIXING = {
    *("bmm", "baddbmm", "convolution", "constant_pad_nd", "roll", "flip", "tril", "triu"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "index_add", "scatter_add", "scatter_reduce"),
}
"""Operations on tokens' vectors that no block needs beside its attention: products of two activations, sums along the
tokens, windows and shifts."""


class TokenMixing(TorchDispatchMode):
    """Lists the operations, in blocks that it watches, by which values of one token could come to another. ``pause`` is
    set while attention runs, which knows the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.pause = False

    def watch(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(lambda *_: self.__enter__() and None)
        block.register_forward_hook(lambda *_: self.__exit__(None, None, None), always_call=True)  # if it fails too

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0].strip("_")
        if not self.pause and (name in _MIXING or _joins(name, out, *args)):
            self.found.append(name)
        return out


def _joins(name: str, out: Any, parts: Any = (), dim: Any = 0, *_: Any) -> bool:
    """Return whether parts are joined along another dim than the last, as states of one token after another are."""
    return name in ("cat", "stack") and isinstance(out, Tensor) and dim % out.dim() != out.dim() - 1 and len(parts) > 1
