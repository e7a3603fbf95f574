"""Continue a text: greedy or with a temperature, one token at a time, recomputing the whole text for each (for short
texts and small models; this is not an inference server)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.data import tokens
from shardwise.data.conversations import Chat, Encoder, Prompt
from shardwise.data.faults import Fault
from shardwise.data.formats import Conversation
from shardwise.data.micro_batch import MicroBatch
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
    """``temperature`` 0 takes the most likely token. ``eot_id`` ends the text. ``top_k`` draws among so many of the
    most likely tokens (0: all), ``top_p`` among the fewest whose probabilities reach it together."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    eot_id: int | None = None
    top_k: int = 0
    top_p: float = 1.0


def generate(
    parts: Sequence[nn.Module],
    prompt: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    over: Callable[[list[int]], bool] = lambda ids: False,
    first: Callable[[Callable[[], list[int]]], list[int]] = lambda choose: choose(),
) -> list[int]:
    """The ids that follow ``prompt`` (at least one id), until ``over`` returns true for them, or the model has no
    further position. With a distributed model every rank calls this, then ``techniques.after_inference``, and gets the
    same result; with ``first`` (HostGroup.first) the first rank chooses ids for all, so that an error reaches every
    rank."""
    [written] = generate_batch(parts, [prompt], sampling, device, lambda row, ids: over(ids), first)
    return written


def generate_batch(
    parts: Sequence[nn.Module],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    device: torch.device,
    over: Callable[[int, list[int]], bool] = lambda row, ids: False,
    first: Callable[[Callable[[], list[int]]], list[int]] = lambda choose: choose(),
) -> list[list[int]]:
    """As :func:`generate` for several prompts at once, which ``over`` tells apart by their number. Each has its own
    draws, from the same seed, so that what follows it does not depend on the others."""
    rows = [list(prompt) for prompt in prompts]
    draws = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    spec = spec_of(parts)
    most = spec.max_position_embeddings if learnt_positions(spec) else sys.maxsize
    going = [row for row, ids in enumerate(rows) if len(ids) < most]
    for _ in range(sampling.max_new_tokens if going else 0):
        with suspended():  # or it would be compiled for the lengths that it meets
            scores = last_logits(parts, [rows[row] for row in going], device)
        chosen = first(partial(_choose_all, scores, sampling, [draws[row] for row in going]))
        told, going = list(zip(going, chosen, strict=True)), []
        for row, chosen_id in told:
            if chosen_id == sampling.eot_id:
                continue
            rows[row].append(chosen_id)
            if not over(row, rows[row][len(prompts[row]) :]) and len(rows[row]) < most:
                going.append(row)
        if not going:
            break
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


def _choose_all(scores: Tensor, sampling: Sampling, draws: Sequence[torch.Generator]) -> list[int]:
    return [choose(logits, sampling, draw) for logits, draw in zip(scores, draws, strict=True)]


