"""Routers that choose by sigmoids, or within groups, against transformers in float64: logits and all gradients within
1e-9.

transformers computes norms, routers, softmaxes and rotations in fp32 whatever the dtype. Here its modules see a torch
in which fp32 is float64, so that nothing but the order of sums is left of the differences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import DataError
from shardwise.models import hf, moe
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, from_hf, parameter_shapes, problems, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.kinds import SigmoidRouting
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Routing, Tally
from tests.models.families import LENGTH, config_of, in_memory, mixtures, random_model
from tests.models.llama import relative, tokens

CASES = [("glm4_moe", groups, seed) for groups in ((1, 1), (2, 1), (4, 2)) for seed in range(2)]
CASES += [("dots1", (2, 1), seed) for seed in range(2)]
CASES += [("minimax_m2", (1, 1), seed) for seed in range(3)]
CASES += [("deepseek_v2", groups, seed) for groups in ((1, 1), (2, 1), (4, 2), (8, 5)) for seed in range(2)]


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
    if family in ("glm4_moe", "dots1"):
        config |= {"n_group": groups[0], "topk_group": groups[1]}
    if family == "deepseek_v2":
        config |= {"n_group": groups[0], "topk_group": groups[1], "topk_method": "group_limited_greedy"}
        config |= {"n_routed_experts": 8, "routed_scaling_factor": 2.3}
    spec = from_hf(config, "test")
    routing = spec.experts.sigmoid or spec.experts.softmax_groups
    assert routing is not None and routing.groups == groups[0]
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


def of_two_best(*given: Any) -> Tensor:
    scores, correction, groups, kept, k, _ = given
    return choose(scores, correction, groups, kept, k, 2)


choose = moe.choose


@torch.no_grad()
def test_each_part_of_a_choice_within_groups_is_seen() -> None:
    """Groups are worth their best alone, not all are kept, weights are scaled and not normalised."""
    worst = dict.fromkeys(("nothing", "two best", "no groups", "no scale", "normalised"), 0.0)
    with in_float64("deepseek_v2"):
        for seed, groups in enumerate([(2, 1), (4, 2), (2, 1), (4, 2)]):
            ours, theirs = pair("deepseek_v2", groups, seed)
            ids, positions = tokens(ours.spec.vocab_size, length=LENGTH, seed=seed)
            reference, how = theirs(ids, use_cache=False).logits, ours.spec.experts.softmax_groups
            assert how is not None
            changes: dict[str, dict[str, Any]] = {
                "nothing": {},
                "two best": {},
                "normalised": {"normalised_top_k": True},
            }
            changes["no groups"] = {"softmax_groups": replace(how, kept_groups=how.groups)}
            changes["no scale"] = {"softmax_groups": replace(how, scale=1.0)}
            for name, fields in changes.items():
                other = Decoder(with_fields(ours.spec, **fields)).double()
                other.load_state_dict(ours.state_dict())
                with patch.object(moe, "choose", of_two_best if name == "two best" else choose):
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
    """Equations 17 to 20 of arXiv 2412.19437, of one sequence of T tokens: of each of N experts N / (K T) times its
    tokens, times the mean of its share of a token's sigmoids. What is computed here is K times as much."""
    spec = with_fields(from_hf(config_of("minimax_m2", 0), "test"), router_aux_loss_coef=1.0, output_router_logits=True)
    layer, own = mixtures(random_model(spec, 0, torch.float64))[0], spec.experts
    x = torch.randn(1, 30, spec.hidden_size, dtype=torch.float64)
    layer.tally = Tally(*(torch.zeros(size, dtype=torch.float64) for size in (own.num_experts, 2, 2)))
    with torch.no_grad():
        layer(x)
    sigmoids = 1 / (1 + (-x[0] @ layer.router.weight.T).exp())
    chosen = (sigmoids + layer.router.correction).topk(own.experts_per_token).indices
    loss = 0.0
    for expert in range(own.num_experts):
        tokens_of = int((chosen == expert).sum())
        share = (sigmoids[:, expert] / sigmoids.sum(1)).mean()
        loss += own.num_experts / (own.experts_per_token * 30) * tokens_of * share.item()
        assert layer.tally.loads[expert] == tokens_of
    assert float(layer.tally.losses[0]) == pytest.approx(own.experts_per_token * loss, rel=1e-12)


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


def written(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """A random model of this spec, whose files are written in this dtype."""
    state = random_model(spec).state_dict()
    hf.write_weights(directory, spec, state.__getitem__, dtype)
    return state


def everything(spec: ModelSpec) -> dict[str, list[slice]]:
    return {name: [slice(0, size) for size in shape] for name, shape in parameter_shapes(spec).items()}


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_an_export_in_bf16_has_the_correction_in_fp32(tmp_path: Path, family: str) -> None:
    spec = from_hf(config_of(family, 0), "test")
    state = written(tmp_path, spec, torch.bfloat16)
    held = load_file(tmp_path / hf.SINGLE)
    dtypes = {name: value.dtype for name, value in held.items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert len(wide) == spec.expert_layers and all(name.endswith("e_score_correction_bias") for name in wide)
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    read = dict(hf.read_weights(tmp_path, everything(spec), spec))
    for name, value in read.items():
        exact = name.endswith("correction")
        assert value.equal(state[name] if exact else state[name].bfloat16()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    theirs = in_memory(spec, state, loaded)
    for name in [name for name in loaded if name.endswith("correction_bias")]:
        assert loaded[name].equal(theirs[name].to(loaded[name].dtype)), name  # MiniMax's class has it in bf16


def test_what_is_behind_the_last_layer_is_left_in_the_files_and_nothing_else(tmp_path: Path) -> None:
    """The layer that predicts one token more; of layers that the model should have, none is passed over."""
    spec = from_hf(config_of("glm4_moe", 0), "test")
    written(tmp_path, spec, torch.float32)
    held = load_file(tmp_path / hf.SINGLE)
    behind = f"model.layers.{spec.num_hidden_layers}."
    more = {f"{behind}eh_proj.weight": torch.ones(2, 4), f"{behind}mlp.gate.weight": torch.ones(3)}
    save_file(held | more, tmp_path / hf.SINGLE)
    assert dict(hf.read_weights(tmp_path, everything(spec), spec)).keys() == parameter_shapes(spec).keys()
    for extra in (f"model.layers.{spec.num_hidden_layers + 1}.x", "model.layers.0.x"):
        save_file(held | {extra: torch.ones(2)}, tmp_path / hf.SINGLE)
        with pytest.raises(DataError, match="CKPT003"):
            dict(hf.read_weights(tmp_path, everything(spec), spec))
