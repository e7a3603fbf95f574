"""Gated delta nets (Yang et al., "Gated Delta Networks", arXiv 2412.06464), and their rule as one operation,
``shardwise::gated_delta``.

Of one head a token has a state S [key,value], a decay g <= 0 and a rate beta:

    S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T        o_t = S_t^T q_t

of queries and keys that are divided by their lengths. A chunk of tokens with the incoming state S is

    D_ij = exp(g_(j+1) + .. + g_i) for i >= j in one document, else 0        e_i = exp(g_1 + .. + g_i), 0 past a start
    A    = beta K K^T * D below its diagonal                                 new = (1 + A)^-1 beta (V - e K S)
    O    = e Q S + (Q K^T * D) new                                           S' = e_last S + K^T (D_last new)

so the bounds of documents are masks, whose values are exactly 0, and nothing is padded for them. Exponents are summed
anew for every j: as differences of one sum they would lose their last places, and what another document forgets would
change bits. States are fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from shardwise.models import fused_delta
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.delta_sizes import CHUNKS, chunk, kept
from shardwise.models.layers import RMSNorm, Rotary, accumulation_dtype, swiglu

LEAST_SQUARE = 1e-6
"""Added to the squared length by which queries and keys are divided."""


class Given(NamedTuple):
    """What the rule reads: q and k [b,s,heads,key], v [b,s,value heads,value], decays and rates [b,s,value heads], and
    where documents start, bool [b,s]; None: at the first token alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rate: Tensor
    starts: Tensor | None

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return [b,heads,values of each,key,value]."""
        (b, _, heads, key), (value_heads, value) = self.k.shape, self.v.shape[2:]
        return b, heads, value_heads // heads, key, value

    def blocks(self) -> list[tuple[int, int]]:
        """Return the first token of each block, and how many chunks it has."""
        size, length = chunk(*self.state_shape[3:]), self.v.shape[1]
        return [(at, min(CHUNKS, -(-(length - at) // size))) for at in range(0, length, CHUNKS * size)]


def starts_of(documents: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return where documents start, bool [b,s], of their cumulative bounds over all b*s tokens."""
    if documents is None:
        return None
    rows, length = shape[:2]
    starts = torch.zeros(rows * length + 1, dtype=torch.bool, device=documents.device)
    return starts.index_fill_(0, documents.long(), True)[:-1].view(rows, length)


