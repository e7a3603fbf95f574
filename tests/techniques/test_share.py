"""What a rank computes with its share of a layer's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.distributed.fake_world import fake_world
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoE, Stacked, stacked
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Precision
from shardwise.techniques import ep
from shardwise.techniques.product import product_of
from tests.parity.mixtures import MIXTRAL

ROWS = torch.randn(6, MIXTRAL.hidden_size, generator=torch.Generator().manual_seed(0))
COUNTS = torch.tensor([1, 0, 2, 3])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_of_a_rank_compute_in_the_dtype_that_their_module_has(dtype: str) -> None:
    """And give what they make of their rows in that of the rest."""
    plan = Plan(Layout(dp_shard=2, ep=2), precision=Precision("fp32", modules=(("*.expert_up", dtype),)))  # type: ignore[arg-type]
    part = Decoder(MIXTRAL)
    up = next(module for module in part.modules() if isinstance(module, MoE)).experts.expert_up
    nn.init.normal_(up.weight)
    own = up.weight.detach().chunk(2)[1].clone()
    with fake_world(plan.layout, rank=1) as meshes:
        ep.apply([part], plan, meshes)
        found = up(ROWS, COUNTS)
    inside = torch.bfloat16 if dtype == "bf16" else torch.float32
    expected = stacked(ROWS.to(inside), COUNTS, own, None, MIXTRAL.experts.expert_size)
    assert found.dtype == torch.float32 and torch.equal(found, expected.float())


def test_what_reads_its_weights_by_itself_is_given_rows_in_its_own_dtype() -> None:
    """Whether it says how it multiplies before its dtypes are told, as 4 bits do after them, or the other way round."""
    layers = [Stacked(4, 8, MIXTRAL.hidden_size) for _ in range(2)]
    product_of(layers[0], torch.bfloat16, torch.float32).multiply = tripled
    product_of(layers[1]).multiply = tripled
    product_of(layers[1], torch.bfloat16, torch.float32)
    for layer in layers:
        found = layer(ROWS, COUNTS)
        assert found.dtype == torch.float32 and torch.equal(found, tripled(ROWS.bfloat16(), COUNTS).float())
        assert not torch.equal(found, tripled(ROWS, COUNTS))


def tripled(x: Tensor, counts: Tensor) -> Tensor:
    return x * 3 + counts.sum()
