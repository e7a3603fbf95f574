"""Work that may fail on some rank."""

from __future__ import annotations

import pytest

from tests.runtime.nursery import Ask


@pytest.mark.prove
def test_what_fails_on_one_rank_is_spared_on_all(ask: Ask) -> None:
    children = ask("tests.runtime.checkpoint.host_group_work:spare", 3, True)
    assert [child.result[0] for child in children] == ["spared ValueError: rank 1 cannot"] * 3


@pytest.mark.prove
@pytest.mark.timeout(60)
def test_a_rank_that_the_others_wait_for_ends_and_sets_them_free(ask: Ask) -> None:
    """They hang in a collective that it will never enter; nothing could go on after that."""
    children = ask("tests.runtime.checkpoint.host_group_work:spare", 2, False)
    assert children[1].result[0] == "raised rank 1 cannot" and 0.9 < children[1].result[1] < 15
    assert children[0].result[0].startswith("raised ") and children[0].result[1] < 20
    assert "Connection closed by peer" in children[0].result[0]


@pytest.mark.prove
@pytest.mark.timeout(60)
def test_a_vote_waits_no_longer_than_it_was_told(ask: Ask) -> None:
    """The group waits half an hour for what ranks write; before that they come as to a step."""
    first, second = (child.result for child in ask("tests.runtime.checkpoint.host_group_work:come_late", 2))
    assert "timed out" in first[0] and 0.4 < first[1] < 2.5
    assert second[0] == "" and second[1] > 2.9
    assert first[2] == second[2] == [5]
