"""The sheets that ship are those the code makes, and a sheet survives being written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.models.config import ModelSpec, parameter_count
from shardwise.planner import sheets, ship
from shardwise.planner.price import repeated
from shardwise.planner.trace import trace
from shardwise.spec.sheet import Sheet

SPEC = ModelSpec("small", 500, 32, 80, 3, 4, 2, 8)


def test_shipped_sheets_are_what_the_code_makes() -> None:
    """A change of the models or of the tracer needs ``python -m shardwise.planner.ship``."""
    assert sheets.shipped() == ship.make(ship.well_known())


def test_every_well_known_model_ships() -> None:
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


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_sheet_are_the_models(tied: bool) -> None:
    spec = replace(SPEC, tie_word_embeddings=tied)
    sheet = trace(spec, "wide")
    total = sum(times * sum(weight.numel(1, 1) for weight in unit.weights) for unit, times in repeated(sheet))
    assert total == parameter_count(spec)


def test_products_cost_six_operations_a_weight_and_token() -> None:
    """Two forward, four backward: the rule of thumb, found in the trace and not put there."""
    block = trace(SPEC, "wide").blocks[0]
    weights = sum(weight.numel(1, 1) for weight in block.weights if len(weight.shape) == 2)
    assert flops(trace(SPEC, "wide"), "b*s") == 6 * weights


def flops(sheet: Sheet, per: str) -> int:
    block = sheet.blocks[0]
    return sum(op.flops for ops in (block.forward, block.backward) for op in ops if op.per == per)
