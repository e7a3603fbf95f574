"""Initial weights: independent of how they are cut, and the same in every release of the algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.models import init
from tests.models.test_decoder import SPEC

NAME = "layers.1.mlp.up.weight"
GOLDEN_SMALL = [0.0177846, -0.0158975, -0.0039344, 0.0011864]
GOLDEN_SECOND_BLOCK = [-0.0041571, -0.010876, -0.0086646, 0.0199892]


def whole(shape: Sequence[int], name: str = NAME, seed: int = 0) -> torch.Tensor:
    return init.fill(name, shape, [slice(0, size) for size in shape], seed, SPEC)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_a_slice_is_a_slice_of_the_whole(data: st.DataObject, shape: list[int]) -> None:
    """Bitwise, with blocks of 16 elements so that slices cross them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK", 16)
        cuts = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        part = [slice(*cut) for cut in cuts]
        assert torch.equal(init.fill(NAME, shape, part, 7, SPEC), whole(shape, seed=7)[tuple(part)])


def test_only_the_blocks_that_meet_the_slice_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = init._draw
    monkeypatch.setattr(init, "BLOCK", 16)
    monkeypatch.setattr(init, "_draw", lambda name, block, *rest: (drawn.append(block), draw(name, block, *rest))[1])
    init.fill(NAME, (16, 8), [slice(4, 6), slice(0, 8)], 0, SPEC)
    assert drawn == [2]
    drawn.clear()
    init.fill(NAME, (4, 64), [slice(0, 4), slice(0, 16)], 0, SPEC)
    assert drawn == [0, 4, 8, 12]


def test_golden_vectors() -> None:
    """A change here changes every run: then ALGORITHM must get a new name. 1e-6: torch's Box-Muller may differ in the
    last bit between instruction sets."""
    assert init.ALGORITHM == "shardwise-init-1"
    torch.testing.assert_close(whole((2, 4))[0], torch.tensor(GOLDEN_SMALL), rtol=0, atol=1e-6)
    part = [slice(1025, 1026), slice(0, 4)]
    second = init.fill("embed.weight", (1100, 1024), part, 3, SPEC)[0]
    torch.testing.assert_close(second, torch.tensor(GOLDEN_SECOND_BLOCK), rtol=0, atol=1e-6)


def test_distribution_and_kinds() -> None:
    values = whole((512, 512))
    assert abs(float(values.mean())) < 4 * SPEC.initializer_range / 512  # four standard errors
    assert abs(float(values.std()) / SPEC.initializer_range - 1) < 0.01
    assert torch.equal(whole((5,), "layers.0.attention_norm.weight"), torch.ones(5))
    assert torch.equal(whole((5,), "layers.0.attention.q.bias"), torch.zeros(5))


def test_names_and_seeds_draw_different_values() -> None:
    values = [whole((4, 4)), whole((4, 4), seed=1), whole((4, 4), "layers.0.mlp.up.weight")]
    assert not any(torch.equal(values[i], values[j]) for i in range(3) for j in range(i))
    assert torch.equal(values[0], whole((4, 4)))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    whole((4, 4))
    assert torch.equal(before, torch.get_rng_state())
