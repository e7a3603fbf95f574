"""Attention behind one seam, ``Attention.inner``, and one operation, ``shardwise::attention``.

What may be seen is data (:class:`MaskSpec`), never a dense mask. The operation saves q, k, v, its output and the
log-sum-exp of every row, whichever kernel computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwise.models import blockwise, cudnn, efficient, flash, flex, kernel_choice
from shardwise.models.blockwise import Rule, Saved
from shardwise.models.config import ModelSpec
from shardwise.models.layers import RMSNorm, Rotary, accumulation_dtype, rotate


@dataclass(frozen=True)
class MaskSpec:
    """A rule of who sees whom: a query sees a key when all that is given here allows it.

    causal: no key after the query. window: only the last ``window`` positions, its own included.
    documents: int32 cumulative boundaries over the flattened b*s tokens, those of rows included: no sight across.
    longest: length of the longest document; 0 where ``documents`` is None.
    soft_cap: scores become cap * tanh(score / cap). sinks: [h] logits that take part in each softmax without a value.
    scale: what q k^T is multiplied by, where it is not 1 / sqrt(e).
    kernel: the one of kernel_choice.py to take where it serves; auto: the first that does.
    positions: int64 [b,s] of queries and keys, where they are not 0..s-1 (documents are then cut by place in the row).
    row_length: of rows that are cut among ranks, how long the whole ones are, which ``documents`` are then of; None:
    rows are whole. bounds: the same as ``documents``, on the host: which ranks have what of a row follows from them.
    reached: int64 [b,s], of such rows how long the document is that each token is in; None where that is asked of none.
    filled: int64 [b], how many tokens of each row are more than padding at its end; None where that is asked of none.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    longest: int = 0
    soft_cap: float | None = None
    sinks: Tensor | None = None
    positions: Tensor | None = None
    scale: float | None = None
    kernel: str = "auto"
    row_length: int | None = None
    bounds: Tensor | None = None
    reached: Tensor | None = None
    filled: Tensor | None = None


_MASK = (
    "Tensor? documents, Tensor? sinks, Tensor? positions, bool causal, int? window, SymInt longest, float? soft_cap, "
    "float? scale, str pinned='auto', int? apart=None"
)
"""No argument may have the name of one of inductor's own for an operation, such as ``kernel``."""
_COMPUTED_BY: dict[str, Any] = {
    "flash": flash,
    "fa3": flash,
    "cudnn": cudnn,
    "efficient": efficient,
    "flex": flex,
    "blockwise": blockwise,
}
"""Where the forward and backward of each row of the table stand; fa3 takes the place of torch's own flash."""
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CUDNN_VERSION = 91_500
"""Above it torch prefers cuDNN on the cards of kernels.CUDNN."""


def device_case(device: torch.device, dtype: torch.dtype, head_dim: int) -> kernel_choice.Case:
    """Return what attention of this dtype on this device asks of a kernel, before its mask."""
    dtype_name, certain = _DTYPES[dtype], torch.are_deterministic_algorithms_enabled()
    if device.type != "cuda":
        return kernel_choice.Case("cpu", dtype_name, head_dim, deterministic=certain)
    if torch.version.hip is not None:
        return kernel_choice.Case("rocm", dtype_name, head_dim, deterministic=certain)
    capability = torch.cuda.get_device_capability(device)
    return kernel_choice.Case("cuda", dtype_name, head_dim, capability, deterministic=certain)


def present(device: torch.device, pin: str) -> frozenset[str]:
    """Return those of kernels.OPTIONAL that this process has; cuDNN of a version that torch does not prefer, when it is
    pinned."""
    version = torch.backends.cudnn.version() if device.type == "cuda" else None
    found = {"cudnn"} if version is not None and (version > CUDNN_VERSION or pin == "cudnn") else set()
    return frozenset(found | {"fa3"} if torch.nn.attention.current_flash_attention_impl() == "FA3" else found)


def prepare(device: torch.device, pin: str) -> None:
    """Have FlashAttention 3 take the place of torch's own, where it is installed for this card and not pinned away."""
    nn_attention = torch.nn.attention
    hopper = device.type == "cuda" and device_case(device, torch.bfloat16, 0).capability == kernel_choice.HOPPER
    there = "FA3" in nn_attention.list_flash_attention_impls() and find_spec(kernel_choice.FA3_PACKAGE) is not None
    if hopper and there and pin in ("auto", "fa3"):
        nn_attention.activate_flash_attention_impl("FA3")


def case_of(q: Tensor, rule: Rule) -> kernel_choice.Case:
    """Return what attention of these queries under this rule asks of a kernel."""
    return replace(
        device_case(q.device, q.dtype, q.shape[-1]),
        documents=rule.documents is not None,
        window=rule.window is not None,
        soft_cap=rule.soft_cap is not None,
        positions=rule.positions is not None,
        odd_length=q.shape[2] % kernel_choice.LENGTH != 0,
        apart=rule.apart is not None,
    )


def _kernel(q: Tensor, rule: Rule) -> tuple[Any, Rule]:
    """Return the module that computes attention under this rule, and the rule as it is told."""
    if q.device.type != "cpu" and rule.documents is not None and rule.documents.shape[0] - 1 == q.shape[0]:
        rule = rule._replace(documents=None)  # every row's end is a boundary, so each row is one document
    return _COMPUTED_BY[kernel_choice.choose(case_of(q, rule), rule.kernel, present(q.device, rule.kernel))], rule


