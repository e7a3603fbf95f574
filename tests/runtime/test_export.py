"""Weights are gathered whole to be exported."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, _redistribute

from shardwise.distributed.fake_world import fake_world
from shardwise.runtime.export import whole
from shardwise.spec.layout import Layout

LOGGER = "torch.distributed.tensor._redistribute"


def test_gathering_what_is_cut_twice_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts are, over those that have the same ones and over those that have others: torch warns of two gathers
    where it thinks that one would do."""
    with fake_world(Layout(dp_shard=4, ep=2)) as meshes:
        mesh = meshes.expert_mesh("expert_fsdp", "ep")
        value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(0)], run_check=False)
        caplog.set_level("WARNING", LOGGER)
        for gather, warnings in ((DTensor.full_tensor, 1), (whole, 0)):
            monkeypatch.setattr(_redistribute, "_warned_flatten_issues", set())
            caplog.clear()
            assert gather(value).shape == (8, 3)
            assert len(caplog.records) == warnings
