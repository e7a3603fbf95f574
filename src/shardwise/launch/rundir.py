"""The directory of a run: its name, whether it may be used, whether the disk can hold what will be written."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.data.remote import all_shown
from shardwise.errors import DataError, MissingInputError, OutputError, Problem, ShardwiseError
from shardwise.launch.writable import check_writable, nearest, unwritable
from shardwise.runtime import owner
from shardwise.runtime.checkpoint.locate import check_length, check_own, with_facts
from shardwise.runtime.checkpoint.manifest import candidates, train_again
from shardwise.runtime.faults.outcome import read_exit
from shardwise.runtime.owner import Claim
from shardwise.spec import finetune
from shardwise.spec.files import kind_of, regular_lines
from shardwise.spec.keys import dotted
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_payload

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ORDER = ("train.seq_len", "run.seed")
"""Keys that decide what the samples are and in which order they come."""
_ELSEWHERE = {"parallel", "recompute", "compile", "checkpoint", "evaluate", "offload"}
"""Sections that may change without ``--resume``: they say where and how a run computes, not what."""
BYTES_A_PARAMETER = 12
"""fp32 weights and two fp32 moments; tokenizer, manifest and cursor are small."""


def check_name(name: str) -> str:
    """A run's name is a directory's name and part of commands. Raises OutputError (OUT006)."""
    if not _NAME.fullmatch(name):
        shown = name.encode("unicode_escape").decode()[:60]
        rule = "run names are letters, digits, . _ -, at most 100, and start with a letter or digit"
        what = f"`{shown}` cannot be a run's name: {rule}"
        raise OutputError(Problem("OUT006", what, "run.name", "`--run my-run-1`"))
    return name


def check_new(target: Path, option: str = "--out") -> None:
    """A directory that the user names with ``option`` is created and never replaced, since it may hold anything. Raises
    OUT001, OUT002."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = f"{target} exists; nothing is overwritten"
        raise OutputError(Problem("OUT001", what, option, f"another {option}"))
    check_writable(target.absolute().parent, option)


