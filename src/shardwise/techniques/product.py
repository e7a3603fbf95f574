"""The way in which a layer computes on a rank: one seam, of which techniques set fields, each its own, in whatever
order.

    precision   inside, outside     the dtypes that it computes in and returns
    tp          inside, outside; the layer's share; a norm that is cut multiplies in its own way
    ep          inside, outside
    nf4, frozen_float8  multiply    by a matrix that is stored in 4 bits, or in a byte each
    float8      multiply            codes of one byte by codes of one byte; comes last, by what those store

An adapter is a forward hook, and comes after all of these. Nobody else gives a layer another forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.distributed.slices import local
from shardwise.models.moe import Router, Stacked, logits, stacked
from shardwise.techniques.share import WHOLE, LayerShare


@dataclass(eq=False)
class LayerProduct:
    """The product that a layer computes. ``multiply`` is given the layer's input in the dtype ``inside`` (and of a
    matrix of experts the counts); what it returns comes out in the dtype ``outside``. None: the dtype that it has."""

    multiply: Callable[..., Tensor]
    inside: torch.dtype | None = None
    outside: torch.dtype | None = None

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        if self.inside is not None and x.is_floating_point():
            x = x.to(self.inside)
        out = self.multiply(x, *rest)
        return out if self.outside is None else out.to(self.outside)


def product_of(layer: nn.Module, inside: torch.dtype | None = None, outside: torch.dtype | None = None) -> LayerProduct:
    """The layer's, through which it computes from now on, in these dtypes where they are given."""
    found = vars(layer).get("forward")
    if not isinstance(found, LayerProduct):
        found = LayerProduct(partial(_multiply(layer), layer))
        layer.forward = found
    found.inside, found.outside = inside or found.inside, outside or found.outside
    return found


def share_of(layer: nn.Module) -> LayerShare:
    """The part of the layer with which this rank multiplies."""
    share: LayerShare = vars(layer).get("share", WHOLE)
    return share


def bias_of(layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    """The bias that is a part of the product; where ranks have parts of a sum it is added later, once."""
    share = share_of(layer)
    return None if layer.bias is None or share.group is not None else share.used(local(layer.bias).to(dtype))


def _multiply(layer: nn.Module) -> Callable[..., Tensor]:
    """Return the function that multiplies by the weight that a layer stores, of which it may have a slice."""
    own: dict[type, Callable[..., Tensor]]
    own = {nn.Linear: _linear, nn.Embedding: _rows, Stacked: _of_experts, Router: _routed}
    return own[type(layer)] if type(layer) in own else type(layer).forward


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = bias_of(layer, x.dtype)
    return functional.linear(x, share_of(layer).used(local(layer.weight).to(x.dtype)), bias)


def _rows(layer: nn.Embedding, ids: Tensor) -> Tensor:
    """Looked up first and cast then, which gives the same numbers as casting the table, for less."""
    return functional.embedding(ids, layer.weight, layer.padding_idx)


def _of_experts(layer: Stacked, x: Tensor, counts: Tensor) -> Tensor:
    return stacked(x, counts, local(layer.weight), _bias(layer), layer.rows)


def _routed(layer: Router, x: Tensor) -> Tensor:
    return logits(x, local(layer.weight), _bias(layer))


def _bias(layer: Router | Stacked) -> Tensor | None:
    return None if layer.bias is None else local(layer.bias)
