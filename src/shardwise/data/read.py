"""Reads sources in units, in bounded memory. The units do not depend on the number of processes that read them.

A unit is a list of byte ranges of files, of about ``UNIT_BYTES`` in total, with all lines that start in them. A long
file is divided into several units, so that processes can share it; a text file is still one document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.data.faults import FAULT_KEY, LINE, UTF16, Fault, Faults, not_unicode, not_utf8
from shardwise.data.source import Source, Sources, reading, unit_hash
from shardwise.errors import DataError, Problem
from shardwise.spec.files import open_regular
from shardwise.spec.units import typed

UNIT_BYTES = 2 * 2**20
LINE_BYTES = 64 * 2**20
EXACT_BYTES = 2**30
"""Of jsonl of at most so many bytes the documents are counted before some are held out."""
_PIECE_BYTES = 2**18
_BOM = b"\xef\xbb\xbf"
_KINDS = {type(None): "null", bool: "a boolean", float: "a number", list: "a list", dict: "an object", str: "a string"}


@dataclass(frozen=True)
class Piece:
    """Part of a document; ``last`` marks its final one. Texts are cut after line ends into pieces of about 256 KiB, so
    that a tokenizer never holds a whole long document. ``held_out``: a document of a jsonl file that belongs to
    validation."""

    text: str
    last: bool
    held_out: bool = False


@dataclass(frozen=True)
class SourcePart:
    """The lines of ``source`` that start in its bytes [start, stop)."""

    source: Source
    start: int
    stop: int

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def continues(self) -> bool:
        """Return whether the part begins inside a document that started in an earlier part."""
        return self.source.kind == "text" and self.start > self.source.start


def units(sources: Sequence[Source]) -> list[tuple[SourcePart, ...]]:
    """Divide and group ``sources``, in their order."""
    result: list[tuple[SourcePart, ...]] = []
    group: list[SourcePart] = []
    room = UNIT_BYTES
    for source in sources:
        for start in range(source.start, source.stop, UNIT_BYTES):
            part = SourcePart(source, start, min(start + UNIT_BYTES, source.stop))
            if group and part.stop - part.start > room:
                result.append(tuple(group))
                group, room = [], UNIT_BYTES
            group.append(part)
            room -= part.stop - part.start
    return [*result, tuple(group)] if group else result


def pieces(part: SourcePart, text_key: str, share: float, faults: Faults) -> Iterator[Piece]:
    """The text of ``part``, document by document, piece by piece. ``share`` of a jsonl file's documents are held
    out."""
    if part.source.kind == "jsonl":
        for offset, line, held_out in _documents(part, share, faults):
            with faults.watch(part.source, offset):
                yield from _split(_record(part, offset, line, text_key), last=True, held_out=held_out)
    else:
        with faults.watch(part.source, part.start):
            yield from _text(part, faults)


def counted(source: Source, limit: int | None = None) -> Iterator[int]:
    """The offset of each document of a jsonl file, of those only that start in its first ``limit`` bytes."""
    stop = source.stop if limit is None else min(source.stop, source.start + limit)
    for offset, line in _lines(SourcePart(source, source.start, stop), Faults(skip=True)):
        if line.strip():
            yield offset


def exactly(sources: Sources, least: int) -> Sources:
    """``sources`` whose ``share`` is the hash below which documents of jsonl are held out, so that their number is the
    share of all to one document, and at least ``least``, of few no more than a quarter. Above ``EXACT_BYTES`` the share
    stays as it is: of so many the hash takes it within a few per mille."""
    lines = [source for source in sources.train if source.kind == "jsonl" and not source.copy]
    if not sources.share or not lines or sum(source.stop for source in lines) > EXACT_BYTES:
        return sources
    names = (f"{source.name}:{offset}" for source in lines for offset in counted(source))
    hashes = sorted(map(unit_hash, names))
    number = max(round(sources.share * len(hashes)), min(least, max(len(hashes) // 4, 1)))
    if number < len(hashes):
        return replace(sources, share=hashes[number])
    return replace(sources, share=0.0, validation=tuple(each for each in sources.validation if each.kind != "jsonl"))


def _lines(part: SourcePart, faults: Faults) -> Iterator[tuple[int, bytes]]:
    """(offset, line) for each line that starts in the part; one over 64 MiB is a fault (DATA007)."""
    with reading(part.source.original), open_regular(part.path) as file:
        if part.start:
            file.seek(part.start - 1)
            _pass_line(file, part.stop)
        while (offset := file.tell()) < part.stop and (line := file.readline(LINE_BYTES + 1)):
            if offset == 0 and line.startswith(UTF16):  # reported once for the whole file
                what = f"{part.name} is UTF-16, not UTF-8"
                raise DataError(Problem("DATA006", what, str(part.source.original), not_utf8(part.path)))
            if len(line) > LINE_BYTES:
                what, fix = f"exceeds {LINE_BYTES // 2**20} MiB", "break the line up, or leave it out"
                faults.add(part.source, offset, Fault("DATA007", what, fix))
                _pass_line(file, part.stop)
            else:
                yield offset, line.removeprefix(_BOM) if offset == 0 else line


def _pass_line(file: BinaryIO, stop: int) -> None:
    """Move to the end of the current line, or past ``stop``: lines that start there belong to another part."""
    while file.tell() < stop and (piece := file.readline(_PIECE_BYTES)):
        if piece.endswith(b"\n"):
            return


def _text(part: SourcePart, faults: Faults) -> Iterator[Piece]:
    block, block_start = bytearray(), part.start
    for offset, line in _lines(part, faults):
        if not block:
            block_start = offset
        block += line
        if len(block) >= _PIECE_BYTES:
            yield from _split(_decode(part, block_start, bytes(block)), last=False)
            block.clear()
    text = _decode(part, block_start, bytes(block))
    last = part.stop == part.source.stop
    if text or last:
        yield from _split(text, last)


def _split(text: str, last: bool, held_out: bool = False) -> Iterator[Piece]:
    """Cut a text into pieces: after a line end, or else before a space, if there is one."""
    start = 0
    while len(text) - start > 2 * _PIECE_BYTES:
        stop = start + _PIECE_BYTES
        cut = text.rfind("\n", start, stop) + 1 or text.rfind(" ", start + 1, stop)
        stop = cut if cut > start else stop
        yield Piece(text[start:stop], False, held_out)
        start = stop
    yield Piece(text[start:], last, held_out)


def _documents(part: SourcePart, share: float, faults: Faults) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, line, held out) for each line of jsonl to be read. Of a source that is read more than once, held-out
    documents are read once; of a source that is read in part, some documents are skipped."""
    source = part.source
    for offset, line in _lines(part, faults):
        if not line.strip():
            continue
        held_out = share > 0 and unit_hash(f"{part.name}:{offset}") < share
        kept = not source.copy if held_out else unit_hash(f"keep:{part.name}:{offset}") < source.keep
        if kept:
            yield offset, line, held_out


