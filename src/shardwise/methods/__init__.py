"""The losses that models are trained with, a module each. A method's row in spec/methods.py says what it reads and what
its loss asks for, and names the loss."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shardwise.spec.methods import LOSSES
from shardwise.spec.records import MethodSpec


def program(method: MethodSpec) -> ModuleType:
    """The module with the loss of a method: of pairs of answers ``losses``, as :data:`pairs.PairLosses`; of tokens
    ``finish``, as :func:`pretrain.finish`."""
    first = LOSSES[method.loss]
    return import_module(first.module or f"{__name__}.{first.name}")
