"""Derivatives: what is wrong in a backward that the run and the plain loop share is seen, and named; what is right
raises no alarm, of any family, method and adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models import attention, blockwise, delta, grouped, layers, moe
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.hf_model import Model
from shardwise.prove import certify, slopes
from shardwise.prove.certificate import Certificate, Facts, result
from shardwise.prove.kept import Command
from shardwise.prove.slopes import Slope
from shardwise.prove.workload import Setting, Workload, pairs, random_everywhere
from shardwise.spec.methods import METHODS
from shardwise.spec.plan import Lora, Remat
from shardwise.spec.recipe import Method
from tests.models.hf_models import CONFIGS, spec_of
from tests.parity.cases import FP64, GEMMA, QWEN, TIED, UNTIED
from tests.parity.cases import plan as plan_of
from tests.parity.experts import MOE
from tests.parity.mixers import NETS
from tests.parity.mixtures import GPT_OSS, MODELS
from tests.parity.test_lora import WIDE
from tests.prove.test_certify import subject_of
from tests.said import shows

DRAWN = Setting(draw=random_everywhere)
CAPACITY = with_fields(MOE, name="tiny-capacity", expert_capacity=1.0)


def job(spec: ModelSpec, seed: int = 0, **settings: Any) -> Workload:
    return Workload(spec, 4, 12, "fp64", "fp64", 1, seed, **{"setting": DRAWN, **settings})


def of_pairs(name: str, seed: int) -> Workload:
    return replace(
        job(UNTIED, seed, setting=Setting(Method(name=name, beta=0.5), pairs, random_everywhere)), seq_len=24
    )


def wrong(found: list[Slope]) -> list[Slope]:
    return [slope for slope in found if not slope.error <= slope.allowed]


swiglu, geglu, clamped = layers._SwiGLU, layers._GeGLU, layers._ClampedSwiGLU
norm, turn, product = layers._RMSNormFunction.backward, layers._Rotate, moe._RouterProduct.backward
combined, copies, outer = moe._Combined.backward, moe._Sorted.backward, grouped._grouped_outer
attend, vecdot = blockwise.backward, torch.linalg.vecdot
by_kernel, sinks = attention.attention_backward, blockwise.sink_gradient


def changed(function: type, backward: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """The backward of an autograd function in another's place."""
    return lambda: patch.object(function, "backward", staticmethod(backward))


