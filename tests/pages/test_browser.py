"""Pages in a real browser: nothing spills over, nothing is loaded, no complaint, and dark is dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.app import main
from tests.cli.test_compare import write_run
from tests.pages.chromium import Tab, program, tab
from tests.pages.test_page import evil_page

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(program() is None, reason="no Chromium is installed (apt-get install chromium)"),
]
SMALL = ["model.path=meta-llama/Llama-3.2-1B", "train.seq_len=1024", "train.global_batch_size=32"]
WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with tab() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("pages")
    plain, staged, both, evil = (place / f"{name}.html" for name in ("plain", "staged", "both", "evil"))
    assert main(["plan", *SMALL, "--cluster", "2x8xL40S", "--html", str(plain)]) == 0
    assert main(["plan", *SMALL, "--cluster", "8xH100", "parallel.pp=4", "--html", str(staged)]) == 0
    runs = [str(write_run(place / name, steps, 0.1)) for name, steps in (("a", 300), ("b", 200))]
    assert main(["compare", *runs, "--html", str(both)]) == 0
    evil.write_text(evil_page().html(), encoding="utf-8")
    return [plain, staged, both, evil]


def test_no_page_spills_over_loads_anything_or_makes_the_browser_complain(browser: Tab, pages: list[Path]) -> None:
    for page in pages:
        for width in WIDTHS:
            browser.open(page, width)
            assert browser.value("document.documentElement.scrollWidth") == width, page
            assert browser.value("document.scripts.length") == 0
            wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
            assert page.stem == "evil" or width > 390 or browser.value(wide) > 0  # what is wide scrolls in its own box
    assert browser.complaints() == []
    assert browser.loaded() == {page.absolute().as_uri() for page in pages}


def test_words_of_pictures_stay_inside_them(browser: Tab, pages: list[Path]) -> None:
    outside = """[...document.querySelectorAll('figure svg[role=img] text')].filter(text => {
        const own = text.getBoundingClientRect(), box = text.ownerSVGElement.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 2
            || own.bottom > box.bottom + 2;
    }).map(text => text.textContent)"""
    for page in pages[:3]:
        browser.open(page, 1440)
        assert browser.value(outside) == [], page


def test_light_and_dark_follow_the_readers_choice(browser: Tab, pages: list[Path]) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(pages[0], 1440, scheme)
        behind = browser.value("getComputedStyle(document.body).backgroundColor")
        text = browser.value("getComputedStyle(document.querySelector('svg text')).fill")
        part = browser.value("getComputedStyle(document.querySelector('svg .part')).fill")
        seen[scheme] = behind, text, part
    assert seen["light"][0] == "rgb(255, 255, 255)" and seen["dark"][0] == "rgb(20, 23, 26)"
    assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))


def test_everything_can_be_reached_by_the_keyboard(browser: Tab, pages: list[Path]) -> None:
    """The first stop leads to the content, boxes that scroll are stops, and what is folded opens."""
    browser.open(pages[0], 390)
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.value("document.activeElement.getAttribute('href')") == "#content"
    scrolls = "[...document.querySelectorAll('.scroll, pre')].every(box => box.tabIndex === 0)"
    assert browser.value(scrolls) is True
    browser.value("document.querySelector('details summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert browser.value("document.querySelector('details').open") is True


def test_a_page_can_be_printed(browser: Tab, pages: list[Path]) -> None:
    browser.open(pages[0], 1440, "dark")
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value("document.querySelector('details pre').checkVisibility()") is True
    browser.ask("Emulation.setEmulatedMedia", media="")
