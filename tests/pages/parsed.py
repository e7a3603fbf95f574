"""A page as a browser would read it: its words, what it loads, and its pictures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "link", "br", "hr", "img", "input"}
SVG = "{http://www.w3.org/2000/svg}"


class Parsed(HTMLParser):
    """``words``: all text but styles and scripts; ``tags``: each with its attributes; ``open``: what is not closed;
    ``wrong``: what is closed and was not open. SVG's empty elements close themselves."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.words = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data + " "

    def pictures(self) -> list[ElementTree.Element]:
        """Each chart as XML. Raises ParseError for one that is not."""
        found = re.findall(r'<svg xmlns="http://www.w3.org/2000/svg".*?</svg>', self.source, re.DOTALL)
        return [ElementTree.fromstring(each) for each in found]


def faults(text: str) -> list[str]:
    """Everything that is wrong with a page: not well-formed, not alone, not readable without scripts, too large, or a
    picture without words."""
    page = Parsed(text)
    found = [f"not closed: {page.open}"] * bool(page.open) + [f"closed, but not open: {tag}" for tag in page.wrong]
    found += [f"<{tag}>" for tag, _ in page.tags if tag in ("script", "iframe", "object", "embed", "img", "base")]
    for tag, given in page.tags:
        found += [f"{tag} has {name}" for name in given if name.startswith("on")]
        links = (given.get(name) or "#" for name in ("href", "src", "srcset", "data") if name in given)
        found += [f"{tag} loads {link}" for link in links if not link.startswith(("#", "data:,"))]
    found += ["a style loads something"] * bool(re.search(r"@import|url\(", text))
    names = [given["id"] for _, given in page.tags if "id" in given]
    found += [f"two of id {name}" for name in set(names) if names.count(name) > 1]
    links = {given["href"] for tag, given in page.tags if tag == "a"}
    found += [f"no place {link}" for link in links if link and link[1:] not in names]
    found += [f"{len(text.encode()):,} bytes"] * (len(text.encode()) > 2_000_000)
    for picture in page.pictures():
        if picture.get("role") != "img" or not picture.get("aria-label"):
            found.append("a picture without words")
        numbers = re.findall(r'="([^"]*)"', ElementTree.tostring(picture, "unicode"))
        found += [f"a coordinate {each}" for each in numbers if re.search(r"(?<![\w ])(nan|inf)\b", each)]
    return found
