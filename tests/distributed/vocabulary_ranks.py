"""What ranks that hold rows of a vocabulary each do in tests, and the one process that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributions import Categorical
from torch.nn import functional as F

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed import vocabulary
from shardwise.distributed.collectives import enter, leave
from shardwise.distributed.meshes import meshes
from shardwise.methods import loss, pairs
from shardwise.methods.loss import IGNORED, Output
from shardwise.models.layers import Head
from shardwise.spec.layout import Layout, cut
from shardwise.spec.recipe import Method
from shardwise.spec.records import TOKEN_FIGURES
from tests.distributed.collective_ranks import share

HIDDEN, SHAPE = 16, (3, 7)


@dataclass(frozen=True)
class Case:
    """``labels``: mixed, first (all on the first rank's rows), last (on the last one's), or none. ``scale`` makes
    logits large. ``fault``: one of :func:`faulty`."""

    ids: int = 29
    padded: bool = True
    soft_cap: float | None = None
    labels: str = "mixed"
    chunk_tokens: int = 4
    factors: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.float64
    frozen: bool = False
    fault: str = ""


@dataclass
class Found:
    """Numbers of one process, or of one rank."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor | None
    each: Tensor
    logits: Tensor
    unlearned: Tensor
    figures: Tensor


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden, weight, labels, factors."""
    torch.manual_seed(0)
    hidden = torch.randn(*SHAPE, HIDDEN, dtype=torch.float64)
    weight = torch.randn(case.ids, HIDDEN, dtype=torch.float64)
    weight[: case.ids // 3] *= case.scale  # other ranks' are smaller
    low, high = {"first": (0, 3), "last": (case.ids - 1, case.ids)}.get(case.labels, (0, case.ids))
    labels = torch.randint(low, high, SHAPE)
    labels[0, :3] = labels[2] = IGNORED
    if case.labels == "none":
        labels[:] = IGNORED
    factors = torch.randn(SHAPE, dtype=torch.float64) if case.factors else None
    return hidden.to(case.dtype), weight.to(case.dtype), labels, factors


def alone(case: Case) -> Found:
    """By torch's own cross-entropy, in fp64."""
    hidden, weight, labels, factors = tensors(case)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.mT
    if case.soft_cap is not None:
        logits = torch.tanh(logits / case.soft_cap) * case.soft_cap
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(SHAPE)
    total = (each if factors is None else each * factors).sum()
    (total * 0.37).backward()
    told = torch.stack([(logits.argmax(-1) == labels).double(), Categorical(logits=logits).entropy()])
    figures = (told * (labels != IGNORED)).sum((1, 2)).detach()
    return Found(total.detach(), hidden.grad, weight.grad, each.detach(), logits.detach(), total.detach(), figures)


def rows_of(weight: Tensor, mesh: DeviceMesh, padded: bool) -> nn.Parameter:
    """The weight cut along dim 0 over a mesh of one axis; ``padded``: with zero rows up to a multiple of its ranks."""
    most = -(-len(weight) // mesh.size())
    if padded:
        weight = F.pad(weight, (0, 0, 0, most * mesh.size() - len(weight)))
    start, stop = cut((0, len(weight)), mesh.size(), mesh.get_local_rank())
    local = weight[start:stop].clone()
    return nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
    )


