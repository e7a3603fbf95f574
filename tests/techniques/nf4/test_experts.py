"""Experts in 4 bits: each by itself, whatever the others are and whoever has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardwise.distributed.fake_world import fake_world
from shardwise.models.config import model_spec, parameter_shapes
from shardwise.runtime.build import build_parts
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan, Precision, Shard
from shardwise.techniques import nf4, wanted
from shardwise.techniques.nf4 import fourbit
from shardwise.techniques.quantised import dequantise_bytes
from shardwise.techniques.stored_matrix import stacked
from tests.techniques.test_workspaces import SMALL_BYTES, held_bytes

SPEC = model_spec("mix", 96, 64, 64, 1, 4, 2, 16, num_experts=8, experts_per_token=2, expert_size=192)
SHAPES = [(3, 64, 64), (5, 96, 192), (4, 300, 1024)]
"""Experts, and the rows and columns of each: whole groups of scales, and others."""


def matrix(experts: int, rows: int, columns: int) -> Tensor:
    weight = torch.randn(experts * rows, columns, generator=torch.Generator().manual_seed(experts))
    return weight * torch.logspace(-3, 0, experts).repeat_interleave(rows).unsqueeze(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_expert_is_quantised_by_itself(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """To the bit, though some are a thousand times larger than others."""
    experts, _, _ = shape
    weight = matrix(*shape)
    kept = fourbit.quantise_each(weight, experts)
    alone = [fourbit.quantise(each) for each in weight.chunk(experts)]
    assert all(torch.equal(whole, torch.cat(each)) for whole, each in zip(kept, zip(*alone, strict=True), strict=True))
    found = fourbit.dequantise_each(kept, experts, dtype)
    assert torch.equal(found, torch.cat([fourbit.dequantise(*each, dtype) for each in alone]))


def test_products_of_experts_and_what_they_save() -> None:
    """Those of dequantised matrices, which are not saved, nor are the rows: backward needs the bytes alone."""
    kept, counts = fourbit.quantise_each(matrix(4, 32, 64), 4), torch.tensor([3, 0, 5, 2])
    x = torch.randn(10, 64, dtype=torch.float64, requires_grad=True)
    each = fourbit.dequantise_each(kept, 4, torch.float64).chunk(4)
    right = torch.cat([rows @ weight.T for rows, weight in zip(x.split(counts.tolist()), each, strict=True)])
    saved: list[Tensor] = []

    def made(kept: Sequence[Tensor], dtype: torch.dtype, again: bool) -> Tensor:
        return fourbit.restore(kept, dtype, None, 4).unflatten(0, (4, 32))

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = stacked(x, counts, kept, made)
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)
    assert {tensor.dtype for tensor in saved} == {torch.uint8, torch.int64}
    one, other = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, right))
    assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "rank", "held"), [(Layout(dp_shard=2, ep=2), 1, range(4, 8)), (Layout(dp_shard=4, ep=2), 0, range(2))]
)
def test_a_rank_asks_for_the_experts_that_it_has(layout: Layout, rank: int, held: range) -> None:
    """No matrix is there whole: of two ranks each asks for half, and of four that cut these for a quarter."""
    plan = Plan(layout, shard=Shard("zero3"), precision=Precision(), lora=Lora(2, 4.0, frozen="fp32", nf4=True))
    with fake_world(layout, rank) as groups:
        [part] = build_parts(SPEC, plan, groups, torch.device("cpu"))
        parameters = dict(part.named_parameters())
        found = wanted(parameters, SPEC, plan)
        for word, rows in (("gate", 192), ("up", 192), ("down", 64)):
            name = f"layers.0.mlp.experts.expert_{word}.weight"
            columns = parameter_shapes(SPEC)[name][1]
            assert found[name] == (slice(held[0] * rows, (held[-1] + 1) * rows), slice(0, columns))


def test_a_rank_stores_its_own() -> None:
    """And what it hands on is what is computed with; pieces of experts are stored in tests/parity."""
    name, shapes = "layers.0.mlp.experts.expert_up.", {"codes": 32, "sizes": 1, "groups": 4}
    weight = matrix(4, 8, 64)
    whole = dict(zip(shapes, fourbit.quantise_each(weight, 4), strict=True))
    parameters = {name + word: torch.zeros_like(value) for word, value in whole.items()}
    parameters["layers.0.mlp.router.weight"] = torch.zeros(4, 64)
    made = nf4.store(parameters, name + "weight", (slice(0, 32), slice(0, 64)), lambda: weight)
    assert all(torch.equal(parameters[name + word], value) for word, value in whole.items())
    assert torch.equal(made(), fourbit.dequantise_each(tuple(whole.values()), 4, torch.float32))  # type: ignore[arg-type]


def test_what_dequantising_holds() -> None:
    experts, rows, columns = 6, 700, 1024
    kept = fourbit.quantise_each(matrix(experts, rows, columns), experts)
    held = held_bytes(lambda: fourbit.dequantise_each(kept, experts, torch.bfloat16))
    assert abs(held - dequantise_bytes(experts * rows, columns)) <= SMALL_BYTES
