"""What a rank does for the tests of gated delta nets whose rows are on several ranks: its tokens of whole rows, through
a net that was told that they are cut."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shardwise.distributed.meshes import meshes
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.delta import GatedDeltaNet
from shardwise.spec.layout import Layout
from shardwise.spec.plan import CpKind, Plan
from shardwise.spec.rows import WholeRows
from shardwise.techniques import cp
from tests.parity.mixers import NETS

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """Rows of so many tokens, of which documents end at ``bounds``, over so many ranks; ``each``: value heads of a key
    head, ``taps``: tokens of a sum."""

    kind: CpKind
    ranks: int
    ulysses: int = 1
    rows: int = 2
    length: int = 48
    bounds: tuple[int, ...] | None = None
    each: int = 1
    taps: int = 4
    dtype: torch.dtype = torch.float64

    @property
    def spec(self) -> ModelSpec:
        return with_fields(NETS, linear_num_value_heads=2 * self.each, linear_conv_kernel_dim=self.taps)

    @property
    def mask(self) -> MaskSpec:
        documents = None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32)
        return MaskSpec(documents=documents, bounds=documents, row_length=self.length)

    def net(self) -> GatedDeltaNet:
        """Heads that forget slowly: of those that forget at once a lost state would not be seen."""
        draw, net = torch.Generator().manual_seed(1), GatedDeltaNet(self.spec).to(torch.float64)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.normal_(0.0, 0.5, generator=draw)
                parameter.sub_(4.0 if name == "decay_log" else 0.0)
        return net.to(self.dtype)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """What the net is given, and the gradient of what it returns, whole."""
        draw = torch.Generator().manual_seed(0)
        shape = 2, self.rows, self.length, self.spec.hidden_size
        x, grad = torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)
        return x, grad


def _found(net: GatedDeltaNet, x: Tensor, grad: Tensor, mask: MaskSpec) -> Found:
    x = x.detach().requires_grad_()
    out = net(x, None, mask)
    wanted = {"x": x, **dict(net.named_parameters())}
    return {"out": out.detach()} | dict(zip(wanted, torch.autograd.grad(out, [*wanted.values()], grad), strict=True))


@cache
def whole(cut: Cut) -> Found:
    """In one process."""
    mask = MaskSpec(documents=cut.mask.documents)
    return _found(cut.net(), *cut.tensors(), mask)


def own(rank: int, world: int, cuts: list[Cut], planted: str = "") -> list[tuple[Tensor, Found]]:
    """Of each case which tokens the rank has [b,s], and what it found: of parameters its part of their gradients."""
    from tests.parity.test_cp_faults import FAULTS

    with FAULTS[planted][0]() if planted else nullcontext():
        found = []
        for cut in cuts:
            groups, net = meshes(Layout(cp=cut.ranks, ulysses=cut.ulysses), "cpu"), cut.net()
            cp.apply([net], Plan(groups.layout, cp_kind=cut.kind), groups)
            rows = WholeRows(cut.length, cut.bounds)
            tokens = [[t for run in groups.row_share.runs(rows, row) for t in range(*run)] for row in range(cut.rows)]
            index = torch.tensor(tokens)
            x, grad = (y.gather(1, index[..., None].expand(-1, -1, y.shape[-1])) for y in cut.tensors())
            found.append((index, _found(net, x, grad, cut.mask)))
        return found


def error(cut: Cut, answers: list[tuple[Tensor, Found]]) -> dict[str, float]:
    """By tensor, the largest difference over the largest element."""
    right, found = whole(cut), dict[str, Tensor]()
    for name, value in right.items():
        found[name] = torch.zeros_like(value)
        for index, parts in answers:
            if name in ("out", "x"):
                found[name].scatter_(1, index[..., None].expand_as(parts[name]), parts[name])
            else:
                found[name] += parts[name]
    return {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in right.items()}
