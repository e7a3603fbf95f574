"""Parity must see what is wrong with experts and in expert parallelism: faults planted into the ranks' code. Gradients
are compared, since Adam hides a constant factor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.distributed import meshes
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.torch_private import in_backward
from shardwise.models import moe
from shardwise.models.moe import Experts, MoE
from shardwise.models.router_losses import Routing
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from shardwise.techniques import shard, tp
from shardwise.techniques.ep import dispatch
from shardwise.techniques.states import Division, State
from tests.parity import planted
from tests.parity.mixtures import GPT_OSS, MIXTRAL, MODELS, QWEN2
from tests.parity.planted import Fault
from tests.parity.test_ep_beside import late_exchanges
from tests.parity.test_ep_field import plan

divided, expert_mesh, replication, state = (
    FSDPModule.set_gradient_divide_factor,
    Meshes.expert_mesh,
    reduce.replication,
    tp.state,
)
computed, from_group, grouped = dispatch.computed_elsewhere, DeviceMesh.from_group, moe.grouped
experts_forward, mixed, route = Experts.forward, MoE.forward, MoE.route
wait_rows = dispatch.wait_rows


def by_loss(name: str, plan: Plan) -> str:
    return "loss"


def without_replicas(self: Meshes, *groups: str) -> DeviceMesh:
    return expert_mesh(self, *(group for group in groups if group != "dp_replicate"))


def means(self: FSDPModule, factor: float) -> None:
    divided(self, 2.0 * factor if isinstance(self, Experts) else factor)


def once_too_often(tensor: Tensor, ranks: int) -> int:
    """Of experts each rank of ep has others: it is no copy."""
    copies = replication(tensor, ranks)
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else ()
    return max(1, copies // 2) if "ep" in (names or ()) else copies


def own_alone(tensor: Tensor, ranks: int) -> int:
    """As if the squares of other ranks' experts were not added."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else ()
    return replication(tensor, ranks) * (2 if "ep" in (names or ()) else 1)


def as_they_are(self: MoE, x: Tensor) -> Routing:
    routing = route(self, x)
    return routing._replace(weights=self.router(x).softmax(-1).topk(self.top, -1).values)


