"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of one narrow
vector for each token, and positions enter through a part of the head that is rotated, whose key all heads share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.models.attention import Attention, MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.layers import RMSNorm, Rotary, made_again, rotate

NORM_EPS = 1e-6
"""Of the norms of latents, whatever ``rms_norm_eps`` is: as transformers has it."""


class LatentAttention(Attention):
    """The mixer ``latent``. Keys and values of all tokens and heads are made in training: what a cache would save in
    generation, the latent, saves nothing here; but selective recomputation saves the latents, and makes heads of them
    again."""

    def __init__(self, spec: ModelSpec) -> None:
        nn.Module.__init__(self)
        self.kind = spec.latent
        self.head_dim = spec.attention.head_dim
        self.sinks = None
        self.narrows = spec.latent.q_lora_rank is not None
        kind = spec.latent
        d = spec.hidden_size
        heads = spec.attention.num_attention_heads
        bias = spec.attention
        if kind.q_lora_rank is None:
            self.q = nn.Linear(d, heads * self.head_dim, bias=False)
        else:
            self.q_a = nn.Linear(d, kind.q_lora_rank, bias=bias.attention_bias)
            self.q_a_norm = RMSNorm(kind.q_lora_rank, NORM_EPS)
            self.q_b = nn.Linear(kind.q_lora_rank, heads * self.head_dim, bias=False)
        self.kv_a = nn.Linear(d, kind.kv_lora_rank + kind.qk_rope_head_dim, bias=bias.attention_bias)
        self.kv_a_norm = RMSNorm(kind.kv_lora_rank, NORM_EPS)
        self.kv_b = nn.Linear(kind.kv_lora_rank, heads * (kind.qk_nope_head_dim + kind.v_head_dim), bias=False)
        self.o = nn.Linear(heads * kind.v_head_dim, d, bias=bias.output_bias)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: MaskSpec) -> Tensor:
        """x [b,s,d] -> [b,s,d]; x may be the tokens of a rank, if :meth:`to_heads` makes [b,s,..] of them. The number
        of heads follows from the projections' widths."""
        kind = self.kind
        still = kind.qk_nope_head_dim
        turned = kind.qk_rope_head_dim
        value = kind.v_head_dim
        latent, key = self.kv_a(x).split([kind.kv_lora_rank, turned], -1)
        latent = self.kv_a_norm(latent)
        if kind.q_lora_rank is None:
            q = self.q(x)
        else:
            queries, latent, key = self.to_heads(self.q_a_norm(self.q_a(x)), latent, key)
            with made_again():
                q = self.q_b(queries)
        with made_again():
            kv = self.kv_b(latent).unflatten(-1, (-1, still + value))
        q_still, q_turned = q.unflatten(-1, (-1, self.head_dim)).split([still, turned], -1)
        key = key.unsqueeze(-2)
        if rotary is not None:
            q_turned, key = (rotate(each, rotary, interleaved=kind.rope_interleave) for each in (q_turned, key))
        k_still, v = kv.split([still, value], -1)
        q = torch.cat([q_still, q_turned], -1)
        k = torch.cat([k_still, key.expand(-1, -1, k_still.shape[-2], -1)], -1)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v.contiguous()))  # saved by itself, without the keys beside it
        out, _ = self.inner(q, k, v, mask)
        return self.o(out.transpose(1, 2).flatten(2))

    def to_heads(self, *narrow: Tensor) -> tuple[Tensor, ...]:
        """The seam that tensor parallelism replaces: what is made of the tokens that a rank has, [..,n] each, as the
        heads read it, of all tokens."""
        return narrow
