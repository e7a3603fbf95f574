"""Which operations of torch are seen to send, and how much: each way in which a DTensor is redistributed too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.distributed.calls import COLLECTIVES, KINDS, SILENT
from shardwise.distributed.fake_world import fake_world
from shardwise.prove.fake_run import WorldCounter
from shardwise.runtime.metrics.measure import record_traffic
from shardwise.spec.layout import Layout

RANKS = 4
LOCAL_BYTES = 8 * 16 * 4


def sent(run: Callable[[Callable[..., DTensor], Tensor, str], object]) -> tuple[Counter[tuple[str, str, int]], int]:
    """What a rank of four is seen to send in a proof, and how many calls a real run records."""
    with fake_world(Layout(dp_shard=RANKS)) as groups:
        mesh = groups.mesh("dp_shard")
        group = str(mesh.get_group().group_name)

        def cut(*placements: object) -> DTensor:
            return DTensor.from_local(torch.ones(8, 16), mesh, placements, run_check=False)  # type: ignore[arg-type]

        with WorldCounter(None, groups.called()) as counter:
            run(cut, torch.ones(8, 16), group)
        with record_traffic() as calls:
            run(cut, torch.ones(8, 16), group)
    assert {call.bytes for call in calls} == {size for _, _, size in counter.sent}
    return counter.sent, len(calls)


@pytest.mark.parametrize(
    ("run", "kind", "size"),
    [
        (lambda cut, x, group: cut(Shard(0)).redistribute(placements=[Replicate()]), "all_gather", RANKS * LOCAL_BYTES),
        (lambda cut, x, group: cut(Partial()).redistribute(placements=[Replicate()]), "all_reduce", LOCAL_BYTES),
        (lambda cut, x, group: cut(Partial()).redistribute(placements=[Shard(0)]), "reduce_scatter", LOCAL_BYTES),
        (lambda cut, x, group: cut(Shard(0)).full_tensor(), "all_gather", RANKS * LOCAL_BYTES),
        (lambda cut, x, group: functional.all_reduce(x, "sum", group), "all_reduce", LOCAL_BYTES),
        (lambda cut, x, group: functional.broadcast(x, 0, group), "broadcast", LOCAL_BYTES),
        (lambda cut, x, group: functional.all_to_all_single(x, None, None, group), "all_to_all", LOCAL_BYTES),
    ],
)
def test_functional_collectives_are_seen(run: Callable[..., object], kind: str, size: int) -> None:
    found, calls = sent(run)
    [(_, was, payload)] = found
    assert (was, payload, found.total(), calls) == (kind, size, 1, 1)


def test_a_dtensor_that_is_cut_along_another_dim_sends() -> None:
    found, _ = sent(lambda cut, x, group: cut(Shard(0)).redistribute(placements=[Shard(1)]))
    assert found.total() == 1 and {kind for _, kind, _ in found} <= {"all_to_all", "all_gather"}


def test_what_waits_sends_nothing_and_what_is_not_known_has_its_own_name() -> None:
    with fake_world(Layout(dp_shard=RANKS)) as groups:
        group = groups.mesh("dp_shard").get_group()
        with WorldCounter(None, groups.called()) as counter:
            torch.distributed.barrier(group)
            torch.distributed.reduce(torch.ones(4096), 0, group=group)
    assert [kind for _, kind, _ in counter.sent] == ["reduce_"]


def test_every_collective_of_torch_has_a_kind() -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = {name.partition("::")[2] for name in names if name.partition("::")[0] in COLLECTIVES}
    left = {"gather_", "scatter_", "reduce_", "batch_p2p_ops"}
    assert known - KINDS.keys() - SILENT <= left
