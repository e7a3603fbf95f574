"""The manifest of a checkpoint directory, and whether the files still match it. No torch here.

    step-00000400/
      manifest.json                        written last: run, step, files with hashes, tensors with slices
      state.json                           step, tokens, data cursor, ... as JSON
      model-00000-of-00002.safetensors     one file a rank and group of tensors (the first part of their names)
      optim-00000-of-00002.safetensors

A manifest that parses and carries its own hash *is* the mark of a committed checkpoint. The hashes are against
accidents, not against an attacker: xxh3-128 of each 16 MiB of a file (so a fault is located), sha256 of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from operator import add, gt, sub
from pathlib import Path
from typing import Any

import xxhash
from pydantic import FiniteFloat

from shardwise.errors import DataError, Problem
from shardwise.spec.file_kind import recognise
from shardwise.spec.files import MANIFEST_BYTES, read_regular, regular
from shardwise.spec.record import Count, from_json
from shardwise.spec.units import typed

FORMAT = 1
CHUNK_BYTES = 16 << 20
MANIFEST, STATE = "manifest.json", "state.json"
_STEP = re.compile(r"step-(\d{8,})")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEAD = b'{"sha256":"'
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"


ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1}
"""The data types of safetensors that checkpoints hold, and the bytes of an element."""
HEADER_BYTES = 100 << 20
"""The largest header of a safetensors file, as the package that reads them has it."""


class Rejected(DataError):
    """A checkpoint that must not be loaded; its one problem says why."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file and the xxh3-128 of each of its 16 MiB chunks, in hex."""

    bytes: Count
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """A box of a tensor: where it begins and its sizes, in elements; its file, and the byte in it where it begins."""

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: str
    begin: Count


@dataclass(frozen=True)
class TensorRecord:
    """Global shape, safetensors dtype (``F32``, ``BF16``, ...) and the slices that make it up."""

    shape: tuple[Count, ...]
    dtype: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Manifest:
    run_id: str
    step: Count
    generation: Count
    world_size: Count
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    format: Count = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())


@dataclass(frozen=True)
class _Format:
    """The part of a manifest that every version has."""

    format: Count = FORMAT


def step_name(step: int) -> str:
    """The directory of a committed step."""
    return f"step-{step:08d}"


