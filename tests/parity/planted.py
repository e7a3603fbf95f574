"""Faults that are planted into the ranks' code: parity must see each, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.spec.plan import Plan
from tests.parity import drawn

Planted = Callable[[], AbstractContextManager[Any]]
Fault = tuple[Planted, ModelSpec, Plan]
"""What plants it, and the model and the plan in which it shows."""


def take_steps(rank: int, faults: Sequence[Fault]) -> list[tuple[parity.Trace, parity.Trace]]:
    """Of each fault two steps without it and two with it."""
    right: dict[tuple[ModelSpec, str], parity.Trace] = {}
    found = []
    for fault, spec, of in faults:
        alike = spec, repr(of)
        if alike not in right:
            right[alike] = drawn.take_steps(rank, spec, of, 2)
        with fault():
            found.append((right[alike], drawn.take_steps(rank, spec, of, 2)))
    return found


def all_seen(faults: Mapping[str, Fault], answers: Sequence[Sequence[tuple[parity.Trace, parity.Trace]]]) -> None:
    """``answers``: by rank what :func:`take_steps` returned."""
    for place, (name, (_, spec, of)) in enumerate(faults.items()):
        plain = drawn.plain(parity.job_of(spec, of, 2))
        for planted in (False, True):
            traces = [each[place][planted] for each in answers]
            found = parity.compare(plain, traces, staged=of.layout.pp > 1)
            worst = max(found.loss.error, found.norm.error, found.gradient.error, found.weight.error)
            said = f"{name} was not seen" if planted else f"without the fault of {name}"
            assert worst > 1e-4 if planted else worst < 1e-9, f"{said}: {found}"
