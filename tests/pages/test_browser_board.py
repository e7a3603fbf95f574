"""A board in a real browser: it fits, follows the reader's colours, leads to its runs and back, and comes anew."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import board_pages
from tests.cli.boards import board, some_runs
from tests.pages.chromium import program, tab

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (apt-get install chromium)"),
]


def test_a_board_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with board(some_runs(tmp_path)) as asked, tab() as browser:
        seen: dict[str, Any] = {}
        for width in (390, 1440):
            for scheme in ("light", "dark"):
                browser.visit(asked.address, width, scheme)
                assert browser.value("document.documentElement.scrollWidth") == width
                seen[scheme] = browser.value("getComputedStyle(document.body).backgroundColor")
                small = "[...document.querySelectorAll('td svg')].map(one => one.getBoundingClientRect().width)"
                assert browser.value(small) == [96] * 4
                cut = "[...document.querySelectorAll('td')].some(one => one.scrollWidth > one.clientWidth + 1)"
                assert browser.value(cut) is False
        assert seen["light"] == "rgb(255, 255, 255)" and seen["dark"] == "rgb(20, 23, 26)"
        assert browser.value("document.scripts.length") == 0
        for width in (390, 1440):
            browser.visit(f"{asked.address}run/finished", width)
            assert browser.value("document.documentElement.scrollWidth") == width
        back = browser.value("document.querySelector('header p a').href")
        there = browser.value("document.referrer")
        assert (back, there) == (asked.address, "")
        monkeypatch.setattr(board_pages, "QUIET_S", 1)
        time.sleep(board_pages.KEPT_S)
        browser.visit(asked.address, 1440)
        browser.value("document.body.dataset.old = 'yes'")
        until_s = time.monotonic() + 20
        while browser.value("document.body && document.body.dataset.old") == "yes":  # it asks again by itself
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert browser.complaints() == []
        assert browser.loaded() == {asked.address, f"{asked.address}run/finished"}
