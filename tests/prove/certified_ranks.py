"""What ranks do for the tests of certificates: a proof with a fault planted into this rank's code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shardwise.spec.plan import Plan
from tests.parity import test_faults, test_pp_faults, test_tp_faults
from tests.prove.planted import RESUME


def planted(name: str, plan: Plan) -> AbstractContextManager[Any]:
    """The fault of this name."""
    if name in test_faults.FAULTS:
        return test_faults.FAULTS[name][0](plan)
    more = {**test_tp_faults.FAULTS, **test_pp_faults.FAULTS}
    return more[name][0]() if name in more else RESUME[name]()


def faulty(rank: int, world: int, name: str, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    plan = given[1][0] if isinstance(given[1], list) else given[1]
    with planted(name, plan):
        return work(rank, world, *given)
