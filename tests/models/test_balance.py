"""The losses of routers and the loads of experts in one process, beside transformers and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.models import router_losses
from shardwise.models.config import with_fields
from shardwise.models.moe import MoE
from shardwise.models.router_losses import RowPlaces, Tally
from tests.parity.experts import MOE

WIDTH = MOE.hidden_size


def layer(**changes: Any) -> MoE:
    torch.manual_seed(0)
    made = MoE(with_fields(MOE, **changes)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def told(module: MoE, auxiliary: float = 0.0, z: float = 0.0) -> Tally:
    factors = torch.tensor([auxiliary, z], dtype=torch.float64)
    module.tally = Tally(torch.zeros(MOE.experts.num_experts).double(), torch.zeros(2).double(), factors)
    return module.tally


def rows(count: int, length: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, length, WIDTH, dtype=torch.float64, requires_grad=True)


def gradients(module: MoE, x: Tensor, loss: Callable[[Tensor], Tensor] = Tensor.sum) -> dict[str, Tensor]:
    """Of the loss of what the layer makes of x, and what its routers add."""
    module.zero_grad()
    x.grad = None
    loss(module(x)).backward()
    assert x.grad is not None
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return found | {"x": x.grad.clone()}


def test_of_one_row_and_one_layer_it_is_transformers_loss() -> None:
    module, x = layer(router_z_loss_coef=0.0), rows(1)
    plain = gradients(module, x)
    tally = told(module, auxiliary=0.7)
    with_loss = gradients(module, x)
    x.grad = None
    module.zero_grad()
    theirs = load_balancing_loss_func(
        (module.router(x.flatten(0, 1)),), MOE.experts.num_experts, MOE.experts.experts_per_token
    )
    assert isinstance(theirs, Tensor)
    (0.7 * theirs).backward()
    assert float(tally.losses[0]) == pytest.approx(float(theirs.detach()), rel=1e-6), "theirs is in fp32"
    for name, expected in {"router.weight": module.router.weight.grad, "x": x.grad}.items():
        assert expected is not None
        torch.testing.assert_close(with_loss[name] - plain[name], expected, rtol=1e-5, atol=1e-7)


def test_e7_of_several_rows_it_is_the_sum_of_those_of_each() -> None:
    """Not transformers' loss of the whole batch, which is another number for other micro-batches."""
    module, x = layer(), rows(3)
    tally = told(module)
    module(x)
    whole = tally.losses.clone(), tally.loads.clone()
    found = []
    for row in x:
        each = told(module)
        module(row[None])
        found.append((each.losses, each.loads))
    for place in (0, 1):
        torch.testing.assert_close(whole[place], torch.stack([each[place] for each in found]).sum(0))


def test_the_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials() -> None:
    module, x = layer(router_aux_loss_coef=0.0), rows(2)
    plain = gradients(module, x)
    tally = told(module, z=0.3)
    added = gradients(module, x)
    module.zero_grad()
    x.grad = None
    logits = module.router(x.flatten(0, 1)).view(2, 12, -1)
    expected = logits.exp().sum(-1).log().square().mean(1).sum()
    (0.3 * expected).backward()
    assert float(tally.losses[1]) == pytest.approx(float(expected.detach()), rel=1e-12) and not tally.losses[0]
    assert module.router.weight.grad is not None and x.grad is not None
    torch.testing.assert_close(added["router.weight"] - plain["router.weight"], module.router.weight.grad)
    torch.testing.assert_close(added["x"] - plain["x"], x.grad)


def test_outside_a_training_step_nothing_is_added_and_nothing_counted() -> None:
    module, x = layer(router_aux_loss_coef=1e6), rows(2)
    without = gradients(layer(router_aux_loss_coef=0.0, router_z_loss_coef=0.0), x)
    for name, gradient in gradients(module, x).items():
        assert torch.equal(gradient, without[name]), name


@pytest.mark.parametrize("frozen", ["router", "all"])
def test_a_router_without_a_gradient_breaks_nothing(frozen: str) -> None:
    """And its losses are counted all the same."""
    module, x = layer(), rows(2).detach()
    for parameter in (module if frozen == "all" else module.router).parameters():
        parameter.requires_grad_(False)
    tally = told(module, 1.0, 1.0)
    out = module(x)
    assert out.requires_grad == (frozen == "router")
    if out.requires_grad:
        out.sum().backward()
        assert module.experts.expert_gate.weight.grad is not None
    assert tally.loads.sum() == 2 * 12 * MOE.experts.experts_per_token and (tally.losses > 0).all()


@pytest.mark.parametrize("what_is_trained", ["all", "what follows"])
def test_e10_recomputation_counts_nothing_twice(what_is_trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the layer itself has no gradient, and runs again for a norm behind it."""
    module, norm = layer(), torch.nn.RMSNorm(WIDTH, dtype=torch.float64)
    x = rows(2) if what_is_trained == "all" else rows(2).detach()
    module.requires_grad_(what_is_trained == "all")

    def counted(recompute: bool) -> Tensor:
        tally = told(module, 1.0, 1.0)

        def block(x: Tensor) -> Tensor:
            return norm(module(x) * 2)

        out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        out.square().sum().backward()
        return torch.cat([tally.loads, tally.losses])

    right = counted(False)
    assert torch.equal(counted(True), right)
    monkeypatch.setattr(router_losses, "in_backward", lambda: False)
    assert torch.equal(counted(True), 2 * right), "the planted fault: what counts does not know that it runs again"


def test_e11_the_routing_is_the_same_when_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer().bfloat16(), rows(4).detach().bfloat16().requires_grad_()
    seen: list[Tensor] = []
    route = module.route

    def watched(x: Tensor) -> router_losses.Routing:
        found = route(x)
        seen.append(found.ids)
        return found

    monkeypatch.setattr(module, "route", watched)
    told(module, 1.0, 1.0)
    checkpoint(module, x, use_reentrant=False).sum().backward()
    first, again = seen
    assert torch.equal(first, again)


def test_places_of_tokens_among_rows() -> None:
    """Three rows of five tokens over four ranks, as many each, rounded up: the last has one that is in no row."""
    found = [RowPlaces(3, 5, 4 * rank).of(4, torch.zeros(1)) for rank in range(4)]
    assert torch.cat([row for row, _ in found]).tolist() == [0] * 5 + [1] * 5 + [2] * 6
    assert torch.cat([inside for _, inside in found]).tolist() == [1.0] * 15 + [0.0]
