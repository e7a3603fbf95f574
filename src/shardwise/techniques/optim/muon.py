"""Muon (Jordan et al. 2024; Liu et al., arXiv 2502.16982), as torch.optim.Muon has it: a matrix of a block's linear
layers moves by the orthogonal matrix nearest to its momentum, which five Newton-Schulz iterations in bf16 find; fused
AdamW updates everything else: embeddings, output layer, norms, routers, biases.

It keeps one number of each such weight instead of two. Iterations need whole matrices: each has one owner (dealt.py),
to whom ranks send their pieces in bf16, and who sends each rank its piece of the result; 2 bytes a weight each way,
nothing of an expert's that a rank holds whole. They take 5 x (4 m m n + 2 m m m) operations of a matrix [m,n], m <= n,
which is little beside a step of many tokens. It pays where its steps learn more than AdamW's; rates are not AdamW's
unless ``adjust_lr_fn: match_rms_adamw``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import optim as theirs
from torch.optim import Optimizer

from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local, local_slice
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.optim import fresh_moments
from shardwise.techniques.optim.dealt import (
    DEALT_OVER,
    NS_STEPS,
    Round,
    Weight,
    gives,
    held,
    is_gathered,
    numel,
    piece,
    ranks_of,
    rounds,
)
from shardwise.techniques.optim.elementwise import Group

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7
MOMENTUM = "momentum_buffer"


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices [b,m,n], each by itself, in their dtype. On a CPU one after another, so that what becomes
    of one does not depend on which others its owner has."""
    if len(matrices) > 1 and matrices.device.type == "cpu":
        return torch.cat([newton_schulz(one[None]) for one in matrices])
    return newton_schulz(matrices)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices [b,m,n] together."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NS_STEPS):
        if len(x) == 1:  # as torch.optim.Muon, to the bit
            gram = x[0] @ x[0].mT
            x = torch.addmm(x[0], torch.addmm(gram, gram, gram, beta=b, alpha=c), x[0], beta=a)[None]
        else:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted(rate: float, shape: tuple[int, int], how: str | None) -> float:
    """Return the learning rate of a matrix of this shape."""
    if how == "match_rms_adamw":
        return rate * 0.2 * sqrt(max(shape))
    return rate * sqrt(max(1.0, shape[0] / shape[1]))


class OwnMatrix(NamedTuple):
    """A weight as this rank holds it: the parameter, its group, and what it is a piece of."""

    parameter: nn.Parameter
    group: Group
    whole: Weight


