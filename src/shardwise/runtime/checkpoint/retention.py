"""The choice of the checkpoints to keep, after a save, once the new checkpoint was read back. No torch here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.runtime.checkpoint.commit import DISK, Disk, discard, fsync_directory
from shardwise.runtime.checkpoint.manifest import Rejected, candidates, check, read, step_name


@dataclass(frozen=True)
class Keep:
    """The newest ``last``, every step that ``every`` divides, and the ``best`` step."""

    last: int
    every: int | None = None
    best: int | None = None


def expendable(steps: list[int], keep: Keep, verified_step: int) -> list[int]:
    """Return the usable ``steps`` to delete, oldest first: older than ``verified_step``, and not to be kept."""
    newest = sorted(steps, reverse=True)[: keep.last]
    older = (step for step in sorted(steps) if step < verified_step and step not in newest)
    return [step for step in older if step != keep.best and (not keep.every or step % keep.every)]


def expire(directory: Path, keep: Keep, verified_step: int, disk: Disk = DISK) -> list[int]:
    """Delete the checkpoints that are no longer kept, now that ``verified_step`` was read back; returns their steps. A
    damaged checkpoint, or one of another run, does not count among the last ones and is not deleted: somebody may want
    to look at it. Of a checkpoint behind a link the link goes.
    """
    run_id, usable = read(directory / step_name(verified_step)).run_id, {}
    for step, path in candidates(directory):
        with suppress(Rejected):
            if check(path, hashes=False).run_id == run_id:
                usable[step] = path
    deleted = expendable(list(usable), keep, verified_step)
    for step in deleted:
        discard(usable[step], disk)
    if deleted:
        fsync_directory(directory, disk)
    return deleted
