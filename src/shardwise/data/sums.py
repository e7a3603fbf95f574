"""Sums over files, and whether the files that data were prepared from are still the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardwise.data.source import Sources, reading
from shardwise.spec.files import open_regular
from shardwise.spec.record import Count

_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class SourceFacts:
    """A file that data were prepared from: where it lay, its size, when it was changed, and its xxh3-128."""

    path: str
    size_bytes: Count
    mtime_ns: int
    xxh3: str


def checksum(path: Path) -> str:
    """xxh3-128 of a file, in hex."""
    summed = xxhash.xxh3_128()
    with reading(path), open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            summed.update(block)
    return summed.hexdigest()


@reading()
def source_files(sources: Sources) -> dict[Path, SourceFacts]:
    """Path, size, time and checksum of each source file."""
    facts: dict[Path, SourceFacts] = {}
    for path in (s.original for s in (*sources.train, *sources.validation)):
        if path not in facts:
            stat = path.stat()
            facts[path] = SourceFacts(str(path), stat.st_size, stat.st_mtime_ns, checksum(path))
    return facts


@reading()
def first_change(files: Iterable[SourceFacts]) -> str | None:
    """The first file whose content has changed. Missing files do not count: prepared data may travel alone."""
    for facts in files:
        path = Path(facts.path)
        if not path.is_file():
            continue
        stat = path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (facts.size_bytes, facts.mtime_ns)
        if not same and (stat.st_size != facts.size_bytes or checksum(path) != facts.xxh3):
            return str(path)
    return None
