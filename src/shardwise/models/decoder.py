"""The decoder: embedding, blocks, norm, output layer. It does not know that it is distributed, nor its family."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.models.attention import Attention, MaskSpec
from shardwise.models.config import LayerKind, ModelSpec, layer_kinds
from shardwise.models.layers import MLP, Finish, Head, RMSNorm, Rotary, rounded, soft_cap
from shardwise.models.rotary import rotary_tables


class Block(nn.Module):
    """Attention and MLP, each behind a norm (or before one, or between two) and added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()

        def norm(placement: str) -> nn.Module:
            if spec.norm_placement not in (placement, "both"):
                return nn.Identity()
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)

        self.attention_norm = norm("before")
        self.attention = Attention(spec)
        self.attention_after_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MLP(spec)
        self.mlp_after_norm = norm("after")
        self.share = spec.residual_multiplier

    def forward(self, hidden: Tensor, rotary: Rotary | None, mask: MaskSpec) -> Tensor:
        """hidden [b,s,d] -> [b,s,d]."""
        hidden = torch.add(
            hidden,
            self.attention_after_norm(self.attention(self.attention_norm(hidden), rotary, mask)),
            alpha=self.share,
        )
        return torch.add(hidden, self.mlp_after_norm(self.mlp(self.mlp_norm(hidden))), alpha=self.share)


class Decoder(nn.Module):
    """A language model of any family, or a ``stage`` of one: the blocks of these numbers, named as in the whole model,
    the embedding with the first of them and norm and output layer with the last. Tied, ``head.weight`` is
    ``embed.weight``. ``kernel``: of attention, as in MaskSpec."""

    def __init__(self, spec: ModelSpec, stage: range | None = None) -> None:
        super().__init__()
        self.spec, self.kernel = spec, "auto"
        self.stage = range(spec.num_hidden_layers) if stage is None else stage
        first, last = 0 in self.stage, spec.num_hidden_layers - 1 in self.stage
        if first:
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList()
        for number in self.stage:
            self.layers.add_module(str(number), Block(spec))
        if last:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)
            self.head = Head(spec.hidden_size, spec.vocab_size)
        if first and last and spec.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: MaskSpec,
        finish: Finish | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """ids and positions int64 [b,s] -> logits [b,s,V], or what ``finish`` makes of hidden [b,s,d] and the output
        weight [V,d], called within the output layer. ``finish`` caps its logits by ``spec.final_soft_cap`` itself.
        A stage begins with the ``hidden`` [b,s,d] of the stage before it, and returns its own to the next."""
        hidden = self.embedded(ids) if hidden is None else hidden
        kinds, order = layer_kinds(self.spec)
        tables, masks = self.tables(kinds, positions, hidden.dtype, mask), self.masks(kinds, ids.shape[1], mask)
        for layer, number in zip(self.layers, self.stage, strict=True):
            hidden = layer(hidden, tables[order[number]], masks[order[number]])
        if self.spec.num_hidden_layers - 1 not in self.stage:
            return hidden
        hidden = self.normed(hidden)
        if finish is not None:
            return self.head(hidden, finish)
        return soft_cap(self.head(hidden), self.spec.final_soft_cap)

    def embedded(self, ids: Tensor) -> Tensor:
        """int64 [b,s] -> [b,s,d]."""
        hidden: Tensor = self.embed(ids)
        factor = self.spec.embedding_multiplier
        return hidden if factor == 1.0 else hidden * rounded(factor, hidden.dtype)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the output layer multiplies, [b,s,d]: the logits' divisor is in it."""
        hidden = self.norm(hidden)
        return hidden if self.spec.logits_scaling == 1.0 else hidden / self.spec.logits_scaling

    def tables(
        self, kinds: tuple[LayerKind, ...], positions: Tensor, dtype: torch.dtype, mask: MaskSpec
    ) -> list[Rotary | None]:
        """The rotation tables of each kind of layer; kinds that turn alike share theirs."""
        made = {
            local: rotary_tables(self.spec, positions, dtype, mask.documents, local)
            for local in dict.fromkeys(kind.local for kind in kinds if kind.rotated)
        }
        return [made[kind.local] if kind.rotated else None for kind in kinds]

    def masks(self, kinds: tuple[LayerKind, ...], length: int, mask: MaskSpec) -> list[MaskSpec]:
        """What each kind of layer sees. A window at least as long as every document is dropped, so that
        the fast kernels can be used."""
        longest = length if mask.documents is None else mask.longest
        mask = mask if self.kernel == "auto" else replace(mask, kernel=self.kernel)
        spec, made = self.spec, []
        for kind in kinds:
            window = kind.window if kind.window is not None and kind.window < longest else None
            own = {"window": window, "soft_cap": spec.attention_soft_cap, "scale": spec.attention_scale}
            made.append(mask if set(own.values()) == {None} else replace(mask, **own))  # type: ignore[arg-type]
        return made