class Stays:
    """In place of what puts rows in the order of experts, and back: rows of which the way back is left out."""

    calls = 0

    @classmethod
    def apply(cls, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        cls.calls += 1
        return x.index_select(0, order) if cls.calls % 2 else x


def rolled(*given: Any) -> Tensor:
    return computed(*given).roll(1, 0)


def without_remote_scores(self: Experts, x: Tensor, routing: Routing, *beside: Any) -> Tensor:
    """Weights of what other ranks' experts make have no gradient."""
    each = routing.counts.shape[0] // 2
    own = routing.ids // each == distributed.get_rank() % 2
    weights = torch.where(own, routing.weights, routing.weights.detach())
    return experts_forward(self, x, routing._replace(weights=weights), *beside)


def shared_on_every_rank(self: MoE, x: Tensor) -> Tensor:
    """As if it were added before a sum over two ranks."""
    out = mixed(self, x)
    if self.shared is None or self.shared_gate is None:
        return out
    return out + self.shared(x) * torch.sigmoid(self.shared_gate(x))


def shared_in_parts(self: MoE, x: Tensor) -> Tensor:
    """What the ranks of tp make of it is not summed."""
    if self.shared is None:
        return mixed(self, x)
    with patch.object(self.shared.down, "_forward_hooks", OrderedDict()):
        return mixed(self, x)


def beyond_the_last(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The last of the rows belongs to no group, and what the product leaves there is what was there."""
    short, last = counts.clone(), counts.nonzero()[-1, 0]
    short[last] -= 1
    out = grouped(x[:-1], weight, short)
    return torch.cat([out, out.new_full((1, out.shape[1]), 7.0)])


def experts_of_another(groups: Any, kind: str, ranks: Tensor, **names: Any) -> DeviceMesh:
    """The mesh has the ranks of ep the other way round than their group."""
    return from_group(groups, kind, ranks.flip(-1), **names)


def routers_are_whole(name: str, how: Division) -> State:
    return State() if ".router." in name else state(name, how)


@contextmanager
def returned_unsorted() -> Iterator[None]:
    Stays.calls = 0
    with patch.object(dispatch, "_Permuted", Stays):
        yield


@contextmanager
def forgotten(*, backward: bool) -> Iterator[None]:
    """Nothing has come until it is waited for, and rows, or their gradients, are not."""

    def waits(x: Tensor) -> None:
        if not x.is_floating_point() or in_backward() != backward:
            wait_rows(x)

    with late_exchanges(), patch.object(dispatch, "wait_rows", waits):
        yield
    dispatch.UNDER_WAY.clear()


DDP = plan(Layout(dp_replicate=2, dp_shard=2, ep=2))
TENSOR = plan(Layout(tp=4, ep=2))
SHARDED = plan(Layout(dp_shard=4, ep=2), "zero3")
HYBRID = plan(Layout(dp_replicate=2, dp_shard=2, ep=2), "zero3")
PAIR = plan(Layout(dp_shard=2, ep=2), "zero3")
WHOLE = plan(Layout(tp=2), sequence_parallel=False)
FAULTS: dict[str, Fault] = {
    "gradients of experts are summed over the ranks of all tokens": (
        lambda: patch.object(shard, "summed_over", by_loss),
        MIXTRAL,
        DDP,
    ),
    "the same beside tp, where these are fewer": (lambda: patch.object(shard, "summed_over", by_loss), MIXTRAL, TENSOR),
    "E14: gradients of experts are not summed over replicas": (
        lambda: patch.object(Meshes, "expert_mesh", without_replicas),
        MIXTRAL,
        HYBRID,
    ),
    "E1: gradients of experts are means": (
        lambda: patch.object(FSDPModule, "set_gradient_divide_factor", means),
        MIXTRAL,
        SHARDED,
    ),
    "experts count once too often in the norm": (
        lambda: patch.object(reduce, "replication", once_too_often),
        MIXTRAL,
        DDP,
    ),
    "E4: of the experts' norm a rank knows its own alone": (
        lambda: patch.object(reduce, "replication", own_alone),
        MIXTRAL,
        PAIR,
    ),
    "weights of the chosen are not normalised": (lambda: patch.object(MoE, "route", as_they_are), MIXTRAL, PAIR),
    "rows come back in the order of the experts": (returned_unsorted, MIXTRAL, PAIR),
    "rows come back one place late": (
        lambda: patch.object(dispatch, "computed_elsewhere", rolled),
        MIXTRAL,
        PAIR,
    ),
    "rows are read before they have come": (lambda: forgotten(backward=False), QWEN2, PAIR),
    "gradients of rows are read before they have come": (lambda: forgotten(backward=True), QWEN2, PAIR),
    "E2: routers learn from the experts of their own rank alone": (
        lambda: patch.object(Experts, "forward", without_remote_scores),
        MIXTRAL,
        PAIR,
    ),
    "T1: gradients of routers are not summed over tokens": (
        lambda: patch.object(tp, "state", routers_are_whole),
        GPT_OSS,
        plan(Layout(tp=2)),
    ),
    "the MLP that all share is added on every rank of tp": (
        lambda: patch.object(MoE, "forward", shared_on_every_rank),
        QWEN2,
        WHOLE,
    ),
    "what ranks of tp make of the MLP that all share is not summed": (
        lambda: patch.object(MoE, "forward", shared_in_parts),
        QWEN2,
        WHOLE,
    ),
    "rows beyond those of the last expert are read": (
        lambda: patch.object(moe, "grouped", beyond_the_last),
        GPT_OSS,
        PAIR,
    ),
    "a rank has the experts of another": (
        lambda: patch.object(meshes.DeviceMesh, "from_group", experts_of_another),
        MIXTRAL,
        PAIR,
    ),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_caught(ranks: RankPool, world: int) -> None:
    faults = {name: fault for name, fault in FAULTS.items() if fault[2].layout.world == world}
    planted.all_seen(faults, ranks.run(train_with_faults, list(faults), world=world))


def test_the_models_are_those_that_parity_proves() -> None:
    assert all(spec in MODELS.values() for _, spec, _ in FAULTS.values())
