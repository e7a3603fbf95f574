"""Saving and resuming a run, by any number of ranks in any layout.

    save    wait for the one in flight -> vote
            in the background: copy to host memory -> wait until the weights are known to be good
            -> write -> gather -> commit -> read back -> delete older ones
            before the weights change: wait for the copy, beside which the next forward and backward have run
    resume  newest first: manifest -> sizes and hashes -> read the slices that this rank needs

The background part is a thread: it spends its time in system calls, which do not hold Python's lock, and needs no
second copy of the bytes as a process would (docs/checkpoints.md). It talks over a gloo group of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import DataError, OutputError, Problem, ShardwiseError
from shardwise.models.tensorfile import NAMES
from shardwise.runtime.checkpoint import commit, manifest
from shardwise.runtime.checkpoint.host_group import TIMEOUT_S, HostGroup, RankError
from shardwise.runtime.checkpoint.inflight import NOT_FINITE, InFlight, Kind, SaveResult
from shardwise.runtime.checkpoint.locate import Signature, best, check_run, compare, locate, run_of, tell, to_resume
from shardwise.runtime.checkpoint.manifest import Manifest, Rejected, step_name
from shardwise.runtime.checkpoint.packed import pack_plan, pack_results, unpack_plan, unpack_results
from shardwise.runtime.checkpoint.retention import Keep, expire
from shardwise.runtime.checkpoint.storage import ShardPlanner, ShardWriter, Target, copy_stream, fill
from shardwise.spec.recipe import Checkpoint

Tensors = Mapping[str, Tensor]
Wanted = Tensors | Callable[[Collection[str]], Tensors]
Facts = dict[str, Any]
Log = Callable[[str], None]
RETRIES_S = (1.0, 5.0)
"""Pauses before a save that failed on the disk is tried again: a full disk or a network file system may recover."""


class RunCheckpoints:
    """The checkpoints of one run in ``directory``. Made by every rank at once; ``process_group`` must be gloo and
    used by nothing else, and is made if None. At most one save is in flight, whose copy may be ``staged_on_disk``.
    ``patience_s`` (set after it is made): so long ranks wait for one another before they save."""

    def __init__(
        self,
        directory: str | Path,
        settings: Checkpoint,
        run_id: str,
        process_group: dist.ProcessGroup | None = None,
        disk: commit.Disk = commit.DISK,
        staged_on_disk: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.settings = settings
        self.run_id = run_id
        self.rejected: list[Problem] = []
        self.patience_s = TIMEOUT_S
        self._disk = disk
        self.group = HostGroup.of(process_group)
        self._writer = ShardWriter(self.directory, run_id, disk, staged_on_disk)
        self._planner = ShardPlanner()
        self._planned: object = None
        self._plan = SavePlan([])
        self._plans: list[SavePlan] = []
        self._metadata = Metadata({})
        self.flight = InFlight(settings.asynchronous)
        self._copied = threading.Event()
        self._copied.set()

    def save(
        self, tensors: Tensors, facts: Mapping[str, Any], step: int, finite: bool = True, known: bool = True
    ) -> bool:
        """Save ``tensors`` (of every rank) and ``facts`` (of the first) as ``step``. They must not change until
        ``copied`` returns; ``guard`` makes an optimizer wait for that.

        ``finite`` is False if the loss or the gradient norm was not finite: a single such vote, and nothing is saved
        and False is returned; otherwise True. What is not ``known`` to be good is copied, and written once
        ``flight.confirm`` says that it is. poll and wait return the outcome. Raises only if a rank is gone.
        """
        self.flight.end()
        begun = time.monotonic()
        layout = _layout(tensors)
        known_layout = layout is not None and layout == self._planned
        votes = self.group.minimum([int(finite), step, -step, int(known_layout)], self.patience_s)
        if votes[1] != -votes[2]:
            raise ValueError(f"the ranks disagree on the step to save: {votes[1]} to {-votes[2]}")
        if not votes[0]:
            self.flight.results.append(SaveResult("skipped", step, NOT_FINITE))
            return False
        try:
            if not votes[3]:
                self._make_plan(tensors, layout)
        except RankError as error:
            self.flight.results.append(SaveResult("failed", step, str(error)))
            return False
        self._copied.clear()
        copy = partial(self._copy, tensors, facts, step, copy_stream(tensors))
        self.flight.begin(partial(self._write, step, begun, copy), known)
        return True

    def beats(self, loss: float) -> bool:
        """Return whether ``keep_best`` wants a checkpoint with this validation loss: no other has a lower one. It is
        kept as the best if its facts say ``validation: loss``. Waits for the save in flight; every rank calls this
        alike."""
        if not self.settings.keep_best or not math.isfinite(loss):
            return False
        self.flight.end()
        lowest = self.group.first(lambda: best(self.directory))
        return lowest is None or loss < lowest[0]

    def copied(self) -> None:
        """Wait until the last save's tensors are copied to host memory; from then on they may change."""
        self._copied.wait()

    def guard(self, optimizer: Optimizer) -> None:
        """Let every step of ``optimizer`` wait for the copy of the tensors that it is about to change."""
        optimizer.register_step_pre_hook(lambda *unused: self.copied())

    def poll(self) -> list[SaveResult]:
        """The outcomes, since the last call, of saves that are over; never blocks."""
        return self.flight.take()

    def wait(self, at_most_s: float | None = None) -> list[SaveResult]:
        """Wait for the save in flight, then poll. What no step has confirmed is not saved."""
        self.flight.end(at_most_s)
        return self.poll()

    def prepare(self, tensors: Tensors) -> int:
        """Plan the files, allocate the room for copies and take the run's directory now, not at the first save. Returns
        the bytes of that room, on the first rank those of all, elsewhere 0. Raises OutputError (OUT002, OUT003) where
        the directory cannot be written."""
        try:
            self.group.first(self._claim)
            self._make_plan(tensors, _layout(tensors))
            self._planner.set_up_planner(dict(tensors))
            given = self._plan, self._planner, self.group.rank, self.group.size
            return sum(self.group.each(lambda: self._writer.stage(*given)))
        except RankError as error:
            raise error.first from error

    def resume(
        self,
        tensors: Wanted,
        path: str | Path | None = None,
        *,
        allow_fresh_start: bool = False,
        log: Log = print,
        kind: Callable[..., object] | None = None,
    ) -> Facts | None:
        """Load the newest checkpoint that verifies into ``tensors``, in place; its facts. None if there is none.

        ``tensors`` may be a function of the names that a checkpoint holds. ``path``: a run, a directory of checkpoints,
        or one checkpoint, instead of this run's own. ``kind``: what its facts must be (manifest.read_facts). Afterwards
        ``rejected`` holds the problem of each that was skipped; ``log`` gets them as text on the first rank. Raises
        DataError if none of them can be used (unless ``allow_fresh_start``), or if they do not fit the model.
        """
        self.flight.end()
        self.rejected = []
        try:
            found = self.group.first(lambda: to_resume(self.directory, path))
            for step, directory in found:
                try:
                    facts = self._load(directory, tensors, kind, any_run=path is not None)
                except RankError as error:
                    if not isinstance(error.first, (Rejected, OSError)):
                        raise
                    self.rejected.append(_problem(error.first, directory))
                    continue
                if self.group.rank == 0:
                    tell(log, directory, self.rejected, found[0][0] - step)
                return facts
        except RankError as error:
            raise error.first from error
        if not found:
            return None
        what = f"{len(found)} checkpoint{'s' if len(found) > 1 else ''}, but none can be used"
        fix = "restore one of them, or start over without them: --allow-fresh-start"
        if not allow_fresh_start:
            raise DataError(Problem("CKPT016", what, str(path or self.directory), fix), *self.rejected)
        if self.group.rank == 0:
            log("\n".join([f"warning[CKPT016]: {what}; starting afresh", *map(str, self.rejected)]))
        return None

    def _claim(self) -> None:
        try:
            self._writer.set_up_storage_writer(True)
        except OSError as error:
            what = f"cannot write {self.directory}: {os.strerror(error.errno or 0).lower()}"
            fix = "run.out=DIRECTORY, one that can be written"
            raise OutputError(Problem("OUT002", what, str(self.directory), fix)) from error

    def _make_plan(self, tensors: Tensors, layout: object) -> None:
        """Decide which rank writes which slice: two collectives, only when the layout of the tensors is new."""
        self._planned = None

        def local() -> str:
            self._planner.set_up_planner(dict(tensors), is_coordinator=self.group.rank == 0)
            return pack_plan(self._planner.create_local_plan())

        plans = self.group.each(local)

        def whole() -> list[str]:
            self._plans, self._metadata = self._planner.create_global_plan([unpack_plan(each) for each in plans])
            return [pack_plan(each) for each in self._plans]

        self._plan = self._planner.finish_plan(unpack_plan(self.group.deal(whole)))
        self._planned = layout

    def _copy(self, tensors: Tensors, facts: Mapping[str, Any], step: int, stream: torch.cuda.Stream | None) -> None:
        try:
            if stream is not None:
                torch.cuda.set_device(stream.device)  # a thread begins on the first GPU, and makes a context there
            self._planner.set_up_planner(dict(tensors))
            self._writer.describe(step, json.dumps(facts, sort_keys=True, allow_nan=False).encode())
            self._writer.stage(self._plan, self._planner, self.group.rank, self.group.size, stream)
        finally:
            self._copied.set()

    def _write(self, step: int, begun: float, copy: Callable[[], None]) -> None:
        group, writer = self.group, self._writer

        def commit_once() -> Path:
            group.first(self._claim)
            path = group.first(lambda: writer.begin(self._plans))
            plan = dataclasses.replace(self._plan, storage_data=Target(path, group.rank, group.size))
            results = group.each(lambda: pack_results(writer.write_data(plan, self._planner).wait()))
            return group.first(lambda: writer.commit(self._metadata, [unpack_results(each) for each in results]))

        try:
            group.each(copy)
            if not self.flight.wanted():
                self.flight.results.append(SaveResult("skipped", step, self.flight.why_not))
                writer.abandon()
                return
            target = _retried(commit_once, writer.begin_again)
            self.flight.results.append(SaveResult("committed", step, str(target), time.monotonic() - begun))
        except BaseException as error:
            writer.abandon()
            uncertain = isinstance(error, RankError) and isinstance(error.first, commit.MaybeCommitted)
            kind: Kind = "maybe committed" if uncertain else "failed"
            self.flight.results.append(SaveResult(kind, step, str(error), time.monotonic() - begun))
            return
        self._tidy(step, target)

    def _tidy(self, step: int, target: Path) -> None:
        """Read the new checkpoint back, each rank what it wrote, and only then delete older ones."""
        group = self.group
        last, every = self.settings.save_total_limit, self.settings.keep_every
        kind: Kind = "unverified"

        def outdated() -> list[int]:
            lowest = best(self.directory) if self.settings.keep_best else None
            return expire(self.directory, Keep(last, every, lowest and lowest[1]), step, self._disk)

        try:
            record = group.first(lambda: manifest.read(target))
            mine = [name for number, name in enumerate(sorted(record.files)) if number % group.size == group.rank]
            group.each(lambda: manifest.check_files(target, record, mine, evict=True))
            kind = "undeleted"
            for old in group.first(outdated):
                self.flight.results.append(SaveResult("removed", old, step_name(old)))
        except BaseException as error:
            self.flight.results.append(SaveResult(kind, step, str(error)))

    def _load(self, directory: Path, wanted: Wanted, kind: Callable[..., object] | None, any_run: bool) -> Facts:
        """Load one checkpoint on all ranks, or raise RankError on all. Nothing is touched before all is verified."""
        group = self.group

        def look() -> list[str]:
            record = manifest.read(directory)
            check_run(directory, record.run_id, None if any_run else self.run_id)
            tensors = wanted(record.tensors) if callable(wanted) else wanted
            seen.append((record, tensors))
            return [name for name in record.tensors if name not in tensors]

        seen: list[tuple[Manifest, Tensors]] = []
        others = group.each(look)  # a rank may hold some layers of the model only
        unwanted = group.first(lambda: sorted(set.intersection(*map(set, others))))
        record, tensors = seen[0]
        known = {name: record.tensors[name] for name in record.tensors if name in tensors or name in unwanted}
        names = sorted(record.files, key=lambda name: -record.files[name].bytes)[group.rank :: group.size]
        group.each(
            lambda: manifest.check_files(directory, record, names, hashes=False)
        )  # or damage looks like a misfit
        group.each(lambda: compare(known, _signature(tensors), str(directory)))
        group.each(lambda: manifest.check_files(directory, record, names))
        facts: Facts = group.first(lambda: manifest.read_facts(directory, kind))
        group.each(lambda: fill(directory, record, tensors))
        return facts


