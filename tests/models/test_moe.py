"""Mixtures of experts: against transformers, and against a plain loop over tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.models import layers
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, from_hf, with_fields
from shardwise.models.grouped import grouped, served
from shardwise.models.moe import Experts, MoE, Routing, added_up, counted, logits
from tests.models.families import LENGTH, config_of, mixtures, pair, random_model, routed, spec_of
from tests.models.llama import relative, tokens

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative, of sums in another order: some roundings of each dtype."""
REFUSED = [
    ("mixtral", {"router_jitter_noise": 0.1}, "MOD001", "router_jitter_noise: 0.1", "router_jitter_noise: null"),
    ("olmoe", {"clip_qkv": 8.0}, "MOD001", "clip_qkv: 8.0", "clip_qkv: null"),
    ("olmoe", {"clip_qkv": 0.0}, "MOD001", "clip_qkv: 0.0", "clip_qkv: null"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "MOD001", "swiglu_limit: 5.0", "swiglu_limit: 7.0"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "MOD001", "swiglu_alpha: 1.0", "swiglu_alpha: 1.702"),
    ("mixtral", {"num_experts_per_tok": 9}, "PLAN008", "9 experts", "num_experts_per_tok: 1 to"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "PLAN008", "0 experts", "num_experts_per_tok: 1 to 6"),
    ("olmoe", {"num_experts": 0}, "PLAN008", "num_experts is 0", "num_experts: 1 or more"),
    ("mixtral", {"num_local_experts": -1}, "PLAN008", "num_local_experts is -1", "num_local_experts: 1 or more"),
    ("mixtral", {"num_local_experts": "8"}, "CFG004", 'got text "8"', "num_local_experts: a whole number"),
    ("qwen2_moe", {"num_experts_per_tok": 2.5}, "CFG004", "got 2.5", "num_experts_per_tok: a whole number"),
    ("qwen2_moe", {"moe_intermediate_size": 0}, "PLAN008", "experts are 0 wide", "moe_intermediate_size: 1 or more"),
    ("mixtral", {"intermediate_size": 0}, "PLAN008", "intermediate_size is 0", "intermediate_size: 1 or more"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "PLAN008", "size is 0", "intermediate_size: 1 or more"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "PLAN008", "the 3 layers", "mlp_only_layers: []"),
    ("qwen3_moe", {"decoder_sparse_step": 4}, "PLAN008", "the 3 layers", "decoder_sparse_step: 1"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_to_the_experts_that_transformers_chooses(family: str, seed: int) -> None:
    """And with the same weights."""
    ours, theirs = pair(family, seed)
    expected: list[tuple[Tensor, Tensor]] = []
    for name, module in theirs.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router")):
            module.register_forward_hook(lambda *given: expected.append(given[2][1:]))
    found = routed(ours)
    ids, positions = tokens(ours.spec.vocab_size, length=LENGTH, seed=seed)
    ours(ids, positions, MaskSpec())
    theirs(ids, use_cache=False)
    assert len(found) == len(expected) == ours.spec.expert_layers
    for routing, (weights, chosen) in zip(found, expected, strict=True):
        assert torch.equal(routing.ids, chosen)
        torch.testing.assert_close(routing.weights, weights, rtol=1e-4, atol=1e-6)
        assert torch.equal(routing.counts, chosen.flatten().bincount(minlength=ours.spec.experts.num_experts))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_add_up_to_one_matter(family: str) -> None:
    spec = spec_of(family)
    ids, positions = tokens(spec.vocab_size, length=LENGTH)
    both = [random_model(with_fields(spec, normalised_top_k=on))(ids, positions, MaskSpec()) for on in (True, False)]
    assert relative(*both) > 1e-3


def test_what_the_clamps_cut_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the comparison with transformers could not see them."""
    model = random_model(spec_of("gpt_oss"))
    ids, positions = tokens(model.spec.vocab_size, length=LENGTH)
    before = model(ids, positions, MaskSpec())
    for name, value in (("CLAMP", 1e9), ("SLOPE", 1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(layers, name, value)
            assert relative(model(ids, positions, MaskSpec()), before) > 1e-3


def experts_of(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Experts:
    return mixtures(random_model(spec, dtype=dtype))[0].experts


def sent(spec: ModelSpec, where: Any, dtype: torch.dtype) -> Routing:
    """Of each token to these experts, [n,k], with random weights."""
    ids = torch.as_tensor(where)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = torch.zeros(len(ids), spec.experts.num_experts)
    return Routing(ids, weights.requires_grad_(), counted(ids, spec.experts.num_experts), logits, logits.softmax(-1))


def token_by_token(spec: ModelSpec, experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """What the experts make, each of one token at a time."""

    def product(name: str, expert: int, value: Tensor) -> Tensor:
        layer = getattr(experts, f"expert_{name}")
        rows = slice(expert * layer.rows, (expert + 1) * layer.rows)
        return torch.nn.functional.linear(value, layer.weight[rows], None if layer.bias is None else layer.bias[rows])

    out = []
    for row, chosen, weights in zip(x, routing.ids.tolist(), routing.weights, strict=True):
        each = [
            product(
                "down", expert, layers.GATES[spec.activation](product("gate", expert, row), product("up", expert, row))
            )
            for expert in chosen
        ]
        out.append(sum(weight * value for weight, value in zip(weights.to(x.dtype), each, strict=True)))
    return torch.stack(out)


ROUTES = {
    "random": [[1, 3], [3, 0], [0, 1], [1, 0], [3, 1]],
    "one has no token": [[1, 2], [2, 1], [1, 2]],
    "all to one": [[2]] * 6,
    "one token": [[3, 0]],
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("width", [24, 23])
def test_experts_are_a_loop_over_tokens(family: str, route: str, dtype: torch.dtype, width: int) -> None:
    """Values and gradients, by one call for all experts and, where a row is not whole 16 bytes, by one for each."""
    spec = with_fields(spec_of(family), hidden_size=32, num_experts=4, expert_size=width)
    gradients = []
    for compute in (Experts.forward, lambda *given: token_by_token(spec, *given)):
        experts = experts_of(spec, dtype)
        routing = sent(spec, ROUTES[route], dtype)
        x = torch.randn(len(routing.ids), 32, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        out = compute(experts, x, routing)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        gradients.append({name: value.grad for name, value in experts.named_parameters()})
        gradients[-1] |= {"x": x.grad, "weights": routing.weights.grad, "out": out.detach()}
    for name, value in gradients[0].items():
        assert value is not None and value.dtype == dtype, name
        assert relative(value.double(), gradients[1][name].double()) < TOLERANCES[dtype], name


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    spec = spec_of("gpt_oss")
    experts = experts_of(spec)
    x = torch.randn(3, spec.hidden_size, dtype=torch.float64)
    experts(x, sent(spec, [[0, 2], [2, 4], [4, 0]], torch.float64)).sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None
        alive = parameter.grad.unflatten(0, (spec.experts.num_experts, -1)).flatten(1).abs().sum(1) > 0
        assert alive.tolist() == [True, False, True, False, True, False], name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens_at_all(family: str) -> None:
    """A rank may have none."""
    moe = mixtures(random_model(spec_of(family)))[0]
    x = torch.randn(1, 0, spec_of(family).hidden_size, requires_grad=True)
    out = moe(x)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in moe.parameters())


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 8), (torch.float32, 7), (torch.float64, 8)])
def test_grouped_products_are_one_product_after_another(dtype: torch.dtype, columns: int) -> None:
    counts = torch.tensor([3, 0, 1, 5])
    x = torch.randn(9, 12, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, columns, 12, dtype=dtype, requires_grad=True)
    assert served(x, columns) == (dtype == torch.float32 and columns == 8)
    found = grouped(x, weight, counts)
    plain = torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts.tolist()), weight, strict=True)])
    torch.testing.assert_close(found, plain)
    factor = torch.randn_like(plain)
    both = [torch.autograd.grad((out * factor).sum(), (x, weight)) for out in (found, plain)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("trained", [True, False])
def test_products_of_frozen_matrices_keep_no_rows(trained: bool) -> None:
    """Nor do routers: only the gradient of a matrix is made of what was multiplied with it."""
    kept: list[Tensor] = []
    rows, counts = torch.randn(6, 8, requires_grad=True), torch.tensor([2, 4])
    router, matrices = torch.randn(2, 8, requires_grad=trained), torch.randn(2, 5, 8, requires_grad=trained)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for product in (lambda: grouped(rows, matrices, counts), lambda: logits(rows, router, None)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            product()
        assert (rows.shape in [tensor.shape for tensor in kept]) == trained


def test_gradients_of_a_whole_mixture_by_finite_differences() -> None:
    """Of router, shared expert and gate too; tokens do not change experts for a difference this small."""
    config = config_of("qwen2_moe") | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
    spec = from_hf(config | {"shared_expert_intermediate_size": 3}, "test")
    moe = mixtures(random_model(replace(spec, hidden_size=6), dtype=torch.float64))[0]
    names, values = zip(*moe.named_parameters(), strict=True)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(moe, dict(zip(names, given, strict=True)), x)
        return out

    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *values))


def test_under_autocast_routers_stay_in_fp32_and_experts_do_not() -> None:
    """What torch casts by itself it casts in linear layers, and would in a router's product."""
    spec = spec_of("gpt_oss")
    moe = mixtures(random_model(spec))[0]
    x = torch.randn(7, spec.hidden_size)
    plain = moe.route(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing, rows = moe.route(x), moe.experts.expert_gate(x, torch.tensor([7, 0, 0, 0, 0, 0]))
    assert rows.dtype == torch.bfloat16
    assert routing.weights.dtype == torch.float32 and torch.equal(routing.weights, plain.weights)


def test_a_router_in_bf16_computes_in_fp32() -> None:
    """Of bf16 inputs: the products are of their values, and nothing is rounded before the choice."""
    moe = mixtures(random_model(spec_of("gpt_oss"), dtype=torch.bfloat16))[0]
    x = torch.randn(7, moe.router.weight.shape[1]).bfloat16()
    assert moe.router.bias is not None
    wide = x.float() @ moe.router.weight.float().T + moe.router.bias.float()
    assert moe.router(x).dtype == torch.float32
    torch.testing.assert_close(moe.router(x), wide)


@pytest.mark.parametrize(("family", "change", "code", "what", "fix"), REFUSED)
def test_what_is_refused(family: str, change: dict[str, Any], code: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf(config_of(family) | change, "x")
    problem = caught.value.problems[0]
    assert problem.code == code and what in problem.what and fix in problem.fix and problem.where == "config of x"


def test_configs_of_transformers_4_and_5_are_read_alike() -> None:
    """Which call the number of experts by two names, and the rotation by others."""
    for family in FAMILIES:
        config, names = config_of(family), ("num_local_experts", "num_experts")
        kept = {key: value for key, value in config.items() if key not in names}
        [count] = {config[name] for name in names if name in config}
        assert all(from_hf(kept | {name: count}, "test") == spec_of(family) for name in names)
    old = {key: value for key, value in config_of("gpt_oss").items() if key not in ("rope_parameters", "swiglu_alpha")}
    stretch = config_of("gpt_oss")["rope_parameters"]
    scaling = {key: value for key, value in stretch.items() if key != "rope_theta"}
    old |= {"rope_theta": stretch["rope_theta"], "rope_scaling": scaling, "experts_per_token": 3}
    assert from_hf(old, "test") == spec_of("gpt_oss")


def test_a_layer_is_a_mixture_or_dense() -> None:
    """As mlp_only_layers and decoder_sparse_step say together."""
    config = config_of("qwen2_moe") | {"num_hidden_layers": 6, "layer_types": None}
    spec = from_hf(config | {"mlp_only_layers": [1], "decoder_sparse_step": 2}, "x")
    assert spec.experts.dense_layers == (0, 1, 2, 4) and spec.expert_layers == 2
    kinds = [type(layer.mlp) for layer in random_model(spec).layers]
    assert kinds == [layers.MLP, layers.MLP, layers.MLP, MoE, layers.MLP, MoE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_rows_are_added_up_where_they_are(tokens: int, k: int, dtype: torch.dtype) -> None:
    """Bit by bit as copies in the order of the tokens are, one after another; weighted, and where some were dropped."""
    order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(k))
    places = order.argsort().view(tokens, k)
    rows = torch.randn(tokens * k, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(tokens, k, dtype=dtype, generator=torch.Generator().manual_seed(2))
    for kept in {tokens * k, tokens * k // 2}:
        each = rows.new_zeros(tokens * k, 6).index_copy_(0, order[:kept], rows[:kept]).view(tokens, k, 6)
        summed = rows.new_zeros(tokens, 6)
        for one in each.unbind(1):
            summed += one
        assert torch.equal(added_up(rows[:kept], order[:kept], places), summed)
        weighted = added_up(rows[:kept], order[:kept], places, weights)
        torch.testing.assert_close(weighted, (each * weights.unsqueeze(-1)).sum(1), rtol=1e-6, atol=1e-6)
