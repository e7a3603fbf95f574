"""Streaming: only a few portions of the data are prepared at a time, while the run trains on them.

The files of the source, in an order drawn from the seed, are grouped into portions. A visit is one reading of a
portion: the first epoch visits them in turn, later ones in other orders. Inside a visit the samples are permuted under
(seed, visit), so sample k of the run depends on the seed and the source alone, and the cursor stays one integer. While
one portion is trained on, a process of rank 0's prepares the next; those used up are deleted. The first stays, for its
tokenizer and its held-out text: three at most are on the disk.

<run>/stream/stream.json          the files of each portion; of each visit so far its samples and their fingerprint
             portion-00000/data/  prepared data
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data import remote, shards, source, store, whole
from shardwise.data.order import Indices, Order, permute
from shardwise.data.pack import Packs, Sample, Windows, open_windows
from shardwise.data.prepare import prepare
from shardwise.errors import DataError, PolicyError, Problem, ShardwiseError, first_line
from shardwise.spec.files import MANIFEST_BYTES, read_regular
from shardwise.spec.recipe import Data, Recipe, TokenizerSection
from shardwise.spec.record import Count, from_json
from shardwise.spec.safe_path import safe_path, without_main


def lay(data: Data, seed: int, records: bool) -> list[list[str]]:
    """The files of the source, as paths and URLs, in portions: one begins with the first file that begins after a
    multiple of ``streaming_bytes``. Raises DATA001, DATA016 and CFG008."""
    files: dict[str, int] = {}
    for name in [data.path] if isinstance(data.path, str) else data.path:
        if remote.is_remote(name):
            files |= remote.listed(name, data.streaming_bytes)
        else:
            files |= {str(found.path): found.stop for found in source.find(name, records)}
    names, at = sorted(files), 0
    portions: dict[int, list[str]] = {}
    for k in Order(len(names), seed).samples(0, len(names)):
        portions.setdefault(at // data.streaming_bytes, []).append(names[k])
        at += files[names[k]]
    return list(portions.values())


@dataclass(frozen=True)
class _Told:
    """The content of stream.json: the settings that must stay; the files of each portion; of each visit so far how many
    samples it had, and their fingerprint."""

    settings: dict[str, Any]
    portions: list[list[str]]
    visits: list[tuple[Count, str]]


def _read(path: Path) -> _Told:
    """Raises DATA013 for what was not written so."""
    try:
        told = from_json(_Told, read_regular(path, MANIFEST_BYTES))
        if not told.portions or not all(told.portions):
            raise ValueError("a portion has no files")
    except (ValueError, OSError) as error:
        what = f"the list of this run's portions is damaged: {first_line(error)}"
        raise DataError(Problem("DATA013", what, str(path), "run.name=another-name, which streams anew")) from error
    return told


def _check_files(told: _Told, recipe: Recipe, path: Path) -> None:
    """Raise PolicyError (SEC006) for a file that is there, and none of those that the recipe names: the list was
    changed. One that is missing is told when its portion is read."""
    names = [recipe.data.path] if isinstance(recipe.data.path, str) else recipe.data.path
    local: set[str] = set()
    for name in names:
        with suppress(ShardwiseError):
            local |= {str(found.path) for found in source.find(name, recipe.sample_tokens is not None)}
    fetched = any(map(remote.is_remote, names))
    for file in (file for portion in told.portions for file in portion):
        known = fetched if remote.is_remote(file) else file in local or not os.path.lexists(file)
        if not known:
            what = f"{file[:200]} is in the list of this run's portions, and none of its data"
            raise PolicyError(Problem("SEC006", what, str(path), "run.name=another-name, which streams anew"))


class Portions:
    """The samples of a run in order, each read from its portion. One of the ranks, the ``leader``, prepares the next
    portion and deletes used ones. Raises DATA013 if the run was started with other settings, and the errors of
    preparing the first portion."""

    def __init__(self, recipe: Recipe, data: Data, root: Path, leader: bool) -> None:
        self.recipe = recipe
        self.data = data
        self.root = root
        self.leader = leader
        self._file = root / "stream.json"
        kept: dict[str, bool | set[str]] = {"data": True, "method": True, "run": {"seed"}, "train": {"seq_len"}}
        settings = recipe.model_dump(mode="json", include=kept, exclude={"data": {"cache", "num_proc"}})
        with whole.lock(self._file):
            if not (root / "portion-00000").is_dir():
                laid = lay(recipe.data, recipe.run.seed, recipe.sample_tokens is not None)
                whole.write_whole(self._file, json.dumps(asdict(_Told(settings, laid, []))))
        self._told = _read(self._file)
        if self._told.settings != settings:
            what, fix = "the run was started with other data or other streaming settings", "run.name=another-name"
            raise DataError(Problem("DATA013", what, str(self._file), fix))
        if leader:
            _check_files(self._told, recipe, self._file)
        self.count, self._visits = len(self._told.portions), self._told.visits
        self._starts = [0, *np.cumsum([samples for samples, _ in self._visits]).tolist()]
        self._opened: dict[int, Windows | Packs] = {}
        self._ahead: BaseProcess | None = None
        self._open(0)
        self.first = store.load(self._path(0) / "data", verify=False)

    def samples(self, first: int, count: int) -> Indices:
        """The numbers of ``count`` samples: they are numbered in the order of the run."""
        return np.arange(first, first + count, dtype=np.int64)

    def __getitem__(self, k: int) -> Sample:
        visit = self._find(k)
        windows = self._open(visit)
        at = permute(np.array([k - self._starts[visit]]), len(windows), self.recipe.run.seed, visit)
        return windows[int(at[0])]

    def advance(self, cursor: int, size: int) -> None:
        """Deletes what no rank reads any more, and has the next portion prepared. Every rank calls this before it reads
        the ``size`` samples of the step at ``cursor``: then all are done with the step before the last."""
        visit = self._find(max(cursor - size, 0))
        self._opened = {number: windows for number, windows in self._opened.items() if number >= visit}
        if self.leader:
            last = int(np.searchsorted(self._starts, cursor + size - 1, "right"))
            self._look_ahead(visit, max(visit + 2, last))

    def ready(self, cursor: int, size: int) -> bool:
        """Return whether the ``size`` samples of the step at ``cursor`` can be read without waiting."""
        end = cursor + size
        while self._starts[-1] < end:
            if not self._path(len(self._visits)).is_dir():
                return False
            self._open(len(self._visits))
        return all(self._path(visit).is_dir() for visit in range(self._find(cursor), self._find(end - 1) + 1))

    def _number(self, visit: int) -> int:
        return visit if visit < self.count else int(Order(self.count, self.recipe.run.seed).samples(visit, 1)[0])

    def _path(self, visit: int) -> Path:
        return self.root / f"portion-{self._number(visit):05}"

    def _find(self, k: int) -> int:
        """The visit that sample k belongs to. Earlier visits that have not been counted yet are prepared to count
        them."""
        while self._starts[-1] <= k:
            self._open(len(self._visits))
        return int(np.searchsorted(self._starts, k, "right")) - 1

    def _open(self, visit: int) -> Windows | Packs:
        """The windows of a visit, waiting for the process that prepares it, or preparing it here if there is none."""
        if visit not in self._opened:
            prepared = store.load(whole.once(self._path(visit), self._maker(visit)) / "data")
            windows = open_windows(prepared.train, self.recipe.train.seq_len, self.recipe.data.mask_documents)
            if visit == len(self._visits):
                self._visits.append((len(windows), prepared.manifest.fingerprint))
                self._starts.append(self._starts[-1] + len(windows))
                if self.leader:
                    whole.write_whole(self._file, json.dumps(asdict(self._told)))
            self._opened[visit] = windows
        return self._opened[visit]

    def _maker(self, visit: int) -> partial[None]:
        own = {"path": self._told.portions[self._number(visit)], "streaming": False}
        if self._number(visit):
            tokenizer = TokenizerSection(path=str(self._path(0) / "data" / "tokenizer"))
            own |= {"tokenizer": tokenizer, "validation_path": None, "validation_share": 0.0}
        known = {self._number(before): fingerprint for before, (_, fingerprint) in enumerate(self._visits)}
        named = self._number(visit), known.get(self._number(visit))
        return partial(_make, self.data.model_copy(update=own), self.recipe.sample_tokens, named)

    def _look_ahead(self, visit: int, end: int) -> None:
        """Delete portions that no visit in [visit, end) reads, except the first, and start preparing the next one."""
        for used in set(self.root.glob("portion-*")) - {self._path(number) for number in (0, *range(visit, end))}:
            # Renamed like an unfinished portion first: one that is deleted only half is then prepared again.
            left = used.rename(used.with_name(f".{used.name}.tmp"))
            shutil.rmtree(left, ignore_errors=True)  # the process that prepares may be deleting it too
        asked, name = self._ahead, str(visit + 1)
        if not self._path(visit + 1).is_dir() and not (asked and (asked.is_alive() or asked.name == name)):
            work = self._path(visit + 1), self._maker(visit + 1)
            self._ahead = get_context("spawn").Process(None, _make_ahead, name, work, daemon=True)
            with safe_path(), without_main():
                self._ahead.start()


def _make(data: Data, sample_tokens: int | None, named: tuple[int, str | None], directory: Path) -> None:
    """Prepare one portion in ``directory``; what is fetched or converted for it goes again. ``named``: its number, and
    its fingerprint where it has been visited. Raises DATA013 when it is not what it was; nothing of it stays then."""
    scratch = directory / "scratch"
    made = prepare(data.model_copy(update={"cache": str(scratch)}), out=directory / "data", sample_tokens=sample_tokens)
    if named[1] not in (None, made.manifest.fingerprint):
        what = f"portion {named[0]} has changed: its files were modified since the run began"
        raise DataError(Problem("DATA013", what, str(directory.parent), "restore them, or start another run"))
    shutil.rmtree(scratch, ignore_errors=True)


def _make_ahead(target: Path, make: partial[None]) -> None:
    """Make the portion ``target``, in a process of its own. Its errors are not reported: the rank that needs the
    portion tries again and reports."""
    shards.die_with_parent()
    current_process().daemon = False  # so that it may have children; it still ends with its rank
    os.nice(10)
    with suppress(ShardwiseError):
        whole.once(target, make)


def open_data(
    recipe: Recipe,
    data: Data,
    directory: Path,
    first: bool,
    trust_s: float = 0.0,
    progress: remote.Progress | None = None,
) -> tuple[store.Prepared, Portions | None]:
    """Find or make what is prepared before the run: all of ``data``, or, streamed into ``directory`` (the ``first``
    rank prepares it), their first portion. ``data``: the recipe's with their format and tokenizer settled."""
    if not recipe.data.streaming:  # once the first portion is there, ``data`` are its files
        return prepare(data, progress=progress, sample_tokens=recipe.sample_tokens, trust_s=trust_s), None
    portions = Portions(recipe, data, directory, first)
    return portions.first, portions
