"""Records as encoded samples: formats, chat template, masks, and samples that are too long or unusable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.data import formats, tokens
from shardwise.data.conversations import Chat, Encoded, Encoder, Rendered, lay
from shardwise.data.faults import Fault, Faults
from shardwise.data.fields import Fields
from shardwise.data.formats import Conversation
from shardwise.data.limits import bounded
from shardwise.data.read import SourcePart, records
from shardwise.data.template import Template, find_template
from shardwise.spec.recipe import PREFERENCE

_BATCH = 64


@dataclass(frozen=True)
class SampleRules:
    """The rules by which records become samples. ``template``: the text of a chat template; None: there is none.
    ``seq_len``: the most tokens a sample may have."""

    form: str
    template: str | None
    train_on: str
    end_of_turn: bool
    seq_len: int
    too_long: Literal["truncate", "drop", "error"]
    packing: bool
    text_key: str
    fields: Fields

    @property
    def pairs(self) -> bool:
        """Return whether samples come in twos, the chosen answer first."""
        return self.form == PREFERENCE


@cache
def _chat(tokenizer: Path, rules: SampleRules) -> Chat:
    text = rules.template if rules.template is not None else find_template(None, tokenizer)
    return Chat(Template(text, tokens.special_tokens(tokenizer)), _encoder(tokenizer), rules.end_of_turn)


_encoder = cache(Encoder)
tokenizer_of = cache(tokens.open_directory)
"""The tokenizer of a directory, opened once in the life of a process."""


_Pieces = tuple[Rendered | Encoded, ...]
"""The pieces of a sample: texts that are encoded separately, or pieces that are encoded already."""


@dataclass(frozen=True)
class _Waiting:
    """A sample that waits to be tokenised."""

    offset: int
    held_out: bool
    pieces: _Pieces

    def texts(self) -> list[Rendered]:
        """The pieces that are not encoded yet."""
        return [piece for piece in self.pieces if isinstance(piece, Rendered)]


def encode(
    part: SourcePart, tokenizer: Path, rules: SampleRules, share: float, faults: Faults
) -> Iterator[tuple[bool, Encoded]]:
    """(held out, sample) for the records of ``part``. ``faults.counts`` gains ``truncated`` (and how many
    ``cut_tokens`` that costs, and ``cut_answers``, which lack their end), ``dropped`` (too long to be of use),
    ``divided`` (samples more than records) and ``disarmed`` (special tokens in the data that are encoded as text)."""
    encoder = _encoder(tokenizer)
    before = encoder.disarmed
    waiting: list[_Waiting] = []
    for offset, record, held_out in records(part, share, faults):
        with faults.watch(part.source, offset), bounded():
            made = [_Waiting(offset, held_out, sample) for sample in _render(record, tokenizer, rules)]
            for text in (text for sample in made for text in sample.texts()):
                encoder.check(text.text)
            faults.counts["divided"] += len(made) - (2 if rules.pairs else 1)
            waiting += made
        if len(waiting) >= _BATCH:
            yield from _finish(part, waiting, encoder, rules, faults)
            waiting = []
    yield from _finish(part, waiting, encoder, rules, faults)
    faults.counts["disarmed"] += encoder.disarmed - before


def _render(record: formats.Record, tokenizer: Path, rules: SampleRules) -> Iterator[_Pieces]:
    """The samples of a record: two if it is a pair of answers, else one or more."""
    record = rules.fields.rename(record)
    if not rules.pairs:
        yield from _lay(formats.parse(record, rules.form, rules.train_on, rules.text_key), tokenizer, rules)
        return
    sides = [list(_lay(side, tokenizer, rules)) for side in formats.parse_pair(record)]
    turns = [sample[0] for sample, *_ in sides if len(sample) == 1]  # of conversations; texts have an end-of-text too
    prompts = {turn.text[: turn.spans[0][0]] for turn in turns if isinstance(turn, Rendered)}
    if max(map(len, sides)) > 1 or len(prompts) > 1:
        what = "the chat template renders the prompt differently once an answer follows it"
        raise Fault("CHAT003", what, "give each answer one assistant message, or choose another data.chat_template")
    yield from (side for (side,) in sides)


def _lay(found: formats.Sample, tokenizer: Path, rules: SampleRules) -> Iterator[_Pieces]:
    own = tokenizer_of(tokenizer)
    if isinstance(found, Conversation):
        for sample in _chat(tokenizer, rules).render(found):
            yield (sample,)
    elif isinstance(found, formats.Tokens):
        if (largest := max(found.ids)) >= own.vocab_size:
            what = f"id {largest!s:.40} at token {found.ids.index(largest)} >= vocab {own.vocab_size}"
            raise Fault("DATA009", what, "data.tokenizer.path=TOKENIZER, the one that made these ids")
        ids, labels = np.array(found.ids, dtype=np.int64), np.array(found.labels, dtype=np.int64)
        yield (Encoded(ids, (labels >= 0).astype(np.uint8), 0),)
    else:
        prefix = Encoded(np.array(own.prefix, dtype=np.int64), np.zeros(len(own.prefix), dtype=np.uint8), 0)
        yield (prefix, *lay(found, _encoder(tokenizer), own.eot_id, rules.end_of_turn))


def _finish(
    part: SourcePart, waiting: list[_Waiting], encoder: Encoder, rules: SampleRules, faults: Faults
) -> Iterator[tuple[bool, Encoded]]:
    encoded = iter(encoder.encode([text for item in waiting for text in item.texts()]))
    whole = [
        _join([next(encoded) if isinstance(piece, Rendered) else piece for piece in item.pieces]) for item in waiting
    ]
    counts = faults.counts
    for first in range(0, len(waiting), 2 if rules.pairs else 1):
        item = waiting[first]
        with faults.watch(part.source, item.offset):
            fit = (
                _fit_pair(whole[first : first + 2], rules, counts) if rules.pairs else _fit(whole[first], rules, counts)
            )
            yield from ((item.held_out, sample) for sample in fit)


def _join(pieces: list[Encoded]) -> Encoded:
    """The sample that ``pieces`` make up. Its first token has no predecessor and is never trained on."""
    ids = np.concatenate([piece.ids for piece in pieces])
    supervised = np.concatenate([piece.supervised for piece in pieces])
    whole = Encoded(ids, supervised, sum(piece.text_bytes for piece in pieces))
    learnt = supervised.copy()
    learnt[:1] = 0
    return _learn(whole, ids, learnt)


def _fit(sample: Encoded, rules: SampleRules, counts: Counter[str]) -> list[Encoded]:
    """The sample within ``seq_len``, or nothing. Raises Fault CHAT002 when it has no supervised tokens."""
    if not sample.supervised.any():
        raise Fault("CHAT002", "has no tokens to train on", "leave the record out")
    return _within([sample], [rules.seq_len], rules, counts)


def _fit_pair(pair: list[Encoded], rules: SampleRules, counts: Counter[str]) -> list[Encoded]:
    """Return both answers, in at most ``seq_len`` tokens together, or nothing. If they are cut, each gets half of it,
    and what the other does not need.

    They are supervised from the first token in which they differ: the tokens before it have the same probabilities in
    both and cancel out. This also covers a token that contains the end of the prompt and the start of one answer.
    Raises Fault CHAT002 if they do not differ, or one has no supervised tokens.
    """
    chosen, rejected = (side.ids for side in pair)
    least = min(len(chosen), len(rejected))
    differ = np.flatnonzero(chosen[:least] != rejected[:least])
    shared = int(differ[0]) if differ.size else least
    if shared == max(len(chosen), len(rejected)):
        raise formats.same()
    for name, side in zip(("chosen", "rejected"), pair, strict=True):
        first = int(side.supervised.argmax())
        side.supervised[max(shared, 1) : first] = 1
        side.supervised[:shared] = 0
        if not side.supervised.any():
            raise Fault("CHAT002", f"`{name}` has no tokens to train on", "leave the record out")
    room = [max(rules.seq_len // 2, rules.seq_len - len(side)) for side in (rejected, chosen)]
    room[1] = rules.seq_len - min(len(chosen), room[0])
    return _within(pair, room, rules, counts)


def _within(samples: list[Encoded], room: list[int], rules: SampleRules, counts: Counter[str]) -> list[Encoded]:
    """``samples``, each cut to its ``room`` in tokens; empty if they are dropped."""
    length = sum(len(sample.ids) for sample in samples)
    if length <= rules.seq_len:
        return samples
    if rules.too_long == "error":
        what = f"is {length:,} tokens, train.seq_len {rules.seq_len:,}"
        raise Fault("DATA015", what, f"train.seq_len={length}, or data.too_long=truncate or drop")
    cut = [_learn(one, one.ids[:most], one.supervised[:most]) for one, most in zip(samples, room, strict=True)]
    if rules.too_long == "drop" or not all(sample.supervised.any() for sample in cut):
        counts["dropped"] += 1
        return []
    for sample, kept in zip(samples, cut, strict=True):
        counts["truncated"] += len(sample.ids) > len(kept.ids)
        counts["cut_tokens"] += len(sample.ids) - len(kept.ids)
        counts["cut_answers"] += bool(sample.supervised[len(kept.ids) :].any())
    return cut


def _learn(sample: Encoded, ids: NDArray[np.int64], supervised: NDArray[np.uint8]) -> Encoded:
    """``sample`` with fewer supervised tokens, and with a proportional share of its text bytes."""
    text_bytes = round(sample.text_bytes * int(supervised.sum()) / max(int(sample.supervised.sum()), 1))
    return Encoded(ids, supervised, text_bytes)
