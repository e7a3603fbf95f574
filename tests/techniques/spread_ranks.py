"""What ranks of a pool do under the technique of tests/techniques/spread.py, which their package does not have."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.spec.plan import Plan
from tests.techniques import spread

_AT = techniques.ORDER.index(techniques.tp) + 1
ORDER = (*techniques.ORDER[:_AT], spread, *techniques.ORDER[_AT:])
"""The line in it."""


def train(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int) -> list[parity.Trace]:
    with patch.object(techniques, "ORDER", ORDER):
        return parity.train_on_rank(rank, world, spec, plans, steps)
