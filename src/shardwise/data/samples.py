"""From records to encoded samples: formats, chat template, masks, and what is too long or not usable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from shardwise.data import formats, tokens
from shardwise.data.chat import Chat, Encoded, Encoder, Rendered, lay
from shardwise.data.formats import Conversation, Fault
from shardwise.data.read import Part, fault, records
from shardwise.data.template import Template, find_template, special_tokens

_BATCH = 64


@dataclass(frozen=True)
class Rules:
    """How records become samples. ``template``: the text of a chat template; None: there is none. ``seq_len``: the
    most tokens a sample may have."""

    form: str
    template: str | None
    train_on: str
    end_of_turn: bool
    seq_len: int
    too_long: Literal["truncate", "drop", "error"]
    skip_bad: bool
    packing: bool
    text_key: str


@cache
def _chat(tokenizer: Path, rules: Rules) -> Chat:
    text = rules.template if rules.template is not None else find_template(None, tokenizer)
    return Chat(Template(text, special_tokens(tokenizer)), _encoder(tokenizer), rules.end_of_turn)


@cache
def _encoder(tokenizer: Path) -> Encoder:
    return Encoder(tokenizer)


@cache
def _tokenizer(directory: Path) -> tokens.Tokenizer:
    return tokens.open_directory(directory)


@dataclass(frozen=True)
class _Waiting:
    """A sample on its way to the tokenizer, in pieces that are encoded apart, or past it."""

    offset: int
    held_out: bool
    sample: tuple[Rendered, ...] | Encoded
    prefix: tuple[int, ...] = ()


def encode(
    part: Part, tokenizer: Path, rules: Rules, share: float, counts: Counter[str]
) -> Iterator[tuple[bool, Encoded]]:
    """(held out, sample) for the records of ``part``. ``counts`` gains ``truncated``, ``dropped`` (too long to be of
    use), ``bad`` (left out as the recipe allows), ``divided`` (samples more than records) and ``disarmed`` (special
    tokens in the data that are encoded as text). Raises DataError with the number of the line."""
    encoder = _encoder(tokenizer)
    before = encoder.disarmed
    waiting: list[_Waiting] = []
    for offset, record, held_out in records(part, share):
        try:
            made = list(_render(record, tokenizer, rules))
        except Fault as found:
            if not (rules.skip_bad and found.code == "CHAT002"):
                raise fault(part, offset, found.code, found.what, found.fix) from found
            counts["bad"] += 1
            continue
        counts["divided"] += len(made) - 1
        waiting += [_Waiting(offset, held_out, sample, prefix) for sample, prefix in made]
        if len(waiting) >= _BATCH:
            yield from _finish(part, waiting, encoder, rules, counts)
            waiting = []
    yield from _finish(part, waiting, encoder, rules, counts)
    counts["disarmed"] += encoder.disarmed - before


def _render(
    record: formats.Record, tokenizer: Path, rules: Rules
) -> Iterator[tuple[tuple[Rendered, ...] | Encoded, tuple[int, ...]]]:
    found = formats.parse(record, rules.form, rules.train_on, rules.text_key)
    own = _tokenizer(tokenizer)
    if isinstance(found, Conversation):
        for sample in _chat(tokenizer, rules).render(found):
            yield (sample,), ()
    elif isinstance(found, formats.Tokens):
        ids, labels = np.array(found.ids, dtype=np.int64), np.array(found.labels, dtype=np.int64)
        if ids.max() >= own.vocab_size:
            what = f"id {ids.max()} at token {int(ids.argmax())} >= vocab {own.vocab_size}"
            raise Fault("DATA009", what, "data.tokenizer.path=<the tokenizer that these ids are of>")
        yield Encoded(ids, (labels >= 0).astype(np.uint8), 0), ()
    else:
        yield lay(found, _encoder(tokenizer), own.eot_id, rules.end_of_turn), own.prefix


def _finish(
    part: Part, waiting: list[_Waiting], encoder: Encoder, rules: Rules, counts: Counter[str]
) -> Iterator[tuple[bool, Encoded]]:
    texts = [piece for item in waiting if isinstance(item.sample, tuple) for piece in item.sample]
    try:
        encoded = iter(encoder.encode(texts))
    except Fault:  # find out whose it is
        for item in waiting:
            if isinstance(item.sample, tuple):
                try:
                    encoder.encode(item.sample)
                except Fault as found:
                    raise fault(part, item.offset, found.code, found.what, found.fix) from found
        raise
    for item in waiting:
        sample = _join([next(encoded) for _ in item.sample]) if isinstance(item.sample, tuple) else item.sample
        try:
            kept = _fit(_begin(sample, item.prefix), rules, counts)
        except Fault as found:
            if not (rules.skip_bad and found.code == "CHAT002"):
                raise fault(part, item.offset, found.code, found.what, found.fix) from found
            counts["bad"] += 1
            continue
        if kept is not None:
            yield item.held_out, kept


def _join(pieces: list[Encoded]) -> Encoded:
    if len(pieces) == 1:
        return pieces[0]
    ids = np.concatenate([piece.ids for piece in pieces])
    supervised = np.concatenate([piece.supervised for piece in pieces])
    return Encoded(ids, supervised, sum(piece.text_bytes for piece in pieces))


def _begin(sample: Encoded, prefix: tuple[int, ...]) -> Encoded:
    """With the tokenizer's own begin-of-text in front; and nothing comes before the first token, so that it is never
    learnt."""
    ids = np.concatenate([np.array(prefix, dtype=np.int64), sample.ids])
    supervised = np.concatenate([np.zeros(len(prefix), dtype=np.uint8), sample.supervised])
    supervised[:1] = 0
    return replace(sample, ids=ids, supervised=supervised)


def _fit(sample: Encoded, rules: Rules, counts: Counter[str]) -> Encoded | None:
    """The sample within ``seq_len``; None: it is left out. Raises Fault CHAT002 when nothing in it is learnt."""
    length = len(sample.ids)
    if not sample.supervised.any():
        raise Fault("CHAT002", "trains on 0 tokens", "data.on_bad_sample=skip, or leave the line out")
    if length <= rules.seq_len:
        return sample
    if rules.too_long == "error":
        what = f"is {length:,} tokens, train.seq_len {rules.seq_len:,}"
        raise Fault("DATA015", what, f"train.seq_len={length}, or data.too_long=truncate or drop")
    cut = sample.supervised[: rules.seq_len]
    if rules.too_long == "drop" or not cut.any():
        counts["dropped"] += 1
        return None
    counts["truncated"] += 1
    text_bytes = round(sample.text_bytes * int(cut.sum()) / int(sample.supervised.sum()))
    return Encoded(sample.ids[: rules.seq_len], cut, text_bytes)
