"""Messages under other names become the records that everybody knows, or it is said what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.faults import Fault
from shardwise.data.fields import Fields
from shardwise.data.pack import open_windows
from shardwise.data.prepare import prepare
from shardwise.spec.recipe import Data
from tests.said import shows

FIELDS = Fields("call.turns", "speaker", "said.text", (("agent", "assistant"), ("customer", "user")))
CALL = {
    "call": {"turns": [{"speaker": "customer", "said": {"text": "hi"}}, {"speaker": "agent", "said": {"text": "ho"}}]}
}
KNOWN = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def test_names_are_reached_and_renamed() -> None:
    assert FIELDS.rename({"id": 7, **CALL}) == {"id": 7, **KNOWN}
    assert Fields().rename(KNOWN) is KNOWN
    dotted = Fields("a.b")  # a field whose own name has a dot comes first
    assert dotted.rename({"a.b": KNOWN["messages"]})["messages"] == KNOWN["messages"]
    weighed = {"messages": [{"from": "user", "content": "hi", "weight": 0}]}
    assert Fields(role="from").rename(weighed) == {"messages": [{"role": "user", "content": "hi", "weight": 0}]}
    pair = {"prompt": "hi", "chosen": [{"from": "bot", "content": "ho"}], "rejected": "no"}
    told = Fields(role="from", roles=(("bot", "assistant"),)).rename(pair)
    assert told == {"prompt": "hi", "chosen": [{"role": "assistant", "content": "ho"}], "rejected": "no"}


def test_roles_of_sharegpt_are_renamed_too() -> None:
    turns = [{"from": "customer", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    told = Fields(roles=(("customer", "user"),)).rename({"conversations": turns})
    assert told == {"conversations": [{"from": "user", "value": "hi"}, {"from": "gpt", "value": "ho"}]}


@pytest.mark.parametrize(
    ("record", "what", "fix"),
    [
        ({"talk": []}, ["`call.turns`", "talk"], "name one: data.messages_key"),
        ({"call": {"turns": "hi"}}, ["`call.turns`", "list"], "name the list: data.messages_key"),
        (
            {"call": {"turns": [{"who": "agent", "said": {"text": "hi"}}]}},
            ["`call.turns[0].speaker`", "who, said"],
            "name one: data.role_key",
        ),
        (
            {"call": {"turns": [{"speaker": "agent", "said": "hi"}]}},
            ["`call.turns[0].said.text`", "speaker, said"],
            "name one: data.content_key",
        ),
    ],
)
def test_what_is_missing_is_named(record: dict[str, object], what: list[str], fix: str) -> None:
    with pytest.raises(Fault) as caught:
        FIELDS.rename(record)
    assert (caught.value.code, caught.value.fix) == ("DATA005", fix) and shows(caught.value, *what)


def test_they_train_as_the_known_format_does(settings: Callable[..., Data], tmp_path: Path) -> None:
    """The same tokens and labels; prepared apart, since the settings are not the same."""
    for name, record in (("known", KNOWN), ("call", CALL)):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    keys = {"messages_key": "call.turns", "role_key": "speaker", "content_key": "said.text"}
    names = {**keys, "roles": {"agent": "assistant", "customer": "user"}}
    shared = {"chat_template": "chatml", "validation_share": 0.0}
    known = prepare(settings(tmp_path / "known.jsonl", **shared), sample_tokens=64)
    call = prepare(settings(tmp_path / "call.jsonl", **shared, **names), sample_tokens=64)
    one, two = (open_windows(each.train, 64, True) for each in (known, call))
    assert len(one) == len(two) > 0
    for n in range(len(one)):
        for left, right in zip(vars(one[n]).values(), vars(two[n]).values(), strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))