def of_weight(backward: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """As it is, but for the second gradient."""

    def scaled(*given: Any) -> Any:
        first, second, *rest = backward(*given)
        return first, None if second is None else second * factor, *rest

    return scaled


def swapped(backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: backward(*given)[::-1]


def of_values(*given: Any) -> Any:
    grad_q, grad_k, _, grad_sinks = by_kernel(*given)
    return grad_q, grad_k, grad_k, grad_sinks


@contextmanager
def soft_cap_by_magnitude() -> Iterator[None]:
    """The derivative of cap * tanh(s / cap) is 1 - tanh(s / cap)**2, and not of the magnitude."""

    def backward(*given: Any) -> Any:
        with patch.object(Tensor, "square", Tensor.abs):
            return attend(*given)

    with patch.object(blockwise, "backward", backward):
        yield


@dataclass(frozen=True)
class Fault:
    planted: Callable[[], AbstractContextManager[Any]]
    spec: ModelSpec
    named: str


FAULTS: dict[str, Fault] = {
    "SwiGLU's two gradients are swapped": Fault(
        changed(swiglu, swapped(swiglu.backward)), UNTIED, "layers.2.mlp.up.weight"
    ),
    "GeGLU's gradient of up lacks a factor": Fault(
        changed(geglu, of_weight(geglu.backward, 0.9)), GEMMA, "layers.2.mlp.up.weight"
    ),
    "the clamped SwiGLU's gradient of up lacks a factor": Fault(
        changed(clamped, of_weight(clamped.backward, 0.9)), GPT_OSS, "layers.1.mlp.experts.expert_up.bias"
    ),
    "the router's weight has no gradient": Fault(
        changed(moe._RouterProduct, of_weight(product, 0.0)), MOE, "layers.1.mlp.router.weight"
    ),
    "weights of experts have the other sign": Fault(
        changed(moe._Combined, of_weight(combined, -1.0)), MOE, "layers.1.mlp.router.weight"
    ),
    "copies of a token are added up twice": Fault(
        changed(moe._Sorted, lambda *given: (2 * copies(*given)[0], None, None, None)),
        MODELS["Mixtral"],
        "layers.1.mlp_norm.weight",
    ),
    "the gradient of experts' weights lacks a factor": Fault(
        lambda: patch.object(grouped, "_grouped_outer", lambda *given: 0.99 * outer(*given)),
        MOE,
        "layers.1.mlp.experts.expert_down.weight",
    ),
    "a norm's mean is of one element more": Fault(
        lambda: patch.object(torch.linalg, "vecdot", lambda a, b: vecdot(a, b) * 20 / 21),
        UNTIED,
        "hidden states before norm.weight",
    ),
    "a norm's weight has a gradient a thousandth too large": Fault(
        changed(layers._RMSNormFunction, of_weight(norm, 1.001)), UNTIED, "norm.weight"
    ),
    "rotation is not turned back": Fault(
        changed(turn, lambda ctx, grad: (layers._rotate(grad, *ctx.saved_tensors, 1.0), None, None, None)),
        UNTIED,
        "layers.2.attention.k.weight",
    ),
    "attention's soft cap": Fault(soft_cap_by_magnitude, GEMMA, "layers.2.attention.k_norm.weight"),
    "values have the gradient of keys": Fault(
        lambda: patch.object(attention, "attention_backward", of_values), UNTIED, "layers.2.attention.v.weight"
    ),
    "the gradient of sinks has the other sign": Fault(
        lambda: patch.object(blockwise, "sink_gradient", lambda *given: -sinks(*given)),
        GPT_OSS,
        "layers.1.attention.sinks",
    ),
    "what a head forgets later has no gradient": Fault(
        lambda: patch.object(delta, "_from_here", lambda x, dim: x), NETS, "layers.1.attention.in_a.weight"
    ),
}


@pytest.mark.matrix(4)
@pytest.mark.rare(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_backward_is_seen_and_named_first(name: str) -> None:
    fault = FAULTS[name]
    with fault.planted():
        found = wrong(slopes.prove(job(fault.spec)))
    assert found and found[0].what == fault.named, [slope.what for slope in found]


RIGHT: dict[str, Callable[[int], Workload]] = {
    **{spec.name: partial(job, spec) for spec in (UNTIED, TIED, GEMMA, QWEN, NETS, MOE, CAPACITY, *MODELS.values())},
    "not normalised": partial(job, MODELS["Qwen3, not normalised"]),
    "frozen": partial(job, UNTIED, frozen=("embed.*", "layers.0.*")),
    "adapters": partial(job, TIED, lora=Lora(2, 4.0, frozen="bf16")),
    "adapters and an output layer": partial(
        job, UNTIED, lora=Lora(2, 4.0, modules_to_save=("embed_tokens", "lm_head"))
    ),
    "magnitudes": partial(job, UNTIED, lora=Lora(2, 4.0, dora=True)),
    "magnitudes of experts": partial(job, MOE, lora=Lora(2, 4.0, dora=True)),
    "4 bits": partial(job, WIDE, lora=Lora(2, 4.0, nf4=True)),
    **{name: partial(of_pairs, name) for name, method in METHODS.items() if method.pairs},
    **{kind: partial(job, spec_of(kind)) for kind in CONFIGS},
    "gpt2 with adapters": partial(job, spec_of("gpt2"), lora=Lora(2, 4.0)),
}


@pytest.mark.matrix(48)
@pytest.mark.rare(12)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_right_raises_no_alarm(seed: int, name: str) -> None:
    """Everything is judged, and at most a fifth of what would raise an alarm."""
    found = slopes.prove(RIGHT[name](seed))
    assert all(slope.judged for slope in found)
    assert not [slope for slope in found if not slope.error <= slope.allowed / 5]


def test_what_is_not_finite_is_wrong() -> None:
    with changed(swiglu, of_weight(swiglu.backward, math.nan))():
        assert wrong(slopes.prove(job(UNTIED)))[0].what == "layers.2.mlp.up.weight"


NORM = "norm.weight"
plain_loss = slopes.plain_loss


ALL_BUT_NORM = ("embed.*", "layers.*", "head.*")


def test_a_step_that_meets_a_switch_is_not_taken() -> None:
    """The loss has a bend where the first step ends, and none within the second."""
    one = job(UNTIED, frozen=ALL_BUT_NORM)
    landscape = slopes.Landscape(one)
    at = float(landscape.weights[NORM][0] + 0.6 * slopes.STEPS[0] * landscape.direction(NORM, 0)[0])

    def bent(model: Model, weights: Any, *given: Any) -> Tensor:
        return plain_loss(model, weights, *given) + (weights[NORM][0] - at).abs()

    with patch.object(slopes, "plain_loss", bent):
        found = slopes.prove(one)
        assert len(found) == 5 and not wrong(found) and all(slope.judged for slope in found)
        with patch.multiple(slopes, STEPS=slopes.STEPS[:1], DIRECTIONS=1):
            assert [slope.what for slope in slopes.prove(one) if not slope.judged] == [NORM]


class Here:
    """One rank, in this process."""

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = 60.0) -> list[Any]:
        assert world == 1
        return [fn(0, world, *args)]


def test_what_is_not_judged_is_said() -> None:
    subject = subject_of(UNTIED, replace(plan_of("zero3", 2, FP64), frozen=ALL_BUT_NORM))

    def rough(*given: Any) -> Tensor:
        loss = plain_loss(*given)
        return loss + 1e-4 * torch.sin(1e12 * loss.detach())

    with patch.object(slopes, "plain_loss", rough):
        check = certify.run(subject, "derivatives", 0, Here())
    assert not check.problems and check.figures["not judged"] == check.figures["tensors"] == 5
    assert shows(result(check), "0 tensors", "5 more")
    facts = Facts("", "", "", "quick", "", Command(), {})
    [line] = [line for line in Certificate(subject, facts, [check], {}).unseen() if "derivatives" in line]
    assert shows(line, "derivatives", "5 of 5")


@pytest.mark.prove
def test_a_certificate_names_the_fault_and_the_smallest_case_that_has_it() -> None:
    subject = subject_of(replace(MODELS["Mixtral"], num_hidden_layers=8), plan_of("zero3", 4, FP64, Remat("full")))
    assert not certify.run(subject, "derivatives", 0, Here()).problems
    with FAULTS["the router's weight has no gradient"].planted():
        check = certify.run(subject, "derivatives", 0, Here())
        found = certify.smallest_failing(subject, check, Here())
    assert check.problems[0].startswith("gradient of layers.2.mlp.router.weight: along")
    assert check.problems[0].endswith(" layers.7.mlp.router.weight")
    assert found is not None and found.needed == found.words == ("experts",)
