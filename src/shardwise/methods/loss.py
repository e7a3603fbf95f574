"""Linear layer and cross-entropy in one, a chunk of tokens at a time: the logits of all tokens never exist.

Gradients of the hidden states and of the weight are made in the forward pass, while a chunk's logits are at hand; the
backward pass scales them (Hsu et al., "Liger Kernel", 2024). So a loss can be propagated once.

Where ranks hold rows of the weight each (distributed/vocabulary.py), a rank computes the logits of its own rows. What
the others need of them are three numbers a token: the greatest logit, the sum of the exponentials, the label's logit;
and a fourth where entropies are asked for. The loss is then the same on every rank; the gradient of hidden is this
rank's part of a sum.

Beside losses a method may ask for ``TOKEN_FIGURES`` of each token: whether the model's first choice is the label, and
the entropy of what it predicts. They are found while a chunk's logits are at hand.

Where the plan compiles and a rank holds all rows, :func:`losses_and_gradient`, compiled, stands between the products.
It reads a chunk's logits twice and writes their gradient once, where eager operations pass over wide ones many times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise import methods
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed import vocabulary
from shardwise.distributed.vocabulary import Rows
from shardwise.models.attention import MaskSpec
from shardwise.models.layers import accumulation_dtype, soft_cap
from shardwise.spec.cluster import joins_products
from shardwise.spec.records import ENTROPY, TOKEN_ACCURACY

IGNORED = -100
Finish = Callable[[Tensor, "Output", MicroBatch, float], "Loss"]
"""(hidden [b,s,d], output layer, micro-batch, denominator) -> the sum of its terms / denominator."""
Score = Callable[[Tensor, "Output", MicroBatch], Tensor]
"""(hidden [b,s,d], output layer, micro-batch) -> whatever is asked of them."""
Pair = tuple[Tensor, Tensor]
Asked = tuple[tuple[str, ...], Rows | None]
"""Which figures are asked for, and which rows of the output weight this rank holds; None: all."""
Between = Callable[[Tensor, Tensor, Tensor | None, float | None, tuple[str, ...]], Pair]
"""(logits [n,V], labels [n], factors [n], soft cap, names of k figures) -> losses and figures [1+k,n], gradient [n,V]:
:func:`losses_and_gradient`."""


class Further(NamedTuple):
    """The part in the loss of a layer that predicts a further token: its mean over the ``targets`` of the whole step,
    times ``weight``."""

    weight: float
    targets: float


@dataclass(frozen=True)
class Output:
    """The output layer as a method finds it: its weight [V,d], what caps its logits to cap * tanh(logits / cap), and
    how many of its rows are ids, the others being padding at its end; None: all. ``group``: the ranks that have some
    tokens each of the same rows; None: rows are whole. ``between``: what is computed between the two products
    where gradients are made; None, and wherever ranks hold rows of the weight each: eager operations. ``figures``: what
    a method asks for of each token beside its loss: the first so many of ``TOKEN_FIGURES``. ``further``: of a model
    with a layer that predicts a further token."""

    weight: Tensor
    soft_cap: float | None = None
    vocabulary: int | None = None
    group: ProcessGroup | None = None
    between: Between | None = None
    figures: tuple[str, ...] = ()
    further: Further | None = None


class Loss(NamedTuple):
    """A method's result of a micro-batch: the ``value`` that backward begins from, a scalar, and scalars to be reported
    beside it, by name. All are shares of a mean: what is reported is their sum over micro-batches and ranks. A tuple,
    in which FSDP2 finds the tensor that backward of the output layer begins from. ``own``: the value without what is
    added to it and reported beside it; None: nothing is."""

    value: Tensor
    figures: Mapping[str, Tensor] = MappingProxyType({})
    own: Tensor | None = None

    def detached(self) -> Loss:
        """Return the loss, without what is added to it, and the figures in fp64, out of the graph."""
        figures = {name: figure.detach().double() for name, figure in self.figures.items()}
        return Loss((self.value if self.own is None else self.own).detach().double(), figures)

    def plus(self, other: Loss) -> Loss:
        """The sums. Both have the same figures."""
        figures = {name: figure + other.figures[name] for name, figure in self.figures.items()}
        return Loss(self.value + other.value, figures)


def mask(batch: MicroBatch) -> MaskSpec:
    """Causal, and within documents where the batch tells them."""
    cut = {"row_length": batch.row_length, "bounds": batch.bounds, "reached": batch.reached}
    return MaskSpec(documents=batch.documents, longest=batch.longest, filled=batch.filled, **cut)  # type: ignore[arg-type]


def logits(hidden: Tensor, head: Output, batch: MicroBatch | None = None) -> Tensor:
    """[..,V] in fp32 (fp64) of hidden [..,d], whole."""
    whole = vocabulary.logits(hidden, head.weight, head.vocabulary)
    return soft_cap(whole.to(accumulation_dtype(hidden.dtype)), head.soft_cap)


def _capped(hidden: Tensor, weight: Tensor, soft_cap: float) -> Tensor:
    """Logits [n,V] in fp32 (fp64), as cap * tanh(logits / cap)."""
    return (hidden @ weight.mT).to(accumulation_dtype(hidden.dtype)).div_(soft_cap).tanh_().mul_(soft_cap)


def _cap_derivative(capped: Tensor, soft_cap: float) -> Tensor:
    """The derivative of :func:`_capped` by the logits, 1 - tanh^2, in the place of its result."""
    return capped.div_(soft_cap).square_().neg_().add_(1.0)


def _pick(logs: Tensor, labels: Tensor) -> Tensor:
    """Losses [n], 0 where the label is ignored."""
    picked = logs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -picked.masked_fill_(labels == IGNORED, 0.0)


def _logit_gradient(logs: Tensor, labels: Tensor) -> Tensor:
    """Probabilities less one at the label, zero rows where ignored; in place."""
    supervised = (labels != IGNORED).unsqueeze(-1).to(logs.dtype)
    minus_one = -torch.ones_like(supervised)
    return logs.exp_().scatter_add_(-1, labels.clamp_min(0).unsqueeze(-1), minus_one).mul_(supervised)


def losses_and_gradient(
    logits: Tensor, labels: Tensor, factors: Tensor | None, soft_cap: float | None, figures: tuple[str, ...] = ()
) -> Pair:
    """The losses of logits [n,V] and the ``figures`` of their tokens [1+k,n], 0 where the label is ignored, and the
    gradient of the losses by the logits in their dtype, times factors. To be compiled: eager it would make several wide
    tensors. The label's place is a comparison, which is fused with the rest of the pass, as ``scatter_add`` is not. The
    logits are not written over: inductor of torch 2.11 would let ``gather`` read what was written."""
    given = logits.to(accumulation_dtype(logits.dtype))
    wide = given if soft_cap is None else torch.tanh(given / soft_cap) * soft_cap
    greatest = wide.amax(-1, keepdim=True)
    log_sum = greatest + (wide - greatest).exp().sum(-1, keepdim=True).log()
    place, supervised = labels.clamp_min(0).unsqueeze(-1), labels != IGNORED
    losses = (log_sum - wide.gather(-1, place)).squeeze(-1).masked_fill(~supervised, 0.0)
    weights = supervised.to(wide.dtype) if factors is None else supervised * factors
    label = torch.arange(logits.shape[-1], device=logits.device) == place
    probabilities = (wide - log_sum).exp()
    told = [losses]
    if TOKEN_ACCURACY in figures:
        told.append((wide.argmax(-1) == labels).to(wide.dtype))
    if ENTROPY in figures:
        told.append((log_sum.squeeze(-1) - (probabilities * wide).sum(-1)).masked_fill(~supervised, 0.0))
    gradient = (probabilities - label.to(wide.dtype)) * weights.unsqueeze(-1)
    if soft_cap is not None:
        gradient = gradient * (1.0 - (wide / soft_cap).square())
    return torch.stack(told), gradient.to(logits.dtype)


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor, capped: Tensor | None, asked: Asked) -> Pair:
    """The losses and figures of a chunk [1+k,n], and the gradient of the losses by its (capped) logits."""
    figures, rows = asked
    if rows is not None:
        exponentials, own = _own_statistics(hidden, weight, labels, capped, asked)
        told, share = _join(rows.stacked(own), labels, rows.rank)
        place, mine = rows.own(labels)
        minus_one = -mine.unsqueeze(-1).to(share.dtype)
        gradient = exponentials.mul_(share.unsqueeze(-1)).scatter_add_(-1, place.unsqueeze(-1), minus_one)
        return told[: 1 + len(figures)], gradient
    logs, told = _of_whole_rows(hidden, weight, labels, capped, figures)
    return told, _logit_gradient(logs, labels)


def _of_whole_rows(
    hidden: Tensor, weight: Tensor, labels: Tensor, capped: Tensor | None, figures: tuple[str, ...] = ()
) -> Pair:
    """The log-probabilities [n,V] in fp32 (fp64) of hidden [n,d] and weight [V,d], and losses and figures [1+k,n]."""
    logits = hidden @ weight.mT if capped is None else capped
    right = logits.argmax(-1) == labels if TOKEN_ACCURACY in figures else None  # of logits, which may be half as wide
    logs = torch.log_softmax(logits, -1, dtype=accumulation_dtype(hidden.dtype))
    del logits
    told = [_pick(logs, labels)]
    if right is not None:
        told.append(right.to(logs.dtype))
    if ENTROPY in figures:
        told.append(logs.exp().mul_(logs).sum(-1).neg_().masked_fill_(labels == IGNORED, 0.0))
    return logs, torch.stack(told)


def _own_statistics(hidden: Tensor, weight: Tensor, labels: Tensor, capped: Tensor | None, asked: Asked) -> Pair:
    """Return of this rank's rows exp(logits - greatest) [n,rows], and [3,n]: the greatest logit, the sum of these, and
    the label's logit (0 if it is another rank's); for entropies also the sum of these times (logits - greatest). A sum
    of exponentials is positive, so its sign is free to say one thing more: it is negative where the first of the
    greatest is the label's, if figures are asked for."""
    figures, rows = asked
    assert rows is not None
    logits = (hidden @ weight.mT).to(accumulation_dtype(hidden.dtype)) if capped is None else capped
    place, mine = rows.own(labels)
    picked = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
    greatest = logits.amax(-1)
    chosen = mine & (logits.argmax(-1) == place) if TOKEN_ACCURACY in figures else None
    shifted = logits - greatest.unsqueeze(-1) if logits is capped else logits.sub_(greatest.unsqueeze(-1))
    products = [shifted.exp().mul_(shifted).sum(-1)] if ENTROPY in figures else []
    exponentials = shifted.exp_()
    sums = exponentials.sum(-1)
    sums = sums if chosen is None else torch.where(chosen, -sums, sums)
    return exponentials, torch.stack([greatest, sums, picked, *products])


