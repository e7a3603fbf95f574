"""Which weights are narrow on the device, and how they come back from the host, on streams that stand-ins play."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event, Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Offload, Plan, Precision, Shard
from shardwise.techniques.offload import host_copies
from shardwise.techniques.offload.host_copies import Return, ReturningWeights
from shardwise.techniques.offload.narrow import narrow, narrows

WHOLE = Plan(precision=Precision("bf16"), offload=Offload("host"))
CUT = replace(WHOLE, layout=Layout(dp_shard=2), shard=Shard("zero3"))
MATRIX, NORM, BIAS = ("layers.3.attention.q.weight", 2), ("layers.3.mlp_norm.weight", 1), ("layers.3.mlp.up.bias", 1)
EXPERTS, ROUTER = ("layers.3.mlp.experts.expert_up.weight", 2), ("layers.3.mlp.router.weight", 2)
ENDS = [("embed.weight", 2), ("norm.weight", 1), ("head.weight", 2)]


def test_all_that_is_gathered_or_what_is_cast_whole() -> None:
    """Of a block. A router multiplies in fp32, by a weight that it casts itself; a scalar is not cut, nor gathered."""
    assert all(narrow(CUT, *each) for each in (MATRIX, NORM, BIAS, EXPERTS, ROUTER))
    assert [narrow(WHOLE, *each) for each in (MATRIX, EXPERTS, NORM, BIAS, ROUTER)] == [True] * 2 + [False] * 3
    assert not any(narrow(plan, *each) for plan in (WHOLE, CUT) for each in (*ENDS, ("layers.3.scale", 0)))


@pytest.mark.parametrize(
    "more",
    [
        {"precision": Precision()},
        {"precision": Precision("bf16", "bf16")},
        {"precision": Precision("bf16", modules=(("*norm", "fp32"),))},
        {"offload": Offload()},
        {"offload": Offload("none", "host")},
        {"offload": Offload("host", weights="host")},
        {"lora": Lora(4)},
    ],
    ids=str,
)
def test_where_none_is_narrow(more: dict[str, Any]) -> None:
    assert narrows(WHOLE) and not narrows(replace(WHOLE, **more))


def test_what_the_device_updates_or_nobody_is_not_narrow() -> None:
    half = replace(WHOLE, offload=Offload("host", optimizer_fraction=0.5))
    assert [narrow(half, f"layers.{number}.mlp.up.weight", 2) for number in range(4)] == [False, True, False, True]
    assert not narrow(replace(WHOLE, frozen=("layers.3.*",)), *MATRIX)


@dataclass
class Done:
    """When a group is there."""

    number: int
    synchronized: bool = False

    def synchronize(self) -> None:
        self.synchronized = True


@dataclass
class Stream:
    """Of a device, and for which groups it waits."""

    device: str = "stand-in"
    waits: list[int] = field(default_factory=list)

    def record_event(self) -> None: ...

    def wait_event(self, done: Done) -> None:
        self.waits.append(done.number)


class Beside:
    """Three blocks and an end, whose weights come when they are ``released``, the end's first."""

    def __init__(self) -> None:
        self.blocks = [nn.Linear(2, 2, bias=False).bfloat16() for _ in range(3)]
        self.parameters = [nn.Parameter(torch.zeros(2)), *(block.weight for block in self.blocks)]
        self.copies = [torch.full(one.shape, 1.0 + 2**-9 + number) for number, one in enumerate(self.parameters)]
        self.rooms = [torch.full_like(copy, 9.0) for copy in self.copies]
        each = zip(self.parameters, self.copies, self.rooms, strict=True)
        self.released, self.done = [Event() for _ in range(4)], [Done(number) for number in range(4)]
        self.computes, self.gathers = Stream(), Stream()
        self.weights = ReturningWeights([*each])
        self.weights._stream, self.weights._thread = Stream(), ThreadPoolExecutor(1)  # type: ignore[assignment]
        self.weights.come_beside(self.blocks)

    def send(self, stream: Stream, group: list[Return], begun: None) -> Done:
        number = next(number for number, one in enumerate(self.parameters) if one is group[0][0])
        assert self.released[number].wait(10)
        host_copies._send(group)
        return self.done[number]

    @property
    def there(self) -> list[bool]:
        return [torch.equal(one, copy.to(one.dtype)) for one, copy in zip(self.parameters, self.copies, strict=True)]


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    with (
        patch.object(host_copies, "_send_on", made.send),
        patch.object(host_copies, "gather_stream", lambda block: made.gathers),
        patch.object(torch.cuda, "current_stream", lambda *device: made.computes),
    ):
        yield made


def run(block: nn.Module) -> Tensor:
    found: Tensor = block(torch.ones(1, 2, dtype=torch.bfloat16))
    return found


def test_a_block_waits_for_its_own_weights_and_the_end_at_once(beside: Beside) -> None:
    timer = Timer(0.05, beside.released[0].set)
    timer.start()
    assert beside.weights.give() == 2 * 4 + 3 * 4 * 2
    assert beside.there == [True, False, False, False] and beside.computes.waits == [0] and not beside.gathers.waits
    Timer(0.05, beside.released[1].set).start()
    assert torch.equal(run(beside.blocks[0]), torch.full((1, 2), 4.0, dtype=torch.bfloat16))
    assert beside.there == [True, True, False, False]
    run(beside.blocks[0])  # of a second micro-batch
    assert beside.computes.waits == [0, 1] and beside.gathers.waits == [1]
    for released in beside.released:
        released.set()
    run(beside.blocks[1])
    assert beside.computes.waits == [0, 1, 2] and beside.gathers.waits == [1, 2]


def test_copies_change_when_all_have_been_copied(beside: Beside) -> None:
    """Those of a block that has not run too."""
    for released in beside.released[:3]:
        released.set()
    beside.weights.give()
    Timer(0.05, beside.released[3].set).start()
    beside.weights.settle()
    assert all(beside.there) and all(done.synchronized for done in beside.done)


def test_what_is_rounded_is_rounded_into_the_room_of_a_gradient(beside: Beside) -> None:
    """Half of it; what comes as it is needs none."""
    for released in beside.released:
        released.set()
    beside.weights.give()
    beside.weights.settle()
    for number, (room, copy) in enumerate(zip(beside.rooms, beside.copies, strict=True)):
        half = room.flatten().view(torch.bfloat16)[: copy.numel()].view(copy.shape)
        assert torch.equal(half, copy.bfloat16()) is (number > 0)
        assert bool((room.flatten()[copy.numel() // 2 if number else 0 :] == 9.0).all())
