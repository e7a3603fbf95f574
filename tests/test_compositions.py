"""docs/compositions.md is what the tests' rows and the planner's checks say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compositions import FEATURES, page, pairs, refused, sources

ROOT = Path(__file__).parents[1]


def test_the_page_is_not_stale() -> None:
    assert (ROOT / "docs" / "compositions.md").read_text() == page() + "\n"


def test_no_row_has_two_that_are_refused_together() -> None:
    wrong = [both for both, pair in pairs().items() if pair.refused and pair.numbers is not None]
    assert not wrong


def test_every_pair_is_proved_or_refused() -> None:
    """One that is not needs a row, in tests/prove/pairs.py or where it belongs."""
    neither = [
        both for both, pair in pairs().items() if pair.numbers is None and pair.bytes is None and not pair.refused
    ]
    assert not neither


def test_every_feature_is_met_and_every_source_exists() -> None:
    met = {name for name, holds in FEATURES.items() for source in sources() for row in source.rows if holds(*row)}
    assert met == set(FEATURES)
    assert all((ROOT / source.file).is_file() and source.rows for source in sources())


@pytest.mark.prove
def test_a_refusal_has_its_code() -> None:
    assert refused("tp", "HF modules") == ["PLAN022"]
    assert "PLAN023" in refused("zbv", "compile")
    assert refused("tp", "ZeRO-3") == []
