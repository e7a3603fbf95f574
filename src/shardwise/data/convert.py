"""Converts other file formats to jsonl (one record per line), once, into the cache, in bounded memory.

The formats are compressed jsonl, json (a list of objects), csv and tsv, parquet and arrow. So there is one reader of
records, one way to divide a file among processes, and one numbering: line n of the result is line n of compressed
jsonl, csv and tsv (a record of several lines is at its last line) and record n of the other formats.
"""

from __future__ import annotations

import csv
import errno
import gzip
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, TextIO
from uuid import UUID

from shardwise.data.faults import FAULT_KEY, not_utf8
from shardwise.data.source import Source, digest, reading
from shardwise.data.whole import once
from shardwise.errors import DataError, Problem, UnavailableError, first_line

WHOLE_BYTES = 256 * 2**20
"""A json file is parsed whole, so it may not be larger."""
MOST_TIMES, LEAST_BYTES = 200, 2**30
"""A packed file may become so many times larger; text becomes three to ten times. Below ``LEAST_BYTES`` it does no
harm."""
ROOM = 0.9
"""The share of the free disk that one file may take."""
HEAD_BYTES = 2**16
_BLOCK_BYTES, _LINE_CHARACTERS = 2**20, 64 * 2**20
_LEAVE_OUT = "leave the column out of the file"
_NO_RECORD = object()
"""Becomes an empty line, so that line numbers stay those of the source file."""
VERSION = 3
"""The version of the conversion: cached results of another version are not used."""


def converted(source: Source, cache: Path) -> Path:
    """The directory in the cache that holds, or will hold, what ``source`` is converted to."""
    with reading(source.path):
        stat = source.path.stat()
    return cache / "converted" / digest([VERSION, str(source.path), stat.st_size, stat.st_mtime_ns])


def to_jsonl(source: Source, cache: Path) -> Source:
    """The jsonl in the cache of a source of kind ``other``. Raises DATA004 to DATA008 for files that cannot be read."""
    target = converted(source, cache)

    def make(directory: Path) -> None:
        with (directory / "records.jsonl").open("xb") as out, reading(source.path):
            _convert(source, out)

    made = once(target, make) / "records.jsonl"
    return replace(source, path=made, kind="jsonl", stop=made.stat().st_size, origin=source.path)


def head(source: Source, directory: Path) -> Source:
    """The first records of ``source`` as jsonl, about ``HEAD_BYTES`` of them, written into ``directory``."""
    if source.kind != "other":
        return replace(source, stop=min(source.stop, HEAD_BYTES))
    path = directory / f"{digest(str(source.path))}.jsonl"
    with path.open("wb") as out, reading(source.path):
        _convert(source, out, HEAD_BYTES)
    data = path.read_bytes()
    stop = len(data) if len(data) < HEAD_BYTES else data.rfind(b"\n") + 1  # the last line may have been cut
    return replace(source, path=path, kind="jsonl", stop=min(stop, HEAD_BYTES), origin=source.path)