class Chunks:
    """What ``count`` chunks from the token ``at`` on need that does not depend on their state, [b,heads,values of
    each,count,tokens,..]."""

    def __init__(self, given: Given, at: int, count: int) -> None:
        self.at, self.heads, self.wide = at, given.k.shape[2], accumulation_dtype(given.v.dtype)
        self.shape = count, chunk(*given.state_shape[3:])
        self.scale = given.q.shape[-1] ** -0.5
        self.q, self.q_length = self._unit(self.cut(given.q), self.scale)
        self.k, self.k_length = self._unit(self.cut(given.k), 1.0)
        self.v, self.rate = self.cut(given.v), self.cut(given.rate).unsqueeze(-1)
        decay = self.cut(given.decay)
        seen = torch.ones(self.shape[1], self.shape[1], dtype=torch.bool, device=decay.device).tril()
        self.below = seen.tril(-1)
        sums = decay.unsqueeze(-1).expand(*decay.shape, self.shape[1]).masked_fill(~self.below, 0.0).cumsum(-2)
        reach = decay.cumsum(-1).exp()
        if given.starts is not None:
            document = self.cut(given.starts.unsqueeze(-1), heads=1).cumsum(-1)
            seen = seen & (document.unsqueeze(-1) == document.unsqueeze(-2))
            reach = reach * (document == 0)
        self.within = sums.masked_fill_(~seen, -torch.inf).exp_()
        self.reach, self.last = reach.unsqueeze(-1), self.within[..., -1, :].unsqueeze(-1)
        self.left = self.reach[..., -1:, :]
        self.pairs = self.k @ self.k.mT
        self.mixed = (self.rate * self.pairs * self.within).tril(-1)
        eye = torch.eye(self.shape[1], dtype=self.wide, device=decay.device).expand_as(self.mixed)
        self.solved = torch.linalg.solve_triangular(self.mixed, eye, upper=False, unitriangular=True)
        self.scores = (self.q @ self.k.mT) * self.within

    def cut(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Tokens of x [b,s,h(,d)], zeros behind the last, as [b,heads,h of each,count,tokens(,d)]."""
        count, size = self.shape
        x = x[:, self.at : self.at + count * size]
        x = pad(x, (*(0, 0) * (x.dim() - 2), 0, count * size - x.shape[1]))
        x = x.unflatten(1, (count, size)).unflatten(3, (heads or self.heads, -1))
        return x.permute(0, 3, 4, 1, 2, *range(5, x.dim())).to(self.wide)

    def join(self, x: Tensor, out: Tensor) -> None:
        """The inverse of :meth:`cut`: write x into its tokens of ``out`` [b,s,h(,d)]."""
        x = x.permute(0, 3, 4, 1, 2, *range(5, x.dim())).flatten(3, 4).flatten(1, 2)
        tokens = min(x.shape[1], out.shape[1] - self.at)
        out[:, self.at : self.at + tokens].copy_(x[:, :tokens])

    @staticmethod
    def _unit(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """x divided by its length, times ``scale``, and what it was divided by."""
        length = torch.rsqrt(x.square().sum(-1, keepdim=True) + LEAST_SQUARE)
        return x * length * scale, length

    def step(self, number: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One chunk: what keys read of the state, the new values, and the state after it."""
        k, read = self.k[:, :, :, number], self.k[:, :, :, number] @ state
        new = self.v[:, :, :, number] - self.reach[:, :, :, number] * read
        new = self.solved[:, :, :, number] @ (self.rate[:, :, :, number] * new)
        return read, new, self.left[:, :, :, number] * state + k.mT @ (self.last[:, :, :, number] * new)

    def back(self, number: int, grad: Tensor, read: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the gradient of the state after a chunk: what keys read of it, the gradient of what is solved for, and
        that of the state before. ``read``, ``asked``: of new values and of the state, as outputs read them."""
        k, written = self.k[:, :, :, number], self.k[:, :, :, number] @ grad
        inner = self.solved[:, :, :, number].mT @ (read[:, :, :, number] + self.last[:, :, :, number] * written)
        reading = (self.reach * self.rate)[:, :, :, number] * inner
        return written, inner, self.left[:, :, :, number] * grad - k.mT @ reading + asked[:, :, :, number]


def forward(given: Given, before: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [b,s,value heads,value], the states between blocks in the room that is kept for them, and the
    last state; ``before``: the state before the first token, zeros if None."""
    v, shape = given.v, given.state_shape
    state = v.new_zeros(shape, dtype=accumulation_dtype(v.dtype)) if before is None else before
    states = v.new_zeros(*v.shape[:3], kept(*shape[3:]), dtype=state.dtype)
    out, room = torch.empty_like(v, memory_format=torch.contiguous_format), _places(states, state)
    for at, count in given.blocks():
        if at:
            next(room).copy_(state)
        block = Chunks(given, at, count)
        each, new = state.new_empty(*shape[:3], count, *shape[3:]), torch.empty_like(block.v)
        for number in range(count):
            each[:, :, :, number] = state
            _, new[:, :, :, number], state = block.step(number, state)
        block.join(block.reach * (block.q @ each) + block.scores @ new, out)
    return out, states, state


def of_outputs(block: Chunks, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of new values and of the state, as the outputs read them."""
    return block.scores.mT @ grad, block.q.mT @ (block.reach * grad)


def _places(states: Tensor, like: Tensor) -> Iterator[Tensor]:
    """Views of what is kept, each a state."""
    size, flat = like.numel(), states.view(-1)
    return (flat[at : at + size].view_as(like) for at in range(0, flat.numel() - size + 1, size))


def backward(
    grad: Tensor, given: Given, states: Tensor, before: Tensor | None = None, after: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of q, k, v, decays and rates, and that of the state before the first token. ``after``: that
    of the state after the last."""
    shape, blocks = given.state_shape, given.blocks()
    zeros = states.new_zeros(shape)
    first = [zeros if before is None else before]
    incoming = first + [place for place, _ in zip(_places(states, zeros), blocks[1:], strict=False)]
    after = zeros if after is None else after
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[:5])
    for (at, count), state in zip(reversed(blocks), reversed(incoming), strict=True):
        block = Chunks(given, at, count)
        found, after = _of_block(block, block.cut(grad), state, after)
        for x, out in zip(found, grads, strict=True):
            block.join(x, out)
    return grads, after


def _of_block(block: Chunks, grad: Tensor, state: Tensor, after: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of a block's q, k, v, decays and rates, and that of its incoming ``state``."""
    count, k, reach = block.shape[0], block.k, block.reach
    before, behind = (state.new_empty(*state.shape[:3], count, *state.shape[3:]) for _ in range(2))
    read, new, written, inner = (torch.empty_like(block.v) for _ in range(4))
    for number in range(count):
        before[:, :, :, number] = state
        read[:, :, :, number], new[:, :, :, number], state = block.step(number, state)
    scored, of_state = of_outputs(block, grad)
    for number in reversed(range(count)):
        behind[:, :, :, number] = after
        written[:, :, :, number], inner[:, :, :, number], after = block.back(number, after, scored, of_state)
    of_v = block.rate * inner
    seen = grad @ before.mT
    of_reach = (block.q * seen).sum(-1, keepdim=True) - (of_v * read).sum(-1, keepdim=True)
    of_last = (new * written).sum(-1, keepdim=True)
    of_left = (before * behind).sum((-1, -2)).unsqueeze(-1)
    of_scores, of_mixed = grad @ new.mT, -(inner @ new.mT).tril(-1)
    of_rate = (inner * (block.v - reach * read)).sum(-1) + (of_mixed * block.pairs * block.within).sum(-1)
    exponents = of_scores * block.scores + of_mixed * block.mixed
    exponents[..., -1, :] += (block.last * of_last).squeeze(-1)
    sums = (reach * of_reach).squeeze(-1)
    sums[..., -1] += block.left[..., 0, 0] * of_left.squeeze(-1)
    of_decay = (_from_here(exponents, -2) * block.below).sum(-1) + _from_here(sums, -1)
    of_scores, of_pairs = (
        x.sum(2, keepdim=True) for x in (of_scores * block.within, block.rate * of_mixed * block.within)
    )
    of_q = (reach * seen).sum(2, keepdim=True) + of_scores @ k
    of_k = ((block.last * new) @ behind.mT - (reach * of_v) @ before.mT).sum(2, keepdim=True)
    of_k = of_k + of_scores.mT @ block.q + (of_pairs + of_pairs.mT) @ k
    of_q = block.q_length * (of_q * block.scale - block.q * (block.q * of_q).sum(-1, keepdim=True) / block.scale)
    of_k = block.k_length * (of_k - k * (k * of_k).sum(-1, keepdim=True))
    return (of_q, of_k, of_v, of_decay, of_rate), after


def _from_here(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


_RULE = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? documents"


@torch.library.custom_op(
    "shardwise::gated_delta", mutates_args=(), schema=f"({_RULE}, Tensor? before=None) -> (Tensor, Tensor)"
)
def gated_delta(*given: Any) -> tuple[Tensor, Tensor]:
    """The outputs of the rule, and the states that it keeps. The fields of :class:`Given`, with the bounds of documents
    in the place of their starts; head h of values uses head h / (values of each) of keys. ``before``: the state before
    the first token, which gets no gradient here."""
    before = given[6] if len(given) > 6 else None
    if fused_delta.serves(*given[:2]):
        return fused_delta.forward(given[:5], given[5], before), _room(*given[1:3])
    return forward(given_of(given), before)[:2]


@torch.library.custom_op(
    "shardwise::gated_delta_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_RULE}, Tensor? before, Tensor states, Tensor? after=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def gated_delta_backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, decays and rates from that of the outputs, and of the state ``after`` the last
    token."""
    before, states, *after = saved[6:]
    if fused_delta.serves(*saved[:2]):
        return fused_delta.backward(grad, saved[:5], saved[5], before, *after)
    return backward(grad, given_of(saved), states, before, *after)[0]


def _room(k: Tensor, v: Tensor) -> Tensor:
    """Return the room for the states that are kept of such keys and values."""
    numbers = kept(k.shape[-1], v.shape[-1])
    return v.new_empty(*v.shape[:3], numbers, dtype=accumulation_dtype(v.dtype))


def given_of(fields: tuple[Any, ...]) -> Given:
    """Return what the rule reads of an operation's arguments, which begin as those of :func:`gated_delta` do."""
    q, k, v, decay, rate, documents = fields[:6]
    return Given(q, k, v, decay, rate, starts_of(documents, v.shape))


@gated_delta.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _room(k, v)


@gated_delta_backward.register_fake
def _(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in saved[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    return *gated_delta_backward(grad, *ctx.saved_tensors), None, None


gated_delta.register_autograd(_backward, setup_context=_save)


def _taps(x: Tensor, starts: Tensor | None, count: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """x as it was 0, 1, .. tokens before, zeros where a document began meanwhile, and where that is so."""
    barred = None if starts is None else torch.zeros_like(starts)
    for back in range(count):
        if barred is not None and starts is not None and back:
            barred = barred | pad(starts, (back - 1, 0))[:, : starts.shape[1]]
        moved = pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        yield back, moved if barred is None else moved.masked_fill(barred.unsqueeze(-1), 0), barred


def _summed(x: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
    taps = weight.shape[-1]
    total = torch.zeros_like(x)
    for back, moved, _ in _taps(x, starts, taps):
        total.addcmul_(moved, weight[:, 0, taps - 1 - back])
    return total


@torch.library.custom_op(
    "shardwise::conv_silu", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? documents) -> Tensor"
)
def conv_silu(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """silu of the sums of each channel of x [b,s,c] over tokens, its own the last of ``weight`` [c,1,taps]; none of
    another document."""
    return silu(_summed(x, weight, starts_of(documents, x.shape)), inplace=True)


@torch.library.custom_op(
    "shardwise::conv_silu_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor? documents) -> (Tensor, Tensor)",
)
def conv_silu_backward(grad: Tensor, x: Tensor, weight: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    starts, taps = starts_of(documents, x.shape), weight.shape[-1]
    grad = torch.ops.aten.silu_backward(grad, _summed(x, weight, starts))
    grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
    for back, moved, barred in _taps(x, starts, taps):
        at = taps - 1 - back
        grad_weight[:, 0, at] = (grad * moved).sum((0, 1), dtype=accumulation_dtype(x.dtype))
        sent = grad if barred is None else grad.masked_fill(barred.unsqueeze(-1), 0)
        grad_x[:, : x.shape[1] - back].addcmul_(sent[:, back:], weight[:, 0, at])
    return grad_x, grad_weight


@conv_silu.register_fake
def _(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@conv_silu_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *conv_silu_backward(grad, *ctx.saved_tensors), None


conv_silu.register_autograd(_conv_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class GatedDeltaNet(nn.Module):
    """The mixer ``linear_attention``. Its tokens meet in :meth:`convolve` and :meth:`recur` alone."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        own, d = spec.delta, spec.hidden_size
        self.key, self.value = own.linear_key_head_dim, own.linear_value_head_dim
        heads = own.linear_num_value_heads
        keys, values = own.linear_num_key_heads * self.key, heads * self.value
        self.in_q, self.in_k = (nn.Linear(d, keys, bias=False) for _ in range(2))
        self.in_v, self.in_z = (nn.Linear(d, values, bias=False) for _ in range(2))
        self.in_b, self.in_a = (nn.Linear(d, heads, bias=False) for _ in range(2))
        self.out = nn.Linear(values, d, bias=False)
        taps = own.linear_conv_kernel_dim
        self.conv_q, self.conv_k = (nn.Parameter(torch.zeros(keys, 1, taps)) for _ in range(2))
        self.conv_v = nn.Parameter(torch.zeros(values, 1, taps))
        self.decay_log, self.dt_bias = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        self.head_norm = RMSNorm(self.value, spec.rms_norm_eps)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: MaskSpec) -> Tensor:
        """x [b,s,d] -> [b,s,d]. The number of heads follows from the projections' widths."""
        q, k, v = (
            self.convolve(project(x), self.own(name).to(x.dtype), mask).unflatten(-1, (-1, size))
            for project, name, size in (
                (self.in_q, "conv_q", self.key),
                (self.in_k, "conv_k", self.key),
                (self.in_v, "conv_v", self.value),
            )
        )
        wide = accumulation_dtype(x.dtype)
        decay = -self.own("decay_log").to(wide).exp() * softplus(self.in_a(x).to(wide) + self.own("dt_bias").to(wide))
        out = self.recur(q, k, v, decay, torch.sigmoid(self.in_b(x).to(wide)), mask)
        z = self.in_z(x).unflatten(-1, (-1, self.value))
        return self.out(swiglu(z, self.head_norm(out)).flatten(2))

    def own(self, name: str) -> Tensor:
        """The parameter with this name, of the heads that are computed here."""
        return getattr(self, name)  # which a proof may have put in the parameter's place

    def convolve(self, x: Tensor, weight: Tensor, mask: MaskSpec) -> Tensor:
        """Return the sums over tokens of x [b,s,c], each behind a silu."""
        return conv_silu(x, weight, mask.documents)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, mask: MaskSpec) -> Tensor:
        """Return what the rule makes of the heads, [b,s,value heads,value]."""
        return gated_delta(q, k, v, decay, rate, mask.documents)[0]
