"""A loop of one's own over Shardwise's decoder with context parallelism, beside a plain loop in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.distributed.meshes import Meshes
from shardwise.errors import ConfigError
from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankPool
from shardwise.runtime import own
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from tests.runtime import own_ranks
from tests.runtime.test_own import plain_decoder, same
from tests.said import refusal, shows

STEPS = 3
SETTINGS = {
    "ring, beside ddp": (4, "ddp", {"cp": 2}),
    "gather, beside zero3": (4, "zero3", {"cp": 2, "cp_kind": "gather", "recompute": "full"}),
    "ulysses, zero3 over its ranks": (2, "zero3", {"cp": 2, "cp_kind": "ulysses", "recompute": "selective"}),
    "ring, beside tp": (4, "zero1", {"cp": 2, "tp": 2}),
}
ROWS = [8, 8 + 3, 16, 16 + 1, 24, 32]
"""Where documents end in four rows of eight tokens, the first of one document."""


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", SETTINGS)
def test_float64(ranks: RankPool, case: str) -> None:
    world, strategy, settings = SETTINGS[case]
    same(ranks.run(own_ranks.decoder, strategy, settings, STEPS, world=world), plain_decoder(STEPS))


def test_packed_documents(ranks: RankPool) -> None:
    """All rows on each rank of the ring."""
    bounds = [0, *ROWS]
    answers = ranks.run(own_ranks.decoder, "ddp", {"cp": 2}, STEPS, "", bounds, world=2)
    same(answers, plain_decoder(STEPS, bounds))


@pytest.mark.parametrize(
    ("module", "layout", "code", "said"),
    [
        (nn.Linear(4, 4), Layout(cp=2), "PLAN026", "Linear"),
        (Decoder(own_ranks.UNTIED), Layout(cp=3, ulysses=3), "PLAN026", "3 does not divide"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(module: nn.Module, layout: Layout, code: str, said: str) -> None:
    kind: Any = "ulysses" if layout.ulysses > 1 else "ring"
    with pytest.raises(ConfigError, match=said) as refused:
        own.parallelize(module, Plan(layout, cp_kind=kind), None)
    assert [problem.code for problem in refused.value.problems] == [code]


def test_rows_that_cannot_be_cut() -> None:
    ids = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ConfigError, match=refusal("PLAN026", "6 tokens", "2 processes")) as refused:
        shardwise.cut_rows(Meshes(Layout(cp=2)), ids, ids)
    assert shows(refused.value.problems[0].fix, "multiple of 4")


def test_rows_of_one_process_are_whole() -> None:
    ids = torch.arange(8).view(2, 4)
    own_ids, labels, positions, mask = shardwise.cut_rows(None, ids, ids + 1)
    assert torch.equal(own_ids, ids) and torch.equal(labels, ids + 1) and mask.row_length is None
    assert torch.equal(positions, torch.arange(4).expand(2, -1))


def test_degrees_that_do_not_divide_the_processes() -> None:
    asked: dict[str, Any] = {"cp": 2, "tp": 3}
    with own_ranks.started(4), pytest.raises(ConfigError, match=refusal("PLAN001", "cp 2", "tp 3", "4 processes")):
        own.make_plan("zero3", **asked)


@pytest.mark.parametrize("kind", ["rings", "nested"])
def test_kinds_that_a_loop_of_ones_own_does_not_know(kind: Any) -> None:
    """Of nested it cannot say over how many neighbours."""
    with own_ranks.started(4), pytest.raises(ConfigError, match=refusal("CFG005", "`cp_kind`", f"'{kind}'")):
        own.make_plan("zero3", cp=4, cp_kind=kind)
