"""The sheets that ship are those the code makes, and a sheet survives being written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.families import FULL, SLIDING
from shardwise.planner import sheets, ship
from shardwise.planner.price import flops as flops_of_plan
from shardwise.planner.price import seen
from shardwise.planner.trace import trace
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.sheet import Sheet

SPEC = ModelSpec("small", 500, 32, 80, 3, 4, 2, 8)


@pytest.mark.big
def test_shipped_sheets_are_what_the_code_makes() -> None:
    assert sheets.shipped() == ship.make(ship.well_known())


def test_some_shipped_sheets_are_what_the_code_makes() -> None:
    made = ship.make(ship.well_known()[::6])
    assert len(made) >= 6 and made.items() <= sheets.shipped().items()


def test_every_well_known_model_ships() -> None:
    """Keys hold a hash of the code: a change of the models or of the tracer needs ``python -m
    shardwise.planner.ship``."""
    for spec in ship.well_known():
        for variant in ship.VARIANTS:
            assert sheets.key(spec, variant) in sheets.shipped()


@pytest.mark.parametrize("variant", ship.VARIANTS)
def test_a_sheet_survives_being_cached(variant: str, tmp_path: Path) -> None:
    made = sheets.sheet_of(SPEC, variant, tmp_path)
    assert made == trace(SPEC, variant)
    assert len(list(tmp_path.iterdir())) == 1
    assert sheets.sheet_of(SPEC, variant, tmp_path) == made


def test_a_spoilt_cache_is_made_again(tmp_path: Path) -> None:
    sheets.sheet_of(SPEC, "wide", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{not json")
    assert sheets.sheet_of(SPEC, "wide", tmp_path) == trace(SPEC, "wide")


def test_depth_and_name_share_a_sheet() -> None:
    assert sheets.key(SPEC, "wide") == sheets.key(replace(SPEC, name="other", num_hidden_layers=9), "wide")
    assert sheets.key(SPEC, "wide") != sheets.key(replace(SPEC, hidden_size=64), "wide")
    assert sheets.key(SPEC, "wide") != sheets.key(SPEC, "narrow")


WINDOWED = replace(
    SPEC, num_hidden_layers=4, sliding_window=16, layer_types=(SLIDING, SLIDING, FULL, SLIDING), final_soft_cap=30.0
)
MIXED = replace(WINDOWED, nope_layers=(1,))


@pytest.mark.parametrize(("spec", "kinds", "sorts"), [(SPEC, 1, 1), (WINDOWED, 2, 1), (MIXED, 3, 2)])
def test_blocks_of_several_kinds(spec: ModelSpec, kinds: int, sorts: int, tmp_path: Path) -> None:
    """What is not rotated allocates less; a window changes only what attention computes."""
    made = sheets.sheet_of(spec, "narrow", tmp_path)
    assert made == trace(spec, "narrow") == sheets.sheet_of(spec, "narrow", tmp_path)
    assert len(made.blocks) == kinds and len({block.forward for block in made.blocks}) == sorts
    assert made.capped == (spec.final_soft_cap is not None)
    assert [made.blocks[kind].window for kind in made.order] == [
        spec.sliding_window if spec.layer_types and spec.layer_types[layer] == SLIDING else None
        for layer in range(spec.num_hidden_layers)
    ]


def test_windows_and_numbers_share_a_sheet_but_sorts_of_layers_do_not() -> None:
    assert sheets.key(SPEC, "wide") == sheets.key(WINDOWED, "wide") != sheets.key(MIXED, "wide")
    assert sheets.key(SPEC, "wide") != sheets.key(replace(SPEC, norm_placement="both"), "wide")


def test_a_window_saves_arithmetic_beyond_it() -> None:
    """Pairs of query and key are counted one by one."""
    assert seen(9, None) == seen(9, 9) == seen(9, 20) == 81
    for s, window in ((64, 16), (100, 7)):
        pairs = sum(min(place + 1, window) for place in range(s))
        assert abs(seen(s, window) / 2 - pairs) <= s
    plan = Plan(Layout(), Batch(1, 1, 64), Shard(), Precision())
    whole, cut = (
        flops_of_plan(trace(spec, "wide"), plan) for spec in (replace(WINDOWED, sliding_window=None), WINDOWED)
    )
    attention = 4 * flops(trace(SPEC, "wide"), "b*s*s")
    assert whole - cut == 3 * attention // 4 * (64 * 64 - seen(64, 16))


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_sheet_are_the_models(tied: bool) -> None:
    spec = replace(SPEC, tie_word_embeddings=tied)
    sheet = trace(spec, "wide")
    total = sum(times * sum(weight.numel(1, 1) for weight in unit.weights) for unit, times in sheet.repeated())
    assert total == parameter_count(spec)


def test_products_cost_six_operations_a_weight_and_token() -> None:
    """Two forward, four backward: the rule of thumb, found in the trace and not put there."""
    block = trace(SPEC, "wide").blocks[0]
    weights = sum(weight.numel(1, 1) for weight in block.weights if len(weight.shape) == 2)
    assert flops(trace(SPEC, "wide"), "b*s") == 6 * weights


def flops(sheet: Sheet, per: str) -> int:
    block = sheet.blocks[0]
    return sum(op.flops for ops in (block.forward, block.backward) for op in ops if op.per == per)