def _join(statistics: Tensor, labels: Tensor, rank: int) -> Pair:
    """Return, from the ranks' statistics [ranks,3 or 4,n], the losses, whether labels are the first choice, and
    entropies where these can be known [2 or 3,n], 0 where ignored; and the factors [n] that make probabilities of this
    rank's exponentials, 0 where ignored."""
    greatest, signed, picked, *products = statistics.unbind(1)
    highest, first = greatest.max(0)
    shifts, sums = greatest - highest, signed.abs()
    scales = shifts.exp()
    total = (sums * scales).sum(0)
    ignored, chosen = labels == IGNORED, signed.gather(0, first.unsqueeze(0)).squeeze(0) < 0
    told = [highest - picked.sum(0) + total.log(), chosen.to(sums.dtype)]
    told += [total.log() - ((each + shifts * sums) * scales).sum(0) / total for each in products]
    return torch.stack(told).masked_fill_(ignored, 0.0), (scales[rank] / total).masked_fill_(ignored, 0.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; the total is wider."""
    if joins_products(total.device.type):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


Chunks = tuple[Output, Rows | None, int, float | None]
"""The output layer, which of its rows this rank holds, how many tokens a chunk has, and by what every second loss is
multiplied, where there are two of each token."""


def _chunk(
    hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor | None, head: Output, rows: Rows | None
) -> Pair:
    """The losses and figures of a chunk [1+k,n], and the gradient by the logits, times factors. ``weight``: what this
    rank multiplies with of the head's, as ``hidden`` is typed."""
    if head.between is not None and rows is None:
        return head.between(hidden @ weight.mT, labels, factors, head.soft_cap, head.figures)
    capped = None if head.soft_cap is None else _capped(hidden, weight, head.soft_cap)
    told, gradient = _losses(hidden, weight, labels, capped, (head.figures, rows))
    if factors is not None:
        gradient.mul_(factors.unsqueeze(-1))
    if capped is not None and head.soft_cap is not None:
        gradient.mul_(_cap_derivative(capped, head.soft_cap))
    return told, gradient


def _by_turns(told: Tensor, gradient: Tensor, first: int, factor: float) -> Pair:
    """Return the figures of the first of two losses a token, which take turns in a chunk [1+k,n], and the sums of the
    first and of the second ones [2]. Multiplies the gradient of the second, in place. ``first``: the place of a
    first."""
    gradient[1 - first :: 2].mul_(factor)
    own = told[:, first::2]
    return own, torch.stack([own[0].sum(), told[0, 1 - first :: 2].sum()])


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients that are wanted: of hidden in its dtype, of the weight in the compute dtype (one chunk) or
    fp32 (several; fp64 for fp64). Returns the sum of the losses, and that of each figure [k] in fp64; of two losses a
    token, the figures are those of the first, and behind them the sums of the first and of the second losses [k+2]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor | None, chunks: Chunks
    ) -> Pair:
        wide, (head, rows, chunk_tokens, second) = accumulation_dtype(hidden.dtype), chunks
        held = weight.shape[0] if rows is None else rows.held
        cast = weight.to(hidden.dtype)[:held]
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        single = hidden.shape[0] <= chunk_tokens
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight and not single else None
        total = hidden.new_zeros((), dtype=wide)
        told_of = len(head.figures) + (0 if second is None else 2)
        sums = hidden.new_zeros(told_of, dtype=torch.float64)
        for tokens in methods.chunks(hidden.shape[0], chunk_tokens):
            chosen = None if factors is None else factors[tokens]
            told, wide_grad_logits = _chunk(hidden[tokens], cast, labels[tokens], chosen, head, rows)
            if second is not None:
                told, each = _by_turns(told, wide_grad_logits, tokens.start % 2, second)
                total += each[0] + each[1] * second
                sums += torch.cat([told[1:].sum(-1), each])
            else:
                total += told[0].sum() if chosen is None else told[0] @ chosen
                sums += told[1:].sum(-1)
            grad_logits = wide_grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, cast, out=grad_hidden[tokens])
            if grad_weight is not None and grad_logits.dtype == wide:
                grad_weight[:held].addmm_(grad_logits.mT, hidden[tokens])
            elif grad_weight is not None:
                _add_product(grad_weight[:held], grad_logits.mT, hidden[tokens])
            elif want_weight:
                grad_weight = torch.empty_like(weight, dtype=hidden.dtype)
                torch.mm(grad_logits.mT, hidden, out=grad_weight[:held])
                grad_weight[held:].zero_()
            del told, wide_grad_logits, grad_logits  # or they would live on while the next chunk's are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return total, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden.mul_(grad)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden: Tensor, head: Output, labels: Tensor, chunk_tokens: int, factors: Tensor | None = None
) -> Tensor:
    """The sum of the token losses, each times its factor, a scalar in fp32 (fp64 for fp64).

    hidden [..,d], the output layer's weight [V,d] (cast to hidden's dtype), labels int64 [..] with -100 where nothing
    is to be learned, ``factors`` like labels in the result's dtype, constants; None: all 1.
    """
    if not torch.is_grad_enabled():
        losses = token_losses(hidden, head, labels, chunk_tokens)
        return (losses if factors is None else losses * factors).sum()
    return loss_and_figures(hidden, head, labels, chunk_tokens, factors)[0]


