"""The names of what a step does: the same in the trace of a planned step and in that of a measured one."""

from __future__ import annotations

OPTIMIZER = "optimizer"
"""Clipping, and the update of the weights."""


def unit_name(unit: int | str) -> str:
    """A block by its number, or an end of the model: ``block 3``, ``head``."""
    return f"block {unit}" if isinstance(unit, int) else unit


def pass_name(direction: str, unit: int | str) -> str:
    """A pass of one unit: ``forward block 3``."""
    return f"{direction} {unit_name(unit)}"


def stage_name(direction: str, stage: int) -> str:
    """A pass of a stage of a pipeline: ``backward stage 1``."""
    return f"{direction} stage {stage}"


def sent_name(kind: str, category: str, of: str = "") -> str:
    """A collective: ``all-gather weights of block 4``."""
    return f"{kind.replace('_', '-')} {category}" + f" of {of}" * bool(of)
