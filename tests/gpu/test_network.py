"""NCCL's sockets, those of its bootstrap and of its own service, are as little open to a network as gloo's."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shardwise.runtime.world import world
from shardwise.spec.layout import Layout
from tests.launch.sockets import network_addresses, stays_here

pytestmark = pytest.mark.gpu


def test_a_rank_on_a_gpu_listens_on_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")  # what a cluster's environment may say; put back afterwards
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with world(Layout(), "cuda", 60.0):
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        assert total.item() == 1.0
        found = network_addresses(os.getpid())
        assert found and all(map(stays_here, found)), found
