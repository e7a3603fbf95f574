"""A log takes no event that cannot be: what is not alive is not freed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.models.lookup import load_spec
from shardwise.planner.event_log import StepLog
from shardwise.planner.schedule import Step, schedule
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import fold
from shardwise.planner.unit_passes import Passes
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.rank_kind import Stage
from shardwise.spec.sheet import Sheet
from shardwise.techniques.events import GRADIENT, OUTPUT, TO_HOST, Begin, Copy, Event, Free, Make, TensorKey


def test_freeing_what_is_not_alive_is_an_error() -> None:
    log = StepLog()
    log.make("weights", "gathered", 8)
    log.free("weights")
    with pytest.raises(KeyError, match="weights is freed"):
        log.free("weights")


def test_what_lies_on_a_tier_is_freed_there() -> None:
    """A gradient leaves for the host, and goes on to the disk: of each tier the peak is what lay there at once."""
    log = StepLog()
    log.make("gradient", "gradients", 8)
    log.make("its copy", "gradients", 8, "host")
    log.add(Copy("device", "host", 8, TO_HOST))
    log.free("gradient")
    log.make("on disk", "moments", 24, "disk")
    log.free("its copy")
    log.make("another", "gradients", 4)
    span = fold(log.events)
    assert [span.on(tier).top_bytes for tier in ("device", "host", "disk")] == [8, 8, 24]
    assert [span.on(tier).net_bytes for tier in ("device", "host", "disk")] == [4, 0, 24]
    with pytest.raises(ValueError, match="is freed as"):
        log.make(TensorKey(0, 0, 1, 5), "activations", 8, "host")
        log.play(Free((0, 5), "activations", 8), TensorKey(0, 0, 1, ""))


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
    """Nothing is swept away when a unit or a micro-batch ends."""
    plan = Plan(Layout(1, 8), Batch(1, 2, 256), Shard("zero3"))
    sheet = techniques.cost(sheet_of(load_spec("SmolLM2-135M"), plan), plan)
    block = sheet.blocks[0]
    made = {tensor for op in block.backward for tensor in op.allocates}
    index, op = next((i, op) for i, op in enumerate(block.backward) if made & set(op.frees))
    held = replace(op, frees=tuple(tensor for tensor in op.frees if tensor not in made))
    wrong = replace(block, backward=(*block.backward[:index], held, *block.backward[index + 1 :]))
    assert schedule(sheet, plan)
    with pytest.raises(KeyError, match="still alive"):
        schedule(replace(sheet, blocks=(wrong, *sheet.blocks[1:])), plan)


PIPELINE = Plan(Layout(), Batch(1, 1, 256), Shard("ddp"))
Order = list[tuple[str, int]]
"""Of one stage: ``F`` or ``B``, and of which micro-batch."""


def gpipe(micro_batches: int) -> Order:
    return [(which, i) for which in "FB" for i in range(micro_batches)]


def one_forward_one_backward(stage: int, micro_batches: int) -> Order:
    """Of two stages: the first runs a forward ahead."""
    ahead = 1 - stage
    order: Order = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        order += [("F", i + ahead)] * (i + ahead < micro_batches) + [("B", i)]
    return order


def on_paper() -> Sheet:
    return techniques.cost(sheet_of(load_spec("Llama-3.1-8B"), PIPELINE), PIPELINE)


def played(stage: int, order: Order) -> StepLog:
    """A stage of two in this order; what it takes from the other is made, and what it leaves for it freed, at once."""
    whole, log = on_paper(), StepLog()
    half = len(whole.order) // 2
    blocks = range(half) if stage == 0 else range(half, len(whole.order))
    held = (Stage(0, range(half), head=False), Stage(1, range(half, len(whole.order)), embedding=False))
    sheet = replace(whole, rank_kind=replace(whole.rank_kind, stages=held)).of_stage(held[stage])
    assert sheet.rank_kind.blocks == blocks
    step = Step(log, sheet, PIPELINE, Passes.of(sheet, PIPELINE, "cpu"), stage)
    edge = half if stage == 0 else 0
    size = sheet.blocks[0].tensors[sheet.blocks[0].output].bytes(1, 256)
    for which, micro in order:
        output, gradient = (TensorKey(stage, micro, edge, tensor) for tensor in (OUTPUT, GRADIENT))
        if which == "F":
            if stage == 1:
                log.make(output, "activations", size)
            step.forward(micro)
            if stage == 0:
                log.free(output)
        else:
            if stage == 0:
                log.make(gradient, "activations", size)
            step.backward(micro, last=(which, micro) == order[-1])
            if stage == 1:
                log.free(gradient)
    log.ended()
    return log


def peak_bytes(events: Iterable[Event]) -> int:
    """Of activations and of what the loss makes."""
    return fold(e for e in events if isinstance(e, Make | Free) and e.category in ("activations", "logits")).top_bytes


@pytest.mark.parametrize("stage", [0, 1])
def test_forward_passes_of_several_micro_batches_are_alive_at_once(stage: int) -> None:
    """Under GPipe those of all, under 1F1B those of as many as there are stages left: one computes, and of each other
    there is what its units save, with rotation tables of each stage's own, and of the last stage both gradients that
    the loss has made, its value and its figures."""
    sheet = on_paper()
    units = (sheet.embedding, *(sheet.blocks[kind] for kind in sheet.order), sheet.head)
    own = (units[:17], (sheet.embedding, *units[17:]))[
        stage
    ]  # the embedding's input is token ids, which are there from the beginning
    kept = sum(unit.tensors[t].bytes(1, 256) for unit in own for t in unit.saved if (unit, t) != (sheet.embedding, 0))
    kept += stage * (4 * (256 * 4096 + 128_256 * 4096 + 1) + 8 * len(Plan().loss_figures))
    alone = peak_bytes(played(stage, gpipe(1)).events)
    for m in (2, 5):
        for order, held in ((gpipe(m), m), (one_forward_one_backward(stage, m), 2 - stage)):
            events = played(stage, order).events
            assert {event.micro_batch for event in events if isinstance(event, Begin)} == set(range(m))
            assert peak_bytes(events) == alone + (held - 1) * kept


def test_a_micro_batch_frees_only_what_is_its_own() -> None:
    """Of a stage: a backward before its forward, or a second one, finds nothing to free."""
    for order in ([("B", 0)], [("F", 0), ("B", 1)], [("F", 0), ("B", 0), ("B", 0)]):
        with pytest.raises(KeyError, match="not alive"):
            played(1, order)
    with pytest.raises(KeyError, match="alive already"):
        played(1, [("F", 0), ("F", 0)])
