"""The search for checkpoints: those that exist and are intact, and the ones that a user means; if none, an error that
helps. No torch here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.runtime.checkpoint import manifest as manifests
from shardwise.runtime.checkpoint.manifest import MANIFEST, STATE, Identity, Manifest, Rejected, TensorRecord
from shardwise.spec.file_kind import PICKLES, pickle_refused, recognise
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import from_json

Signature = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor name to global shape and safetensors dtype."""


def locate(path: Path) -> list[tuple[int, Path]]:
    """(step, directory) of the checkpoints that ``path`` can mean, newest first: a step's directory, a directory of
    them, or a run's directory. Raises MissingInputError (CKPT001), DataError (CKPT008), PolicyError (SEC004)."""
    if path.is_file():
        if path.suffix in PICKLES:
            raise pickle_refused(path)
        if something_else := recognise(path):
            raise DataError(something_else)
    step = re.fullmatch(r"step-\d+", path.name)
    if path.is_dir() and (step or path.name.startswith(".tmp-") or (path / MANIFEST).exists()):
        if step and (path / MANIFEST).exists():
            return [found for found in manifests.candidates(path.parent) if found[1].name == path.name]
        last = newest(path.parent)
        what = "this checkpoint was never committed (no manifest)" + (f". Last committed: {last.name}" if last else "")
        raise DataError(Problem("CKPT008", what, str(path), f"--resume {last}" if last else "--resume an earlier run"))
    for directory in (path, path / "checkpoints"):
        found = manifests.candidates(directory)
        if found:
            return found
    near = _nearest(path)
    fix = f"nearest: {near}" if near else "name a run (runs/NAME) or one of its checkpoints"
    what = f"no checkpoint in {path} (looked for step-*/{MANIFEST})"
    raise MissingInputError(Problem("CKPT001", what, str(path), fix))


def is_own(run: Path) -> bool:
    """Return True if ``run`` is a user's own training loop's: its checkpoints are in it, and no recipe."""
    return not (run / "recipe.yaml").exists() and bool(manifests.candidates(run))


@dataclass(frozen=True)
class RunRecord:
    """The fields that a later start needs of ``run.json``: the run's id, and the fingerprint of its data."""

    run_id: str
    data: str


def run_of(directory: Path) -> str | None:
    """The id of the run whose checkpoints ``directory`` holds, as run.json beside it says; None where it says none."""
    with suppress(OSError, ValueError):
        return from_json(RunRecord, read_regular(directory.parent / "run.json", NOTE_BYTES)).run_id
    return None


def check_run(path: Path, found: str, run_id: str | None) -> None:
    """Raise Rejected (CKPT013) if the checkpoint ``path`` is of the run ``found``, and its directory of another."""
    if run_id not in (None, found):
        what = f'{path.name} belongs to run "{found}", this is run "{run_id}"'
        raise Rejected(Problem("CKPT013", what, str(path), "move it to the checkpoints of its own run"))


def check_own(directory: Path) -> None:
    """Raise Rejected (CKPT013) if the newest checkpoint in ``directory`` that can be read is another run's."""
    run_id = run_of(directory)
    for _, path in manifests.candidates(directory) if run_id else ():
        try:
            record = manifests.read(path)
        except Rejected:
            continue
        return check_run(path, record.run_id, run_id)


def newest(directory: Path) -> Path | None:
    """The newest checkpoint of the directory's own run whose manifest verifies and whose files have the right sizes.
    Their contents are not read."""
    run_id = run_of(directory)
    for _, path in manifests.candidates(directory):
        with suppress(Rejected):
            check_run(path, manifests.check(path, hashes=False).run_id, run_id)
            return path
    return None


def to_resume(directory: Path, path: str | Path | None) -> list[tuple[int, Path]]:
    """The checkpoints to resume from, newest first: those of ``path``, or else of the run's own ``directory``."""
    if path is None:
        return manifests.candidates(directory)
    found = locate(Path(path))
    last = newest(directory)
    step, named = found[0]
    if last is not None and named.parent.resolve() == directory.resolve() and step < manifests.read(last).step:
        what = f"{named.name} is not the newest of this run: {last.name} is there, and never overwritten"
        raise DataError(Problem("CKPT017", what, str(path), f"another run.name, or set {last} aside first"))
    return found


def tell(log: Callable[[str], None], directory: Path, rejected: Sequence[Problem], redone: int) -> None:
    """Say which checkpoint is used, and what was wrong with newer ones."""
    for name in manifests.unlisted(directory, manifests.read(directory)):
        log(f"warning[CKPT019]: {directory.name}/{name} is not in the manifest; it was not read")
    for problem in rejected:
        log(str(problem))
    if rejected:
        log(f"using {directory.name}; {redone} steps will be redone")


def with_facts(directory: Path) -> Iterator[tuple[Path, Manifest, dict[str, Any]]]:
    """The checkpoints of a run of ``shardwise train`` whose facts can be read, newest first, each with its manifest and
    its facts. What else is in them is not looked at."""
    run_id = run_of(directory)
    for _, path in manifests.candidates(directory):
        with suppress(Rejected, OSError):
            record = manifests.read(path)
            check_run(path, record.run_id, run_id)
            manifests.check_files(path, record, [STATE])
            yield path, record, manifests.read_facts(path, Identity)


def check_length(step: int, max_steps: int | None) -> None:
    """Raise DataError CKPT024 if a run at ``step`` is to end before that step."""
    if max_steps is not None and max_steps < step:
        what = f"the run is at step {step}, and would end at step {max_steps}"
        fix = f"`train.max_steps={step + 1}` or more, or a new run with another `--run`"
        raise DataError(Problem("CKPT024", what, "train.max_steps", fix))


