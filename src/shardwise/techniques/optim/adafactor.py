"""Adafactor (Shazeer and Stern, arXiv 1804.04235), as torch.optim.Adafactor has it: AdamW's second moment, of which a
matrix keeps the means of its rows and of its columns alone, and no first one.

Steps are relative to the size of a weight, and at most 1 / sqrt(t) of it; an update whose root mean square is above 1
is scaled down to that. All these are means over whole weights. So where ranks hold rows of them, sums come together in
two all-reduces a step: of all columns, of the means of rows and of the size of each weight; then of each update's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import optim as theirs
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise.distributed.slices import cuts, local
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.optim import elementwise
from shardwise.techniques.optim.elementwise import PIECE, Group
from shardwise.techniques.optim.elementwise import regimes as regimes

DECAY, LEAST_SIZE = -0.8, 1e-3
"""The exponent of t in 1 - beta2; the root mean square that a weight has at least, for the length of its steps."""
ROWS, COLUMNS = "row_var", "col_var"


class Factored(Optimizer):
    """Adafactor over plain parameters and such of which ranks hold rows. A vector is a matrix of one column, whose
    second moment is that of its rows."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        for parameter in (each for group in self.param_groups for each in group["params"]):
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = {"step": step, ROWS: _means(parameter, 1)}
            if parameter.ndim > 1:
                self.state[parameter][COLUMNS] = _means(parameter, 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient. Like torch's fused AdamW, it divides gradients by
        ``grad_scale``, and changes nothing if ``found_inf`` is 1."""
        updates: dict[dist.ProcessGroup | None, list[Iterator[Tensor]]] = {}
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                updates.setdefault(_holders(parameter), []).append(self._update(parameter, group))
        for holders, each in updates.items():
            for _ in range(2):
                _sum([next(update) for update in each], holders)
            for update in each:
                next(update, None)

    def _update(self, parameter: nn.Parameter, group: Group) -> Iterator[Tensor]:
        """Update a parameter. What it yields is to be summed, in place, over the ranks that hold other rows."""
        assert parameter.grad is not None
        state = self.state[parameter]
        numel = parameter.numel()
        eps = torch.finfo(parameter.dtype).eps
        weight, grad, rows = (_matrix(local(each)) for each in (parameter.detach(), parameter.grad, state[ROWS]))
        columns, count = local(state[COLUMNS]) if COLUMNS in state else None, numel // grad.shape[1]
        wide, t = torch.promote_types(grad.dtype, torch.float32), state["step"].double() + 1
        forget, found = (t**DECAY).to(wide), self._found(grad.device)
        sums, new_rows = torch.zeros(grad.shape[1] + 2, dtype=wide, device=grad.device), rows.to(wide, copy=True)
        for part, own in self._pieces(grad, wide):
            squares = own.square()
            new_rows[part] = rows[part].to(wide).lerp(squares.mean(1, keepdim=True), forget)
            sums[:-2] += squares.sum(0)
            sums[-1] += weight[part].to(wide).square().sum()
        sums[-2] = new_rows.sum()
        yield sums
        new_columns = None if columns is None else columns.to(wide).lerp(sums[:-2] / count, forget)
        mean = (sums[-2] / count).clamp_min(eps)

        def scaled(part: slice, own: Tensor) -> Tensor:
            estimate = new_rows[part] if new_columns is None else new_rows[part] @ new_columns / mean
            return own * estimate.clamp_min(eps * eps).rsqrt()

        size = sum((scaled(*each).square().sum() for each in self._pieces(grad, wide)), sums.new_zeros(()))
        yield size
        length = (sums[-1] / numel).sqrt().clamp_min(LEAST_SIZE) * (t**-0.5).clamp_max(group["lr"]).to(wide)
        length = length / (size / numel).sqrt().clamp_min(1.0)
        for part, own in self._pieces(grad, wide):
            new = weight[part].to(wide) * (1 - group["lr"] * group["weight_decay"]) - length * scaled(part, own)
            weight[part] = torch.where(found, weight[part], new.to(weight.dtype))
        rows.copy_(torch.where(found, rows, new_rows.to(rows.dtype)))
        if columns is not None and new_columns is not None:
            columns.copy_(torch.where(found, columns, new_columns.to(columns.dtype)))
        state["step"] += ~found

    def _pieces(self, grad: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows, a few at a time, with their gradients."""
        each = max(1, PIECE.get(grad.device.type, 2**22) // grad.shape[1])
        for part in elementwise.pieces(len(grad), each):
            own = grad[part].to(wide)
            yield part, own if self.grad_scale is None else own / self.grad_scale

    def _found(self, device: torch.device) -> Tensor:
        none = torch.zeros((), dtype=torch.bool, device=device)
        return none if self.found_inf is None else self.found_inf.to(device) > 0


def _matrix(tensor: Tensor) -> Tensor:
    """Return a view with rows and columns, of a vector with one column."""
    return tensor if tensor.ndim == 2 else tensor.view(-1, 1)


def _means(parameter: nn.Parameter, dim: int) -> Tensor:
    """Return zeros for the means over a dim of a parameter, cut as it is along the other; of a vector over none."""
    if parameter.ndim < 2:
        return torch.zeros_like(parameter)
    held = local(parameter.detach())
    shapes = [[1 if each == dim else size for each, size in enumerate(of.shape)] for of in (held, parameter)]
    zeros = held.new_zeros(shapes[0])
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [Replicate() if placed.is_shard(dim) else placed for placed in parameter.placements]
    shape = torch.Size(shapes[1])
    return DTensor.from_local(zeros, parameter.device_mesh, placements, shape=shape, stride=(shape[1], 1))


def _holders(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that hold rows of a parameter; None where each has all."""
    axes = [axis for axis, _ in cuts(parameter)] if isinstance(parameter, DTensor) else []
    return parameter.device_mesh.get_group(axes[0]) if isinstance(parameter, DTensor) and axes else None


def _sum(parts: Sequence[Tensor], ranks: dist.ProcessGroup | None) -> None:
    """Add up tensors over ranks, in place, in one all-reduce."""
    if ranks is None:
        return
    joined = torch.cat([part.view(-1) for part in parts])
    dist.all_reduce(joined, group=ranks)
    for part, whole in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.view(-1).copy_(whole)


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; nothing in it is drawn."""
    return Factored(groups)


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make torch's own."""
    return theirs.Adafactor(groups)
