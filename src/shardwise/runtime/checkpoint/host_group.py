"""The ranks that save and load together: a gloo group of their own, so that their collectives never mix with those of
training. An exception on any rank is raised on every rank at once, so that none waits in a collective for a rank that
failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PosixPath
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from shardwise.distributed.torch_private import set_timeout
from shardwise.errors import ShardwiseError
from shardwise.runtime.checkpoint.commit import MaybeCommitted
from shardwise.runtime.checkpoint.manifest import FileRecord, Manifest, Rejected, Slice, TensorRecord
from shardwise.runtime.objects import broadcast, decode, encode, gather, may_travel

T = TypeVar("T")
JOIN_S = 60.0
"""How long ranks wait for one another when the group is made."""
TIMEOUT_S = 1800.0
"""How long a rank may write while the others wait for it. A rank that dies is noticed at once, through its sockets."""


may_travel(MaybeCommitted, Rejected, Manifest, FileRecord, TensorRecord, Slice, PosixPath)


class RankError(Exception):
    """Work failed on some rank. ``first`` is the failure of the lowest such rank."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures
        self.first = failures[min(failures)]
        super().__init__("; ".join(f"rank {rank}: {error}" for rank, error in failures.items()))


@dataclass(frozen=True)
class HostGroup:
    """``group`` is None for a single process without torch.distributed."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Self:
        """The ranks of ``group`` (gloo), or of a new gloo group over all ranks: a collective call."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        if group is None:
            dist.barrier()  # a rank that died before this is noticed here; new_group would wait for it
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=JOIN_S))
            set_timeout(group, TIMEOUT_S)
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def minimum(self, values: list[int], patience_s: float) -> list[int]:
        """The smallest of each value over the ranks, which come to this as to a step: none is waited for longer."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        vote = dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.group, async_op=True)
        vote.wait(timedelta(seconds=patience_s))
        return [int(value) for value in tensor]

    def first(self, work: Callable[[], T]) -> T:
        """Return on every rank what ``work`` returns on the first. Raises RankError everywhere if it raised."""
        result, error = _attempt(work) if self.rank == 0 else (None, None)
        if self.size > 1:
            result, error = broadcast((result, error), self.group)
        if error is not None:
            raise RankError({0: error})
        return result  # type: ignore[return-value]

    def spared(self, work: Callable[[], T], patience_s: float) -> T | Exception:
        """Do ``work``, in which ranks may wait for one another, and return its result; or on every rank an error of it,
        if it failed on any. If the other ranks do not arrive within ``patience_s``, they wait inside ``work`` for this
        one, and only its end releases them: then this rank's error is raised alone."""
        failed, result = None, None
        try:
            result = work()
        except Exception as error:
            failed = error.first if isinstance(error, RankError) else error
        if self.size > 1:
            failures, until_s = torch.tensor(int(failed is not None)), time.monotonic() + patience_s
            vote = dist.all_reduce(failures, group=self.group, async_op=True)
            while failed is not None and not vote.is_completed():
                if time.monotonic() > until_s:
                    raise failed
                time.sleep(0.01)
            try:
                vote.wait()
            except RuntimeError as error:
                raise failed or error from error
            if failures:
                try:
                    self.each(lambda: _raise(failed))
                except RankError as error:
                    failed = error.first
        return result if failed is None else failed  # type: ignore[return-value]

    def deal(self, work: Callable[[], list[T]]) -> T:
        """The first rank makes a list of one value per rank; every rank gets its own, and decodes no other's. Raises as
        ``first`` does."""
        if self.size == 1:
            return self.first(work)[0]
        parts: list[torch.Tensor] = []

        def make() -> list[int]:
            parts.extend(encode(thing) for thing in work())
            return [len(part) for part in parts]

        sizes = self.first(make)
        own = torch.empty(max(sizes), dtype=torch.uint8)
        padded = [torch.nn.functional.pad(part, (0, len(own) - len(part))) for part in parts]
        dist.scatter(own, padded or None, group=self.group, group_src=0)
        return decode(own[: sizes[self.rank]])

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; the list of results on the first rank, an empty one elsewhere.

        Raises RankError on every rank if it raised on any.
        """
        answers: list[Any] = gather(_attempt(work), self.group) if self.size > 1 else [_attempt(work)]
        failures = {rank: failed for rank, (_, failed) in enumerate(answers) if failed is not None}
        if self.size > 1:
            failures = broadcast(failures, self.group)
        if failures:
            raise RankError(failures)
        return [found for found, _ in answers]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except (ShardwiseError, OSError, MaybeCommitted, RankError) as error:
        return None, error.first if isinstance(error, RankError) else error
    except BaseException as error:
        # DCP's CheckpointException is not an Exception, and none may leave the others waiting
        return None, RuntimeError(f"{type(error).__name__}: {error}")