@torch.library.custom_op(
    "shardwise::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_MASK}) -> (Tensor, Tensor)"
)
def attention(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v and its log-sum-exp. ``mask`` is the fields of :class:`Rule`.

    q [b,h,s,e], k and v [b,hk,s,e] with hk dividing h -> out [b,h,s,e] (laid out as [b,s,h,e]), lse [b,h,s] in fp32.
    Values may be narrower than keys, and out is then too: kernels compute with zeros beside them.
    Keys of other tokens than the queries (``apart``) may be more, or fewer.
    """
    kernel, rule = _kernel(q, Rule(*mask))
    out, lse = kernel.forward(q, k, _widened(v, q), rule)
    out = out[..., : v.shape[-1]]
    if rule.sinks is not None:
        out, lse = blockwise.with_sinks(out, lse, rule.sinks)
    return _heads_inside(out), lse.contiguous()


@torch.library.custom_op(
    "shardwise::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_MASK}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(grad: Tensor, *saved_and_mask: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (laid out as [b,s,h,e]) and of the sinks (empty without sinks) from that of ``out``."""
    saved = Saved(*saved_and_mask[:5])
    kernel, rule = _kernel(saved.q, Rule(*saved_and_mask[5:]))
    grad = _heads_inside(grad)  # a kernel may take it for granted that the last dim is contiguous
    v, out = saved.v, saved.out
    wide = saved._replace(v=_widened(v, saved.q), out=_widened(out, saved.q))
    grad_q, grad_k, grad_v = kernel.backward(_widened(grad, saved.q), wide, rule)
    grads = grad_q, grad_k, grad_v[..., : v.shape[-1]]
    grad_sinks = grad.new_empty(0) if rule.sinks is None else blockwise.sink_gradient(grad, saved, rule.sinks)
    grad_q, grad_k, grad_v = (_heads_inside(x) for x in grads)
    return grad_q, grad_k, grad_v, grad_sinks


def _heads_inside(x: Tensor) -> Tensor:
    """Return the same values laid out as [b,s,h,e], which is how the projections make and read them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _widened(x: Tensor, like: Tensor) -> Tensor:
    """``x`` as wide as the heads of ``like``, with zeros."""
    missing = like.shape[-1] - x.shape[-1]
    return pad(x.transpose(1, 2), (0, missing)).transpose(1, 2) if missing else x


def _fresh(x: Tensor, width: int | None = None) -> Tensor:
    b, h, s, e = x.shape
    return x.new_empty(b, s, h, e if width is None else width).transpose(1, 2)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fresh(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@attention_backward.register_fake
def _(grad: Tensor, *saved_and_mask: Any) -> tuple[Tensor, ...]:
    saved, rule = Saved(*saved_and_mask[:5]), Rule(*saved_and_mask[5:])
    grad_sinks = grad.new_empty(0) if rule.sinks is None else torch.empty_like(rule.sinks)
    return _fresh(saved.q), _fresh(saved.k), _fresh(saved.v), grad_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, sinks, positions, *settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or backward would be handed zeros for it
    ctx.settings = settings
    ctx.save_for_backward(q, k, v, *output, documents, sinks, positions)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing that was computed from ``out`` has a gradient
        return (None,) * 13
    *grads, grad_sinks = attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, grad_sinks if ctx.needs_input_grad[4] else None, *[None] * 8


attention.register_autograd(_backward, setup_context=_save)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and norms of queries and keys where the model has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        own, d = spec.attention, spec.hidden_size
        self.head_dim, self.qk_norm = own.head_dim, own.qk_norm
        q_size, kv_size = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
        self.q = nn.Linear(d, q_size, bias=own.attention_bias)
        self.q_gate = nn.Linear(d, q_size, bias=own.attention_bias) if own.attention_gate else None
        self.k = nn.Linear(d, kv_size, bias=own.attention_bias)
        self.v = nn.Linear(d, kv_size, bias=own.attention_bias)
        self.o = nn.Linear(q_size, d, bias=own.output_bias)
        self.sinks = nn.Parameter(torch.zeros(own.num_attention_heads)) if own.attention_sinks else None
        if own.qk_norm is not None:
            sizes = (q_size, kv_size) if own.qk_norm == "projection" else (own.head_dim,) * 2
            self.q_norm, self.k_norm = (RMSNorm(size, spec.rms_norm_eps, spec.norm_plus_one) for size in sizes)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: MaskSpec) -> Tensor:
        """x [b,s,d] -> [b,s,d]; without tables nothing is rotated. The number of heads follows from the projections'
        widths."""
        q, k, v = (project(x) for project in (self.q, self.k, self.v))
        if self.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out, _ = self.inner(q, k, v, replace(mask, sinks=self.own("sinks")) if self.sinks is not None else mask)
        out = out.transpose(1, 2).flatten(2)
        return self.o(out if self.q_gate is None else out * torch.sigmoid(self.q_gate(x)))

    def own(self, name: str) -> Tensor:
        """The parameter with this name, such as the sinks [h], of the heads that are computed here."""
        return getattr(self, name)  # which a proof may have put in the parameter's place

    def inner(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        """The seam that context parallelism replaces. q [b,h,s,e], k and v [b,hk,s,e] -> out [b,h,s,e], lse [b,h,s]."""
        tensors = (mask.documents, mask.sinks, mask.positions)
        return attention(
            q, k, v, *tensors, mask.causal, mask.window, mask.longest, *(mask.soft_cap, mask.scale, mask.kernel)
        )
