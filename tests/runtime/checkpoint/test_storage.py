from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardwise.distributed.pinned import host_buffer
from shardwise.models.tensorfile import NAMES
from shardwise.runtime.checkpoint import storage
from shardwise.runtime.checkpoint.manifest import Slice
from shardwise.runtime.checkpoint.save import RunCheckpoints, read
from shardwise.runtime.checkpoint.storage import ShardPlanner, ShardWriter, lay_out
from shardwise.spec.recipe import Checkpoint


def save(directory: Path, state: dict[str, Tensor]) -> None:
    checkpoints = RunCheckpoints(directory, Checkpoint(asynchronous=False), "run")
    checkpoints.save(state, {}, 1)
    assert [event.kind for event in checkpoints.poll()] == ["committed"]


def test_every_data_type_comes_back_bitwise_and_aligned(tmp_path: Path) -> None:
    from safetensors import safe_open

    make = torch.Generator().manual_seed(0)
    state = {
        f"model.{code}": torch.randint(0, 2, (3, dtype.itemsize), generator=make, dtype=torch.uint8).view(dtype)
        for dtype, code in NAMES.items()
        if dtype != torch.float8_e8m0fnu  # scales in the files of others: no weight of a run has it
    }
    save(tmp_path, state)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read(tmp_path, loaded)
    assert all(torch.equal(loaded[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)
    file = tmp_path / "step-00000001" / "model-00000-of-00001.safetensors"
    with safe_open(file, framework="pt") as stored:
        assert set(stored.keys()) == set(state)
        assert all(stored.get_tensor(name).dtype == state[name].dtype for name in state)
    plan = ShardPlanner()
    plan.set_up_planner(state)
    (part,) = lay_out(plan.create_local_plan(), 0, 1)
    assert all(begin % state[item.index.fqn].dtype.itemsize == 0 for item, begin in part.items)
    assert len(part.header) % 8 == 0


def test_a_tensor_that_is_not_contiguous_is_saved_by_value(tmp_path: Path) -> None:
    state = {"model.w": torch.arange(12.0).view(3, 4).t()}
    save(tmp_path, state)
    loaded = {"model.w": torch.zeros(4, 3)}
    read(tmp_path, loaded)
    assert torch.equal(loaded["model.w"], torch.arange(12.0).view(3, 4).t())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=0, max_size=3), st.integers(1, 40), st.data())
def test_any_box_of_a_stored_slice_can_be_read_in_any_block_size(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], block_bytes: int, data: st.DataObject
) -> None:
    """Boxes that are cut in every dim, as a reader sharded otherwise than the writer asks for."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    file = tmp_path_factory.mktemp("box") / "file"
    file.write_bytes(b"header.." + whole.numpy().tobytes())
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, most - start)) for most, start in zip(shape, low, strict=True)]
    index = MetadataIndex("w", low)
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0] * len(low)), index, torch.Size(low), torch.Size(size))
    target = torch.full(size, -1.0)
    with pytest.MonkeyPatch.context() as patch, open(file, "rb") as opened:
        patch.setattr(storage, "READ_BYTES", block_bytes)
        where = Slice((0,) * len(shape), tuple(shape), "file", 8)
        storage._read_box(opened.fileno(), where, torch.float32, item, target)
    assert torch.equal(target, whole[tuple(slice(o, o + n) for o, n in zip(low, size, strict=True))])


def test_host_buffers_are_used_again(tmp_path: Path) -> None:
    writer, planner = ShardWriter(tmp_path, "run"), ShardPlanner()
    seen = set()
    for value in range(3):
        planner.set_up_planner({"model.w": torch.full((100,), float(value))})
        assert writer.stage(planner.create_local_plan(), planner, 0, 1) == 400
        seen |= {buffer.data_ptr() for buffer in writer._buffers.values()}
    assert len(seen) == 1


def test_pinned_memory_is_locked_at_its_size_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own pinned memory would be 4 MiB here; a stand-in for CUDA's runtime notes what it is asked for."""
    locked: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
            locked[pointer] = size
            return flags

        def cudaHostUnregister(self, pointer: int) -> int:
            return 0 * locked.pop(pointer)

    size = (2 << 20) + 1
    assert not locked and not host_buffer(size, pinned=False).is_pinned()
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    waited = list[dict[int, int]]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append({**locked}))
    buffer = host_buffer(size, pinned=True)
    assert locked == {buffer.data_ptr(): size} and buffer.numel() == size
    view = buffer[:7]
    del buffer
    assert locked, "a view of it is alive"
    del view
    assert not locked and [*waited[0].values()] == [size], "copies on their way have ended before"
    assert host_buffer(0, pinned=True).numel() == 0 and not locked


def test_what_is_no_tensor_belongs_into_the_facts() -> None:
    planner = ShardPlanner()
    planner.set_up_planner({"model.step": 3})
    with pytest.raises(TypeError, match=r"model.step"):
        planner.create_local_plan()