@dataclass(frozen=True)
class _Validated:
    validation: FiniteFloat | None = None


def best(directory: Path) -> tuple[float, int, Path] | None:
    """Validation loss, step and directory of the checkpoint with the lowest loss, the earliest of equals. The loss is
    among a checkpoint's own facts, so that both are committed together. None: no checkpoint has one."""
    found, run_id = [], run_of(directory)
    for step, path in manifests.candidates(directory):
        with suppress(Rejected, OSError):
            check_run(path, manifests.check(path, hashes=False).run_id, run_id)
            if (loss := manifests.read_facts(path, _Validated).get("validation")) is not None:
                found.append((float(loss), step, path))
    return min(found, default=None)


def locate_best(run: Path) -> Path:
    """The best checkpoint of a run. Raises MissingInputError (CKPT021) if none was validated at its step."""
    locate(run)
    found = best(run if is_own(run) else run / "checkpoints")
    if found is None:
        fix = "train with `checkpoint.keep_best: true`, or leave out --best for the newest"
        raise MissingInputError(Problem("CKPT021", "no checkpoint of this run has a validation loss", str(run), fix))
    return found[2]


@dataclass(frozen=True)
class Verdict:
    """One checkpoint of a directory: ``problem`` is None if every byte is as it was written."""

    step: int
    path: Path
    problem: Problem | None
    unlisted: tuple[str, ...] = ()


def verify(directory: str | Path) -> list[Verdict]:
    """Read every byte of every checkpoint in ``directory``, newest first. Changes nothing."""
    verdicts = []
    for step, path in manifests.candidates(directory):
        try:
            record = manifests.check(path)
            verdicts.append(Verdict(step, path, None, tuple(manifests.unlisted(path, record))))
        except Rejected as error:
            verdicts.append(Verdict(step, path, error.problems[0]))
    return verdicts


def _nearest(path: Path) -> Path | None:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        names = [name for name in os.listdir(parent) if (parent / name).is_dir()]
    except OSError:
        return None
    for name in difflib.get_close_matches(path.name, names, n=5, cutoff=0.5) or sorted(names)[:20]:
        for directory in (parent / name, parent / name / "checkpoints"):
            if (found := newest(directory)) is not None:
                return found
    return newest(parent)


def compare(stored: Mapping[str, TensorRecord], wanted: Signature, where: str, partial: bool = False) -> None:
    """Raise one DataError with every kind of difference: names (CKPT003), shapes (CKPT002), data types (CKPT004).

    ``partial``: the file may hold more than is wanted.
    """
    missing = [name for name in wanted if name not in stored]
    unexpected = [] if partial else [name for name in stored if name not in wanted]
    both = [name for name in wanted if name in stored]
    shapes = [name for name in both if stored[name].shape != wanted[name][0]]
    dtypes = [name for name in both if stored[name].dtype != wanted[name][1]]
    problems = []
    if missing or unexpected:
        problems.append(_names(stored, wanted, missing, unexpected, where))
    if shapes:
        problems.append(_shapes(stored, wanted, shapes, where))
    if dtypes:
        name = dtypes[0]
        kind = "optimizer state" if name.startswith("optim.") else "weights"
        there, here = _WORDS.get(stored[name].dtype, stored[name].dtype), _WORDS.get(wanted[name][1], wanted[name][1])
        count = f"{len(dtypes)} of {len(wanted)} tensors differ in data type"
        what = f"{count}: {kind} `{name}` is {there} in the file, {here} here"
        key = "optim.moments" if name.startswith("optim.") else "precision.weights"
        problems.append(Problem("CKPT004", what, where, f"{key}={there}"))
    if problems:
        raise DataError(*problems)


_WORDS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def _names(
    stored: Mapping[str, TensorRecord], wanted: Signature, missing: list[str], unexpected: list[str], where: str
) -> Problem:
    what = f"{_some(missing, 'missing')}, {_some(unexpected, 'unexpected')}"
    layers = _layers(stored), _layers(wanted)
    if layers[0] != layers[1]:
        what += f": the file has {layers[0]} layers, the model {layers[1]}"
        return Problem("CKPT003", what, where, f"model.config.num_hidden_layers={layers[0]}")
    return Problem("CKPT003", what, where, "use the recipe and the version that wrote the checkpoint")


def _some(names: list[str], how: str) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {how}" + (f" ({shown})" if names else "")


def _layers(names: Mapping[str, object]) -> int:
    """Return how many blocks ``...layers.N...`` there are."""
    parts = (name.split(".") for name in names)
    numbers = (a[i + 1] for a in parts for i in range(len(a) - 1) if a[i] == "layers" and a[i + 1].isdigit())
    return len(set(numbers))


def _shapes(stored: Mapping[str, TensorRecord], wanted: Signature, names: list[str], where: str) -> Problem:
    shown = ", ".join(f"`{name}` file {list(stored[name].shape)}, model {list(wanted[name][0])}" for name in names[:3])
    what = f"{len(names)} of {len(wanted)} tensors differ: {shown}" + (" ..." if len(names) > 3 else "")
    fix = "use the model.config that the run was started with (recipe.yaml beside checkpoints/)"
    for name in names:
        theirs, ours = stored[name].shape, wanted[name][0]
        if "embed." in name and theirs[1:] == ours[1:]:
            fix = f"model.config.vocab_size={theirs[0]}"
    return Problem("CKPT002", what, where, fix)
