"""Numbers that all ranks must share: before a step its tokens and the wish to stop, between the hosts; after
backward, between the devices, the gradient norm and the loss, from which every rank's device takes the same decision
with no host waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local, replication

PIECE = 4096
"""So many squares are summed in fp32 where a CPU does it; what comes of them, in fp64."""


def count_supervised(meshes: Meshes, terms: int, stop: bool = False) -> tuple[int, bool]:
    """Return what the loss of the whole optimizer step is a mean over, and whether any rank wants to ``stop``."""
    total, _, stops = count_tokens(meshes, terms, (0, 0), stop)
    return total, stops


def count_tokens(meshes: Meshes, terms: int, tokens: tuple[int, int], stop: bool) -> tuple[int, tuple[int, int], bool]:
    """As :func:`count_supervised`, from each rank's ``terms`` (over its micro-batches), with the sum of its ``tokens``,
    supervised and read. One all-reduce of 32 bytes between the hosts, while their devices may still compute the step
    before."""
    numbers = torch.tensor([*(each * meshes.counts for each in (terms, *tokens)), int(stop)])
    meshes.sum(numbers, "world")
    total, supervised, read, stops = numbers.tolist()
    return total, (supervised, read), stops > 0


def count(meshes: Meshes, own: int) -> int:
    """Return the sum of what the ranks count of their own tokens. One all-reduce of 8 bytes between the hosts."""
    numbers = torch.tensor([own * meshes.counts])
    meshes.sum(numbers, "world")
    return int(numbers)


def local_squares(parameters: Iterable[Tensor], ranks: int) -> Tensor:
    """Sum over this rank's gradient shards of |g|^2 / replication: a scalar in fp64, each norm taken in at least fp32.

    ``ranks``: of this rank's stage. Summed over the world it is the square of the true global norm. Padding is not part
    of a local shard, and a tied parameter is one parameter, so neither counts twice.
    """
    groups: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in _gradients(parameters):
        shard = local(gradient)
        if shard.numel():
            groups.setdefault((replication(gradient, ranks), shard.dtype, shard.device), []).append(shard)
    squares = []
    for (copies, dtype, device), shards in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        if device.type == "cpu":
            norms = torch.cat([norm for shard in shards for norm in _norms_of_pieces(shard, wide)])
        else:
            norms = torch.stack(torch._foreach_norm(shards, 2, dtype=wide))
        squares.append(norms.double().square().sum() / copies)
    return sum(squares[1:], start=squares[0]) if squares else torch.zeros((), dtype=torch.float64)


def _norms_of_pieces(shard: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norms of whole pieces, and of what is left. On a CPU torch sums the squares of a tensor one after another in
    fp32: of 4 million numbers the norm is off by 1e-4, of 67 million by half a per cent."""
    flat = shard.reshape(-1)
    whole = flat.numel() // PIECE * PIECE
    pieces = flat[:whole].view(whole // PIECE, PIECE)
    return torch.linalg.vector_norm(pieces, dim=1, dtype=wide), torch.linalg.vector_norm(flat[whole:], dtype=wide)[None]


def combine(meshes: Meshes, squares: Tensor, loss: Tensor, *figures: Tensor, counted: Tensor | None = None) -> Tensor:
    """[square of the gradient norm, mean loss, further figures, what is ``counted``] over all ranks, fp64, on the
    device of ``loss``, which is this rank's share of the mean, as the figures are; of what is counted [n] every rank
    has a share. One all-reduce of 16 bytes, and 8 a figure or count. A NaN or infinity of norm or loss anywhere reaches
    every rank, so all of them skip or none does."""
    shares = [share.detach().double().reshape(()) for share in (loss, *figures)]
    numbers = torch.stack([squares.to(loss.device), *(s if meshes.counts else torch.zeros_like(s) for s in shares)])
    numbers = torch.cat([numbers, counted]) if counted is not None and len(counted) else numbers
    meshes.sum(numbers, "world")
    return numbers


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor that brings gradients of this ``norm`` to at most ``max_norm`` (as ``clip_grad_norm_``)."""
    if max_norm is None:
        return torch.ones_like(norm)
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(parameters: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place, shard by shard, with no DTensor operation."""
    shards: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in _gradients(parameters):
        shard = local(gradient)
        shards.setdefault((shard.dtype, shard.device), []).append(shard)
    for (dtype, device), group in shards.items():
        torch._foreach_mul_(group, factor.to(device, torch.promote_types(dtype, torch.float32)))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are, once of a parameter that is named twice."""
    once = {id(parameter): parameter.grad for parameter in parameters}
    return [gradient for gradient in once.values() if gradient is not None]
