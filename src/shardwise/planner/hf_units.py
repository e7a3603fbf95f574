"""The units of a model that runs in transformers' own modules, for the tracer: what runs before its blocks, a block,
and what runs after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.models.attention import MaskSpec
from shardwise.models.blocks import blocks
from shardwise.models.hf_model import HFDecoder
from shardwise.planner.recorder import plain_tensors
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.variant import Variant

Start = Callable[[], torch.Tensor]
"""Begins the recording of a unit, and returns the unit's input."""
Call = Callable[[Start], torch.Tensor]


def hf_models(
    variant: Variant, model: HFDecoder, ids: torch.Tensor
) -> tuple[Call, list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
    """A unit of a model of transformers: the embedding is what runs where blocks only pass on what they are given, the
    head what follows the last one."""
    layers = blocks(model)
    given: list[tuple[Any, Any]] = []

    def run(block: Callable[..., torch.Tensor]) -> torch.Tensor:
        plain = [layer.forward for layer in layers]
        for index, layer in enumerate(layers):
            layer.forward = partial(block, index)
        try:
            return model.normed(ids, ids, MaskSpec())
        finally:
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = forward

    def collect(index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append((args, kwargs))  # what blocks share, made before the first block and held to the end
        if index + 1 == len(layers):
            raise _Reached(hidden)
        return hidden

    def embedding(start: Start) -> torch.Tensor:
        start()
        try:
            return run(collect)
        except _Reached as reached:
            return reached.hidden

    hidden = torch.empty((*ids.shape, variant.model.hidden_size), dtype=torch_dtype(variant.plan.precision.compute))

    def unsaved() -> list[torch.Tensor]:
        """Some blocks make other tables of those that they are given, and save these."""
        saved, made = set[int](), given[: len(layers)]
        leaf = hidden.detach().requires_grad_()

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            saved.add(_storage(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            for layer, (args, kwargs) in zip(layers, made, strict=True):
                layer(leaf, *args, **kwargs)
        return [tensor for tensor in plain_tensors(made) if _storage(tensor) not in saved]

    if variant.what == "embedding":
        return embedding, [ids], unsaved
    if variant.what == "head":
        last = len(layers) - 1
        return lambda start: run(lambda index, hidden, *_, **__: start() if index == last else hidden), [], list
    embedding(lambda: hidden)
    args, kwargs = given[variant.block]
    layer = layers[variant.block]
    return lambda start: layer(start(), *args, **kwargs), plain_tensors((args, kwargs)), list


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Reached(Exception):
    """The last block was called."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden
