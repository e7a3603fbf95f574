"""Routers that choose by sigmoids, against transformers in float64: logits and all gradients within 1e-9.

transformers computes norms, routers, softmaxes and rotations in fp32 whatever the dtype. Here its modules see a torch
in which fp32 is float64, so that nothing but the order of sums is left of the differences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.models import moe
from shardwise.models.attention import MaskSpec
from shardwise.models.balance import Routing
from shardwise.models.config import ModelSpec, from_hf, problems, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.kinds import SigmoidRouting
from shardwise.models.moe import MoE
from tests.models.families import LENGTH, config_of, in_memory, mixtures, random_model
from tests.models.llama import relative, tokens

CASES = [("glm4_moe", groups, seed) for groups in ((1, 1), (2, 1), (4, 2)) for seed in range(2)]
CASES += [("minimax_m2", (1, 1), seed) for seed in range(3)]


class WideTorch:
    """torch, in which fp32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(family: str) -> Iterator[None]:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    ropes = importlib.import_module("transformers.modeling_rope_utils")
    with ExitStack() as stack:
        for module in (modeling, ropes):
            stack.enter_context(patch.object(module, "torch", WideTorch()))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def pair(family: str, groups: tuple[int, int], seed: int) -> tuple[Decoder, PreTrainedModel]:
    config = config_of(family, seed)
    if family == "glm4_moe":
        config |= {"n_group": groups[0], "topk_group": groups[1]}
    spec = from_hf(config, "test")
    assert spec.experts.sigmoid is not None and spec.experts.sigmoid.groups == groups[0]
    ours = random_model(spec, seed, torch.float64)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    state = in_memory(spec, ours.state_dict(), theirs.state_dict())
    if spec.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return ours, theirs.eval()


@pytest.mark.parametrize(("family", "groups", "seed"), CASES)
def test_logits_and_gradients_in_float64(family: str, groups: tuple[int, int], seed: int) -> None:
    with in_float64(family):
        ours, theirs = pair(family, groups, seed)
        ids, positions = tokens(ours.spec.vocab_size, length=LENGTH, seed=seed)
        labels = ids.roll(-1, 1).flatten()
        logits, reference = ours(ids, positions, MaskSpec()), theirs(ids, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), labels).backward()
        F.cross_entropy(reference.flatten(0, 1), labels).backward()
    assert logits.dtype == reference.dtype == torch.float64
    worst = {"logits": relative(logits, reference)}
    given = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    given |= {name: torch.zeros_like(p) for name, p in ours.named_parameters() if name.endswith("correction")}
    gradients = in_memory(ours.spec, given, theirs.state_dict())
    largest = max(float(p.grad.norm()) for p in theirs.parameters() if p.grad is not None)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        if float(parameter.grad.norm()) > 1e-9 * largest:  # of k's bias without rotation: nothing but rounding
            worst[name] = relative(gradients[name], parameter.grad)
    assert len(worst) > 20
    at = max(worst, key=worst.__getitem__)
    assert worst[at] < 1e-9, (at, worst[at])