def _convert(source: Source, out: IO[bytes], enough_bytes: float = math.inf) -> None:
    suffix, room_bytes = source.path.suffix, int(ROOM * shutil.disk_usage(Path(out.name).parent).free)
    if suffix in (".gz", ".zst"):
        for _ in _decompress(source, out, enough_bytes):
            _check_size(source, out, room_bytes)
        return
    reader = {".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow}[suffix]
    for number, record in enumerate(reader(source), 1):
        if out.tell() >= enough_bytes:
            break
        try:
            line = "" if record is _NO_RECORD else json.dumps(record, ensure_ascii=False, default=_plain)
        except (TypeError, RecursionError) as error:
            code, why = ("DATA005", f"holds {error}") if isinstance(error, TypeError) else ("DATA007", "is too deep")
            raise DataError(Problem(code, f"{source.name}:{number} {why}", str(source.path), _LEAVE_OUT)) from error
        out.write(line.encode("utf-8", "backslashreplace") + b"\n")  # a lone surrogate as JSON writes it: \udc80
        if number % 1024 == 0:
            _check_size(source, out, room_bytes)


def _check_size(source: Source, out: IO[bytes], room_bytes: int) -> None:
    """Raise DATA007 once the text of ``source`` is too large for the file, and OSError once it is for the disk: a file
    of a few MB can be made to fill any."""
    packed, size = source.path.stat().st_size, out.tell()
    if size > max(LEAST_BYTES, MOST_TIMES * packed):
        what = f"{source.name}, {packed:,} bytes, becomes more than {MOST_TIMES} times as much text"
        fix = f"if that is what it should hold, unpack it yourself: data.path={source.path.with_suffix('')}"
        raise DataError(Problem("DATA007", what, str(source.path), fix))
    if size > room_bytes:
        raise OSError(errno.ENOSPC, f"{source.name} becomes larger than the disk has room for", out.name)


def _plain(value: Any) -> Any:
    """The JSON form of values in tables that are not strings, numbers or lists: binary values are decoded as UTF-8,
    dates and times become ISO 8601 strings, decimals and durations (in seconds) numbers. Bytes that are not UTF-8 are
    cut after the first invalid byte, which becomes a lone surrogate: an error (DATA006) only if the value would be
    trained on, so that a column of images does no harm."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                return value[: error.start + 1].decode("utf-8", "surrogateescape")
        case date() | time():
            return value.isoformat()
        case Decimal():
            return float(value)
        case timedelta():
            return value.total_seconds()
        case UUID():
            return f"{value}"
    raise TypeError(f"a value of type {type(value).__name__}, which is neither text nor number")


def _decompress(source: Source, out: IO[bytes], enough_bytes: float) -> Iterator[None]:
    lines = written = 0
    try:
        with gzip.open(source.path) if source.path.suffix == ".gz" else _zstd(source.path) as stream:
            while written < enough_bytes and (block := stream.read(_BLOCK_BYTES)):
                out.write(block)
                written += len(block)
                lines += block.count(b"\n")
                yield
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        cut = isinstance(error, EOFError) or "trunc" in str(error).lower()
        why = "ends early" if cut else f"is damaged ({str(error).lower()})"
        what = f"{source.name} {why} at byte {written:,} of its text ({lines:,} lines were read)"
        raise DataError(Problem("DATA008", what, str(source.path), "fetch the file again")) from error


def _zstd(path: Path) -> Any:
    return _pyarrow(path).CompressedInputStream(str(path), "zstd")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        what = f"{path.name} is read with pyarrow, which is not installed"
        raise UnavailableError(Problem("DATA008", what, str(path), 'pip install "shardwise[parquet]"')) from error
    return pyarrow


def _json(source: Source) -> Iterator[Any]:
    if source.path.stat().st_size > WHOLE_BYTES:
        what = f"{source.name} is a single JSON value of more than {WHOLE_BYTES // 2**20} MiB"
        name = source.path.with_suffix(".jsonl").name
        raise DataError(Problem("DATA007", what, str(source.path), f"jq -c '.[]' {source.path} > {name}"))
    try:
        found = json.loads(source.path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        what = f"{source.name} byte {error.start + 1}: not UTF-8 (0x{error.object[error.start]:02x})"
        raise DataError(Problem("DATA006", what, str(source.path), not_utf8(source.path))) from error
    except (ValueError, RecursionError) as error:
        code = "DATA007" if isinstance(error, RecursionError) else "DATA004"
        what = f"{source.name}: {str(error).lower()}"
        raise DataError(Problem(code, what, str(source.path), "repair it; a json file is a list of objects")) from error
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(found) == 1 and lists else [found]
    yield from found if isinstance(found, list) else [found]


def _csv(source: Source) -> Iterator[Any]:
    csv.field_size_limit(_LINE_CHARACTERS)
    with source.path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(
            _lines(source, file), delimiter="\t" if source.path.suffix == ".tsv" else ",", strict=True
        )
        line = 0
        try:
            for row in rows:
                for _ in range(line + 1, rows.line_num):
                    yield _NO_RECORD
                line = rows.line_num
                if None in row or None in row.values():
                    got = sum(isinstance(value, str) for value in row.values()) + len(row.get(None) or ())
                    row = {FAULT_KEY: f"has {_fields(got)}, the header {_fields(len(rows.fieldnames or ()))}"}
                yield row
        except csv.Error as error:
            what = f"{source.name}:{rows.line_num} {error}"
            raise DataError(Problem("DATA004", what, str(source.path), "repair the line")) from error
        except UnicodeDecodeError as error:  # which counts in blocks of the file
            raise _not_utf8(source) from error


def _lines(source: Source, file: TextIO) -> Iterator[str]:
    """The lines of a text, none longer than a field may be: a file need not have an end of line at all."""
    number = 0
    while line := file.readline(_LINE_CHARACTERS):
        number += 1
        if len(line) == _LINE_CHARACTERS:
            what = f"{source.name}:{number} is longer than {_LINE_CHARACTERS:,} characters"
            raise DataError(Problem("DATA007", what, str(source.path), "repair the line"))
        yield line


def _fields(count: int) -> str:
    return "1 field" if count == 1 else f"{count} fields"


def _not_utf8(source: Source) -> DataError:
    place = ": not UTF-8"
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f":{number} byte {error.start + 1}: not UTF-8 (0x{line[error.start]:02x})"
                break
    return DataError(Problem("DATA006", f"{source.name}{place}", str(source.path), not_utf8(source.path)))


def _parquet(source: Source) -> Iterator[dict[str, Any]]:
    pyarrow = _pyarrow(source.path)
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _damaged(source, error) from error


def _arrow(source: Source) -> Iterator[dict[str, Any]]:
    """Arrow's stream format (what datasets writes) or its file format."""
    pyarrow = _pyarrow(source.path)
    try:
        with source.path.open("rb") as file:
            stream = file.read(6) != b"ARROW1"
        with pyarrow.memory_map(str(source.path)) as mapped:
            reader = pyarrow.ipc.open_stream(mapped) if stream else pyarrow.ipc.open_file(mapped)
            batches = iter(reader) if stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                _check_offsets(pyarrow, batch)
                for start in range(0, batch.num_rows, 1024):
                    yield from batch.slice(start, 1024).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _damaged(source, error) from error


def _check_offsets(pyarrow: Any, batch: Any) -> None:
    """Raise ArrowInvalid for columns that point outside of the file, which would be read there: the process would end
    with a signal. Text that is not UTF-8 is told later, with its line."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise


def _damaged(source: Source, error: Exception) -> DataError:
    if type(error) in (OverflowError, ValueError):  # a date or a duration that Python has no room for
        what = f"{source.name} holds a value that is out of range: {first_line(error)}"
        return DataError(Problem("DATA005", what, str(source.path), _LEAVE_OUT))
    what = f"{source.name} cannot be read: {first_line(error)}"
    return DataError(Problem("DATA008", what, str(source.path), "fetch the file again"))
