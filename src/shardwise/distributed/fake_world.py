"""A process group of any size in one process, whose collectives do nothing: enough to see what would be sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.torch_private import fake_store, forget_sharding, fresh_sharding_propagation
from shardwise.spec.layout import Layout


@contextmanager
def fake_world(layout: Layout, rank: int = 0) -> Iterator[Meshes]:
    """A default process group of ``layout.world`` ranks, this process being ``rank``, whose collectives do nothing."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=layout.world)
    try:
        with fresh_sharding_propagation():
            yield meshes(layout, "cpu")
    finally:
        dist.destroy_process_group()
        forget_sharding()