class Muon(Optimizer):
    """Muon over plain and sharded parameters, and AdamW over those of groups without ``matrices``."""

    def __init__(self, groups: list[Group], optim: OptimSection, plan: Plan) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.momentum = optim.momentum
        self.nesterov = optim.nesterov
        self.adjust = optim.adjust_lr_fn
        self.dtype = torch.float64 if plan.precision.weights == "fp64" else torch.bfloat16
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.meshes, self.own = Meshes(), list[OwnMatrix]()
        self.dealt = list[tuple[Round, Exchange | None]]()
        rest = [group for group in self.param_groups if not group["matrices"]]
        betas = (optim.beta1, optim.beta2)
        self.rest = theirs.AdamW(rest, betas=betas, eps=optim.eps, fused=plan.optim.fused) if rest else None
        for group in self.param_groups:
            for parameter in group["params"]:
                fresh = fresh_moments(parameter)
                kept = {"step": fresh["step"], MOMENTUM: fresh["exp_avg"]} if group["matrices"] else fresh
                self.state[parameter] = kept
                if self.rest is not None and not group["matrices"]:
                    self.rest.state[parameter] = kept

    def deal(self, wholes: Mapping[nn.Parameter, Weight], meshes: Meshes) -> None:
        """Deal out the work on matrices among the ranks of the meshes. ``wholes``: of what parameters are pieces."""
        self.meshes = meshes
        groups = {each: group for group in self.param_groups if group["matrices"] for each in group["params"]}
        self.own = [OwnMatrix(each, groups[each], whole) for each, whole in wholes.items() if each in groups]
        assert len(self.own) == len(groups), "a matrix is nobody's"
        for parameter, _, whole in self.own:
            here = tuple((part.start, part.stop) for part in local_slice(parameter))
            assert here == held(whole, meshes.layout, meshes.rank), "a matrix is not cut as its states say"
        weights = [each.whole for each in self.own]
        for group in DEALT_OVER:
            alone = meshes.size(group) == 1
            for dealt in rounds(weights, group, meshes.layout, meshes.rank):
                self.dealt.append((dealt, None if alone else Exchange(dealt, weights, group, meshes)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter. Like torch's fused AdamW, it divides gradients by ``grad_scale``, and
        changes nothing if ``found_inf`` is 1."""
        if self.rest is not None:
            vars(self.rest).update(grad_scale=self.grad_scale, found_inf=self.found_inf)
            self.rest.step()
        for dealt, exchange in self.dealt:
            found = [self._direction(*one[:2]) for one in dealt]
            results = _orthogonalised(found) if exchange is None else exchange.results(found)
            for one, result in zip(dealt, results, strict=True):
                self._move(*one[:2], result)
        for parameter, *_ in self.own:
            step = self.state[parameter]["step"]
            step += 1 if self.found_inf is None else 1 - self.found_inf.to(step.device)

    def _part(self, tensor: Tensor, weight: int, number: int) -> Tensor:
        """Return this rank's piece, a view, of a matrix of a weight, of whose shape ``tensor`` is."""
        whole, here = self.own[weight].whole, self.meshes
        (start, stop), _ = piece(whole, number, here.layout, here.rank)
        (begun, _), _ = held(whole, here.layout, here.rank)
        before = max(number * whole.matrix[0] - begun, 0)
        return local(tensor.detach())[before : before + stop - start]

    def _direction(self, weight: int, number: int) -> Tensor:
        """Change the momentum of a piece, and return what is to be orthogonalised of it."""
        parameter = self.own[weight].parameter
        assert parameter.grad is not None
        grad, kept = (self._part(each, weight, number) for each in (parameter.grad, self.state[parameter][MOMENTUM]))
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        mean = kept.to(grad.dtype).lerp(grad, 1 - self.momentum)
        self._put(kept, mean)
        return (grad.lerp(mean, self.momentum) if self.nesterov else mean).to(self.dtype)

    def _move(self, weight: int, number: int, result: Tensor) -> None:
        """Move a piece of a matrix."""
        parameter, group, whole = self.own[weight]
        mine = self._part(parameter, weight, number)
        new = mine.to(torch.promote_types(mine.dtype, torch.float32)) * (1 - group["lr"] * group["weight_decay"])
        self._put(mine, new.add_(result, alpha=-adjusted(group["lr"], whole.matrix, self.adjust)))

    def _put(self, old: Tensor, new: Tensor) -> None:
        new = new.to(old.dtype)
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf.to(old.device) > 0, old, new))