@contextmanager
def faulty(name: str) -> Iterator[None]:
    """``unmasked``: rows of padding take part. ``local``: a rank takes its own greatest logit for everybody's."""
    rows, join = vocabulary.rows, loss._join

    def local(statistics: Tensor, labels: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        statistics[:, 0] = statistics[rank, 0].clone()
        return join(statistics, labels, rank)

    if name == "unmasked":
        with patch.object(vocabulary, "rows", lambda weight, ids=None: rows(weight)):
            yield
    elif name == "local":
        with patch.object(loss, "_join", local):
            yield
    else:
        yield


def together(rank: int, world: int, cases: list[Case]) -> list[Found]:
    """Each case, as this rank has it."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return [one(case, mesh) for case in cases]


def one(case: Case, mesh: DeviceMesh) -> Found:
    hidden, weight, labels, factors = tensors(case)
    hidden, parameter = hidden.requires_grad_(), rows_of(weight, mesh, case.padded)
    parameter.requires_grad_(not case.frozen)
    head = Output(parameter, case.soft_cap, case.ids)
    with faulty(case.fault):
        told = replace(head, figures=TOKEN_FIGURES)
        total, figures = loss.loss_and_figures(hidden, told, labels, case.chunk_tokens, factors)
        (total * 0.37).backward()
        each = loss.token_losses(hidden, head, labels, case.chunk_tokens)
        with torch.no_grad():
            unlearned = loss.linear_cross_entropy(hidden, head, labels, case.chunk_tokens, factors)
            logits = loss.logits(hidden, head)
    grad = None
    if not case.frozen:
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        grad = parameter.grad.to_local()
    return Found(total.detach(), hidden.grad, grad, each, logits, unlearned, figures)


def chosen(rank: int, world: int, figures: tuple[str, ...]) -> Tensor:
    """How many labels of five are the first of the greatest logits, where several are: of 29 ids, the tokens' logits
    are greatest at 3 and 28, at 20 and 21, at none (all are equal), and, of two more, at 9 alone."""
    mesh = init_device_mesh("cpu", (world,))
    weight, hidden = torch.zeros(29, 5), torch.eye(5)
    for token, ids in enumerate(((3, 28), (20, 21), (), (9,), (9,))):
        weight[list(ids), token] = 2.0
    head = Output(rows_of(weight, mesh, padded=True), None, 29, figures=figures)
    told = [loss.loss_and_figures(hidden, head, torch.tensor(labels), 2)[1] for labels in TIES]
    return torch.stack(told)


TIES = [(3, 20, 0, 9, 9), (28, 21, 1, 9, IGNORED), (28, 21, 28, 0, 8)]


def preference() -> tuple[Tensor, Tensor, MicroBatch]:
    """Hidden, weight, and two pairs of answers."""
    hidden, weight, labels, _ = tensors(Case())
    labels[2] = torch.randint(0, 29, (7,))
    answers = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3, 3], [0, 0, 1, 1, 2, 2, 3]])
    batch = MicroBatch(labels, labels, labels, None, 0)
    batch.answers, batch.references = answers, torch.tensor([[0.3, 0.0], [0.2, 1.4]], dtype=torch.float64)
    return hidden.requires_grad_(), weight, batch


def prefer(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    method = Method(name="dpo", beta=0.7, label_smoothing=0.2)
    return pairs.finish(hidden, Output(weight, None, 29), batch, 2.0, chunk_tokens=4, method=method).value


def preferred(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """dpo's loss and gradients."""
    mesh = init_device_mesh("cpu", (world,))
    hidden, weight, batch = preference()
    parameter = rows_of(weight, mesh, padded=True)
    total = prefer(hidden, parameter, batch)
    total.backward()
    assert isinstance(parameter.grad, DTensor)
    return total.detach(), hidden.grad, parameter.grad.to_local()


IDS = torch.tensor([[3, 28, 0, 3, 9], [15, 14, 9, 27, 1], [8, 7, 22, 21, 3]])


def tied(rank: int, world: int, soft_cap: float | None, sequence: bool, whole: bool) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of this rank's rows of one weight that is looked up and multiplies; ``whole``: of whole
    logits, by torch's cross-entropy."""
    groups = meshes(Layout(tp=world), "cpu")
    weight, group = rows_of(tensors(Case())[1], groups.mesh("tp"), padded=True), groups.groups["tp"]
    stream = leave(vocabulary.look_up(IDS, weight, 29), group, cut=sequence)
    hidden = enter(torch.tanh(stream), group, tuple(IDS.shape) if sequence else None)
    labels, head = IDS.roll(-1, 1), Output(weight, soft_cap, 29)
    if whole:
        logits = vocabulary.logits(hidden, weight, 29)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    else:
        total = loss.linear_cross_entropy(hidden, head, labels, 4)
    total.backward()
    assert isinstance(weight.grad, DTensor)
    return total.detach(), weight.grad.to_local()


def tied_alone(soft_cap: float | None) -> tuple[Tensor, Tensor]:
    weight = tensors(Case())[1].requires_grad_()
    logits = torch.tanh(F.embedding(IDS, weight)) @ weight.mT
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    total = F.cross_entropy(logits.flatten(0, 1), IDS.roll(-1, 1).flatten(), reduction="sum")
    total.backward()
    return total.detach(), weight.grad


def sharded_too(rank: int, world: int, padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output layer cut over tp and, by FSDP2, over dp_shard, each rank of which has rows of hidden of its own: the
    loss of its rows, their gradient, and the gradient of the weight, gathered over dp_shard."""
    groups = meshes(Layout(dp_shard=2, tp=world // 2), "cpu")
    hidden, weight, labels, _ = tensors(Case())
    labels = labels[:2]
    own = groups.index("batch")
    head = Head(HIDDEN, 29)
    head.weight = rows_of(weight, groups.mesh("tp"), padded)
    fully_shard(head, mesh=groups.mesh("dp_shard"))
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)
    hidden = hidden[own : own + 1].requires_grad_()
    total = head(hidden, lambda h, w: loss.linear_cross_entropy(h, Output(w, None, 29), labels[own : own + 1], 4))
    total.backward()
    grad = head.weight.grad
    assert isinstance(grad, DTensor)
    return total.detach(), hidden.grad, grad.full_tensor()


def looked_up(rank: int, world: int, sequence: bool) -> tuple[Tensor, Tensor]:
    """The embedding of :data:`IDS`, this rank's share of it if ``sequence``, and the gradient of its rows."""
    groups = meshes(Layout(tp=world), "cpu")
    weight = rows_of(tensors(Case())[1], groups.mesh("tp"), padded=False)
    out = leave(vocabulary.look_up(IDS, weight), groups.groups["tp"], cut=sequence)
    slope = torch.arange(float(IDS.numel() * HIDDEN), dtype=torch.float64).view(*IDS.shape, HIDDEN)
    out.backward(share(slope, rank, world) if sequence else slope)
    assert isinstance(weight.grad, DTensor)
    return out.detach(), weight.grad.to_local()
