"""What the tests of preferences run on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.methods import pairs
from shardwise.methods.loss import Output
from shardwise.spec.layout import cut
from shardwise.spec.recipe import Method

ROWS, LENGTH, HIDDEN, IDS = 2, 8, 5, 29
DPO = Method(name="dpo", beta=0.7, label_smoothing=0.2)


def preferred(rank: int, world: int, method: Method = DPO) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of three pairs in two rows, of which each rank has some columns, and its gradients: of the hidden states
    and of the output layer."""
    drawn = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64, generator=drawn)
    weight = torch.randn(IDS, HIDDEN, dtype=torch.float64, generator=drawn).requires_grad_()
    labels = torch.randint(IDS, (ROWS, LENGTH), generator=drawn)
    labels[0, 3] = -100
    answers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [2, 2, 3, 3, 4, 4, 4, 5]])
    start, stop = cut((0, LENGTH), world, rank)
    mine = hidden[:, start:stop].clone().requires_grad_()
    own = labels[:, start:stop]
    batch = MicroBatch(
        own, own, own, None, 0, answers[:, start:stop], torch.tensor([[0.3, 0.0], [0.2, 1.4], [0.0, -0.7]]).double()
    )
    head = Output(weight, group=dist.group.WORLD if world > 1 else None)
    loss = pairs.finish(mine, head, batch, 3.0, chunk_tokens=4, method=method).value
    loss.backward()
    assert mine.grad is not None and weight.grad is not None
    return loss.detach(), mine.grad, weight.grad
