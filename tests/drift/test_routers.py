"""Plans of models whose routers choose by sigmoids, or within groups, say what is sent, held and saved, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove.drift import drift
from shardwise.spec.plan import Dtype, Plan, Precision
from tests.parity import routers
from tests.parity.routers import MODELS, PLANS


def alike(name: str, compute: Dtype, weights: Dtype = "fp32") -> Plan:
    of = replace(PLANS[name], precision=Precision(compute, weights))
    of = of if of.lora is None else replace(of, lora=replace(of.lora, frozen=weights))
    return replace(of, expert_imbalance=1.0) if of.layout.ep > 1 else of


DTYPES: tuple[Dtype, Dtype] = ("fp32", "bf16")


@pytest.mark.matrix(8)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, model: str) -> None:
    """Each layout of each model, in one dtype of the first and the other of the second."""
    of = alike(name, DTYPES[([*PLANS].index(name) + [*MODELS].index(model)) % 2])
    for rank in {0, of.layout.world - 1}:
        assert not drift(routers.model(model, of), of, rank).differences()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["zero3", "ddp", "tp", "ep", "pp", "lora, zero3", "lora, tp"])
def test_corrections_are_in_fp32_beside_weights_in_bf16(name: str) -> None:
    of = alike(name, "bf16", "bf16")
    assert not drift(routers.model("GLM", of), of, of.layout.world - 1).differences()
