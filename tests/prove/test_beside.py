"""The model of each family beside transformers' class, and forwards that are wrong together with their backward: what
derivatives and parity cannot see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models import decoder, layers
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.families import FAMILIES
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec
from shardwise.models.moe import MoE
from shardwise.prove import beside, certify, slopes
from shardwise.prove.certificate import mark, result
from shardwise.prove.pool import RankPool
from shardwise.prove.shrink import shrink
from shardwise.prove.smallest import Outcome, smallest
from shardwise.prove.workload import Setting, Workload, job_of, random_everywhere
from shardwise.spec.plan import Batch, Layout, Plan, Precision
from tests.models.families import CONFIGS, spec_of
from tests.prove.test_certify import subject_of

ONE = Plan(Layout(), Batch(2, 1, 4096))
FP64 = Precision("fp64", "fp64", "fp64")


def job(spec: ModelSpec) -> Workload:
    small = beside.counterpart(shrink(spec, ONE).spec)
    assert not isinstance(small, str), small
    plan = replace(ONE, batch=Batch(2, 1, 12), precision=FP64)
    return job_of(small, plan, 1, Setting(draw=random_everywhere))


KNOWN = {load_spec(name).family: name for name in configs()}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("family", sorted({*FAMILIES} & {*CONFIGS, *KNOWN}))
def test_right_models_are_those_of_transformers(family: str) -> None:
    """A ten-thousandth of what is allowed: 1e-13."""
    spec = load_spec(KNOWN[family]) if family in KNOWN else spec_of(family)
    found = beside.on_rank(0, 1, job(spec))
    assert len(found.gradients) >= 10 and not found.problems()
    assert max(found.logits, *found.gradients.values()) < beside.TOLERANCE / 1e4


LLAMA, GEMMA, QWEN3 = (load_spec(name) for name in ("Llama-3.1-8B", "Gemma-2-9b", "Qwen3-30B-A3B"))
route, norm = MoE.route, layers.rms_norm


def of_a_larger_eps(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    return norm(x, weight, 1e-3, plus_one)


def not_normalised(self: MoE, x: Tensor) -> Any:
    found = route(self, x)
    return found._replace(weights=found.weights * 1.5)


def capped_later(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else torch.tanh(x / (2 * cap)) * 2 * cap


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], ModelSpec]] = {
    "what norms add is a hundred times as large": (lambda: patch.object(layers, "rms_norm", of_a_larger_eps), LLAMA),
    "weights of experts are half as large again": (lambda: patch.object(MoE, "route", not_normalised), QWEN3),
    "logits are capped at twice the cap": (lambda: patch.object(decoder, "soft_cap", capped_later), GEMMA),
}
"""What plants it, and where it shows."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_forward_is_seen_though_its_backward_matches(name: str) -> None:
    planted, spec = FAULTS[name]
    with planted():
        found = beside.on_rank(0, 1, job(spec))
        known = slopes.prove(job(spec))
    assert any("transformers" in line for line in found.problems()), found
    assert not [slope for slope in known if not slope.error <= slope.allowed], "derivatives see it too"


def test_what_no_config_says_is_told() -> None:
    other = with_fields(LLAMA, attention_sinks=True)
    assert "attention_sinks" in str(beside.counterpart(other))
    assert "own modules" in str(beside.counterpart(spec_of_gpt2()))


def test_what_is_not_compared_is_left_out_and_said(ranks: RankPool) -> None:
    """Of what no config says, and of a class that cannot be made; what is wrong here is no reason."""
    subject = subject_of(with_fields(LLAMA, attention_sinks=True), ONE)
    check = certify.run(subject, "model", 0, ranks)
    assert not check.problems and "attention_sinks" in check.left_out
    assert mark(check) == "left out" and result(check) == check.left_out
    with patch.object(beside, "_theirs", side_effect=ImportError("no such class")):
        assert "no such class" in beside.on_rank(0, 1, job(LLAMA)).why
    with patch.object(beside.hf, "assembled", side_effect=KeyError("a name")), pytest.raises(KeyError, match="a name"):
        beside.on_rank(0, 1, job(LLAMA))


def test_a_case_that_nothing_is_compared_with_is_no_smaller_one() -> None:
    """Gemma without its windows has no config: they stay, and are not said to be needed."""
    small = subject_of(GEMMA, ONE).small
    assert small is not None

    def outcome(spec: ModelSpec, plan: Plan) -> Outcome:
        return "cannot be" if isinstance(beside.counterpart(spec), str) else "fails"

    found = smallest(small.spec, small.plan, outcome)
    assert "window" in found.words and not found.needed and not found.changing


def spec_of_gpt2() -> ModelSpec:
    from tests.models.hf_models import spec_of as theirs

    return theirs("gpt2")
