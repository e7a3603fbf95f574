"""Bad records: what is wrong with each, and on which line. The first ones are reported together, or all are skipped."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.data.source import Source
from shardwise.errors import DataError, Problem
from shardwise.spec.files import open_regular
from shardwise.spec.units import typed

MOST = 20
"""Bad records that are reported at once."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FAULT_KEY = "\0fault"
"""The only key of an object that replaces a row which could not become a record; its value says what is wrong."""
LINE = "<line>"
"""A placeholder for the line number in the text of a fix."""


class Fault(Exception):
    """The fault of one record: a code, a description and a fix. ``offset``: its byte in the file; None: where the
    record starts."""

    def __init__(self, code: str, what: str, fix: str, offset: int | None = None) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.fix = fix
        self.offset = offset


def not_unicode(error: UnicodeEncodeError) -> Fault:
    """Return the fault of a text that cannot be encoded. Bytes in tables that are not UTF-8 arrive as lone
    surrogates."""
    point = ord(error.object[error.start])
    if 0xDC80 <= point <= 0xDCFF:
        fix = "write the column as UTF-8 text, or leave the record out"
        return Fault("DATA006", f"not UTF-8 (0x{point - 0xDC00:02x})", fix)
    return Fault("DATA006", f"lone surrogate U+{point:04X}", "write both halves of the character, or leave it out")


def not_utf8(path: Path) -> str:
    """The command that converts ``path`` to UTF-8. UTF-16 is recognised by its first bytes; Latin-1 is a guess."""
    with open_regular(path) as file:
        marked = file.read(2) in UTF16
    recode = f"-t utf-8 {typed(path)} > {typed(path.stem + '-utf8' + path.suffix)}"
    return f"iconv -f utf-16 {recode}" if marked else f"iconv -f latin1 {recode}, if it is Latin-1"


@dataclass(frozen=True)
class BadRecord:
    """One bad record. ``where``: the file that the user named; ``whole``: a text file, which is never skipped."""

    code: str
    name: str
    line: int
    what: str
    fix: str
    where: str
    whole: bool = False


class BadRecords(DataError):
    """The first bad records that were found."""

    def __init__(self, *found: BadRecord) -> None:
        self.found = found[:MOST]
        super().__init__(*_problems(self.found))

    def __reduce__(self) -> tuple[type[BadRecords], tuple[BadRecord, ...]]:
        return type(self), self.found  # so that a tokenising process can tell its parent


def _problems(found: Sequence[BadRecord]) -> list[Problem]:
    """One problem for each record; records of a file with the same fault share one."""
    alike: dict[tuple[str, ...], list[BadRecord]] = {}
    for bad in found:
        alike.setdefault((bad.code, bad.where, bad.what), []).append(bad)
    problems = []
    for first, *others in alike.values():
        what = f"{first.name}:{first.line} {first.what}"
        if others:
            what += "; the same at " + ", ".join(f"{bad.name}:{bad.line}" for bad in others)
        problems.append(Problem(first.code, what, first.where, first.fix))
    if not all(bad.whole for bad in found):
        skip = "data.on_bad_sample=skip leaves out every bad record"
        skip += f" (these are the first {MOST})" if len(found) == MOST else ""
        problems[-1] = replace(problems[-1], fix=f"{problems[-1].fix}; {skip}")
    return problems


class Faults:
    """Collects bad records while files are read. With ``skip`` they are left out and counted by code; otherwise they
    are raised as BadRecords, once there are enough of them or ``settle`` is called. A text file is not a record and is
    never left out."""

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.counts: Counter[str] = Counter()
        self._found: list[BadRecord] = []
        self._counted = (Path(), 0, 1)

    @contextmanager
    def watch(self, source: Source, offset: int) -> Iterator[None]:
        """A Fault raised in the block is attributed to the record at byte ``offset``; the rest of the block is
        skipped."""
        try:
            yield
        except Fault as fault:
            self.add(source, offset, fault)
        except RecursionError:
            fix = "flatten the record or leave it out"
            self.add(source, offset, Fault("DATA007", "is nested too deeply to be read", fix))

    def add(self, source: Source, offset: int, fault: Fault) -> None:
        """Count or collect one fault."""
        if self.skip and source.kind == "jsonl":
            self.counts.update(("bad", fault.code))
            return
        line = self._line(source.path, offset if fault.offset is None else fault.offset)
        fix, where = fault.fix.replace(LINE, str(line)), str(source.original)
        self._found.append(BadRecord(fault.code, source.name, line, fault.what, fix, where, source.kind != "jsonl"))
        if len(self._found) == MOST:
            self.raise_found()

    def raise_found(self) -> None:
        """Raises BadRecords if there are any."""
        if self._found:
            raise BadRecords(*self._found)

    def _line(self, path: Path, offset: int) -> int:
        """The number, from 1, of the line that holds byte ``offset``. Reads the file up to there, or from the fault
        before on."""
        known, start, number = self._counted
        start, number = (start, number) if known == path and start <= offset else (0, 1)
        with open_regular(path) as file:
            file.seek(start)
            left = offset - start
            while left > 0 and (block := file.read(min(left, 2**20))):
                number += block.count(b"\n")
                left -= len(block)
        self._counted = path, offset, number
        return number
