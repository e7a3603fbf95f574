"""Pages: everything that comes from outside is text, colours can be read, and nothing else is needed."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import product

import pytest

from shardwise.pages.charts import Dot, bars, lines, scatter
from shardwise.pages.page import Chapter, Listing, Paragraphs, Table, WebPage
from shardwise.pages.timelines import TimeBlock, timeline
from tests.pages.parsed import Parsed, faults

EVIL = "</title></style><script>alert('x')</script>\"'&amp;<img src=https://example.org/x onerror=alert(1)>"


def evil_page() -> WebPage:
    rows = {EVIL: [TimeBlock(0.0, 1.0, "c0", EVIL)]}
    parts = [
        lines(EVIL, (EVIL, EVIL), {EVIL: [(1.0, 2.0), (2.0, 1.0)], "b": [(1.0, 1.0)]}),
        scatter(EVIL, (EVIL, EVIL), [Dot(1.0, 1.0, EVIL, EVIL, "good")], {EVIL: 2.0}, [("good", EVIL)]),
        bars(EVIL, EVIL, {EVIL: {EVIL: 1.0}}, {EVIL: 1.0}, lambda size: EVIL),
        timeline(EVIL, rows, [("c0", EVIL)], lambda size: EVIL),
        Table((EVIL,), [(EVIL,)], "<", EVIL),
        Paragraphs([EVIL]),
        Listing(EVIL, EVIL),
        Listing(EVIL, EVIL, folded=True),
    ]
    return WebPage(EVIL, EVIL, [Chapter(EVIL, parts)], "good", [EVIL])


def test_what_comes_from_outside_is_text() -> None:
    text = evil_page().html()
    assert faults(text) == []
    assert "<script" not in text and "<img" not in text
    assert Parsed(text).words.count(EVIL) > 20


def test_a_page_says_that_nothing_may_be_loaded() -> None:
    tags = Parsed(evil_page().html()).tags
    policy = next(given["content"] for tag, given in tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "script" not in policy


def test_the_test_of_pages_sees_what_is_wrong() -> None:
    good = evil_page().html()
    for old, new in (
        ("</main>", ""),
        ("<main", "<script>1</script><main"),
        ('href="data:,"', 'href="https://example.org/style.css"'),
        ("<h1>", "<h1 onclick='x()'>"),
        (' role="img"', ""),
    ):
        assert faults(good.replace(old, new)), old


def colours() -> dict[str, dict[str, str]]:
    """The colours of the style sheet by scheme."""
    sheet = files("shardwise.pages").joinpath("page.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)
    names = ("light", "dark", "print")
    return {name: dict(re.findall(r"--(\w+): (#\w{6})", block)) for name, block in zip(names, blocks, strict=True)}


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_colours_can_be_told_from_what_is_behind_them(scheme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for pictures."""
    found = colours()[scheme]
    texts = [name for name in found if name in ("ink", "quiet", "link", "good", "close", "bad")]
    marks = [name for name in found if re.fullmatch(r"c\d+", name)]
    assert len(texts) == 6 and len(marks) == 16
    weak = [(a, b) for a, b in product(texts, ("paper", "field")) if contrast(found[a], found[b]) < 4.5]
    weak += [(name, "paper") for name in marks if contrast(found[name], found["paper"]) < 3]
    assert weak == []
