"""A tape takes no event that cannot be: what is not alive is not freed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.models.load import load_spec
from shardwise.planner.schedule import schedule
from shardwise.planner.sheets import sheet_of
from shardwise.planner.tape import Tape
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard


def test_freeing_what_is_not_alive_is_an_error() -> None:
    tape = Tape()
    tape.make("weights", "gathered", 8)
    tape.free("weights")
    with pytest.raises(KeyError, match="weights is freed"):
        tape.free("weights")


def test_a_unit_whose_operation_frees_a_tensor_twice_has_no_schedule() -> None:
    plan = Plan(Layout(1, 8), Batch(1, 1, 256), Shard("zero3"))
    sheet = techniques.cost(sheet_of(load_spec("SmolLM2-135M"), plan), plan)
    block = sheet.blocks[0]
    index, op = next((i, op) for i, op in enumerate(block.forward) if op.frees and op.frees != (block.input,))
    again = replace(block.forward[index + 1], frees=(*block.forward[index + 1].frees, op.frees[-1]))
    wrong = replace(block, forward=(*block.forward[: index + 1], again, *block.forward[index + 2 :]))
    with pytest.raises(KeyError, match="not alive"):
        schedule(replace(sheet, blocks=(wrong, *sheet.blocks[1:])), plan)


def test_a_unit_that_does_not_free_what_its_backward_made_has_no_schedule() -> None:
    """Nothing is swept away when a unit ends: the next micro-batch finds it still there."""
    plan = Plan(Layout(1, 8), Batch(1, 2, 256), Shard("zero3"))
    sheet = techniques.cost(sheet_of(load_spec("SmolLM2-135M"), plan), plan)
    block = sheet.blocks[0]
    made = {tensor for op in block.backward for tensor in op.allocates}
    index, op = next((i, op) for i, op in enumerate(block.backward) if made & set(op.frees))
    held = replace(op, frees=tuple(tensor for tensor in op.frees if tensor not in made))
    wrong = replace(block, backward=(*block.backward[:index], held, *block.backward[index + 1 :]))
    assert schedule(sheet, plan)
    with pytest.raises(KeyError, match="alive already"):
        schedule(replace(sheet, blocks=(wrong, *sheet.blocks[1:])), plan)