def free_name(out: Path, stem: str) -> str:
    """``stem-1``, or the first number that is not taken."""
    stem, number = _clean(stem), 1
    while (out / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"


def _clean(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:90] or "run"


def newest_run(out: Path, stem: str) -> Path | None:
    """The run ``stem-N`` with the highest number."""
    stem = _clean(stem)
    runs = [path for path in out.glob(f"{stem}-*") if path.name.removeprefix(f"{stem}-").isdigit()]
    return max(runs, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def newest_step(directory: Path) -> int | None:
    """The step of the newest committed checkpoint, by name."""
    return next((step for step, _ in candidates(directory / "checkpoints")), None)


def check_standing(directory: Path, recipe: Recipe, *, resume: bool) -> int | None:
    """The step to resume from in ``directory``, None for a fresh start. Its own unfinished run is resumed; another's is
    never touched (OUT001). ``resume`` says that there must be something to continue (CKPT001), and with it other
    settings may be given, but not such that the data would come in another order (CKPT022)."""
    try:
        step = newest_step(directory)
    except OSError as error:
        raise OutputError(unwritable(directory, error)) from None
    if resume:
        if step is None:
            what = f"no checkpoint in {directory} (looked for checkpoints/step-*)"
            raise MissingInputError(Problem("CKPT001", what, str(directory), "leave out --resume to start afresh"))
        check_own(directory / "checkpoints")  # or its settings would be taken for this run's
        changed = changes(directory, recipe)
        if moved := [f"{key} {changed[key]}" for key in _ORDER if key in changed]:
            what = f"{directory} cannot be resumed with {', '.join(moved)}: its samples would change"
            raise DataError(Problem("CKPT022", what, str(directory), "keep the old value, or start another run"))
        check_length(step, recipe.train.max_steps)
        return step
    if step is None:
        return None
    check_own(directory / "checkpoints")
    what = f'{directory} holds run "{directory.name}" at step {step}'
    fix = "`--resume`, or another `--run` or `--out`; nothing is overwritten"
    differs = {k: how for k, how in changes(directory, recipe).items() if k.partition(".")[0] not in _ELSEWHERE}
    if differs:
        told = ", ".join(f"{key} {how}" for key, how in [*differs.items()][:3]) + (", ..." if len(differs) > 3 else "")
        raise OutputError(Problem("OUT001", f"{what}, of another recipe: {told}", str(directory), fix))
    outcome = read_exit(directory)
    if outcome is not None and outcome.kind == "done":
        fix = "another `--run`, or `--resume` with a larger train.max_steps; nothing is overwritten"
        raise OutputError(Problem("OUT001", f"{what}, finished", str(directory), fix))
    return step


def as_begun(directory: Path, recipe: Recipe) -> Recipe:
    """``recipe`` with what the run in ``directory`` was begun with, wherever that is assumed: another version may
    assume something else."""
    assumed = [*finetune.assumed(recipe), *([finetune.BATCH] if finetune.batch_is_open(recipe) else [])]
    begun = (_facts(directory).get("settings") or {}) if assumed else {}
    kept = {key: begun[key] for key in assumed if isinstance(begun.get(key), int | float)}
    if begun and "train.num_epochs" in assumed and "train.num_epochs" not in kept:
        kept["train.max_steps"] = begun.get("train.max_steps") or finetune.DEFAULT_STEPS
    return finetune.with_values(recipe, kept) if kept else recipe


def nothing_to_do(directory: Path, recipe: Recipe) -> str | None:
    """The message for a run that is finished, unless ``recipe`` makes it longer; else None."""
    outcome, step = read_exit(directory), newest_step(directory)
    if outcome is None or outcome.kind != "done" or step is None or outcome.step > step:
        return None
    patience, (_, stale) = recipe.evaluate.early_stopping_patience, _facts(directory).get("early_stopping", (None, 0))
    if patience is not None and stale >= patience:
        why = f"stopped early at step {step}, as its last {stale} validations found no lower loss"
        return f"nothing to do: {directory} {why}; for more, give a larger evaluate.early_stopping_patience"
    lengths = [key for key in changes(directory, recipe) if key.startswith(("train.", "evaluate."))]
    if lengths and recipe.train.max_steps != step:
        return None
    return f"nothing to do: {directory} was finished at step {step}; for more, give a larger train.max_steps"


def changes(directory: Path, recipe: Recipe) -> dict[str, str]:
    """Return by key how ``recipe`` differs from what the run in ``directory`` was trained with: the settings in its
    newest checkpoint, since recipe.yaml may have been edited. Of ``run``, only the seed is compared."""
    old, new = _facts(directory).get("settings"), _settings(recipe)
    try:
        old = old or _settings(load_recipe(directory / "recipe.yaml"))  # no checkpoint can be read
    except ShardwiseError as error:
        return {"recipe.yaml": f"which cannot be read: {error.problems[0].what}"}
    defaults = _settings(Recipe())  # a key that an older version did not have
    old |= {key: defaults.get(key) for key in new if key not in old}
    compared = [key for key in {**old, **new} if not key.startswith("run.") or key == "run.seed"]
    return {key: f"{new.get(key)} (was {old.get(key)})" for key in compared if old.get(key) != new.get(key)}


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe's settings as checkpoints hold them."""
    shown: dict[str, Any] = all_shown(dotted(recipe.model_dump(mode="json")))
    return shown


def _facts(directory: Path) -> dict[str, Any]:
    """The facts of a run's newest readable checkpoint, which include the settings by dotted key; empty if there is
    none."""
    return next((facts for _, _, facts in with_facts(directory / "checkpoints")), {})


def resuming(directory: Path, step: int, recipe: Recipe) -> str:
    """The message for a resumed run: from which step, and with which changed settings."""
    differs = "".join(f"; {key} {change}" for key, change in changes(directory, recipe).items())
    return f"resuming {directory} from step {step}{differs}"


def check_kinds(directory: Path) -> None:
    """Raise OutputError (OUT002) where a named pipe or a device lies in a run's directory, or in one of it: whoever
    opened it, to read or to write, would wait for ever. Raises OSError for a log that is none, such as a directory."""
    for path in (*directory.glob("*"), *directory.glob("*/*")):
        with suppress(FileNotFoundError):  # a link to nowhere, or it has just gone
            mode = path.stat().st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                what = f"{path} is {kind_of(mode)}, not a regular file"
                raise OutputError(Problem("OUT002", what, f"{path}", "remove it, or use another `--run`"))
    for name in ("metrics.jsonl", "events.jsonl"):  # to which is added
        if (directory / name).exists() or (directory / name).is_symlink():
            next(regular_lines(directory / name), None)


@contextmanager
def owned(directory: Path, say: Callable[[str], None], token: str = "") -> Iterator[Claim]:
    """Own ``directory`` for the length of the block; remove it afterwards if it is empty and was created here. Raises
    OutputError: OUT005 while another process owns it, OUT002 if it cannot be written."""
    new = [path for path in (directory, directory.parent) if not path.exists()]
    check_writable(directory)
    try:
        check_kinds(directory)
        claim = owner.claim(directory, token, say)
    except OSError as error:
        raise OutputError(unwritable(Path(error.filename or directory), error)) from None
    try:
        yield claim
    finally:
        claim.release()
        with suppress(OSError):
            for path in new:
                path.rmdir()


def filled(directory: Path, error: OSError) -> OutputError:
    """The error of a run whose disk is full (OUT002)."""
    where = Path(error.filename or directory)
    return OutputError(replace(unwritable(where, error), fix=f"make room there, then `{train_again(directory)}`"))


def check_space(directory: Path, parameters: int, keep: int, export_bytes: int = 0) -> int:
    """Bytes that checkpoints will take at once: ``keep`` of them and one in flight, of which some may lie in
    ``directory`` already. Raises OutputError (OUT003)."""
    checkpoint = parameters * BYTES_A_PARAMETER
    needed = checkpoint * (keep + 1) + export_bytes
    place = nearest(directory)
    there = [_size(path) for _, path in candidates(directory / "checkpoints")]
    left = [_size(path) for name in (".tmp-*", ".trash-*") for path in (directory / "checkpoints").glob(name)]
    exported = max(_size(directory / name) for name in ("hf", "adapter"))
    free = shutil.disk_usage(place).free + sum(left) + min(exported, export_bytes)
    room = free + min(sum(there), keep * checkpoint)
    if needed > room:
        what = f"a checkpoint is ~{show_payload(checkpoint)}, {keep} and one being written need {show_payload(needed)}"
        what += f", {show_payload(room)} free on {place}" + (", with what of them is there" if room > free else "")
        smaller = keep > 1 and 2 * checkpoint + export_bytes <= free + min(sum(there), checkpoint)
        fix = "a larger disk with `--out`" + (", or `checkpoint.save_total_limit=1`" if smaller else "")
        raise OutputError(Problem("OUT003", what, "checkpoint.save_total_limit", fix))
    return needed


def _size(directory: Path) -> int:
    """Bytes of the files in ``directory``; 0 behind a link, whose disk may be another."""
    total = 0
    for folder, _, names in os.walk(directory) if not directory.is_symlink() else ():
        with suppress(OSError):  # another process may be deleting it
            total += sum(os.lstat(Path(folder, name)).st_size for name in names)
    return total


def check_offload(directory: Path, plan: Plan) -> None:
    """Check that the disk of ``directory`` has room for what the ranks of this machine keep there. Raises OutputError
    (OUT003)."""
    place = nearest(directory)
    needed = plan.estimate.disk_bytes
    filed = plan.offload.filed
    if needed > (free := shutil.disk_usage(place).free):
        what = f"offload of {' and '.join(filed)} needs {show_payload(needed)}, {show_payload(free)} free on {place}"
        keys = " ".join(f"offload.{key}=host" for key in filed)
        fix = f"`offload.directory=DIRECTORY` with more room, or `{keys}`"
        raise OutputError(Problem("OUT003", what, "offload.directory", fix))
