"""Proofs must see what is wrong: faults planted into the real code, each of which must be reported.

Here are those of drift and of kills. Those of derivatives are in test_slopes.py, of dtypes in planted_rounding.py, and
those of parity in tests/parity/test_faults.py, test_tp_faults.py, test_pp_faults.py, test_cp_faults.py,
test_ep_faults.py, test_experts.py, test_capacity.py, test_offload.py, test_predictors.py and test_float8_faults.py;
docs/proofs.md lists them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch.rundir import newest_step
from shardwise.prove.drift import drift
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from tests.parity.test_capacity import FAULTS as CAPACITY_FAULTS
from tests.parity.test_cp_faults import FAULTS as CP_FAULTS
from tests.parity.test_ep_faults import FAULTS as EP_FAULTS
from tests.parity.test_experts import FAULTS as EXPERT_FAULTS
from tests.parity.test_faults import FAULTS
from tests.parity.test_float8_faults import FAULTS as FLOAT8_FAULTS
from tests.parity.test_offload import FAULTS as OFFLOAD_FAULTS
from tests.parity.test_pp_faults import FAULTS as PP_FAULTS
from tests.parity.test_predictors import FAULTS as PREDICTOR_FAULTS
from tests.parity.test_tp_faults import FAULTS as TP_FAULTS
from tests.prove.planted import DRIFT, RESUME, Fault
from tests.prove.planted_rounding import FAULTS as ROUNDING_FAULTS
from tests.prove.planted_sizes import FAULTS as SIZE_FAULTS
from tests.prove.test_slopes import FAULTS as BACKWARD_FAULTS
from tests.runtime.small_run import directory, numbers, recipe, train_here, weights_hash

LIST = Path(__file__).parents[2] / "docs" / "proofs.md"


def differences(fault: Fault) -> list[str]:
    return drift(fault.spec, fault.plan, 0).differences()


@pytest.fixture(scope="module")
def controls() -> dict[str, list[str]]:
    """What drift says of each plan without a fault."""
    return {}


@pytest.mark.matrix(8)
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


class Killed(Exception):
    pass


def killed_and_resumed(root: Path, name: str) -> None:
    """A run of eight steps that breaks off after the fifth and goes on from its checkpoint at the third."""

    def kill(state: TrainState, stats: StepStats) -> None:
        if state.step == 5:
            raise Killed

    made = recipe(root, name, checkpoint={"asynchronous": False})
    with pytest.raises(Killed):
        train_here(made, (kill,))
    assert newest_step(directory(made)) == 3
    train_here(made)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an uninterrupted run is, and one that was killed and went on: the control."""
    root = tmp_path_factory.mktemp("resumed")
    train_here(recipe(root, "whole"))
    killed_and_resumed(root, "control")
    return root


def found_of(root: Path, name: str) -> tuple[object, str]:
    run = directory(recipe(root, name))
    return numbers(run), weights_hash(run)


@pytest.mark.prove
@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", RESUME)
def test_kills_see(root: Path, name: str) -> None:
    assert found_of(root, "control") == found_of(root, "whole"), "without the fault"
    with RESUME[name]():
        killed_and_resumed(root, name.replace(" ", "-"))
    lines, weights = found_of(root, name.replace(" ", "-"))
    right, right_weights = found_of(root, "whole")
    assert lines != right and weights != right_weights


def test_the_list_in_the_docs_is_complete() -> None:
    """Each fault under the proof that sees it."""
    rows = [line.strip("| ").split(" | ") for line in LIST.read_text().splitlines() if line.startswith("| ")]
    listed = {(row[0], row[-1]) for row in rows if row[-1] in ("drift", "derivatives", "parity", "dtypes", "kills")}
    proofs = {
        "drift": DRIFT,
        "derivatives": BACKWARD_FAULTS,
        "parity": {**FAULTS, **TP_FAULTS, **PP_FAULTS, **CP_FAULTS, **EP_FAULTS, **EXPERT_FAULTS, **CAPACITY_FAULTS}
        | {**OFFLOAD_FAULTS, **SIZE_FAULTS, **PREDICTOR_FAULTS, **FLOAT8_FAULTS},
        "dtypes": ROUNDING_FAULTS,
        "kills": RESUME,
    }
    assert listed == {(name, proof) for proof, faults in proofs.items() for name in faults}
    assert len(listed) >= 20
