"""The formats of records for supervised fine-tuning, recognised by their fields, and read as conversations, segments or
tokens.

messages            {"messages": [{"role": ..., "content": ...}], "tools": [...]}    also reasoning_content, tool_calls
sharegpt            {"conversations": [{"from": "human", "value": ...}]}
alpaca              {"instruction": ..., "input": ..., "output": ...}
prompt_completion   {"prompt": ..., "completion": ...}     texts without a template, or lists of messages
segments            {"segments": [{"text": ..., "label": true}]}    template-free; axolotl's input_output
tokens              {"input_ids": [...], "labels": [...]}  labels are the ids, or -100
text                {"text": ...}                          all of it is supervised

and for preference optimisation, never mixed with those:

preference          {"prompt": ..., "chosen": ..., "rejected": ...}    texts, or lists of messages
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardwise.data.faults import Fault

Record = dict[str, Any]
_OUT = "or leave the record out"
ROLES = ("system", "user", "assistant", "tool")
"""Roles that every chat template is expected to know."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of a message that holds its reasoning."""
_ROLES = {"human": "user", "observation": "tool", "function": "tool"}
_ROLES |= dict.fromkeys(("gpt", "model", "chatgpt", "bot", "function_call"), "assistant")


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that chat templates take. ``trained``: whether each is supervised; None: all are."""

    messages: list[dict[str, Any]]
    trained: list[bool] | None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Segment:
    """A piece of text. ``special``: the record says that strings of special tokens in it are to become those tokens."""

    text: str
    supervised: bool
    special: bool = False


@dataclass(frozen=True)
class Tokens:
    """Token ids, and labels that are the same ids, or -100."""

    ids: list[int]
    labels: list[int]


Sample = Conversation | list[Segment] | Tokens


def _keys(record: Record) -> str:
    return ", ".join(list(record)[:12]) or "none"


def detect(record: Record) -> str:
    """The name of a record's format. Raises Fault DATA005 if its fields match none."""
    for name, (fields, _) in _FORMATS.items():
        if all(field in record for field in fields):
            return name
    known = "; ".join(f"{name} ({', '.join(fields)})" for name, (fields, _) in _FORMATS.items())
    what = f"is in no known format; its keys are {_keys(record)}"
    if {"chosen", "rejected"} <= record.keys():
        raise Fault("DATA005", "is a pair of answers, chosen and rejected", "`method: dpo`, or another of pairs")
    raise Fault("DATA005", what, f"rename them to those of one: {known}")


def parse(record: Record, form: str, train_on: str, text_key: str = "text") -> Sample:
    """The sample in a record. ``form``: a format's name, or ``auto``; ``train_on``: ``assistant``, ``last`` (its last
    message), or ``all``. Raises Fault DATA005 for fields of the wrong type."""
    if form == "auto" and text_key != "text" and text_key in record:
        form = "text"
    name = detect(record) if form == "auto" else form
    fields, read = _FORMATS[name]
    if name == "text":
        return [Segment(_text(record, text_key), True)]
    for field in fields:
        if field not in record:
            what = f"has no `{field}`, which {name} has; its keys are {_keys(record)}"
            raise Fault("DATA005", what, "data.format=auto, or the name of its format")
    return read(record, train_on)


def parse_pair(record: Record) -> tuple[Sample, Sample]:
    """The chosen and the rejected answer of a record, each preceded by the prompt. Without ``prompt``, it is what both
    begin with. Raises Fault DATA005 for fields that are missing or of the wrong type, CHAT002 for answers that are
    empty or the same."""
    missing = [field for field in ("chosen", "rejected") if record.get(field) is None]
    if missing:
        fix = '{"prompt": ..., "chosen": ..., "rejected": ...}, or method: sft for records with one answer'
        raise Fault("DATA005", f"has no `{missing[0]}`, which method dpo compares; its keys are {_keys(record)}", fix)
    prompt, chosen, rejected = (record.get(key) for key in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        asked = [] if prompt is None else [Segment(_text(record, "prompt"), False)]
        for key, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer:
                raise Fault("CHAT002", f"`{key}` is empty: there is nothing to train on", f"write the answer, {_OUT}")
        return [*asked, Segment(chosen, True)], [*asked, Segment(rejected, True)]
    sides = [_answer(record, key) for key in ("chosen", "rejected")]
    shared = next((k for k, (one, two) in enumerate(zip(*sides, strict=False)) if one != two), min(map(len, sides)))
    before = [_message(turn, f"prompt[{i}]") for i, turn in enumerate(prompt)] if isinstance(prompt, list) else []
    if isinstance(prompt, str) and not shared:
        before = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, str | list | None):
        raise Fault("DATA005", "`prompt` is neither a string nor a list of messages", "make it one, or leave it out")
    if before and all(side[: len(before)] == before for side in sides):
        before = []
    whole = [[*before, *side] for side in sides]
    if whole[0] == whole[1]:
        raise same()
    first = len(before) + shared
    for role in (messages[first]["role"] for messages in whole if first < len(messages)):
        if role != "assistant":
            what = f"`chosen` and `rejected` first differ in a {role} message, not an assistant message"
            raise Fault("DATA005", what, f"both must answer the same prompt; make them differ in the answer, {_OUT}")
    chosen, rejected = (_conversation(messages, record, "assistant", first) for messages in whole)
    return chosen, rejected


