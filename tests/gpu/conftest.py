"""For machines with GPUs: `make gpu`. What needs several is collected only where there are several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

collect_ignore = [] if torch.cuda.device_count() > 1 else ["test_many_gpus.py"]


@pytest.fixture
def alone() -> Iterator[torch.device]:
    """The first GPU, in a process group of one."""
    assert torch.cuda.is_available(), "these tests need a CUDA device that this build of torch can use"
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.device("cuda", 0)
    finally:
        dist.destroy_process_group()
        torch.cuda.empty_cache()