def candidates(directory: str | Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that has the name of a committed checkpoint, newest step first."""
    root = Path(directory)
    names = os.listdir(root) if root.is_dir() else []
    found = [(int(match[1]), root / name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(found, reverse=True)


def train_again(run: Path) -> str:
    """The command that resumes a run from its newest checkpoint, or starts it again if there is none."""
    return f"shardwise train {'--resume ' if candidates(run / 'checkpoints') else ''}{typed(run)}"


def chunk_hashes(blocks: Iterable[memoryview]) -> FileRecord:
    """The record of the bytes of ``blocks``, one after another."""
    chunks = []
    hasher = xxhash.xxh3_128()
    filled = 0
    total = 0
    for block in blocks:
        while len(block):
            part = block[: CHUNK_BYTES - filled]
            hasher.update(part)
            filled = filled + len(part)
            total = total + len(part)
            block = block[len(part) :]
            if filled == CHUNK_BYTES:
                chunks.append(hasher.hexdigest())
                hasher, filled = xxhash.xxh3_128(), 0
    return FileRecord(total, (*chunks, hasher.hexdigest()) if filled or not chunks else tuple(chunks))


def dump(manifest: Manifest) -> bytes:
    """The manifest's file: its JSON inside a frame with the sha256 of exactly those bytes."""
    body = json.dumps(manifest, default=vars, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _TAIL


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``; :class:`Rejected` if a bit has changed, if it names a file outside its directory, or if
    what it lists is not whole: of every file each chunk, of every tensor each element."""
    digest, body = data[len(_HEAD) : len(_HEAD) + 64], data[len(_HEAD) + 64 + len(_MIDDLE) : -len(_TAIL)]
    if data != _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _TAIL:
        shown = digest[:12].decode(errors="replace")
        what = f"the manifest is damaged: its contents do not match its sha256 ({shown}...)"
        raise Rejected(Problem("CKPT007", what, where))
    try:
        if (written := from_json(_Format, body).format) > FORMAT:
            what = f"written in checkpoint format {written}, this program reads up to {FORMAT}"
            raise Rejected(Problem("CKPT009", what, where, "pip install --upgrade shardwise"))
        manifest = from_json(Manifest, body)
    except ValueError as error:
        raise Rejected(Problem("CKPT009", f"this is not a Shardwise manifest: {error}", where)) from error
    for name in {*manifest.files, *(s.file for record in manifest.tensors.values() for s in record.slices)}:
        if not _SAFE_NAME.fullmatch(name):
            raise Rejected(Problem("SEC006", f'file name "{name}" leaves the checkpoint directory', where))
        if name not in manifest.files:
            raise Rejected(Problem("CKPT009", f"a tensor lies in {name}, which the manifest does not list", where))
    for name, file in manifest.files.items():
        if len(file.chunks) != max(1, -(-file.bytes // CHUNK_BYTES)):
            what = f"{name} is {file.bytes} bytes, and {len(file.chunks)} chunks of it are hashed"
            raise Rejected(Problem("CKPT009", what, where))
    check_coverage(manifest.tensors, where)
    return manifest


def read(directory: str | Path) -> Manifest:
    """The manifest of a committed checkpoint, checked against its hash and the directory's name."""
    path = Path(directory) / MANIFEST
    try:
        manifest = parse(read_regular(path, MANIFEST_BYTES), str(path))
    except FileNotFoundError:
        what = "this checkpoint was never committed (no manifest)"
        raise Rejected(Problem("CKPT008", what, str(directory))) from None
    except OSError as error:
        raise Rejected(Problem("CKPT007", f"the manifest cannot be read: {error.strerror}", str(path))) from error
    if Path(directory).name != step_name(manifest.step):
        what = f"the manifest is of step {manifest.step}, the directory of another"
        raise Rejected(Problem("CKPT007", what, str(directory)))
    return manifest


def check_files(
    directory: str | Path, manifest: Manifest, names: Iterable[str], hashes: bool = True, evict: bool = False
) -> None:
    """Compare the named files with the manifest: sizes, the header of one of tensors, and (``hashes``) every
    byte. Rejected at the first fault.

    ``evict``: drop them from the system's cache first, so that they are read back from the disk.
    """
    placed: dict[str, list[tuple[str, str, Slice]]] = {name: [] for name in names}
    for tensor, entry in manifest.tensors.items():
        for part in entry.slices:
            if part.file in placed:
                placed[part.file].append((tensor, entry.dtype, part))
    for name, parts in placed.items():
        path, record = Path(directory) / name, manifest.files[name]
        try:
            with opened(regular(path, os.O_RDONLY | os.O_NOFOLLOW)) as descriptor:
                _check_size(path, os.fstat(descriptor).st_size, record.bytes)
                if evict:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                if hashes:
                    _check_hashes(path, descriptor, record)
                if path.suffix == ".safetensors":
                    _check_header(path, descriptor, record, parts)
        except FileNotFoundError:
            what = f"the manifest lists {len(manifest.files)} files, {name} is missing"
            raise Rejected(Problem("CKPT014", what, str(directory))) from None
        except OSError as error:
            raise Rejected(Problem("CKPT007", f"{name} cannot be read: {error.strerror}", str(path))) from error


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The facts of a run of ``shardwise train`` besides its state. A user's own loop saves other facts, which may be
    anything."""

    data: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    early_stopping: tuple[FiniteFloat | None, Count] = (None, 0)
    validation: FiniteFloat | None = None


def read_facts(directory: str | Path, kind: Callable[..., object] | None = None) -> dict[str, Any]:
    """The contents of state.json, which must have been checked. Rejected where a value is not what ``kind`` says."""
    path = Path(directory) / STATE
    text = read_regular(path)
    try:
        facts = json.loads(text)
        from_json(kind, text) if kind else None
        if not isinstance(facts, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise Rejected(Problem("CKPT007", f"{STATE} is damaged: {error}", str(path))) from error
    return facts


def check(directory: str | Path, hashes: bool = True) -> Manifest:
    """The manifest of a checkpoint of which every file is as it was written (``hashes=False``: of the size it had)."""
    manifest = read(directory)
    check_files(directory, manifest, sorted(manifest.files), hashes)
    return manifest


def whole(directory: str | Path) -> bool:
    """Return whether the manifest verifies and every file has the right size. Contents are not read."""
    try:
        check(directory, hashes=False)
    except Rejected:
        return False
    return True


def unlisted(directory: str | Path, manifest: Manifest) -> list[str]:
    """Files in the directory that the manifest does not list; they are never read."""
    return sorted(set(os.listdir(directory)) - {*manifest.files, MANIFEST})


def _check_size(path: Path, found_bytes: int, expected_bytes: int) -> None:
    if found_bytes == expected_bytes:
        return
    if found_bytes < expected_bytes and (something_else := recognise(path)):
        raise Rejected(something_else)
    sizes = f"{path.name} is {found_bytes} bytes, the manifest says {expected_bytes}"
    why = "the copy is incomplete" if found_bytes < expected_bytes else "something was appended"
    raise Rejected(Problem("CKPT005", f"{sizes}: {why}", str(path), "copy the file again from where the run wrote it"))


def _check_hashes(path: Path, descriptor: int, record: FileRecord) -> None:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(record.bytes, 1))))
    for number, expected in enumerate(record.chunks):
        begin = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, record.bytes - begin)
        done = read_at(descriptor, buffer[:size], begin)
        if xxhash.xxh3_128_hexdigest(buffer[:done]) != expected:
            what = f"{path.parent.name}/{path.name} fails xxh3 between byte {begin} and {begin + size}"
            raise Rejected(Problem("CKPT007", what, str(path)))


def _check_header(path: Path, descriptor: int, record: FileRecord, parts: list[tuple[str, str, Slice]]) -> None:
    """Check that the file's own header has every slice of it, of that type and those sizes, from that byte on; and that
    the file has no other."""
    length = bytearray(8)
    read_at(descriptor, memoryview(length), 0)
    start = 8 + int.from_bytes(length, "little")
    text = bytearray(max(0, min(start, record.bytes, HEADER_BYTES) - 8))
    read_at(descriptor, memoryview(text), 8)
    try:
        header = from_json(dict[str, Any], bytes(text))
    except ValueError as error:
        raise Rejected(Problem("CKPT009", f"{path.name}: its header cannot be read: {error}", str(path))) from error
    for tensor, dtype, part in parts:
        begin, size = part.begin - start, prod(part.sizes) * ITEM_BYTES[dtype]
        wanted = {"dtype": dtype, "shape": [*part.sizes], "data_offsets": [begin, begin + size]}
        found = (header.get(tensor), header.get(f"{tensor}@{','.join(map(str, part.offsets))}"))
        if wanted not in found or part.begin + size > record.bytes:
            what = f"{tensor}: the manifest has {dtype} {[*part.sizes]} at byte {part.begin} of {path.name}"
            raise Rejected(Problem("CKPT015", f"{what}, its own header has not", str(path)))
    if (count := len(header.keys() - {"__metadata__"})) != len(parts):
        what = f"{path.name} holds {count} tensors, the manifest has {len(parts)} of it"
        raise Rejected(Problem("CKPT015", what, str(path)))


def read_at(descriptor: int, buffer: memoryview, begin: int) -> int:
    """Read a file from byte ``begin`` on into ``buffer``; returns how many bytes there were."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], begin + done)):
        done += count
    return done


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """``descriptor``, closed at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_coverage(tensors: Mapping[str, TensorRecord], where: str = "") -> None:
    """Check that the slices of every tensor cover it exactly: within its shape, no element twice, none missing.

    Asked before a checkpoint is committed, and whenever its manifest is read. Raises :class:`Rejected` (CKPT015) with
    the tensor's name and the number of elements.
    """
    for name, record in tensors.items():
        if record.dtype not in ITEM_BYTES:
            raise Rejected(Problem("CKPT009", f"{name} is of type {record.dtype}, which no checkpoint holds", where))
        ranks = {len(record.shape), *(len(each) for s in record.slices for each in (s.offsets, s.sizes))}
        boxes = sorted((s.offsets, tuple(map(add, s.offsets, s.sizes))) for s in record.slices)
        whole = prod(record.shape)
        if len(ranks) > 1 or any(min(low, default=0) < 0 or any(map(gt, high, record.shape)) for low, high in boxes):
            what = f"{name} {list(record.shape)}: a written slice lies outside of it"
            raise Rejected(Problem("CKPT015", what, where))
        covered = sum(prod(map(sub, high, low)) for low, high in boxes)
        twice = _overlap(boxes)
        if twice or covered != whole:
            what = f"{name} {list(record.shape)}: {covered} of {whole} elements were written"
            raise Rejected(Problem("CKPT015", what + (", some of them twice" if twice else ""), where))


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether two of the boxes (sorted by their low corner) share an element."""
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in boxes:
        active = [other for other in active if not low or other[1][0] > low[0]]
        for other_low, other_high in active:
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(low, high, other_low, other_high, strict=True)):
                return True
        active.append((low, high))
    return False
