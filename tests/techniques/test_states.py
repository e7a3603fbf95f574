"""What ranks hold of each parameter: one table, and what follows from it, beside what the real techniques made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardwise import techniques
from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.slices import cuts, replication
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.hf_model import model_of
from shardwise.runtime.build import allocate
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan, Precision, Shard
from shardwise.techniques import states as table
from shardwise.techniques import tp
from shardwise.techniques.states import Division, State, copies, division, states, sums
from tests.parity.cases import GEMMA, QWEN, TIED, UNTIED
from tests.said import refuses

EVEN, SHARED, BOTH = (replace(spec, intermediate_size=28) for spec in (UNTIED, TIED, GEMMA))
BIASED = replace(QWEN, mlp_bias=True, intermediate_size=28)
LAYOUTS = {
    "ddp": (Layout(dp_replicate=2), "ddp"),
    "ddp, tp": (Layout(dp_replicate=2, tp=2), "ddp"),
    "zero3": (Layout(dp_shard=4), "zero3"),
    "zero2, tp, few key heads": (Layout(dp_shard=2, tp=4), "zero2"),
    "hybrid, tp": (Layout(dp_replicate=2, dp_shard=2, tp=2), "zero3"),
}
ADAPTERS = {"none": None, "lora": Lora(4, 8.0), "dora": Lora(4, 8.0, dora=True)}


def plan_of(layout: str, adapters: str, *, sequence_parallel: bool = True) -> Plan:
    degrees, strategy = LAYOUTS[layout]
    shard, sequence = Shard(strategy), sequence_parallel and degrees.tp > 1  # type: ignore[arg-type]
    return Plan(degrees, shard=shard, precision=Precision(), sequence_parallel=sequence, lora=ADAPTERS[adapters])


def parameters(spec: ModelSpec, plan: Plan) -> Iterator[tuple[str, torch.Tensor, Layout]]:
    """Those that the techniques make, on the last rank."""
    with fake_world(plan.layout, plan.layout.world - 1) as groups:
        with torch.device("meta"):
            parts: list[torch.nn.Module] = [model_of(spec)]
        techniques.apply(parts, plan, groups, lambda parts: allocate(parts, spec, torch.device("cpu")))
        for name, parameter in parts[0].named_parameters():
            yield name, parameter, plan.layout


@pytest.mark.matrix(3)
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_placements_and_the_norms_share_follow_from_the_table(layout: str, adapters: str) -> None:
    """For every parameter: by which dims the real one is cut over which axis, and on how many ranks it is held."""
    plan = plan_of(layout, adapters)
    for spec in (EVEN, SHARED, BOTH, BIASED):
        assert not tp.check(spec, plan)
        for name, parameter, at in parameters(spec, plan):
            told = states(name, parameter.ndim, division(spec, plan), plan)
            placed: dict[str, int] = {}
            if isinstance(parameter, DTensor):
                names = parameter.device_mesh.mesh_dim_names or ()
                placed = {names[axis]: dim for axis, dim in cuts(parameter)}
            expected = {
                at.called(group): s.dim for group, s in told.items() if s.dim is not None and at.size(group) > 1
            }
            assert placed == expected, name
            assert copies(told, at) == replication(parameter, at.size("stage")), name


def test_the_states_of_a_parameter_multiply_to_its_stage() -> None:
    for layout in LAYOUTS:
        plan = plan_of(layout, "none")
        for name, shape in parameter_shapes(BIASED).items():
            told = states(name, len(shape), division(BIASED, plan), plan)
            sizes = [plan.layout.size(group) for group in told]
            assert torch.tensor(sizes).prod() == plan.layout.size("stage")


def test_sums_follow_from_states() -> None:
    """Held whole and in parts: an all-reduce; in pieces: a reduce-scatter; what is a rank's own is not summed."""
    plan = plan_of("hybrid, tp", "none")
    q, norm = (states(name, 2, division(EVEN, plan), plan) for name in ("layers.0.attention.q.weight", "norm.weight"))
    assert sums(q) == {"dp_replicate": "all_reduce", "fsdp": "reduce_scatter"}
    assert sums(norm) == {"tp": "all_reduce", **sums(q)}
    assert sums({"tp": State(0), "loss": State()}) == {}
    alone = plan_of("zero3", "none")
    assert sums(states("scale", 0, Division(1, 2), alone)) == {"loss": "all_reduce"}, "a scalar is not cut"


def test_every_parameter_of_a_model_and_of_what_is_added_has_a_row() -> None:
    for spec, few, apart in product((EVEN, BOTH, BIASED), (2, 64), (True, False)):
        names = tp._names(spec, True)
        assert len(names) > 50 and not table.uncovered(names, Division(few, spec.attention.num_key_value_heads, apart))


def test_a_parameter_without_a_row_is_refused_when_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it is, before any process starts; a plan without tp has no need of the row."""
    rows = {key: row for key, row in table._ROWS.items() if key != ("down", "bias")}
    monkeypatch.setattr(table, "_ROWS", rows)
    cluster = parse_cluster("4xH100")
    [problem] = techniques.check(BIASED, plan_of("ddp, tp", "none"), cluster)
    assert refuses(problem, "PLAN022", "`layers.0.mlp.down.bias`")
    assert not techniques.check(BIASED, plan_of("zero3", "none"), cluster)
    assert not techniques.check(EVEN, plan_of("ddp, tp", "none"), cluster), "it has no such parameter"
