"""Finds the files to read: files, directories, globs, jsonl, and two names: ``stdlib``, the Python standard library's
own sources, and ``python-chat``, conversations about Python that ship with the package.

They are found here and read in ``read``. Names are relative to the path that the user gave, so that the same files in
another place are the same data. A text file is one document; a jsonl file has one document per line. Hidden files and
directories are skipped.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

import xxhash

from shardwise.errors import UNWRITABLE, DataError, MissingInputError, Problem, first_line
from shardwise.spec.files import open_regular
from shardwise.spec.shipped import recipes_directory
from shardwise.spec.units import typed

STDLIB, CHAT = "stdlib", "python-chat"
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_STDLIB_LEAST_BYTES = 2 * 2**20
_JSONL = {".jsonl", ".ndjson"}
_COMPRESSED = {".bz2": "bunzip2 -k", ".xz": "unxz -k", ".gz": "gunzip -k", ".zst": "zstd -d"}
_LARGEST_ID_BYTES = 8
MOST_WEIGHT = 10_000
"""So often a source is read an epoch at most: each time is a source of its own."""
_AMBIGUOUS = {".json", ".csv", ".tsv"}
"""Records for fine-tuning; in pretraining they are text like any other."""
_WHERE = "data.path"
Kind = Literal["text", "jsonl", "other", "ids"]
_KINDS: dict[str, Kind] = {".parquet": "other", ".arrow": "other", ".bin": "ids", **dict.fromkeys(_JSONL, "jsonl")}
"""By suffix; any other file is text."""
_NO_TEXT = re.compile(
    r"\.(png|jpe?g|gif|webp|ico|pdf|zip|tar|whl|mp[34]|wav|pyc|so|o|a|exe|class|woff2?|ttf|np[yz]|pth?|pkl|db|sqlite"
    r"|safetensors|gguf)"
)
"""Files of these suffixes are left out of a directory."""
_ABOUT = re.compile(r"(readme|licen[cs]e|changelog)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Bytes [start, stop) of one file. ``name`` is relative to what the user named, with forward slashes. Files of
    kind ``other`` are converted to jsonl (``convert``) before they are read; ``origin`` is then the file that the user
    named. Files of kind ``ids`` hold token ids (``binary``). ``copy`` and ``keep`` are for mixtures: the source is read
    for the ``copy``-th time in an epoch (from 0), and this time only that share of its documents."""

    path: Path
    name: str
    kind: Kind
    start: int
    stop: int
    origin: Path | None = None
    copy: int = 0
    keep: float = 1.0

    @property
    def original(self) -> Path:
        """The file that the user named."""
        return self.origin or self.path