def read(path: str | Path, tensors: Tensors) -> Facts:
    """Load ``tensors``, in place, from a run's newest intact checkpoint (or the one named); returns its facts. For one
    process, and for a part of a checkpoint, such as the model without the optimizer. Raises as resume does, and for one
    of another run in a run's directory (CKPT013); prints to stderr what was wrong with newer ones."""
    problems: list[Problem] = []
    for _, directory in locate(Path(path)):
        try:
            record = manifest.check(directory)
            check_run(directory, record.run_id, run_of(directory.parent))
            compare(record.tensors, _signature(tensors), str(directory), partial=True)
            facts = manifest.read_facts(directory)
            fill(directory, record, tensors)
            if problems:
                print(*problems, f"using {directory.name}", sep="\n", file=sys.stderr)
            return facts
        except (Rejected, OSError) as error:
            problems.append(_problem(error, directory))
    raise DataError(*problems)


def _signature(tensors: Tensors) -> Signature:
    return {name: (tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype))) for name, tensor in tensors.items()}


def _layout(tensors: Tensors) -> object:
    """Return a value that is equal for two sets of tensors of which the same rank would write the same slices. None if
    one is no tensor: planning says so, to every rank."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return None
    placed = {n: (t.device_mesh, t.placements) for n, t in tensors.items() if isinstance(t, DTensor)}
    return _signature(tensors), placed


def _retried(work: Callable[[], Path], begin_again: Callable[[], None]) -> Path:
    """Do ``work``; if the disk fails, again after a pause. All ranks see the same errors, so all try again."""
    for pause_s in RETRIES_S:
        try:
            return work()
        except RankError as error:
            full = isinstance(error.first, OutputError) and error.first.problems[0].code in ("OUT002", "OUT003")
            gone = isinstance(error.first, FileNotFoundError)
            if not full and (gone or not isinstance(error.first, OSError)):
                raise
        begin_again()
        time.sleep(pause_s)
    return work()


def _problem(error: Exception, directory: Path) -> Problem:
    if isinstance(error, ShardwiseError):
        return error.problems[0]
    return Problem("CKPT007", f"{directory.name} cannot be read: {error}", str(directory))
