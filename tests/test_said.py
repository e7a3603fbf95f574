"""What the other tests ask errors with: another code, field or value is another refusal."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError, Problem
from tests.said import refusal, refuses, shows

TWO = ConfigError(
    Problem("PLAN026", "rows of 16 tokens cannot be cut over 2 processes", "train.seq_len", "a multiple of 4 tokens"),
    Problem("CFG005", "`train.seq_len` must be above 0, got 2.5", "run.yaml:3"),
)


def test_a_refusal_is_of_this_code_these_values_and_this_place() -> None:
    with pytest.raises(ConfigError, match=refusal("PLAN026", "16 tokens", 2, where="train.seq_len", fix="4 tokens")):
        raise TWO
    assert refuses(TWO, "PLAN026", 16, 2) and refuses(TWO, "CFG005", "`train.seq_len`", 2.5, where="run.yaml:3")


@pytest.mark.parametrize(
    ("code", "values", "named"),
    [
        ("PLAN027", [16], {}),
        ("PLAN026", [6], {}),
        ("PLAN026", [1], {}),
        ("PLAN026", [2, 16], {}),
        ("PLAN026", [16], {"where": "seq_len"}),
        ("PLAN026", [16], {"where": "run.yaml:3"}),
        ("PLAN026", [16], {"fix": "16 tokens"}),
        ("CFG005", [2], {}),
        ("CFG005", [16], {}),
        ("CFG005", [], {"fix": "4 tokens"}),
        ("CFG005", [], {"as_warning": True}),
    ],
)
def test_of_no_other(code: str, values: list[object], named: dict[str, str]) -> None:
    assert not refuses(TWO, code, *values, **named)  # type: ignore[arg-type]


def test_a_value_is_whole_and_stands_in_one_line() -> None:
    page = "step 12 of 24: 1.5 s\n`lora` none"
    assert shows(page, "step", 12, 24, "1.5 s") and shows(page, "`lora` none")
    assert not any(shows(page, value) for value in (2, 1, 4, 5, "tep", "lora` non"))
    assert not shows(page, 24, 12) and not shows(page, 12, "`lora`")
