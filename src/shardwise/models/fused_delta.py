"""The rule of gated delta nets by the fused kernels of flash-linear-attention, on a GPU where that is installed.

They compute a chunk's tokens in a few kernels, where plain torch (delta.py) takes some sixty, and hold no state but
their own: what the plain rule keeps for backward has room and is not written. Backward computes the outputs once more.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.distributed.torch_private import differentiable_inside_operations

PACKAGE, MODULE = "flash-linear-attention", "fla.ops.gated_delta_rule"
LARGEST_KEY, OLDEST = 256, (0, 6)


@cache
def installed() -> bool:
    """Return whether the package is there, in a version whose function has as many heads of values as it is given."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST


def serves(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernels compute heads of such queries and keys [b,s,heads,key]: 16 bits, on a GPU."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and k.shape[-1] <= LARGEST_KEY and installed()


class _PackedLine(NamedTuple):
    """Rows one after the other: the bounds of all documents [n+1]; [rows] which of them has a row's ``first`` tokens,
    which its ``last``, and whether it ``goes_on`` there: the row's first token starts no document."""

    bounds: Tensor
    first: Tensor
    last: Tensor
    goes_on: Tensor


def _line(documents: Tensor, rows: int, length: int) -> _PackedLine:
    """Return the line of ``rows`` with these bounds of documents, to which the ends of rows are added."""
    edges = torch.arange(rows + 1, device=documents.device) * length
    documents = documents.long()
    bounds = torch.cat([documents, edges]).unique()
    first, behind = (torch.searchsorted(bounds, each) for each in (edges[:-1], edges[1:]))
    return _PackedLine(bounds, first, behind - 1, ~torch.isin(edges[:-1], documents))


def _rule(given: tuple[Tensor, ...], documents: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b,s,value heads,value] and the state after each row's last token, [b,value heads,key,value],
    of q, k, v, decays and rates; ``before``: the state before the first."""
    fused = import_module(MODULE).chunk_gated_delta_rule
    rows, length = given[2].shape[:2]
    settings: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if documents is None:
        return fused(*given, initial_state=before, **settings)
    line = _line(documents, rows, length)
    if before is not None:
        kept = torch.where(line.goes_on[:, None, None, None], before, 0)
        before = before.new_zeros(len(line.bounds) - 1, *before.shape[1:]).index_copy(0, line.first, kept)
    flat = (x.flatten(0, 1).unsqueeze(0) for x in given)
    out, states = fused(*flat, initial_state=before, cu_seqlens=line.bounds, **settings)
    return out.view(given[2].shape), states[line.last]


def forward(given: tuple[Tensor, ...], documents: Tensor | None, before: Tensor | None) -> Tensor:
    """Return the outputs of q, k, v, decays and rates, as ``shardwise::gated_delta`` does."""
    return _rule(given, documents, None if before is None else before.flatten(1, 2))[0]


def backward(
    grad: Tensor,
    given: tuple[Tensor, ...],
    documents: Tensor | None,
    before: Tensor | None,
    after: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of what is given from that of the outputs, and of the state ``after`` the last token, as
    ``shardwise::gated_delta_backward`` does."""
    with differentiable_inside_operations(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in given]
        out, last = _rule(tuple(leaves), documents, None if before is None else before.flatten(1, 2))
        ends = [] if after is None else [after.flatten(1, 2).to(last.dtype)]
        return torch.autograd.grad([out, last][: 1 + len(ends)], leaves, [grad, *ends])
