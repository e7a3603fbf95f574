"""Objects between ranks: they arrive as they were, and what could run code is refused, whoever sent it."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError, DataError, OutputError, Problem, ShardwiseError
from shardwise.prove.pool import RankPool
from shardwise.runtime import objects
from shardwise.runtime.checkpoint import host_group, storage
from shardwise.runtime.checkpoint.commit import MaybeCommitted
from shardwise.runtime.checkpoint.manifest import FileRecord, Manifest, Rejected, Slice, TensorRecord
from tests.runtime import rank_work

PROBLEM = Problem("CKPT001", "what", "where", "fix")
RECORD = FileRecord(3, ("ab",))
MANIFEST = Manifest("r", 1, 2, 3, {"f": RECORD}, {"t": TensorRecord((1,), "F32", (Slice((0,), (1,), "f", 0),))})


class Code:
    """What a stranger would send: unpickling it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.made,)


@pytest.mark.parametrize(
    "value",
    [None, 3, float("inf"), "é", b"\x80", [1, (2, {"a": None})], Path("/a/b"), MANIFEST, torch.arange(3).tolist()],
)
def test_values_arrive_as_they_were(value: Any) -> None:
    found = objects.decode(objects.encode(value))
    assert type(found) is type(value) and found == value


def test_the_plans_of_a_checkpoint_arrive_as_they_were() -> None:
    tensors = {"model.a": torch.zeros(3, 4), "optim.b": torch.zeros(()), "model.c": torch.zeros(2, dtype=torch.int8)}
    planner = storage.ShardPlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    assert objects.decode(objects.encode(plans)) == plans
    written = [storage.WriteResult(item.index, 4, storage.StoredSlice("f", RECORD, 8)) for item in plans[0].items]
    assert objects.decode(objects.encode(written)) == written


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError(errno.ENOENT, "No such file", "x"),
        OSError("the file ends early"),
        RuntimeError("ValueError: x"),
        MaybeCommitted("x"),
        Rejected(PROBLEM),
        ConfigError(PROBLEM, PROBLEM),
        OutputError(PROBLEM),
        *(kind(PROBLEM) for kind in ShardwiseError.__subclasses__()),
    ],
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    """Every kind that host_group._attempt lets through."""
    _, sent = host_group._attempt(lambda: throw(error))
    found = objects.decode(objects.encode(sent))
    assert type(found) is type(sent) is type(error)
    assert (found.args, str(found)) == (sent.args, str(sent))
    if isinstance(error, DataError):
        assert found.problems == error.problems


def throw(error: Exception) -> None:
    raise error


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_is_refused(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    pickled = torch.frombuffer(bytearray(pickle.dumps(Code(made), protocol)), dtype=torch.uint8)
    for data in (objects.encode(Code(made)), objects.encode([1, {"a": Code(made)}]), pickled):
        with pytest.raises(pickle.UnpicklingError):
            objects.decode(data)
    assert not made.exists()


def test_objects_go_to_all_to_the_first_and_to_each(ranks: RankPool) -> None:
    for rank, (told, gathered, dealt) in enumerate(ranks.run(rank_work.exchange_objects, world=3)):
        assert told == {"of": 0, "long": "x" * 1000}
        assert gathered == ([{"of": n, "long": "x" * (1000 - n)} for n in range(3)] if rank == 0 else [])
        assert dealt == ("for", rank, "y" * rank)
