"""What ranks do for the tests of certificates: a proof with a fault planted into this rank's code."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from shardwise.methods import loss
from shardwise.runtime.state import TrainState
from shardwise.spec.plan import Plan
from shardwise.techniques import states, tp
from shardwise.techniques.states import Division, State
from tests.parity import test_cp_faults, test_ep_faults, test_faults, test_offload, test_pp_faults, test_tp_faults
from tests.prove.planted import RESUME

state, tensors, join = states.state, TrainState.tensors, loss._join
NUMBER = re.compile(r"(?<=layers\.)\d+")


def norms_of_heads_are_whole(name: str, how: Division) -> State:
    return State() if re.search(r"\.[qk]_norm\.", name) else state(name, how)


def sum_of_whole_logits(statistics: Tensor, labels: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """As if each rank had all logits, and not its own: the loss is right + log(ranks)."""
    statistics = statistics.clone()
    statistics[:, 1] *= len(statistics)
    return join(statistics, labels, rank)


def numbered_within_the_stage(self: TrainState) -> dict[str, Tensor]:
    """As what is loaded is named; what is saved, after some steps, has its names in the whole model."""
    found = tensors(self)
    if self.step:
        return found
    first = min((int(number[0]) for name in found if (number := NUMBER.search(name))), default=0)
    return {NUMBER.sub(lambda number: str(int(number[0]) - first), name): value for name, value in found.items()}


FIELD: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "T6: a norm of heads is not summed over tensor-parallel ranks": lambda: patch.object(
        tp, "state", norms_of_heads_are_whole
    ),
    "T11: the loss is taken of whole logits as if they were cut": lambda: patch.object(
        loss, "_join", sum_of_whole_logits
    ),
    "K3: a stage loads the layers that have its own numbers": lambda: patch.object(
        TrainState, "tensors", numbered_within_the_stage
    ),
}
"""What was wrong elsewhere (NVIDIA/Megatron-LM#7452, findings 11, 1 and 12) and has a counterpart here."""


def planted(name: str, plan: Plan) -> AbstractContextManager[Any]:
    """The fault of this name."""
    if name in test_faults.FAULTS:
        return test_faults.FAULTS[name][0](plan)
    axes = (test_tp_faults, test_pp_faults, test_cp_faults, test_ep_faults, test_offload)
    of_axes = {name: fault for axis in axes for name, (fault, _, _) in axis.FAULTS.items()}
    return {**of_axes, **RESUME, **FIELD}[name]()


def faulty(rank: int, world: int, name: str, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """``work`` with the fault in this rank's code."""
    plan = given[1][0] if isinstance(given[1], list) else given[1]
    with planted(name, plan):
        return work(rank, world, *given)
