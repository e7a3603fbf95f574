"""The state of a sampler or a scheduler comes back from JSON as it was: types, keys and bits."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from shardwise.errors import DataError
from shardwise.runtime.checkpoint.stateful import LARGEST_BYTES, decode, encode

STATES: list[Any] = [
    {"a": [1, 2.5, None, True, "text"], "b": {"c": {}}},
    {"best": float("-inf"), "milestones": Counter({3: 2}), "pair": (1, (2,))},
    {0: "a", "$float": "no infinity", (1, 2): []},
]


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    found = decode(json.loads(json.dumps(encode(state, "state"), allow_nan=False)))
    assert found == state and repr(found) == repr(state)


def test_tensors_come_back_to_the_bit() -> None:
    odd = torch.tensor([[1.0, float("nan"), -0.0]], dtype=torch.bfloat16)
    for tensor in (odd, odd.T, torch.tensor(3), torch.empty(0, 2), torch.Generator().get_state(), torch.tensor(True)):
        found = decode(json.loads(json.dumps(encode({"x": tensor}, "state"))))["x"]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("value", [b"pickled", {1, 2}, lambda: 0, torch.empty(LARGEST_BYTES + 1, dtype=torch.uint8)])
def test_what_is_neither_is_refused_where_it_stands(value: Any) -> None:
    with pytest.raises(DataError, match=r"CKPT020.*`loader.workers.1.rng`"):
        encode({"workers": [{}, {"rng": value}]}, "loader")