def records(part: SourcePart, share: float, faults: Faults) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """(offset, record, held out) for each record of a jsonl file. Faults: DATA004 (not JSON), DATA005 (no object),
    DATA006 (not UTF-8), DATA007 (too long or too deep)."""
    if part.source.kind != "jsonl":
        fix = "name .jsonl, .json, .csv, .parquet or .arrow files (jsonl also as .gz and .zst)"
        kind = "token ids" if part.source.kind == "ids" else "text"
        what = f"{part.name} is {kind}; methods sft and dpo read records"
        raise DataError(Problem("DATA005", what, str(part.path), fix))
    for offset, line, held_out in _documents(part, share, faults):
        with faults.watch(part.source, offset):
            yield offset, _object(part, offset, line, int, '{"messages": [...]}'), held_out


def _record(part: SourcePart, offset: int, line: bytes, text_key: str) -> str:
    """The text of one line of jsonl. Raises Fault DATA004 (not JSON), DATA005 (no such text), DATA006 (not UTF-8),
    DATA007 (too deep)."""
    # Parsed as floats: parsing a very long integer would take quadratic time.
    record = _object(part, offset, line, float, f'{{"{text_key}": "..."}}')
    if text_key not in record:
        texts = [key for key, value in record.items() if isinstance(value, str)]
        best = max(texts, key=lambda key: len(record[key]), default=None)
        fix = f"data.text_key={best}" if best is not None else f"give every line a `{text_key}`"
        keys = ", ".join(list(record)[:12]) or "none"
        raise Fault("DATA005", f"has no `{text_key}`; its keys are {keys}", fix)
    text = record[text_key]
    if not isinstance(text, str):
        fix = f"make `{text_key}` a string, or leave the record out"
        raise Fault("DATA005", f"`{text_key}` is {_KINDS[type(text)]}, not a string", fix)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = not_unicode(error)
        raise Fault(found.code, f"character {error.start + 1}: {found.what}", found.fix) from error
    return text


def _object(
    part: SourcePart, offset: int, line: bytes, number: type[int] | type[float], example: str
) -> dict[str, Any]:
    """One line of jsonl, which must be an object."""
    decoded = _decode(part, offset, line).rstrip("\r\n")
    try:
        record = json.loads(decoded, parse_int=number)
    except JSONDecodeError as error:
        snippet = decoded[max(error.colno - 41, 0) :].strip()[:60]
        why = error.msg.lower().removesuffix(" at").removesuffix(" starting")
        fix = f"repair the line: sed -n {LINE}p {typed(part.path)}"
        raise Fault("DATA004", f"col {error.colno}: {why}: `{snippet}`", fix) from error
    except ValueError as error:  # a whole number of thousands of digits
        what = f"holds an integer of more than {sys.get_int_max_str_digits():,} digits"
        raise Fault("DATA004", what, "shorten the number") from error
    if not isinstance(record, dict):
        kind = _KINDS.get(type(record), "a number")
        raise Fault("DATA005", f"is {kind}, not an object", f"a line is an object such as {example}")
    if FAULT_KEY in record:
        raise Fault("DATA004", record[FAULT_KEY], "quote fields that hold separators or line ends")
    return record


def _decode(part: SourcePart, offset: int, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        start = offset + error.start + (len(_BOM) if offset == 0 and _starts_with_bom(part) else 0)
        line_start = start - (error.start - (data.rfind(b"\n", 0, error.start) + 1))
        place = f"byte {start - line_start + 1}"
        what = f"{place}: not UTF-8 (0x{data[error.start]:02x}), at byte {start:,} of the file"
        raise Fault("DATA006", what, f"{not_utf8(part.path)}; or leave the file out", line_start) from error


def _starts_with_bom(part: SourcePart) -> bool:
    with open_regular(part.path) as file:
        return file.read(len(_BOM)) == _BOM