def chosen_otherwise(filled: float, of_group: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A choice that fills masked groups with this value, and values groups by what is made of their experts."""

    def choose(scores: Tensor, correction: Tensor, groups: int, kept: int, k: int) -> Tensor:
        each = (scores + correction).unflatten(-1, (groups, -1))
        best = of_group(each).topk(kept, -1).indices
        outside = torch.ones_like(each[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return each.masked_fill(outside.unsqueeze(-1), filled).flatten(-2).topk(k, -1).indices

    return choose


def two_best(each: Tensor) -> Tensor:
    return each.topk(2, -1).values.sum(-1)


def weighted_with_correction(self: MoE, found: Tensor, how: SigmoidRouting) -> Routing:
    routing = by_sigmoids(self, found, how)
    biased = (routing.scores + self.router.correction).gather(-1, routing.ids)
    return routing._replace(weights=how.scale * biased / biased.sum(-1, keepdim=True))


by_sigmoids = MoE.by_sigmoids
Mutation = tuple[Callable[[SigmoidRouting], SigmoidRouting], Callable[[], AbstractContextManager[Any]], dict[str, Any]]


def choosing(filled: float, of_group: Callable[[Tensor], Tensor]) -> Mutation:
    return lambda how: how, lambda: patch.object(moe, "choose", chosen_otherwise(filled, of_group)), {}


MUTATIONS: dict[str, Mutation] = {
    "masked groups are zero": choosing(0.0, two_best),
    "a group is worth its best alone": choosing(-torch.inf, lambda each: each.max(-1).values),
    "no groups": (lambda how: replace(how, groups=1, kept_groups=1), nullcontext, {}),
    "weights with the correction": (
        lambda how: how,
        lambda: patch.object(MoE, "by_sigmoids", weighted_with_correction),
        {},
    ),
    "no scale": (lambda how: replace(how, scale=1.0), nullcontext, {}),
    "not normalised": (lambda how: how, nullcontext, {"normalised_top_k": False}),
}


@torch.no_grad()
def test_each_part_of_the_choice_is_seen() -> None:
    """One seed is not enough to see that masked groups are -inf, not 0: the worst of several is taken."""
    worst = dict.fromkeys([*MUTATIONS, "nothing"], 0.0)
    same: Mutation = (lambda how: how, nullcontext, {})
    with in_float64("glm4_moe"):
        for seed, groups in enumerate([(2, 1), (4, 2), (2, 1), (4, 2)]):
            ours, theirs = pair("glm4_moe", groups, seed)
            ids, positions = tokens(ours.spec.vocab_size, length=LENGTH, seed=seed)
            reference = theirs(ids, use_cache=False).logits
            for name, (change, mutated, fields) in {"nothing": same, **MUTATIONS}.items():
                routing = ours.spec.experts.sigmoid
                assert routing is not None
                other = Decoder(with_fields(ours.spec, sigmoid=change(routing), **fields)).double()
                other.load_state_dict(ours.state_dict())
                with mutated():
                    worst[name] = max(worst[name], relative(other(ids, positions, MaskSpec()), reference))
    assert worst.pop("nothing") < 1e-12
    assert min(worst.values()) > 1e-5, worst


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_the_correction_changes_who_is_chosen_and_has_no_gradient(family: str) -> None:
    spec = from_hf(config_of(family, 1), "test")
    model = random_model(spec, 1, torch.float64)
    layer, x = mixtures(model)[0], torch.randn(50, spec.hidden_size, dtype=torch.float64)
    first = layer.route(x)
    first.weights.sum().backward()
    assert layer.router.correction.grad is None and not layer.router.correction.requires_grad
    layer.router.correction.data.zero_()
    other = layer.route(x)
    assert (first.ids.sort(-1).values != other.ids.sort(-1).values).any()
    assert other.scores.equal(first.scores)


def test_the_loss_that_balances_experts_is_deepseek_s() -> None:
    """Equations 17 to 20 of arXiv 2412.19437, of one sequence: N_r / (K_r T) of each expert's tokens, times the mean of
    its share of a token's sigmoids; what is computed here is K_r times as much."""
    spec = from_hf(config_of("minimax_m2", 0), "test")
    spec = with_fields(spec, router_aux_loss_coef=1.0, output_router_logits=True)
    layer = mixtures(random_model(spec, 0, torch.float64))[0]
    routing = layer.route(torch.randn(30, spec.hidden_size, dtype=torch.float64))
    sigmoids = 1 / (1 + (-routing.logits).exp())
    assert routing.scores.allclose(sigmoids / sigmoids.sum(1, keepdim=True), rtol=1e-14)
    assert (
        layer.route(torch.randn(30, spec.hidden_size, dtype=torch.float64))
        .weights.sum(1)
        .allclose(torch.ones(30, dtype=torch.float64))
    )


def grouped(groups: int, kept: int, experts: int = 8, each: int = 3) -> ModelSpec:
    spec = from_hf(config_of("minimax_m2", 0), "test")
    routing = SigmoidRouting(groups, kept)
    return with_fields(spec, num_experts=experts, experts_per_token=each, sigmoid=routing)


@pytest.mark.parametrize(
    ("groups", "kept", "experts", "each"),
    [(3, 1, 8, 2), (8, 1, 8, 1), (0, 0, 8, 2), (4, 0, 8, 2), (2, 3, 8, 2), (4, 1, 8, 3)],
)
def test_groups_that_no_router_can_have(groups: int, kept: int, experts: int, each: int) -> None:
    [found] = problems(grouped(groups, kept, experts, each))
    assert found.code == "PLAN008"


def test_groups_that_a_router_can_have() -> None:
    assert not [
        one for groups, kept in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4)) for one in problems(grouped(groups, kept))
    ]
