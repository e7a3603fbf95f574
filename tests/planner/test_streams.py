"""What runs beside the computation is waited for: a list scheduler runs each stream in order, as far as its waits let
it, and says which events are known to be over when another begins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise import techniques
from shardwise.models.lookup import load_spec
from shardwise.planner.event_log import StepLog
from shardwise.planner.schedule import schedule
from shardwise.planner.sheets import sheet_of
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Offload, Plan, Remat, Shard
from shardwise.techniques.events import (
    TO_DEVICE,
    TO_HOST,
    Begin,
    Compute,
    Copy,
    Event,
    Free,
    Make,
    Mark,
    Record,
    Send,
    Wait,
)
from tests.planner.test_spans import SHARDINGS

SPEC = replace(load_spec("Llama-3.1-8B"), num_hidden_layers=5)
MIB = 2**20


def replayed(events: Sequence[Event]) -> Callable[[int, int], bool]:
    """Whether the first of two events is certainly over when the second begins: it is earlier in the same stream, or
    that has waited for it. Memory changes where the computation stands. Raises AssertionError where streams wait for
    one another in a circle."""
    streams: dict[str, list[int]] = {}
    where: list[tuple[str, int]] = []
    recorded: dict[Hashable, int] = {}
    awaited: dict[int, int] = {}
    for i, event in enumerate(events):
        stream = event.stream if isinstance(event, Compute | Send | Copy | Record | Wait) else "compute"
        queue = streams.setdefault(stream, [])
        where.append((stream, len(queue)))
        queue.append(i)
        if isinstance(event, Record):
            recorded[event.mark] = i
        elif isinstance(event, Wait):
            awaited[i] = recorded[event.mark]
    clock = {stream: dict.fromkeys(streams, 0) for stream in streams}  # how many of each stream it knows to be over
    begun: dict[int, dict[str, int]] = {}
    while len(begun) < len(events):
        before = len(begun)
        for stream, queue in streams.items():
            while queue and awaited.get(queue[0], -1) in {-1} | begun.keys():
                i, known = queue.pop(0), clock[stream]
                if i in awaited:
                    known.update({other: max(known[other], count) for other, count in begun[awaited[i]].items()})
                begun[i] = known.copy()
                known[stream] += 1
        assert len(begun) > before, "streams wait for one another"
    return lambda first, second: where[first][1] < begun[second][where[first][0]]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_what_is_sent_in_another_stream_is_waited_for_before_it_is_used(sharding: str) -> None:
    """A gather before its weights are copied out, and that before another fills its buffer; a reduction of gradients
    that are there, before its buffer is freed; and all of it before the step ends."""
    layout, shard = SHARDINGS[sharding]
    plan = Plan(layout, Batch(1, 2, 256), shard)
    events = schedule(techniques.cost(sheet_of(SPEC, plan), plan), plan)
    is_over = replayed(events)
    beside = [i for i, event in enumerate(events) if isinstance(event, Send) and event.stream != "compute"]
    assert bool(beside) == (layout.dp > 1)

    def after(i: int, kind: type[Make | Free], key: Hashable) -> int:
        found = (k for k, event in enumerate(events[i:], i) if isinstance(event, kind) and event.key == key)
        return next(found, len(events) - 1)

    for i in beside:
        sent = events[i]
        assert isinstance(sent, Send) and is_over(i, events.index(Mark("end of backward")))
        if sent.kind == "all_gather":
            made = (event.key for event in reversed(events[:i]) if isinstance(event, Make))
            _, group = next(key for key in made if isinstance(key, tuple) and key[0] == "gather")
            out, freed = after(i, Make, ("weights", group)), after(i, Free, ("gather", group))
            assert is_over(i, out)
            assert all(is_over(out, k) for k in beside if k > freed and events[k].stream == "gather")  # type: ignore[union-attr]
        else:
            last = max(k for k in range(i) if isinstance(events[k], Compute))
            assert is_over(last, i)
        if sent.kind == "reduce_scatter":
            assert is_over(i, after(i, Free, "scatter"))


def test_gathers_run_ahead_of_the_computation() -> None:
    """While a block computes, the next is gathered: neither waits for the other, in forward and in backward."""
    plan = Plan(Layout(1, 8), Batch(1, 1, 256), Shard("zero3"))
    events = schedule(techniques.cost(sheet_of(SPEC, plan), plan), plan)
    is_over = replayed(events)
    gathers = [i for i, event in enumerate(events) if isinstance(event, Send) and event.kind == "all_gather"]
    computed = [i for i, event in enumerate(events) if isinstance(event, Compute)]
    for i in gathers[2:]:
        last, following = max(k for k in computed if k < i), min(k for k in computed if k > i)
        assert not is_over(last, i) or not is_over(i, following)


def test_inputs_of_blocks_leave_and_come_back_beside_what_is_computed() -> None:
    """Each behind the computation before it, and over when its memory is freed, or used again: one stream each way."""
    plan = Plan(batch=Batch(1, 2, 256), remat=Remat("full"), offload=Offload("none", "host"))
    events = schedule(techniques.cost(sheet_of(SPEC, plan), plan), plan)
    is_over = replayed(events)
    computed = [i for i, event in enumerate(events) if isinstance(event, Compute)]
    begun = [i for i, event in enumerate(events) if isinstance(event, Begin)]
    copies = [(i, event) for i, event in enumerate(events) if isinstance(event, Copy) and event.source != event.target]
    one_pass = [("device", "host", TO_HOST)] * 4 + [("host", "device", TO_DEVICE)] * 4
    assert [(event.source, event.target, event.stream) for _, event in copies] == 2 * one_pass
    for i, event in copies:
        assert all(is_over(k, i) for k in computed if k < i)
        assert not is_over(i, next(k for k in computed if k > i))
        ended = next(k for k in begun if k > i)
        assert is_over(i, next(k for k in computed if k > ended))
        if event.stream == TO_HOST:
            freed = [k for k in range(i, ended) if isinstance(events[k], Free) and is_over(i, k)]
            assert freed, "within the block's forward"


def test_weights_are_read_a_block_ahead_into_rooms_that_are_free() -> None:
    """Each read is over before the copy to the device begins, and begins when the copy before the last is over."""
    plan = Plan(batch=Batch(1, 2, 256), frozen=("layers.*.mlp.*",), offload=Offload(weights="nvme"))
    events = schedule(techniques.cost(sheet_of(SPEC, plan), plan), plan)
    is_over = replayed(events)
    copies = [(i, event.source) for i, event in enumerate(events) if isinstance(event, Copy)]
    reads, copied = ([i for i, source in copies if source == tier] for tier in ("disk", "host"))
    assert len(reads) == len(copied) == 2 * 9
    for number, (read, copy) in enumerate(zip(reads, copied, strict=True)):
        assert is_over(read, copy) and (number < 2 or is_over(copied[number - 2], read))
        following = next(i for i, event in enumerate(events[read:], read) if isinstance(event, Compute))
        assert is_over(read, following) is (number % 9 == 0), "but for the first of a pass, it computes meanwhile"


def test_inputs_of_blocks_go_to_a_file_and_back_in_order() -> None:
    """Beside what is computed too; written when they are on the host, on the device when they have been read. What
    follows the fourth input waits until the first is written, whose room it takes."""
    plan = Plan(batch=Batch(1, 2, 256), remat=Remat("full"), offload=Offload("none", "nvme"))
    events = schedule(techniques.cost(sheet_of(SPEC, plan), plan), plan)
    is_over = replayed(events)
    computed = [i for i, event in enumerate(events) if isinstance(event, Compute)]
    copies = [(i, event) for i, event in enumerate(events) if isinstance(event, Copy)]
    out, home = [("device", "host", TO_HOST), ("host", "disk", "disk")], [("disk", "host", "disk")]
    one_pass = 4 * out + 4 * [*home, ("host", "device", TO_DEVICE)]
    assert [(event.source, event.target, event.stream) for _, event in copies] == 2 * one_pass
    for (first, _), (second, _) in zip(copies[::2], copies[1::2], strict=True):
        assert is_over(first, second) and not is_over(second, next(k for k in computed if k > second))
    on_disk = [i for i, event in copies if event.stream == "disk"]
    assert all(is_over(first, second) for first, second in pairwise(on_disk))
    written, fourth = on_disk[0], copies[6][0]
    assert is_over(written, fourth) and not is_over(written, copies[4][0])


def test_a_host_gives_back_what_it_has_been_sent() -> None:
    """Two buckets leave in one stream and come home in another: each is waited for on its own, not all at once."""
    log = StepLog()
    for bucket in range(2):
        log.record("compute", ("made", bucket))
        log.wait(TO_HOST, ("made", bucket))
        log.add(Copy("device", "host", 4 * MIB, TO_HOST))
        log.record(TO_HOST, ("left", bucket))
        log.wait(TO_DEVICE, ("left", bucket))
        log.add(Copy("host", "device", 2 * MIB, TO_DEVICE))
        log.record(TO_DEVICE, ("back", bucket))
    log.wait("compute", ("back", 0))
    log.add(Compute(1))
    is_over = replayed(log.events)
    first, second = [i for i, event in enumerate(log.events) if isinstance(event, Copy) and event.stream == TO_DEVICE]
    assert is_over(first, len(log.events) - 1) and not is_over(second, len(log.events) - 1)


def test_a_wait_for_what_was_never_recorded_is_an_error() -> None:
    with pytest.raises(KeyError, match="not been recorded"):
        StepLog().wait("compute", ("gathered", 3))