@dataclass(frozen=True)
class Sources:
    """The sources of each split. ``share``: of each jsonl file this share of documents is held out, chosen by a hash of
    name and position."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    share: float


@contextmanager
def reading(path: Path | str = "the data", fix: str = "restore it, or name other data") -> Iterator[None]:
    """Turns an OSError into DATA001, but for what a disk says that cannot be written. ``path``: what is read, for
    errors that do not name it."""
    try:
        yield
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise
        path = error.filename or path
        what = f"{path} cannot be read: {error.strerror or first_line(error)}"
        raise MissingInputError(Problem("DATA001", what, str(path), fix)) from error


def find(paths: str | Sequence[str], records: bool = False) -> list[Source]:
    """The files behind ``paths`` in a fixed order, each once. ``records``: json and csv files hold records, not text.
    Raises DATA001 if a path matches nothing."""
    names = [paths] if isinstance(paths, str) else list(paths)
    found: dict[Path, Source] = {}
    for name in names:
        for source in _find_one(name, records):
            if source.path.suffix == ".idx" and source.path.with_suffix(".bin").is_file():
                continue  # it is read with its .bin
            table = records and source.path.suffix in _AMBIGUOUS
            found.setdefault(source.path, replace(source, kind="other") if table else source)
    if not found:
        fix = "data.path=stdlib, or a file or directory"
        raise MissingInputError(Problem("DATA001", "no data is named", _WHERE, fix))
    return list(found.values())


def divide(sources: Sequence[Source], share: float) -> Sources:
    """Hold out ``share`` of ``sources`` for validation. Text files are chosen by a hash of their name (at least the one
    with the lowest hash), of a single text file the end is held out, and documents in jsonl are chosen while they are
    read."""
    texts = [source for source in sources if source.kind in ("text", "ids")]
    lines = [source for source in sources if source.kind == "jsonl"]
    if share == 0:
        return Sources(tuple(sources), (), 0.0)
    if len(texts) == 1 and not lines:
        cut = int(texts[0].stop * (1 - share))
        cut = cut - cut % _LARGEST_ID_BYTES if texts[0].kind == "ids" else _line_start(texts[0].path, cut)
        head, tail = replace(texts[0], stop=cut), replace(texts[0], start=cut)
        return Sources((head,), (tail,) if tail.start < tail.stop else (), share)
    ranked = sorted(texts, key=lambda source: unit_hash(source.name))
    held = {source.path for source in ranked if unit_hash(source.name) < share}
    if not lines:
        held = held or {ranked[0].path}
        held -= {ranked[-1].path}
    train = tuple(source for source in sources if source.path not in held)
    return Sources(train, tuple(s for s in sources if s.path in held or s.kind == "jsonl"), share)


def mix(paths: Sequence[str], weights: Sequence[float], sources: Sequence[Source]) -> tuple[Source, ...]:
    """``sources``, each repeated according to the weight of its path: 2.5 means twice, and half of the documents,
    chosen by hash, a third time. Raises DATA012 for invalid weights."""
    shown = ", ".join(f"{name}: {weight:g}" for name, weight in zip(paths, weights, strict=False))
    if len(weights) != len(paths):
        what, fix = f"{len(weights)} weights for {len(paths)} paths", "one weight for each entry of data.path"
        raise DataError(Problem("DATA012", what, "data.mixture_weights", fix))
    if min(weights) < 0 or not 0 < max(weights) <= MOST_WEIGHT:
        what = f"weights must be from 0 to {MOST_WEIGHT:,} and not all 0, got {shown}"
        fix = "a weight of 1 reads every document once per epoch"
        raise DataError(Problem("DATA012", what, "data.mixture_weights", fix))
    by_path: dict[Path, float] = {}
    for name, weight in zip(paths, weights, strict=True):
        for found in _find_one(name, any(each.origin for each in sources)):
            by_path.setdefault(found.path, weight)
    mixed = []
    for source in sources:
        weight = by_path[source.original]
        for copy in range(math.ceil(weight)):
            keep = min(1.0, weight - copy)
            if source.kind == "jsonl" or unit_hash(f"keep:{source.name}") < keep:
                mixed.append(replace(source, copy=copy, keep=keep))
    return tuple(mixed)


def digest(value: Any) -> str:
    """The xxh3-128 hash, in hex, of a JSON value; the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on ``name`` alone."""
    return xxhash.xxh3_64_intdigest(os.fsencode(name)) / 2**64


def _line_start(path: Path, at: int) -> int:
    """The start of the first line that begins at ``at`` or later."""
    with reading(path), open_regular(path) as file:
        file.seek(max(at - 1, 0))
        while (piece := file.readline(2**20)) and not piece.endswith(b"\n"):
            pass
        return file.tell() if at else 0


def _find_one(name: str, records: bool) -> Iterator[Source]:
    if name == STDLIB:
        yield from _stdlib()
        return
    path = recipes_directory() / "data" / f"{CHAT}.jsonl" if name == CHAT else Path(name).expanduser()
    if path.is_file():
        yield _source(path, path.name)
    elif path.is_dir():
        found = _sources(path, _taken(path, records))
        if not found:
            what = f"`{name}` is a directory without files"
            raise MissingInputError(Problem("DATA001", what, _WHERE, "name another directory, or a file"))
        yield from found
    elif has_magic(name):
        first_magic = next(index for index, part in enumerate(path.parts) if has_magic(part))
        matches = map(Path, sorted(glob(str(path), recursive=True)))
        found = _sources(Path(*path.parts[:first_magic]), filter(Path.is_file, matches))
        if not found:
            raise _nothing(name, f"`{name}` matches no file")
        yield from found
    else:
        raise _nothing(name, f"`{name}` does not exist")


def _taken(directory: Path, records: bool) -> list[Path]:
    """The files of a directory that are data. Pictures and the like never are; beside tables or records a readme or a
    licence is not, and where ``records`` are read no text is."""
    files = [file for file in _walk(directory, set()) if not _NO_TEXT.fullmatch(file.suffix.lower())]
    kinds = {*_KINDS, ".idx", *(_AMBIGUOUS if records else ())}
    tables = [file for file in files if _suffix(file) in kinds]
    if records or not tables:
        return tables or files
    return [file for file in files if _suffix(file) in kinds or not _ABOUT.match(file.stem)]


def _suffix(path: Path) -> str:
    """Return the suffix of a file, without the one of its compression."""
    return Path(path.stem if path.suffix in _COMPRESSED else path).suffix.lower()


def taken_and_left_out(paths: str | Sequence[str], records: bool) -> list[str]:
    """A line about each directory of which something is left out, or files of several suffixes are taken."""
    lines = []
    for name in [paths] if isinstance(paths, str) else paths:
        directory = Path(name).expanduser()
        if name in (STDLIB, CHAT) or not directory.is_dir() or (directory / "manifest.json").is_file():
            continue
        taken = _taken(directory, records)
        rest = Counter(_suffix(path) or "no suffix" for path in set(_walk(directory, set())).difference(taken))
        kinds = Counter(_suffix(path) or "no suffix" for path in taken)
        told = [", ".join(f"{number:,} {kind}" for kind, number in sorted(each.items())) for each in (kinds, rest)]
        lines += [f"{name}: {told[0]}; left out: {told[1] or 'nothing'}"] * bool(rest or len(kinds) > 1)
    return lines


def _sources(root: Path, files: Iterable[Path]) -> list[Source]:
    """``files``, named relative to ``root``."""
    return [_source(file, file.relative_to(root).as_posix()) for file in files]


def _walk(root: Path, left_out: set[str]) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in left_out and not name.startswith("."))
        for file in sorted(files):
            path = Path(directory, file)
            if not file.startswith(".") and path.is_file():
                yield path


def _source(path: Path, name: str) -> Source:
    lines = path.suffix in (".gz", ".zst") and Path(path.stem).suffix in _JSONL
    if path.suffix in _COMPRESSED and not lines:
        fix = f"{_COMPRESSED[path.suffix]} {path}, and name {path.with_suffix('').name}"
        what = f"{path.name} is compressed; of these only .jsonl.gz and .jsonl.zst can be read"
        raise DataError(Problem("DATA008", what, str(path), fix))
    with reading(path, f"chmod +r {typed(path)}"):
        size = path.stat().st_size
        open_regular(path).close()
    return Source(path.resolve(), name, "other" if lines else _KINDS.get(path.suffix, "text"), 0, size)


def _nothing(name: str, what: str) -> MissingInputError:
    """DATA001 with a suggestion: the name with another suffix, a similar name, or the first names in the directory."""
    path = Path(name).expanduser()
    if os.path.lexists(path):  # a link to nothing or in a circle, or no file
        to = f"a broken link to {os.readlink(path)}" if path.is_symlink() else "neither file nor directory"
        fix = f"name a file, a directory or a glob; ls -l {typed(path)}"
        return MissingInputError(Problem("DATA001", f"`{name}` is {to}", _WHERE, fix))
    directory = path.parent
    while not directory.is_dir() or has_magic(str(directory)):
        path, directory = directory, directory.parent
    entries = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    nearest = [f"{path.name}{tail}" for tail in (".gz", ".zst", ".txt", "l") if glob(f"{directory / path.name}{tail}")]
    nearest += difflib.get_close_matches(path.name, entries, n=1)
    if not nearest and has_magic(path.name):
        suffixes = {Path(entry).suffix for entry in entries} & {".txt", ".md", *_JSONL}
        nearest = [f"*{suffix}" for suffix in sorted(suffixes)]
    if nearest:
        better = str(directory / nearest[0])
        return MissingInputError(Problem("DATA001", f"{what} (did you mean {better}?)", _WHERE, f"data.path={better}"))
    there = ", ".join(entries[:5]) + (f" and {len(entries) - 5} more" if len(entries) > 5 else "")
    fix = f"{directory.resolve()} holds {there or 'nothing'}; name a file, a directory or a glob"
    return MissingInputError(Problem("DATA001", what, _WHERE, fix))


def _stdlib() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = _sources(root, (path for path in _walk(root, _STDLIB_LEFT_OUT) if path.suffix == ".py"))
    total = sum(source.stop for source in sources)
    if total < _STDLIB_LEAST_BYTES:
        what = f"the Python in {root} comes without its library's sources: {len(sources)} .py files, {total:,} bytes"
        raise MissingInputError(Problem("DATA001", what, _WHERE, "data.path=DIRECTORY, or a full Python"))
    yield from sources
