"""Compiled blocks meet the batches of a whole run."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch

from shardwise.models.attention import MaskSpec
from shardwise.spec.plan import Plan
from shardwise.techniques import compile
from tests.drift.compiled import compiler
from tests.models.families import random_model, spec_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
def test_every_kind_of_layer_meets_every_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows beside full attention, training and evaluation, one row and several, documents of any number and
    length: more graphs than torch makes by default, and no more once each has been met."""
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", torch.compiler.config.recompile_limit)
    spec, length, draw = spec_of("gemma3_text"), 32, Random(0)

    def read(rows: int, learn: bool) -> None:
        starts = draw.sample(range(1, rows * length), draw.randint(1, 20))
        bounds = sorted({*starts, *range(0, rows * length + 1, length)})
        longest = max(last - first for first, last in pairwise(bounds))
        positions = torch.arange(length).expand(rows, length)
        mask = MaskSpec(documents=torch.tensor(bounds, dtype=torch.int32), longest=longest)
        with torch.set_grad_enabled(learn):
            model(torch.zeros_like(positions), positions, mask)

    with compiler("eager") as graphs:
        [model] = compile.apply([random_model(spec)], Plan(compile=True), None)
        kinds = [(2, True), (2, False), (3, False), (1, False)]
        for rows, learn in kinds * 3:
            read(rows, learn)
        met = graphs["eager"]
        for rows, learn in kinds * 3:
            read(rows, learn)
    assert 8 < met == graphs["eager"]
