"""Continue a text: greedy or with a temperature, one token at a time, recomputing the whole text for each (for short
texts and small models; this is not an inference server)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.data import tokens
from shardwise.data.batch import MicroBatch
from shardwise.data.chat import Chat, Encoder, Prompt
from shardwise.data.faults import Fault
from shardwise.data.template import Template, find_template
from shardwise.errors import DataError, Problem, TrainingError
from shardwise.methods.loss import Output, logits
from shardwise.models.blocks import spec_of
from shardwise.models.config import learnt_positions
from shardwise.runtime import passes
from shardwise.techniques.compile import suspended

LENGTHS = 32
"""Texts are padded to multiples of this."""


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the most likely token. ``eot_id`` ends the text."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    eot_id: int | None = None


def generate(
    parts: Sequence[nn.Module],
    prompt: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    over: Callable[[list[int]], bool] = lambda ids: False,
    first: Callable[[Callable[[], int]], int] = lambda choose: choose(),
) -> list[int]:
    """The ids that follow ``prompt`` (at least one id), until ``over`` returns true for them, or the model has no
    further position. With a distributed model every rank calls this, then ``techniques.after_inference``, and gets the
    same result; with ``first`` (Crew.first) the first rank chooses ids for all, so that an error reaches every rank."""
    ids = list(prompt)
    draw = torch.Generator().manual_seed(sampling.seed)
    spec = spec_of(parts)
    room = spec.max_position_embeddings - len(ids) if learnt_positions(spec) else sampling.max_new_tokens
    for _ in range(min(room, sampling.max_new_tokens)):
        with suspended():  # or it would be compiled for the lengths that it meets
            scores = last_logits(parts, ids, device)
        chosen = first(partial(choose, scores, sampling.temperature, draw))
        if chosen == sampling.eot_id:
            break
        ids.append(chosen)
        if over(ids[len(prompt) :]):
            break
    return ids[len(prompt) :]


def last_logits(parts: Sequence[nn.Module], ids: list[int], device: torch.device) -> Tensor:
    """Logits [V] of the token after ``ids``, in fp32 on the host. The text is padded at its end, which no earlier token
    sees, because kernels are compiled and cached for every length that they meet."""
    length = len(ids)

    def last(hidden: Tensor, head: Output, batch: MicroBatch) -> Tensor:
        return logits(hidden[0, length - 1], head)

    text = torch.tensor([[*ids, *ids[-1:] * (-length % LENGTHS)]], dtype=torch.int64, device=device)
    positions = torch.arange(text.shape[1], device=device)[None].clamp(max=length - 1)
    found = passes.infer(parts, MicroBatch(text, text, positions, None, 0), last)
    return passes.from_last_stage(parts, found, (spec_of(parts).vocab_size,), device).cpu()


def choose(logits: Tensor, temperature: float, draw: torch.Generator) -> int:
    """The most likely id, or one sampled after dividing ``logits`` [V] by ``temperature``. Raises TrainingError
    (NUM002) for logits that are NaN or infinite."""
    if not logits.max() < torch.inf:
        what = "the model's logits are not finite, so no token can be chosen"
        fix = "precision.compute=bf16 or fp32 if it computes in fp16; else an earlier checkpoint"
        raise TrainingError(Problem("NUM002", what, "the model's weights, or the numbers it computes with", fix))
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw))


def continue_text(
    parts: Sequence[nn.Module], tokenizer: tokens.Tokenizer, prompt: str, sampling: Sampling, device: torch.device
) -> str:
    """What the model writes after ``prompt``."""
    return tokenizer.decode(generate(parts, prompt_ids(tokenizer, prompt), sampling, device))


def prompt_ids(tokenizer: tokens.Tokenizer, prompt: str) -> list[int]:
    """The ids of a text to continue; for an empty text, the end of a previous one."""
    return [*tokenizer.prefix, *tokenizer.encode([prompt])[0]] or [tokenizer.eot_id]


def answer(
    parts: Sequence[nn.Module],
    tokenizer: tokens.Tokenizer,
    asked: Prompt,
    sampling: Sampling,
    device: torch.device,
    first: Callable[[Callable[[], int]], int] = lambda choose: choose(),
) -> str:
    """The model's answer, without the token that ends its turn; ``first`` as in :func:`generate`."""

    def over(ids: list[int]) -> bool:
        return ids[-1] == asked.end or (bool(asked.closing) and asked.closing in tokenizer.decode(ids))

    text = tokenizer.decode(generate(parts, asked.ids, sampling, device, over, first))
    return (text.partition(asked.closing)[0] if asked.closing else text).strip()


def ask(tokenizer: Path, question: str) -> Prompt:
    """A question as the turn of a user, by the chat template beside a tokenizer. Raises DataError (CHAT001) where there
    is none, and for a question that cannot be encoded."""
    try:
        text = find_template(None, tokenizer)
    except DataError as error:
        fix = "fine-tune it on conversations (method: sft) with data.chat_template=zephyr, or leave --chat out"
        raise DataError(Problem("CHAT001", "the model has no chat template", str(tokenizer), fix)) from error
    chat = Chat(Template(text, tokens.special_tokens(tokenizer)), Encoder(tokenizer), end_of_turn=True)
    try:
        return chat.ask([{"role": "user", "content": question}])
    except Fault as fault:
        raise DataError(Problem(fault.code, f"the question {fault.what}", "--prompt", fault.fix)) from fault
