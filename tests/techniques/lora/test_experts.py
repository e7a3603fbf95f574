"""Adapters of experts, against a loop over the experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.models.config import model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.init import fill
from shardwise.models.moe import Experts, Routing, counted
from shardwise.models.roles import is_adapter
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import lora
from shardwise.techniques.states import frozen
from tests.said import shows

SPEC = model_spec(
    "mix",
    96,
    32,
    48,
    2,
    4,
    2,
    8,
    num_experts=4,
    experts_per_token=2,
    expert_size=24,
    expert_bias=True,
    shared_expert_size=16,
    shared_expert_gate=True,
    dense_layers=(0,),
)
SETTINGS = Lora(3, 6.0)
NAMES = ("expert_gate", "expert_up", "expert_down")


def adapted(settings: Lora = SETTINGS) -> Decoder:
    """A model in float64 in which nothing is zero."""
    torch.manual_seed(0)
    model = Decoder(SPEC).double()
    lora.apply([model], Plan(lora=settings), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def experts_of(model: nn.Module) -> Experts:
    (found,) = [module for module in model.modules() if isinstance(module, Experts)]
    return found


def given() -> tuple[Tensor, Routing]:
    """Tokens of which the third expert gets none."""
    x = torch.randn(20, 32, dtype=torch.float64)
    first = torch.randint(2, (20, 1))
    ids = torch.cat([first, torch.full_like(first, 3)], 1)
    weights, logits = torch.rand(20, 2, dtype=torch.float64), torch.zeros(20, 4)
    return x, Routing(ids, weights, counted(ids, 4), logits, logits)


def by_hand(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Token by token: in each matrix W + 2 B A of the expert."""

    def product(name: str, expert: int, x: Tensor) -> Tensor:
        layer = experts.get_submodule(name)
        parts = ("weight", "bias", "lora_a.weight", "lora_b.weight")
        weight, bias, down, up = (layer.get_parameter(part).chunk(4)[expert] for part in parts)
        return (weight + 2.0 * up @ down) @ x + bias

    out = []
    for token, ids, weights in zip(x, routing.ids.tolist(), routing.weights, strict=True):
        made = [
            product(
                "expert_down", e, nn.functional.silu(product("expert_gate", e, token)) * product("expert_up", e, token)
            )
            for e in ids
        ]
        out.append((torch.stack(made) * weights.unsqueeze(1)).sum(0))
    return torch.stack(out)


def test_each_expert_has_its_own() -> None:
    experts = experts_of(adapted())
    own = {name: value for name, value in experts.named_parameters() if is_adapter(name)}
    (x, routing), cast = given(), list(own.values())
    right, found = by_hand(experts, x, routing), experts(x, routing)
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), cast) for out in (found, right)), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
        assert [bool(each.any()) for each in one.chunk(4)] == [True, True, False, True]


def test_a_merge_computes_what_the_adapters_did() -> None:
    model = adapted()
    experts, (x, routing) = experts_of(model), given()
    before = experts(x, routing)
    count, lost = lora.merge([model], SETTINGS)
    assert (count, lost) == (4 * 2 + 3 * 3, []) and not any(is_adapter(name) for name, _ in model.named_parameters())
    assert torch.allclose(experts(x, routing), before, rtol=1e-12, atol=1e-12)


def test_what_is_trained() -> None:
    """All linear layers and experts are targeted, a router and the gate of a shared MLP never are."""
    names = {name for name, _ in adapted().named_parameters()}
    plan = Plan(lora=SETTINGS)
    trained = {name for name in names if not frozen(name, plan)}
    assert trained == {*lora.adapters(SPEC, SETTINGS)}
    layers = {name.rpartition(".lora_")[0] for name in trained}
    mlp = {f"layers.1.mlp.experts.{name}" for name in NAMES} | {
        f"layers.1.mlp.shared.{x}" for x in ("gate", "up", "down")
    }
    assert {layer for layer in layers if layer.startswith("layers.1.mlp")} == mlp
    some = lora.adapters(SPEC, replace(SETTINGS, targets=("expert_down",)))
    name = "layers.1.mlp.experts.expert_down.lora_"
    assert some == {f"{name}a.weight": (4 * 3, 24), f"{name}b.weight": (4 * 32, 3)}


def test_first_values_do_not_depend_on_who_has_which_expert() -> None:
    name = "layers.1.mlp.experts.expert_up.lora_a.weight"
    whole = fill(name, (12, 32), (slice(0, 12), slice(0, 32)), 5, SPEC)
    assert torch.equal(fill(name, (12, 32), (slice(6, 12), slice(0, 32)), 5, SPEC), whole[6:])
    assert abs(float(whole.std()) * (3 * 32) ** 0.5 - 1) < 0.1


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        (
            replace(SETTINGS, dora=True),
            "no magnitudes of",
            "lora.targets: [q, k, v, o, gate, up, down]",
        ),
        (replace(SETTINGS, targets=("expert",)), "the role `expert`", "did you mean `expert_"),
        (replace(SETTINGS, targets=("router",)), "the role `router`", "expert_gate"),
        (Lora(20, 6.0, ("q", "expert_up")), "rank 20 exceeds", "16"),
    ],
)
def test_what_cannot_be(settings: Lora, what: str, fix: str) -> None:
    (problem,) = lora.check(SPEC, Plan(lora=settings), parse_cluster("1xH100"))
    assert what in problem.what and fix in problem.fix


def test_magnitudes_beside_experts_without_adapters() -> None:
    settings = replace(SETTINGS, dora=True, targets=("q", "down"))
    assert not lora.check(SPEC, Plan(lora=settings), parse_cluster("1xH100"))
    of_qwen = replace(SPEC, family="qwen3_moe")
    (problem,) = lora.check(of_qwen, Plan(lora=settings), parse_cluster("1xH100"))
    assert shows(problem.what, "PEFT", "magnitudes of down")
