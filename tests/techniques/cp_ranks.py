"""What a rank does for the tests of attention whose keys are on several ranks: its part of whole tensors, through the
technique's own seam."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.distributed.meshes import Meshes, meshes
from shardwise.models.attention import Attention, MaskSpec
from shardwise.models.config import model_spec
from shardwise.spec.layout import Layout
from shardwise.spec.plan import CpKind, Plan
from shardwise.spec.rows import WholeRows
from shardwise.techniques import cp


@dataclass(frozen=True)
class Asked:
    """One call: so many query and key heads, rows and tokens, of which documents end at ``bounds``; ``logits``: how
    large scores are."""

    kind: CpKind
    ranks: int
    heads: int = 4
    key_heads: int = 2
    rows: int = 2
    length: int = 48
    bounds: tuple[int, ...] | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    logits: float = 1.0

    @property
    def layout(self) -> Layout:
        return Layout(cp=self.ranks, ulysses={"ulysses": self.ranks, "nested": 2}.get(self.kind, 1))

    @property
    def mask(self) -> MaskSpec:
        documents = None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32)
        longest = self.length if self.bounds is None else max(b - a for a, b in pairwise(self.bounds))
        sinks = torch.linspace(-2, 3, self.heads, dtype=self.dtype).requires_grad_() if self.sinks else None
        found = MaskSpec(self.causal, self.window, documents, longest, self.soft_cap, sinks, scale=self.scale)
        return replace(found, row_length=self.length, bounds=documents)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, whole."""
        draw = torch.Generator().manual_seed(0)

        def drawn(heads: int, size: float = 1.0) -> Tensor:
            shape = self.rows, heads, self.length, 8
            return (size * torch.randn(shape, generator=draw, dtype=torch.float64)).to(self.dtype)

        size = self.logits**0.5
        return drawn(self.heads, size), drawn(self.key_heads, size), drawn(self.key_heads), drawn(self.heads)


Found = dict[str, Tensor]
"""The output and every gradient."""


def dense(asked: Asked, dtype: torch.dtype = torch.float64) -> Found:
    """By a mask of everybody and everything, in one process."""
    q, k, v, grad = (x.to(dtype) for x in asked.tensors())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bounds = asked.bounds or tuple(range(0, asked.rows * asked.length + 1, asked.length))
    document = torch.bucketize(torch.arange(asked.rows * asked.length), torch.tensor(bounds), right=True)
    document, place = document.view(asked.rows, -1), torch.arange(asked.length)
    seen = document[:, :, None] == document[:, None, :]
    distance = place[:, None] - place
    seen = seen & (distance >= 0) if asked.causal else seen
    seen = seen & (distance.abs() < asked.window) if asked.window else seen
    group = asked.heads // asked.key_heads
    scale = 8**-0.5 if asked.scale is None else asked.scale
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    scores = scores if asked.soft_cap is None else torch.tanh(scores / asked.soft_cap) * asked.soft_cap
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sinks = asked.mask.sinks
    if sinks is not None:
        sinks = sinks.detach().to(dtype).requires_grad_()
        column = sinks[None, :, None, None].expand(asked.rows, -1, asked.length, 1)
        out = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1)
    else:
        out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    wanted = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    grads = torch.autograd.grad(out, [*wanted.values()], grad)
    return {"out": out.detach()} | dict(zip(wanted, grads, strict=True))


def places(asked: Asked, groups: Meshes) -> Tensor:
    """Which tokens of each row this rank has [b,s]."""
    share, rows = groups.row_share, WholeRows(asked.length, asked.bounds)
    return torch.tensor([[t for run in share.runs(rows, row) for t in range(*run)] for row in range(asked.rows)])


def own(asked: Asked, groups: Meshes) -> Found:
    """What this rank finds of its tokens; of sinks its part of their gradient."""
    module = Attention(model_spec("seam", 1, 8 * asked.heads, 8, 1, asked.heads, asked.key_heads, 8))
    cp.apply([module], Plan(asked.layout, cp_kind=asked.kind), groups)
    index = places(asked, groups)[:, None, :, None]
    q, k, v, grad = (x.gather(2, index.expand(-1, x.shape[1], -1, 8)) for x in asked.tensors())
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    mask = asked.mask
    out, _ = module.inner(q, k, v, mask)
    wanted = {"q": q, "k": k, "v": v} | ({} if mask.sinks is None else {"sinks": mask.sinks})
    grads = torch.autograd.grad(out, [*wanted.values()], grad)
    return {"out": out.detach()} | dict(zip(wanted, grads, strict=True))


def each(rank: int, world: int, asked: list[Asked], planted: str = "") -> list[tuple[Tensor, Found]]:
    """Of each call, which tokens the rank has, and what it found. A fault may be planted."""
    from tests.parity.test_cp_faults import OF_ATTENTION

    with OF_ATTENTION[planted]() if planted else nullcontext():
        found = []
        for one in asked:
            groups = meshes(one.layout, "cpu")
            found.append((places(one, groups), own(one, groups)))
        return found


def error(asked: Asked, answers: list[tuple[Tensor, Found]], right: Found) -> dict[str, float]:
    """By tensor, the largest difference over the largest element."""
    found = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in right.items()}
    for index, parts in answers:
        for name, part in parts.items():
            if name == "sinks":
                found[name] += part
            else:
                found[name].scatter_(2, index[:, None, :, None].expand_as(part), part.double())
    return {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp_min(0.01))
        for name, value in right.items()
    }


def seen_by(asked: Asked) -> dict[tuple[int, int], Tensor]:
    """For some tokens of each row, which keys they may see."""
    bounds = asked.bounds or tuple(range(0, asked.rows * asked.length + 1, asked.length))
    document = torch.bucketize(torch.arange(asked.rows * asked.length), torch.tensor(bounds), right=True)
    place, found = torch.arange(asked.length), {}
    for row, token in ((0, 0), (0, 23), (0, 30), (1, 20), (1, 42), (1, 47)):
        own = document.view(asked.rows, -1)[row]
        seen = (own == own[token]) & (place <= token)
        found[row, token] = seen & (token - place < asked.window) if asked.window else seen
    return found


def moved(rank: int, world: int, asked: Asked) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
    """Which tokens the rank has; and for some queries, which of its keys or values have a gradient."""
    groups = meshes(asked.layout, "cpu")
    module = Attention(model_spec("seam", 1, 8 * asked.heads, 8, 1, asked.heads, asked.key_heads, 8))
    cp.apply([module], Plan(asked.layout, cp_kind=asked.kind), groups)
    index, found = places(asked, groups), {}
    q, k, v, _ = (x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, 8)) for x in asked.tensors())
    for row, token in seen_by(asked):
        k, v = (x.detach().requires_grad_() for x in (k, v))
        out, _ = module.inner(q, k, v, asked.mask)
        chosen = torch.zeros_like(out)
        chosen[row, :, index[row] == token] = 1.0
        grads = torch.autograd.grad(out, (k, v), chosen)
        found[row, token] = sum((x[row].abs().sum((0, 2)) for x in grads), start=torch.zeros(())) > 0
    return index, found