def _answer(record: Record, key: str) -> list[dict[str, Any]]:
    """The messages of one side; a string becomes a message from the assistant."""
    value = record[key]
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else _list(record, key)
    return [_message(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]


def same() -> Fault:
    """The fault of a pair whose answers do not differ."""
    return Fault("CHAT002", "`chosen` and `rejected` are the same: no preference to learn", f"change one, {_OUT}")


def _messages(record: Record, train_on: str) -> Conversation:
    turns = _list(record, "messages")
    return _conversation([_message(turn, f"messages[{i}]") for i, turn in enumerate(turns)], record, train_on)


def _message(given: Any, where: str) -> dict[str, Any]:
    turn: dict[str, Any] = given if isinstance(given, dict) else {}
    turn = {key: value for key, value in turn.items() if value is not None or key == "content"}  # tables fill with null
    if not isinstance(turn.get("role"), str):
        raise Fault("DATA005", f"`{where}` has no `role`", 'a message is {"role": "user", "content": "..."}')
    near = get_close_matches(turn["role"].lower(), ROLES, 1, 0.8)
    if near and near[0] != turn["role"]:
        raise Fault("DATA005", f"`{where}.role` is `{turn['role']}`", f"did you mean `{near[0]}`?")
    if turn.get("weight", 1) not in (0, 1):
        what = f"`{where}.weight` is {turn['weight']!r}"
        raise Fault("DATA005", what, "1 (train on this message) or 0 (do not); data.mixture_weights weigh whole files")
    for key in REASONING:
        if not isinstance(turn.get(key, ""), str):
            raise Fault("DATA005", f"`{where}.{key}` is not a string", "make it one, or leave the record out")
    content = turn.get("content")
    calls = turn.get("tool_calls")
    if calls is not None:
        turn = {**turn, "tool_calls": [_call(call, where) for call in (calls if isinstance(calls, list) else [None])]}
        turn.setdefault("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) != len(content):
            raise Fault("DATA005", f"`{where}.content` has parts without a string `text`", "leave the record out")
        turn = {**turn, "content": "".join(part["text"] for part in parts)}
    elif not isinstance(content, str) and not (content is None and calls):
        raise Fault("DATA005", f"`{where}.content` is not a string", "make it one, or leave the record out")
    return turn


def _call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object: OpenAI sends them as a JSON string, but templates render objects."""
    if not isinstance(call, dict):
        raise Fault("DATA005", f"`{where}.tool_calls` is not a list of objects", "leave the record out")
    function = call.get("function")
    if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
        return {**call, "function": {**function, "arguments": _json(arguments, f"{where}.tool_calls")}}
    return call


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Fault("DATA005", f"`{where}` holds a string that is not JSON: {error}", "leave the record out") from error


def _conversation(messages: list[dict[str, Any]], record: Record, train_on: str, first: int = 0) -> Conversation:
    """Return the conversation of ``messages``; ``first``: those before it are not trained on, unless all are."""
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k >= first]
    empty = [
        k
        for k in answers
        if not str(messages[k].get("content") or "").strip()
        and not any(messages[k].get(key) for key in ("tool_calls", *REASONING))
    ]
    if empty:
        what = f"message {empty[0] + 1} (from the assistant) is empty"
        raise Fault("CHAT002", what, f"write its content, {_OUT}")
    chosen = {k for k in answers if messages[k].get("train", True) and messages[k].get("weight", 1)}
    if train_on == "last":
        chosen &= set(answers[-1:])
    if not chosen and train_on != "all":
        if answers:
            what = "excludes every assistant message from training (`train: false` or `weight: 0`)"
            raise Fault("CHAT002", what, f"include one, {_OUT}")
        what = "has no assistant message" + (" after the prompt" if first else "") + ": there is nothing to train on"
        raise Fault("CHAT002", what, f'add {{"role": "assistant", "content": "..."}}, {_OUT}')
    tools = record.get("tools")
    tools = _json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if tools and not isinstance(tools, list):
        raise Fault("DATA005", "`tools` is not a list", "a list of JSON schemas")
    plain = [{key: value for key, value in message.items() if key not in ("train", "weight")} for message in messages]
    trained = None if train_on == "all" else [k in chosen for k in range(len(messages))]
    return Conversation(plain, trained, tools or None)


def _sharegpt(record: Record, train_on: str) -> Conversation:
    turns, messages = _list(record, "conversations"), _system(record)
    for i, turn in enumerate(turns):
        if not (isinstance(turn, dict) and "from" not in turn and "role" in turn):
            if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
                what = f"`conversations[{i}]` has no `from` and `value` that are strings"
                raise Fault("DATA005", what, 'a turn is {"from": "human", "value": "..."}')
            more = {key: turn[key] for key in ("weight", "train") if turn.get(key) is not None}
            turn = {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"], **more}
        messages.append(_message(turn, f"conversations[{i}]"))
    return _conversation(messages, record, train_on)


def _alpaca(record: Record, train_on: str) -> Conversation:
    asked, more = _text(record, "instruction"), "" if record.get("input") is None else _text(record, "input")
    asked = f"{asked}\n\n{more}" if more else asked
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(record, "output")}]
    return _conversation([*_system(record), *turns], record, train_on)


def _system(record: Record) -> list[dict[str, Any]]:
    """The system message of a record that has a field ``system``, as a list of one or none."""
    system = "" if record.get("system") is None else _text(record, "system")
    return [{"role": "system", "content": system}] if system else []


def _prompt_completion(record: Record, train_on: str) -> Sample:
    if isinstance(record["prompt"], list):
        prompt, completion = _list(record, "prompt"), _list(record, "completion")
        messages = [_message(turn, f"prompt and completion [{i}]") for i, turn in enumerate([*prompt, *completion])]
        return _conversation(messages, record, train_on, first=len(prompt))
    answer = _text(record, "completion")
    if not answer:
        raise Fault("CHAT002", "`completion` is empty: there is nothing to train on", f"write the answer, {_OUT}")
    return [Segment(_text(record, "prompt"), train_on == "all"), Segment(answer, True)]


def _segments(record: Record, train_on: str) -> list[Segment]:
    found = []
    for i, segment in enumerate(_list(record, "segments")):
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise Fault("DATA005", f"`segments[{i}]` has no `text`", 'a segment is {"text": "...", "label": true}')
        learnt, special = train_on == "all" or bool(segment.get("label")), bool(segment.get("special"))
        found.append(Segment(segment["text"], learnt, special))
    if not any(segment.supervised and segment.text for segment in found):
        what = "no segment that has text has `label: true`: there is nothing to train on"
        raise Fault("CHAT002", what, f"label one, {_OUT}")
    return found


def _tokens(record: Record, train_on: str) -> Tokens:
    ids = _list(record, "input_ids")
    labels = ids if record.get("labels") is None else _list(record, "labels")
    if not all(type(value) is int and value >= 0 for value in ids):
        raise Fault("DATA005", "`input_ids` is not a list of token ids", "whole numbers from 0 up")
    if len(labels) != len(ids):
        raise Fault("DATA005", f"{len(labels)} `labels` for {len(ids)} `input_ids`", "one label for each id")
    other = next((i for i, (label, id_) in enumerate(zip(labels, ids, strict=True)) if label not in (-100, id_)), None)
    if other is not None:
        what = f"`labels[{other}]` is {labels[other]!s:.40}, neither -100 nor the id {ids[other]!s:.40} at its place"
        raise Fault("DATA005", what, "a label belongs to the id at the same position; Shardwise shifts them")
    return Tokens(ids, ids if train_on == "all" else labels)


def _list(record: Record, key: str) -> list[Any]:
    value = record[key]
    if not isinstance(value, list) or not value:
        what = f"`{key}` is not a list, or is empty"
        raise Fault("DATA005", what, f"make `{key}` one, or leave the record out")
    return value


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        what = f"`{key}` is not a string" if key in record else f"has no `{key}`; its keys are {_keys(record)}"
        raise Fault("DATA005", what, f"make `{key}` a string, or leave the record out")
    return value


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Record, str], Sample]]] = {
    "messages": (("messages",), _messages),
    "sharegpt": (("conversations",), _sharegpt),
    "tokens": (("input_ids",), _tokens),
    "segments": (("segments",), _segments),
    "prompt_completion": (("prompt", "completion"), _prompt_completion),
    "alpaca": (("instruction", "output"), _alpaca),
    "text": (("text",), lambda record, train_on: [Segment(_text(record, "text"), True)]),
}