class Exchange:
    """What the ranks of a group send each other of the matrices of a round: pieces to owners, and pieces of what these
    make of the whole. ``ranks``: those of the group; ``owned``: by rank, the places of its matrices in the round."""

    def __init__(self, dealt: Round, weights: Sequence[Weight], group: str, meshes: Meshes) -> None:
        self.dealt = dealt
        self.group = group
        self.layout = meshes.layout
        self.me, self.process_group = meshes.rank, meshes.groups[group]
        self.weights = [weights[one.weight] for one in dealt]
        self.is_gathered = is_gathered(dealt, weights, group, self.layout)
        self.ranks = ranks_of(self.layout, group, self.me)
        self.owned = [[i for i, one in enumerate(dealt) if one.owner == owner] for owner in range(len(self.ranks))]
        self.mine = self.owned[self.ranks.index(self.me)]

    def results(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's piece of every result, from its pieces of what is to be orthogonalised."""
        if self.is_gathered:
            return self._scattered(_orthogonalised(self._gathered(pieces)), pieces[0])
        return self._scattered(_orthogonalised([pieces[i] for i in self.mine]), pieces[0])

    def _piece(self, i: int, rank: int) -> tuple[slice, slice]:
        rows, columns = piece(self.weights[i], self.dealt[i].number, self.layout, rank)
        return slice(*rows), slice(*columns)

    def _numel(self, i: int, rank: int) -> int:
        return numel(piece(self.weights[i], self.dealt[i].number, self.layout, rank))

    def _gives(self, i: int, rank: int, owner: int) -> bool:
        return gives(self.weights[i], self.group, self.layout, (rank, owner))

    def _gathered(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole of this rank's own matrices."""
        given = [
            [pieces[i] for i in own if self._gives(i, self.me, owner)]
            for owner, own in zip(self.ranks, self.owned, strict=True)
        ]
        taken = [[i for i in self.mine if self._gives(i, rank, self.me)] for rank in self.ranks]
        sizes = [[self._numel(i, rank) for i in own] for rank, own in zip(self.ranks, taken, strict=True)]
        wholes = {i: pieces[0].new_empty(self.weights[i].matrix) for i in self.mine}
        received = self._exchanged(given, sizes, pieces[0])
        for rank, own, parts in zip(self.ranks, taken, received, strict=True):
            for i, part in zip(own, parts, strict=True):
                room = wholes[i][self._piece(i, rank)]
                room.copy_(part.view(room.shape))
        return [wholes[i] for i in self.mine]

    def _scattered(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Send every rank its pieces of this rank's own results, and return those that come from their owners."""
        made = dict(zip(self.mine, wholes, strict=True))
        given = [[made[i][self._piece(i, rank)] for i in self.mine] for rank in self.ranks]
        sizes = [[self._numel(i, self.me) for i in own] for own in self.owned]
        found = dict[int, Tensor]()
        for own, parts in zip(self.owned, self._exchanged(given, sizes, like), strict=True):
            for i, part in zip(own, parts, strict=True):
                rows, columns = self._piece(i, self.me)
                found[i] = part.view(rows.stop - rows.start, columns.stop - columns.start)
        return [found[i] for i in range(len(self.dealt))]

    def _exchanged(
        self, given: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> Iterator[Sequence[Tensor]]:
        """Send each rank tensors, and yield from each those that it sends, of these sizes."""
        counts = [[sum(each.numel() for each in to) for to in given], [sum(each) for each in sizes]]
        sent, received = (like.new_empty(sum(each)) for each in counts)
        tensors = [each for to in given for each in to]
        for room, each in zip(sent.split([each.numel() for each in tensors]), tensors, strict=True):
            room.view(each.shape).copy_(each)
        dist.all_to_all_single(received, sent, counts[1], counts[0], group=self.process_group)
        for part, own in zip(received.split(counts[1]), sizes, strict=True):
            yield part.split(list(own))


def _orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise matrices, those of one shape that follow each other at once."""
    found = list[Tensor]()
    for _, alike in groupby(matrices, lambda one: one.shape):
        own = [*alike]
        found += orthogonal(torch.stack(own) if len(own) > 1 else own[0][None]).unbind()
    return found


class PlainMuon(Optimizer):
    """torch.optim.Muon's own lines, whose products are in the dtype that a group is ``multiplied`` in; and torch's
    AdamW, operation by operation."""

    def __init__(self, groups: list[Group], optim: OptimSection) -> None:
        super().__init__(groups, {"multiplied": torch.float64})
        self.settings = optim
        rest = [group for group in self.param_groups if not group["matrices"]]
        self.rest = theirs.AdamW(rest, betas=(optim.beta1, optim.beta2), eps=optim.eps)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.rest.step()
        for group in self.param_groups:
            for weight in (each for each in group["params"] if group["matrices"] and each.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                stacks = (each.chunk(group["matrices"]) for each in (weight, weight.grad, momentum))
                for param, grad, buf in zip(*stacks, strict=True):
                    self._update(param, grad, buf, group)

    def _update(self, param: Tensor, grad: Tensor, buf: Tensor, group: Group) -> None:
        """Update one matrix."""
        optim, (a, b, c) = self.settings, COEFFICIENTS
        buf.lerp_(grad, 1 - optim.momentum)
        update = grad.lerp(buf, optim.momentum) if optim.nesterov else buf
        ortho_grad = update.to(group["multiplied"])
        if grad.size(0) > grad.size(1):
            ortho_grad = ortho_grad.T
        ortho_grad = ortho_grad / ortho_grad.norm().clamp(min=EPS)
        for _ in range(NS_STEPS):
            gram_matrix = ortho_grad @ ortho_grad.T
            gram_update = torch.addmm(gram_matrix, gram_matrix, gram_matrix, beta=b, alpha=c)
            ortho_grad = torch.addmm(ortho_grad, gram_update, ortho_grad, beta=a)
        if grad.size(0) > grad.size(1):
            ortho_grad = ortho_grad.T
        rows, columns = param.shape
        ratio = sqrt(max(1, rows / columns))
        if optim.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * sqrt(max(rows, columns))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(ortho_grad, alpha=-group["lr"] * ratio)


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Muon:
    """Make it over groups of parameters; nothing in it is drawn. :meth:`Muon.deal` says who has which matrix."""
    return Muon(groups, optim, plan)


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make torch's, matrix by matrix."""
    return PlainMuon(groups, optim)
