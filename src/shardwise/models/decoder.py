"""The decoder: embedding, blocks, norm, output layer. It does not know that it is distributed, nor its family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor, nn

from shardwise.models.attention import MaskSpec
from shardwise.models.blocks import tie
from shardwise.models.config import LayerKind, ModelSpec, layer_kinds
from shardwise.models.layers import MLP, Finish, Head, Part, RMSNorm, Rotary, rounded, soft_cap
from shardwise.models.mixer import Mixer
from shardwise.models.mixers import mixer_of
from shardwise.models.moe import MoE
from shardwise.models.rotary import rotary_tables


def program(mixer: Mixer) -> Callable[[ModelSpec], nn.Module]:
    """The class of a mixer."""
    module, _, name = mixer.module.partition(":")
    return vars(import_module(module))[name]


class Block(nn.Module):
    """A mixer of tokens, named ``attention``, and an MLP, each behind a norm (or before one, or between two) and added
    to the residual stream. ``number``: which of the model's it is."""

    def __init__(self, spec: ModelSpec, number: int = 0) -> None:
        super().__init__()

        def norm(placement: str) -> nn.Module:
            if spec.norm_placement not in (placement, "both"):
                return nn.Identity()
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)

        self.attention_norm = norm("before")
        self.attention = program(mixer_of(spec, number))(spec)
        self.attention_after_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MoE(spec) if spec.has_experts(number) else MLP(spec, spec.mlp_size(number))
        self.mlp_after_norm = norm("after")
        self.share = spec.residual_multiplier

    def forward(self, hidden: Tensor, rotary: Rotary | None, mask: MaskSpec) -> Tensor:
        """hidden [b,s,d] -> [b,s,d]."""
        hidden = torch.add(
            hidden,
            self.attention_after_norm(self.attention(self.attention_norm(hidden), rotary, mask)),
            alpha=self.share,
        )
        filled = () if mask.filled is None else (mask.filled,)
        return torch.add(hidden, self.mlp_after_norm(self.mlp(self.mlp_norm(hidden), *filled)), alpha=self.share)


class Predictor(Block):
    """A block that predicts a further token than the next (multi-token prediction, DeepSeek-V3, arXiv 2412.19437,
    section 2.2). It is given what the blocks make of each token, and the embedding of the token behind it: both are
    normalised and joined by a product, the embedding first. What comes of it predicts the token after that one, through
    ``norm`` and ``head`` of the decoder. The model's own last norm is this block's ``main_norm``, since both outputs
    read what it makes."""

    def __init__(self, spec: ModelSpec, number: int = 0) -> None:
        super().__init__(spec, number)
        self.main_norm, self.embed_norm, self.hidden_norm = (
            RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one) for _ in range(3)
        )
        self.join = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotary: Rotary | None, mask: MaskSpec, following: Tensor | None = None) -> Tensor:
        """hidden [..,d], and ``following`` [..,d], the embeddings of the tokens behind -> [..,2d]: what the output
        layer reads for the next token, and behind it, before its norm, what it reads for the one after. Without
        ``following`` the first alone, [..,d]."""
        normed: Tensor = self.main_norm(hidden)
        if following is None:
            return normed
        both = torch.cat([self.embed_norm(following), self.hidden_norm(normed)], -1)
        return torch.cat([normed, super().forward(self.join(both), rotary, mask)], -1)


