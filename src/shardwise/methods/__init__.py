"""How models are trained. What a method reads and what its loss asks for is a row of spec/methods.py; the loss itself
is a module here."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shardwise.spec.methods import LOSSES, MethodSpec


def program(method: MethodSpec) -> ModuleType:
    """The module with the loss of a method: of pairs of answers ``losses``, as :data:`pairs.PairLosses`; of tokens
    ``finish``, as :func:`pretrain.finish`."""
    return import_module(f"{__name__}.{LOSSES[method.loss].name}")
