"""The losses that models are trained with, a module each. A method's row in spec/methods.py says what it reads and what
its loss asks for, and names the loss."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shardwise.models.config import ModelSpec
from shardwise.spec.methods import LOSSES
from shardwise.spec.plan import Plan
from shardwise.spec.records import MethodSpec


def chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    """Return which tokens pass through the output layer and the loss together."""
    return [slice(start, min(tokens, start + chunk_tokens)) for start in range(0, tokens, chunk_tokens)]


def regimes(spec: ModelSpec, plan: Plan) -> dict[str, bool]:
    """Return by name whether the loss takes the path that it takes at some sizes only; what a method's own module
    states so is among it."""
    tokens, own = plan.batch.micro_batch_size * plan.row_tokens, vars(program(plan.method)).get("regimes")
    tokens *= 1 + spec.predictors
    each = [one.stop - one.start for one in chunks(tokens, plan.batch.loss_chunk_tokens)]
    found = {"several chunks of the loss": len(each) > 1, "a last chunk that is shorter": each[-1] < each[0]}
    return found | (own(spec, plan) if own else {})


def program(method: MethodSpec) -> ModuleType:
    """The module with the loss of a method: of pairs of answers ``losses``, as :data:`pairs.PairLosses`; of tokens
    ``finish``, as :func:`pretrain.finish`."""
    first = LOSSES[method.loss]
    return import_module(first.module or f"{__name__}.{first.name}")
