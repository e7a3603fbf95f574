"""Continue a text: greedy or with a temperature, one token at a time, recomputing the whole text for each (short texts
and small models; a server of models is another program)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.data import tokens
from shardwise.data.chat import Asked
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, learnt_positions
from shardwise.models.layers import soft_cap
from shardwise.runtime.evaluate import reshard


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the likeliest token. ``eot_id`` ends the text."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    eot_id: int | None = None


@torch.no_grad()
def generate(
    parts: Sequence[nn.Module],
    prompt: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    over: Callable[[list[int]], bool] = lambda ids: False,
) -> list[int]:
    """The ids that follow ``prompt`` (at least one id), until ``over`` says of them that it is enough, or the model has
    no position for another. In a distributed model every rank calls this alike and gets the same answer: the draw
    depends on the seed and on nothing of the rank."""
    ids = list(prompt)
    draw = torch.Generator().manual_seed(sampling.seed)
    spec: ModelSpec = parts[0].spec  # type: ignore[assignment]
    room = spec.max_position_embeddings - len(ids) if learnt_positions(spec) else sampling.max_new_tokens
    for _ in range(min(room, sampling.max_new_tokens)):
        chosen = choose(last_logits(parts[0], ids, device), sampling.temperature, draw)
        if chosen == sampling.eot_id:
            break
        ids.append(chosen)
        if over(ids[len(prompt) :]):
            break
    reshard(parts)
    return ids[len(prompt) :]


def last_logits(model: nn.Module, ids: Sequence[int], device: torch.device) -> Tensor:
    """Logits [V] of the token after ``ids``, in fp32 on the host."""

    def finish(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden[0, -1] @ weight.to(hidden.dtype).T

    text = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    positions = torch.arange(len(ids), device=device)[None]
    logits: Tensor = model(text, positions, MaskSpec(), finish)
    return soft_cap(logits.float(), model.spec.final_soft_cap).cpu()  # type: ignore[union-attr, arg-type]


def choose(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    """The likeliest id, or one drawn after dividing ``logits`` [V] by ``temperature``."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw))


def continue_text(
    parts: Sequence[nn.Module], tokenizer: tokens.Tokenizer, prompt: str, sampling: Sampling, device: torch.device
) -> str:
    """What the model writes after ``prompt``."""
    ids = [*tokenizer.prefix, *tokenizer.encode([prompt])[0]] or [tokenizer.eot_id]
    return tokenizer.decode(generate(parts, ids, sampling, device))


def answer(
    parts: Sequence[nn.Module], tokenizer: tokens.Tokenizer, asked: Asked, sampling: Sampling, device: torch.device
) -> str:
    """What the model writes in its turn, without what ends the turn."""

    def over(ids: list[int]) -> bool:
        return ids[-1] == asked.end or (bool(asked.closing) and asked.closing in tokenizer.decode(ids))

    text = tokenizer.decode(generate(parts, asked.ids, sampling, device, over))
    return (text.partition(asked.closing)[0] if asked.closing else text).strip()
