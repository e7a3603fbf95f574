"""The drift test must see what is wrong: faults planted into what a plan's run does, each of which it must report."""

from __future__ import annotations

from functools import cache

import pytest

from shardwise.models.config import ModelSpec
from shardwise.planner.sheets import variant
from shardwise.planner.trace import trace
from shardwise.prove.drift import drift
from shardwise.spec.sheet import Sheet
from tests.prove.planted import DRIFT, Fault


@cache
def sheet(spec: ModelSpec, which: str) -> Sheet:
    return trace(spec, which)


def differences(fault: Fault) -> list[str]:
    return drift(fault.spec, fault.plan, 0, sheet(fault.spec, variant(fault.plan.precision))).differences()


@pytest.fixture(scope="module")
def controls() -> dict[str, list[str]]:
    """What drift says of each plan without a fault."""
    return {}


@pytest.mark.parametrize("name", DRIFT)
def test_drift_sees(name: str, controls: dict[str, list[str]]) -> None:
    fault = DRIFT[name]
    key = f"{fault.spec} {fault.plan}"
    if key not in controls:
        controls[key] = differences(fault)
    assert not controls[key], "without the fault"
    with fault.planted():
        found = differences(fault)
    assert any(fault.seen in line for line in found), found
