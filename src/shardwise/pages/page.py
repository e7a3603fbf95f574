"""A page: a title, what it comes to, and sections of pictures, tables, lines and texts to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from shardwise.pages.charts import Picture, element

MARK = '<meta name="generator" content="shardwise {}">'
"""By this a page of ours is known, and its kind."""


class Marked(str):
    """A cell or a line that is markup already, and is not escaped."""

    def __html__(self) -> str:
        return str(self)


def link(address: str, words: str) -> Marked:
    """A link to another page, relative to this one."""
    return Marked(element("a", escape(words), href=address))


@dataclass(frozen=True)
class Table:
    """Rows of text under their heads; ``align`` has one of ``<`` and ``>`` for each column. ``chosen``: the numbers of
    rows that are marked."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    title: str = ""
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Paragraphs:
    """A paragraph each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """A text to be copied as it is."""

    title: str
    text: str
    folded: bool = False


Part = Picture | Table | Paragraphs | Listing


@dataclass(frozen=True)
class Chapter:
    """The parts of a page under one head."""

    title: str
    parts: Sequence[Part]

    @property
    def name(self) -> str:
        """The name by which links find it."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())


@dataclass(frozen=True)
class WebPage:
    """A page, of whose kind are ``plan``, ``run``, ``comparison`` and ``board``. ``verdict``: the first that is read;
    ``tone``: ``good``, ``close`` or ``bad``, or none."""

    title: str
    verdict: str
    sections: Sequence[Chapter]
    tone: str = ""
    facts: Sequence[str] = field(default=())
    kind: str = "plan"

    def html(self) -> str:
        """The page as one file. Every text is escaped but for pictures and links, which escape theirs."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        here = FileSystemLoader(Path(__file__).parent)
        jinja = Environment(
            loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        kinds = {kind: kind.__name__.lower() for kind in (Picture, Table, Paragraphs, Listing)}
        template, mark = jinja.get_template("page.html"), MARK.format(self.kind)
        return template.render(page=self, mark=mark, kind=lambda part: kinds[type(part)])