def loss_and_figures(
    hidden: Tensor,
    head: Output,
    labels: Tensor,
    chunk_tokens: int,
    factors: Tensor | None = None,
    second: float | None = None,
) -> Pair:
    """As :func:`linear_cross_entropy`, and beside it the sum over the tokens with a label of each of ``head.figures``
    [k] in fp64, which has no gradient. ``second``: of hidden [..,2d] and labels [..,2], two of each token, by what the
    losses of the second ones are multiplied; figures are then those of the first, and two more the sums of the first
    losses and of the second."""
    flat = hidden.reshape(-1, head.weight.shape[-1])
    factors = None if factors is None else factors.reshape(-1)
    weight, rows = vocabulary.rows(head.weight, head.vocabulary)
    return _LinearCrossEntropy.apply(flat, weight, labels.reshape(-1), factors, (head, rows, chunk_tokens, second))


@torch.no_grad()
def token_losses(hidden: Tensor, head: Output, labels: Tensor, chunk_tokens: int) -> Tensor:
    """The loss of each token, shaped as ``labels``, 0 where ignored; without gradients, for evaluation."""
    weight, rows = vocabulary.rows(head.weight, head.vocabulary)
    cast, cap = weight.to(hidden.dtype)[: None if rows is None else rows.held], head.soft_cap

    def found(h: Tensor, y: Tensor) -> Tensor:
        capped = None if cap is None else _capped(h, cast, cap)
        if rows is not None:
            return _own_statistics(h, cast, y, capped, ((), rows))[1]
        return _of_whole_rows(h, cast, y, capped)[1][0]

    parts = zip(hidden.flatten(0, -2).split(chunk_tokens), labels.flatten().split(chunk_tokens), strict=True)
    each = torch.cat([found(h, y) for h, y in parts], -1)
    if rows is not None:  # the ranks' statistics of all tokens together
        each = _join(rows.stacked(each), labels.flatten(), rows.rank)[0][0]
    return each.view_as(labels)


def score(hidden: Tensor, head: Output, batch: MicroBatch, *, chunk_tokens: int) -> Tensor:
    """The loss of each token [b,s] in nats, 0 where there is no label; without gradients."""
    return token_losses(hidden, head, batch.labels, chunk_tokens)
