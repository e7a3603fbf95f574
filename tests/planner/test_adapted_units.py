"""A block with adapters on paper, operation by operation beside a block that ran with them on fake tensors, alone and
cut over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec
from shardwise.planner.sheets import sheet_of
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.techniques import freeze, lora, precision, tp
from tests.covering import pairwise
from tests.planner.test_tp_units import SPEC, B, S, told, traced

BIASED = replace(SPEC, attention_bias=True, mlp_bias=True)
CASES: dict[str, tuple[ModelSpec, Lora]] = {
    "q": (SPEC, Lora(4, 8.0, ("q",))),
    "q, k and v": (SPEC, Lora(4, 8.0, ("q", "k", "v"))),
    "q and v": (SPEC, Lora(4, 8.0, ("q", "v"))),
    "down": (SPEC, Lora(4, 8.0, ("down",))),
    "o and gate": (SPEC, Lora(4, 8.0, ("o", "gate"))),
    "all": (SPEC, Lora(4, 8.0)),
    "all, biased": (BIASED, Lora(4, 8.0)),
    "q, k and v, dropout": (SPEC, Lora(4, 8.0, ("q", "k", "v"), dropout=0.1)),
    "all, biased, dropout": (BIASED, Lora(4, 8.0, dropout=0.1)),
    "magnitudes": (SPEC, Lora(4, 8.0, ("q", "v", "o", "up"), dora=True)),
    "magnitudes, biased": (BIASED, Lora(4, 8.0, dora=True)),
    "magnitudes, biased, dropout": (BIASED, Lora(4, 8.0, ("k", "o", "gate", "down"), dropout=0.1, dora=True)),
}
LAYOUTS = {"alone": (1, False), "two": (2, False), "two, sequence": (2, True), "eight, sequence": (8, True)}


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("case", "layout", "which"), pairwise(CASES, LAYOUTS, ("narrow", "wide")))
def test_an_adapted_block_on_paper_is_the_block_that_ran(
    case: str, layout: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, adapters = CASES[case]
    ranks, sequence = LAYOUTS[layout]
    types = Precision("bf16", "bf16", "bf16") if which == "narrow" else Precision()
    plan = Plan(Layout(tp=ranks), Batch(B, 1, S), Shard(), types, sequence_parallel=sequence)
    plan = replace(plan, lora=replace(adapters, frozen=types.weights))
    sheet = sheet_of(replace(spec, num_hidden_layers=2), which, ranks=ranks)
    for technique in (lora, precision, freeze, tp):
        sheet = technique.cost(sheet, plan)
    paper = sheet.blocks[-1]
    ran = traced(spec, plan, which, monkeypatch)
    wanted, seen = told(ran, which), told(paper, which)
    for what, each in wanted.items():
        assert seen[what] == each, what
