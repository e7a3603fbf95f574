"""What the ranks of tests/techniques/lora/test_dropout.py do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.techniques.lora.dropout import dropped
from tests.distributed.collective_ranks import kept

SHARE, SHAPE = 0.4, (64, 100)


def draw(x: Tensor, place: int | None) -> Tensor:
    """Twice on the same tensor, once on what is a part of another; all are multiplied, so that all are saved."""
    first, part, second = dropped(x, SHARE), dropped(x, SHARE, place), dropped(x, SHARE)
    return torch.stack([first, part, second]).square()


def compiled() -> Callable[..., Tensor]:
    torch._dynamo.reset()
    run: Callable[..., Tensor] = torch.compile(draw, fullgraph=True, backend="aot_eager")
    return run


def run(how: str) -> Callable[..., Tensor]:
    if how in ("plain", "compiled"):
        return draw if how == "plain" else compiled()
    options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if how == "selective" else {}
    return partial(checkpoint, draw, use_reentrant=False, **options)


def masks(rank: int, world: int, how: str, cut: bool) -> tuple[Tensor, Tensor]:
    """What forward kept, and what backward did, [3,*SHAPE]; all ranks have the same seed."""
    torch.manual_seed(7)
    x = torch.ones(3, *SHAPE, requires_grad=True)
    pieces = [run(how)(x[i], rank if cut else None)[i] for i in range(3)]
    out = torch.stack(pieces)
    out.sum().backward()
    return (out > 0).detach(), x.grad > 0
