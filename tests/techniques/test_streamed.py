"""AdamW over a file: bit by bit what torch's computes in memory, whatever the file system; and its errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise.errors import OutputError
from shardwise.techniques.offload import scratch as scratch_files
from shardwise.techniques.offload.host_copies import HostWeights
from shardwise.techniques.offload.scratch import Scratch, aligned
from shardwise.techniques.offload.sizes import BLOCK_BYTES, PAGE_BYTES
from shardwise.techniques.offload.streamed import StreamedAdamW

BLOCK = BLOCK_BYTES // 4
SHAPES = ((2 * BLOCK + 21,), (3, 7), (), (BLOCK,))
"""Several blocks, of which the last is odd; less than a page; a scalar; exactly one."""
DEFAULTS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def weights() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def streaming(parameters: list[nn.Parameter], directory: Path) -> tuple[HostWeights, StreamedAdamW]:
    host = HostWeights(parameters, early=False, cut=False, directory=directory)
    decays = ((0.1, parameters[:2]), (0.0, parameters[2:]))
    groups = [{"params": [host.of(one) for one in ones], "weight_decay": decay} for decay, ones in decays]
    return host, host.streamed(groups, dict(DEFAULTS))


def gradients(step: int) -> Iterator[torch.Tensor | None]:
    """The last has none in the second step."""
    draw = torch.Generator().manual_seed(1 + step)
    for place, shape in enumerate(SHAPES):
        yield None if (place, step) == (3, 1) else torch.randn(shape, generator=draw)


@pytest.mark.parametrize("direct", [True, False])
def test_four_steps_are_those_of_torch(tmp_path: Path, direct: bool) -> None:
    """Another rate in each, one that is skipped, and a parameter that is left out of one."""
    mine, theirs = weights(), weights()
    with nullcontext() if direct else patch.object(scratch_files, "_opened_direct", lambda name: None):
        host, optimizer = streaming(mine, tmp_path)
    assert host.scratch is not None and (direct or not host.scratch.direct)
    decays = ((0.1, theirs[:2]), (0.0, theirs[2:]))
    known = torch.optim.AdamW(
        [{"params": ones, "weight_decay": decay} for decay, ones in decays],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for step in range(4):
        skip = torch.tensor(float(step == 2))
        for group, other in zip(optimizer.param_groups, known.param_groups, strict=True):
            group["lr"] = other["lr"] = 1e-2 / (1 + step)
        for one, other, gradient in zip(mine, theirs, gradients(step), strict=True):
            one.grad = other.grad = gradient
        host.take_rest()
        optimizer.found_inf = known.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        known.step()
        optimizer.zero_grad()
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(host.of(one), other)
            for name in ("exp_avg", "exp_avg_sq"):
                if other in known.state:
                    assert torch.equal(optimizer.state[host.of(one)][name], known.state[other][name])
    assert [float(optimizer.state[host.of(one)]["step"]) for one in mine] == [3, 3, 3, 2]


def test_what_is_filled_in_memory_is_read_by_the_next_step(tmp_path: Path) -> None:
    """As a checkpoint fills it, and what a step has written is what is mapped."""
    [one] = parameters = [nn.Parameter(torch.zeros(BLOCK + 5))]
    host = HostWeights(parameters, early=False, cut=False, directory=tmp_path)
    optimizer = host.streamed([{"params": [host.of(one)], "weight_decay": 0.0}], {**DEFAULTS, "lr": 0.0})
    with torch.no_grad():
        one.fill_(3.0)
        optimizer.state[host.of(one)]["exp_avg"].fill_(2.0)
    host.read()
    one.grad = torch.zeros_like(one)
    host.take_rest()
    optimizer.step()
    assert torch.equal(one, torch.full_like(one, 3.0))
    assert torch.equal(optimizer.state[host.of(one)]["exp_avg"], torch.full((BLOCK + 5,), 1.8))


def test_the_file_has_no_name(tmp_path: Path) -> None:
    """So that nothing is left of it, however the process ends, and nothing can be taken for more than it is."""
    host, _ = streaming(weights(), tmp_path / "new")
    assert [*(tmp_path / "new").iterdir()] == []
    assert host.scratch is not None
    descriptor = host.scratch._buffered
    assert os.fstat(descriptor).st_nlink == 0
    del host, _
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "OUT003"), (errno.EROFS, "OUT002")])
def test_a_disk_that_has_no_room_is_told_before_a_step(tmp_path: Path, number: int, code: str) -> None:
    refuse = OSError(number, os.strerror(number))
    with patch.object(os, "posix_fallocate", side_effect=refuse), pytest.raises(OutputError) as raised:
        Scratch(tmp_path, [5 * 2**30])
    [problem] = raised.value.problems
    assert problem.code == code and problem.where == "offload.directory" and str(tmp_path) in problem.what
    assert ("needs 5.0 GiB" in problem.what) is (code == "OUT003")
    assert [*tmp_path.iterdir()] == []


def test_an_error_of_a_thread_ends_the_step(tmp_path: Path) -> None:
    """And no thread goes on behind it."""
    mine = weights()
    host, optimizer = streaming(mine, tmp_path)
    for one in mine:
        one.grad = torch.ones_like(one)
    host.take_rest()
    failure = OSError(errno.EIO, "worn out")
    with patch.object(Scratch, "write", side_effect=failure), pytest.raises(OSError, match="worn out"):
        optimizer.step()


def test_pieces_come_where_they_belong(tmp_path: Path) -> None:
    """Short reads and writes go on where they stopped."""
    calls = []

    def short(call: object) -> object:
        def some(descriptor: int, views: list[memoryview], at: int) -> int:
            calls.append(at)
            return call(descriptor, [views[0][:PAGE_BYTES]], at)  # type: ignore[operator, no-any-return]

        return some

    file = Scratch(tmp_path, [100, 2 * PAGE_BYTES, 1])
    view, room = aligned(2 * PAGE_BYTES)
    room.copy_(torch.arange(2 * PAGE_BYTES) % 251)
    wanted = room.clone()
    with patch.object(os, "pwritev", short(os.pwritev)), patch.object(os, "preadv", short(os.preadv)):
        file.write(1, 0, view)
        room.zero_()
        file.read(1, 0, view)
    assert torch.equal(room, wanted) and len(calls) == 4
    assert torch.equal(file.mapped(1, wanted), wanted)
    assert not file.mapped(0, torch.empty(100, dtype=torch.uint8)).any()
