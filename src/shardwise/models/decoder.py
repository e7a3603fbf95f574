"""The decoder: embedding, blocks, norm, output layer. It does not know that it is distributed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shardwise.models.attention import Attention, MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.layers import MLP, RMSNorm, Rotary, rotary_tables

Finish = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, hidden: Tensor, rotary: Rotary, mask: MaskSpec) -> Tensor:
        """hidden [b,s,d] -> [b,s,d]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """A Llama. Tied, ``head.weight`` is ``embed.weight``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, positions: Tensor, mask: MaskSpec, finish: Finish | None = None) -> Tensor:
        """ids and positions int64 [b,s] -> logits [b,s,V], or what ``finish`` makes of hidden [b,s,d] and the output
        weight [V,d]: a loss computed here holds the parameters of the root while it runs."""
        hidden = self.embed(ids)
        rotary = rotary_tables(self.spec, positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask)
        hidden = self.norm(hidden)
        return self.head(hidden) if finish is None else finish(hidden, self.head.weight)
