"""Conversations as token ids, and which of them are supervised.

An assistant message is supervised from where generation would begin (the template rendered up to there, with its
generation prompt) to the token that ends it: what the model is to write, no more and no less. Templates with
``{% generation %}`` marks decide themselves what is supervised. Some templates render earlier messages differently once
others follow (Qwen 3 drops their reasoning, Mistral moves the system prompt): then one conversation becomes several
samples, each of them what the model will see when it writes that message, and every message is supervised once.

Text of the data never becomes a special token. While a template renders, each special token that stands in the data is
replaced by a private character that no tokenizer knows, and what the template itself writes by another that stands for
the token; so both can be told apart in one pass of the tokenizer, which therefore cuts the text as transformers would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.faults import Fault, not_unicode
from shardwise.data.formats import ROLES, Conversation, Segment
from shardwise.data.template import CLOSE, OPEN, PROBE, WITH_TOOLS, RenderError, Template
from shardwise.spec.files import read_regular

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

_ALIAS = 0x100000
_GUARD = 0x108000
_RESERVED_END = 0x10FFFD
_RESERVED = re.compile(f"[{chr(_ALIAS)}-{chr(_RESERVED_END)}]")
_GUARDED = re.compile(f"[{chr(_GUARD)}-{chr(_RESERVED_END)}]")
_CLOSING = re.compile(f"[{chr(_ALIAS)}-{chr(_GUARD - 1)}\\s]")
_GROUP = re.compile(f"\\s*[{chr(_ALIAS)}-{chr(_GUARD - 1)}]+")
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Rendered:
    """A sample as text, special tokens as private characters, and the [start, stop) of supervised characters."""

    text: str
    spans: Spans


@dataclass(frozen=True)
class Encoded:
    """A sample: ids, which of them are supervised, and the bytes of text that those stand for."""

    ids: NDArray[np.int64]
    supervised: NDArray[np.uint8]
    text_bytes: int


@dataclass(frozen=True)
class Prompt:
    """A prompt: ids that end where the model's turn begins. Its turn ends at the id ``end``, or, if the template ends
    turns with plain text, at the text ``closing``."""

    ids: list[int]
    end: int | None
    closing: str


class Encoder:
    """Encodes with one tokenizer. ``specials`` in data are counted in ``disarmed``."""

    def __init__(self, tokenizer: Path) -> None:
        """``tokenizer``: the directory with tokenizer.json."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        content = json.loads(read_regular(tokenizer / "tokenizer.json"))
        added = [token for token in content.get("added_tokens") or () if token["special"]]
        # Nothing may be added around the text, and offsets must refer to whole tokens.
        content.update(post_processor=None, truncation=None, padding=None)
        self._backend: Backend = Backend.from_str(json.dumps(content))
        self._backend.encode_special_tokens = True
        flags = ("lstrip", "rstrip", "single_word")
        aliases = [
            AddedToken(chr(_ALIAS + i), normalized=False, special=False, **{flag: token[flag] for flag in flags})
            for i, token in enumerate(added)
        ]
        self._backend.add_tokens(aliases)
        largest = max(self._backend.get_vocab(with_added_tokens=True).values())
        self._true_ids = np.arange(largest + 1)
        for alias, token in zip(aliases, added, strict=True):
            self._true_ids[self._backend.token_to_id(alias.content)] = token["id"]
        self._texts = [token["content"] for token in added]
        self._numbers = {text: i for i, text in enumerate(self._texts)}
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.disarmed = 0

    def guard(self, value: Any) -> Any:
        """``value`` from the data, with each special token in its texts replaced by a private character."""
        if isinstance(value, str):
            if reserved := _RESERVED.search(value):
                what = f"it contains the private-use character U+{ord(reserved.group()):X}"
                raise Fault("DATA006", what, "leave it out")
            guarded, count = self._special.subn(lambda found: chr(_GUARD + self._numbers[found.group()]), value)
            self.disarmed += count
            return guarded
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        return [self.guard(item) for item in value] if isinstance(value, list) else value

    def check(self, text: str) -> None:
        """Raises Fault DATA006 for a text that cannot be encoded."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error

    def alias(self, text: str) -> str:
        """A rendered text with the template's special tokens as single characters."""
        return self._special.sub(lambda found: chr(_ALIAS + self._numbers[found.group()]), text)

    def eot(self, eot_id: int) -> str:
        """The character for end-of-text in a rendered text."""
        return self.alias(str(self._backend.id_to_token(eot_id)))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Ids and masks of samples, whose texts have passed ``check``."""
        opened = [self._disguise_no_more(sample) for sample in rendered]
        encodings = self._backend.encode_batch([sample.text for sample in opened], add_special_tokens=False)
        return [self._mask(sample, encoding) for sample, encoding in zip(opened, encodings, strict=True)]

    def _disguise_no_more(self, sample: Rendered) -> Rendered:
        """The sample with the original text of the data, and its spans adjusted."""

        def opened(text: str) -> str:
            return _GUARDED.sub(lambda found: self._texts[ord(found.group()) - _GUARD], text)

        if not _GUARDED.search(sample.text):
            return sample
        spans = [(len(opened(sample.text[:start])), len(opened(sample.text[:stop]))) for start, stop in sample.spans]
        return Rendered(opened(sample.text), spans)

    def _mask(self, sample: Rendered, encoding: Encoding) -> Encoded:
        ids = np.array(encoding.ids, dtype=np.int64)
        supervised = np.zeros(len(ids), dtype=np.uint8)
        text_bytes = 0
        for start, stop in sample.spans:
            first, after = (_first_token(encoding, at, len(sample.text)) for at in (start, stop))
            supervised[first:after] = 1
            text_bytes += len(_RESERVED.sub("", sample.text[start:stop]).encode())
        return Encoded(self._true_ids[ids], supervised, text_bytes)


def _first_token(encoding: Encoding, at: int, end: int) -> int:
    """The first token that begins at character ``at`` or later. Asked of the tokenizer: a list of all offsets would
    cost as much as the encoding."""
    for character in range(at, end):
        token = encoding.char_to_token(character)
        if token is not None:
            # this one began earlier, or is one of several for the character
            while token < len(encoding.ids) and (found := encoding.token_to_chars(token)) and found[0] < at:
                token += 1
            return int(token)
    return len(encoding.ids)


_WRITES_TOOLS = f"data.chat_template={' or '.join(WITH_TOOLS)}, which write tools and their calls; or repair the record"


@dataclass(frozen=True)
class Chat:
    """Renders conversations with one template. ``end_of_turn``: the tokens that end a turn are learnt with it."""

    template: Template
    encoder: Encoder
    end_of_turn: bool

    def render(self, talk: Conversation) -> list[Rendered]:
        """The samples of one conversation (see above). Raises Fault CHAT002 for what the template refuses and turns
        without text, CHAT003 where the template does not show what the assistant's part is."""
        tools = self.encoder.guard(talk.tools)
        messages = self._filled(self.encoder.guard(talk.messages), tools)
        self._check_roles(messages, tools)
        self._check_tools(messages, tools)
        if talk.trained is None:
            text = self._text(messages, tools)
            return [Rendered(text, [(0, len(text))])]
        if self.template.marked:
            return [self._marked(messages, tools, talk)]
        samples: list[Rendered] = []
        for k in (k for k, trained in enumerate(talk.trained) if trained):
            whole, start = self._turn(messages, tools, k)
            span = start, self._end(whole, start)
            last = samples[-1] if samples else None
            if last is not None and whole.startswith(last.text[: last.spans[-1][1]]):
                samples[-1] = Rendered(whole, [*last.spans, span])
            else:
                samples.append(Rendered(whole, [span]))
        return samples

    def ask(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Prompt:
        """The prompt for the turn that follows ``messages``, as in training, with ``tools`` that it may call. Raises
        Fault CHAT002 where the template refuses them, CHAT003 where it does not show where an answer begins."""
        tools = self.encoder.guard(tools)
        turns = [*self._filled(self.encoder.guard(messages), tools), {"role": "assistant", "content": PROBE}]
        whole, start = self._turn(turns, tools, len(messages))
        self.encoder.check(whole)
        closing = whole[start : self._end(whole, start)].partition(PROBE)[2].strip()
        if PROBE in whole[:start] + closing:
            what, fix = "the chat template writes an answer more than once", "choose another data.chat_template"
            raise Fault("CHAT003", what, fix)
        given, ending = self.encoder.encode([Rendered(text, []) for text in (whole[:start], closing)])
        special = _RESERVED.match(closing) is not None
        return Prompt(given.ids.tolist(), int(ending.ids[0]) if special else None, "" if special else closing)

    def _filled(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
        """``messages`` with an empty text where a content is null, as it is in calls of tools, if the template takes no
        null, or writes ``None`` for it."""
        empty = [{**message, "content": ""} if message.get("content", "") is None else message for message in messages]
        if empty == messages:
            return messages
        try:
            written = self.template.render(messages, tools).count("None")
        except RenderError:
            return empty
        with suppress(RenderError):
            return messages if self.template.render(empty, tools).count("None") == written else empty
        return messages

    def _check_roles(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Raises Fault CHAT002 for a message that the template leaves out because it does not know its role: changing
        its content does not change the rendered text."""
        for k, message in enumerate(messages):
            role = message["role"]
            if role in ROLES or not message.get("content"):
                continue
            other = [*messages[:k], {**message, "content": PROBE}, *messages[k + 1 :]]
            if self._text(other, tools) == self._text(messages, tools):
                what = f"message {k + 1} has the role `{role}`, which the chat template leaves out"
                fix = f"{quote(f'data.roles.{role}=user')}, or =system, =assistant, =tool"
                raise Fault("CHAT002", what, fix)

    def _check_tools(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Raises Fault CHAT002 where the template leaves out the tools, or an assistant's calls of them."""
        bare = [{**message, "tool_calls": None, "content": message.get("content") or ""} for message in messages]
        called = any(message.get("tool_calls") for message in messages)
        for field, given, other in (("tools", tools, (messages, None)), ("tool_calls", called, (bare, tools))):
            with suppress(RenderError):
                if given and self.template.render(*other) == self.template.render(messages, tools):
                    raise Fault("CHAT002", f"has `{field}`, which the chat template leaves out", _WRITES_TOOLS)

    def _text(self, messages: list[dict[str, Any]], tools: list[Any] | None, generate: bool = False) -> str:
        return self.encoder.alias(_unmarked(self._raw(messages, tools, generate))[0])

    def _raw(self, messages: list[dict[str, Any]], tools: list[Any] | None, generate: bool = False) -> str:
        try:
            return self.template.render(messages, tools, generate)
        except RenderError as error:
            what = f"cannot be rendered by the chat template: {error}"
            fix = "repair the record, or choose another data.chat_template"
            called = tools or any(message.get("tool_calls") for message in messages)
            raise Fault("CHAT002", what, _WRITES_TOOLS if called else fix) from error

    def _turn(self, messages: list[dict[str, Any]], tools: list[Any] | None, k: int) -> tuple[str, int]:
        """The conversation up to and including turn ``k``, and where generation of that turn begins."""
        whole = self._text(messages[: k + 1], tools)
        prompt = self._text(messages[:k], tools, generate=True) if k else ""
        before = self._text(messages[:k], tools) if k else ""
        fits = bool(k) and whole.startswith(prompt)
        if fits and prompt != before:
            return whole, len(prompt)
        # The template has no generation prompt, or one that its own history does not repeat: see where content goes.
        probe = self._text([*messages[:k], {"role": messages[k]["role"], "content": PROBE}], tools)
        head = probe.partition(PROBE)[0]
        if head != probe and fits and not head[len(prompt) :].strip():
            return whole, len(prompt)
        closed = head.rstrip()  # a blank before an answer need not be there before a call
        if head != probe and whole.startswith(closed):
            if fits or whole.startswith(before):
                return whole, len(head if whole.startswith(head) else closed)
            # Mistral's early templates lose the system prompt once there is an answer: keep what was asked.
            if prompt and prompt[-1] == closed[-1:] and _CLOSING.match(prompt[-1]):
                return prompt + whole[len(closed) :], len(prompt)
        what = f"the chat template does not show where message {k + 1} (from the assistant) begins"
        fix = "put {% generation %} and {% endgeneration %} around the assistant's part, in data.chat_template"
        raise Fault("CHAT003", what, fix)

    def _end(self, whole: str, start: int) -> int:
        """Return where the turn that begins at ``start``, the last of ``whole``, ends: after the special tokens that
        directly follow its text. Anything after them (a line end, an end-of-text) is not part of the turn."""
        said = len(whole)
        while said > start and _CLOSING.match(whole, said - 1):
            said -= 1
        group = _GROUP.match(whole, said)
        if group is None:
            return start + len(whole[start:].rstrip())
        spaces = len(group.group()) - len(group.group().lstrip())
        return group.end() if self.end_of_turn else said + spaces

    def _marked(self, messages: list[dict[str, Any]], tools: list[Any] | None, talk: Conversation) -> Rendered:
        assert talk.trained is not None
        text, marks = _unmarked(self.encoder.alias(self._raw(messages, tools)))
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [talk.trained[k] for k in turns]
        if not all(wanted):
            if len(marks) != len(turns):
                marked = f"marks {len(marks)} parts as the assistant's, but there are {len(turns)} assistant messages"
                fix = "data.train_on=assistant, or a template that marks each of them once"
                raise Fault("CHAT003", f"the chat template {marked}", fix)
            marks = [mark for mark, want in zip(marks, wanted, strict=True) if want]
        if not self.end_of_turn:
            marks = [(start, self._end(text[:stop], start)) for start, stop in marks]
        return Rendered(text, marks)


def _unmarked(text: str) -> tuple[str, Spans]:
    """The text without the marks of ``{% generation %}``, and where they stood."""
    pieces = []
    spans = []
    size = 0
    opened = 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            opened = size
        elif piece == CLOSE:
            spans.append((opened, size))
        else:
            pieces.append(piece)
            size += len(piece)
    return "".join(pieces), spans


def lay(segments: Sequence[Segment], encoder: Encoder, eot_id: int, end_of_turn: bool) -> tuple[Rendered, ...]:
    """Template-free segments, closed by end-of-text, which is supervised if the last segment is. Each is encoded by
    itself, as a prompt will be when the model is used: no token lies across a seam."""
    found = []
    for segment in segments:
        text = encoder.alias(segment.text) if segment.special else encoder.guard(segment.text)
        found.append(Rendered(text, [(0, len(text))] if segment.supervised else []))
    eot = encoder.eot(eot_id)
    learnt = segments[-1].supervised and end_of_turn
    return (*found, Rendered(eot, [(0, len(eot))] if learnt else []))