class Decoder(Part):
    """A language model of any family, or a part of one: the blocks of these ``numbers``, named as in the whole model,
    and where it has the ``embedding`` the embedding, where it has the ``head`` the last norm and the output layer.
    Tied, ``head.weight`` is ``embed.weight``."""

    def __init__(
        self, spec: ModelSpec, numbers: Iterable[int] | None = None, *, embedding: bool = True, head: bool = True
    ) -> None:
        super().__init__(spec, input_trained=not embedding)
        self.has_head = head
        self.numbers = tuple(range(spec.num_hidden_layers) if numbers is None else numbers)
        if embedding:
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList()
        for number in self.numbers:
            self.layers.add_module(str(number), (Predictor if spec.predicts(number) else Block)(spec, number))
        if head:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)
            self.head = Head(spec.hidden_size, spec.vocab_size)
        if spec.tie_word_embeddings:
            tie([self])

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: MaskSpec,
        finish: Finish | None = None,
        before: tuple[Tensor, ...] = (),
        following: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """ids and positions int64 [b,s] -> logits [b,s,V], or what ``finish`` makes of hidden [b,s,d] and the output
        weight [V,d], called within the output layer. ``finish`` caps its logits by ``spec.final_soft_cap`` itself. A
        part without the embedding begins with what the part ``before`` it returned, one without the head returns what
        the next begins with: hidden [b,s,d], or of sequence-parallel ranks their own tokens [n,d]. ``following`` int64
        [b,s], of a model with a predictor: the id behind each. Then there are two logits a token, [b,s,2,V], and
        ``finish`` is given hidden [b,s,2d]: for the next token, and for the one after. Embeddings of ``following``, as
        large as hidden, then go behind it from part to part."""
        # Under no other name: what no backward reads of the first hidden states is let go of in the loop.
        hidden, *behind = before or self.begun(ids, following)
        given = {"following": behind[0]} if behind else {}
        kinds, order = layer_kinds(self.spec)
        tables, masks = self.tables(kinds, positions, hidden.dtype, mask), self.masks(kinds, ids.shape[1], mask)
        for layer, number in zip(self.layers, self.numbers, strict=True):
            own = given if self.spec.predicts(number) else {}
            hidden = layer(hidden, tables[order[number]], masks[order[number]], **own)
        if not self.has_head:
            return (hidden, *behind)
        hidden = self.normed(hidden)
        if finish is not None:
            return self.head(hidden, finish)
        return soft_cap(self.head(hidden), self.spec.final_soft_cap)

    def begun(self, ids: Tensor, following: Tensor | None) -> tuple[Tensor, ...]:
        """What the first block begins with, and the embeddings of ``following``."""
        return (self.embedded(ids),) if following is None else self.embedded_twice(ids, following)

    def embedded_twice(self, ids: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings of both, each int64 [b,s] -> [b,s,d], in one look-up, so that there is one gradient."""
        first, second = self.embedded(torch.stack([ids, following], -1)).chunk(2, -1)
        return first.contiguous(), second.contiguous()

    def embedded(self, ids: Tensor) -> Tensor:
        """int64 [b,s] -> [b,s,d], or [b,s,n] -> [b,s,n*d]."""
        hidden: Tensor = self.embed(ids)
        hidden = hidden.flatten(2) if hidden.ndim > 3 else hidden
        factor = self.spec.embedding_multiplier
        return hidden if factor == 1.0 else hidden * rounded(factor, hidden.dtype)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return what the output layer multiplies, [b,s,d]: the logits' divisor is in it."""
        if not self.spec.predictors:
            hidden = self.norm(hidden)
        elif hidden.shape[-1] > self.spec.hidden_size:  # the first half is normalised already
            first, second = hidden.chunk(2, -1)
            hidden = torch.cat([first, self.norm(second)], -1)
        return hidden if self.spec.logits_scaling == 1.0 else hidden / self.spec.logits_scaling

    def tables(
        self, kinds: tuple[LayerKind, ...], positions: Tensor, dtype: torch.dtype, mask: MaskSpec
    ) -> list[Rotary | None]:
        """The rotation tables of each kind of layer; kinds that turn alike share theirs."""
        made = {
            local: rotary_tables(self.spec, positions, dtype, mask.documents, local, mask.reached)
            for local in dict.fromkeys(kind.local for kind in kinds if kind.rotated)
        }
        return [made[kind.local] if kind.rotated else None for kind in kinds]

    def masks(self, kinds: tuple[LayerKind, ...], length: int, mask: MaskSpec) -> list[MaskSpec]:
        """Return the mask of each kind of layer. A window at least as long as every document is dropped, so that the
        fast kernels can be used."""
        whole = length if mask.row_length is None else mask.row_length
        longest = whole if mask.documents is None else mask.longest
        mask = mask if self.kernel == "auto" else replace(mask, kernel=self.kernel)
        spec, made = self.spec, []
        mask = mask if mask.filled is None or spec.experts.expert_capacity else replace(mask, filled=None)
        for kind in kinds:
            window = kind.window if kind.window is not None and kind.window < longest else None
            own = {
                "window": window,
                "soft_cap": spec.attention.attention_soft_cap,
                "scale": spec.attention.attention_scale,
            }
            made.append(mask if set(own.values()) == {None} else replace(mask, **own))  # type: ignore[arg-type]
        return made