def last_logits(parts: Sequence[nn.Module], texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Logits [b,V] of the token after each of the texts, in fp32 on the host. Texts are padded at their ends, which no
    earlier token sees, to one length of few, because kernels are compiled and cached for every length that they
    meet."""
    lengths = torch.tensor([len(ids) for ids in texts], device=device)
    width = -(-max(map(len, texts)) // LENGTHS) * LENGTHS

    def last(hidden: Tensor, head: Output, batch: MicroBatch) -> Tensor:
        return logits(hidden[torch.arange(len(texts), device=device), lengths - 1], head)

    filled = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in texts]
    text = torch.tensor(filled, dtype=torch.int64, device=device)
    positions = torch.arange(width, device=device)[None].minimum(lengths[:, None] - 1)
    found = passes.infer(parts, MicroBatch(text, text, positions, None, 0), last)
    return passes.from_last_stage(parts, found, (len(texts), spec_of(parts).vocab_size), device).cpu()


def choose(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """The most likely id, or one drawn, of ``logits`` [V]. Raises TrainingError (NUM002) for logits that are NaN or
    infinite."""
    if not logits.max() < torch.inf:
        what = "the model's logits are not finite, so no token can be chosen"
        fix = "precision.compute=bf16 or fp32 if it computes in fp16; else an earlier checkpoint"
        raise TrainingError(Problem("NUM002", what, "the model's weights, or the numbers it computes with", fix))
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, sampling), 1, generator=draw))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability with which each id of ``logits`` [V] is drawn: after the temperature, then ``top_k``, then
    ``top_p``."""
    scores = logits / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, ids = torch.softmax(scores, 0).sort(descending=True)
        before = ordered.cumsum(0) - ordered  # what is likelier than each; the likeliest always stays
        scores[ids[before >= sampling.top_p]] = -torch.inf
    return torch.softmax(scores, 0)


def prompt_ids(tokenizer: tokens.Tokenizer, prompt: str) -> list[int]:
    """The ids of a text to continue; for an empty text, the end of a previous one."""
    return [*tokenizer.prefix, *tokenizer.encode([prompt])[0]] or [tokenizer.eot_id]


def answer(
    parts: Sequence[nn.Module],
    tokenizer: tokens.Tokenizer,
    asked: Prompt,
    sampling: Sampling,
    device: torch.device,
    first: Callable[[Callable[[], list[int]]], list[int]] = lambda choose: choose(),
) -> str:
    """The model's answer, without the token that ends its turn; ``first`` as in :func:`generate`."""

    def over(ids: list[int]) -> bool:
        return ids[-1] == asked.end or (bool(asked.closing) and asked.closing in tokenizer.decode(ids))

    return _until(asked.closing, tokenizer.decode(generate(parts, asked.ids, sampling, device, over, first))).strip()


def write_batch(
    parts: Sequence[nn.Module],
    tokenizer: tokens.Tokenizer,
    asked: Sequence[Prompt],
    sampling: Sampling,
    device: torch.device,
    tell: Callable[[int, str], None] = lambda row, text: None,
) -> list[str]:
    """Return what the model writes after each prompt, without what ends its turn. ``tell`` is given the number of a
    prompt and what has been written after it, at every token."""

    def over(row: int, ids: list[int]) -> bool:
        whole, closing = tokenizer.decode(ids), asked[row].closing
        tell(row, _until(closing, whole))
        return ids[-1] == asked[row].end or (bool(closing) and closing in whole)

    written = generate_batch(parts, [prompt.ids for prompt in asked], sampling, device, over)
    return [_until(prompt.closing, tokenizer.decode(ids)) for prompt, ids in zip(asked, written, strict=True)]


def _until(closing: str, text: str) -> str:
    return text.partition(closing)[0] if closing else text


def chat_of(tokenizer: Path) -> Chat:
    """The chat template beside a tokenizer. Raises DataError (CHAT001) where there is none."""
    try:
        text = find_template(None, tokenizer)
    except DataError as error:
        fix = "fine-tune it on conversations with data.chat_template=zephyr; without --chat `generate`"
        fix += " continues a text"
        raise DataError(Problem("CHAT001", "the model has no chat template", str(tokenizer), fix)) from error
    return Chat(Template(text, tokens.special_tokens(tokenizer)), Encoder(tokenizer), end_of_turn=True)


def ask_text(tokenizer: tokens.Tokenizer, prompt: str) -> Prompt:
    """A text to continue."""
    return Prompt(prompt_ids(tokenizer, prompt), None, "")


def ask_turns(chat: Chat, turns: Conversation, where: str) -> Prompt:
    """The prompt for the answer to ``turns``. Raises DataError for those that the template refuses or that cannot be
    encoded; ``where`` they come from."""
    try:
        return chat.ask(turns.messages, turns.tools)
    except Fault as fault:
        raise DataError(Problem(fault.code, f"the question {fault.what}", where, fault.fix)) from fault
