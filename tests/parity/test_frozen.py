"""With frozen parameters a plan's training is the plain loop's with the same parameters frozen, in float64 (tolerance:
tests/parity/test_fp64.py); norm and clipping count the trained ones only, as torch's own clipping does in the plain
loop; and what is frozen stays, to the bit, what it was.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from shardwise.models import init
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Plan, Remat
from tests.covering import pairwise
from tests.parity.cases import FP64, STRATEGIES, TIED, UNTIED, plan

TOLERANCE = 1e-9
FROZEN = {
    "embedding": ("embed.*",),
    "feed-forward layers": ("*.mlp.*",),
    "first block and embedding": ("embed.*", "layers.0.*"),
    "all but norms": ("embed.*", "*.attention.*", "*.mlp.*", "head.*"),
    "head": ("head.*",),
    "all but the head": ("embed.*", "layers.*", "norm.*"),
}
STEPS = 3
"""The second update is the first that the first one's moments and clipping have a part in."""


def holds(ranks: RankPool, spec: ModelSpec, plans: list[Plan]) -> None:
    """All plans have one size."""
    answers = ranks.run(parity.train_on_rank, spec, plans, STEPS, world=plans[0].layout.world)
    for place, of in enumerate(plans):
        traces = [mine[place] for mine in answers]
        right = parity.plain(parity.job_of(spec, of, STEPS))
        found = parity.compare(right, traces)
        errors = [found.loss, found.norm, found.gradient, found.weight]
        assert all(error.error <= TOLERANCE for error in errors), f"{found}\nunder {of}"
        held = [name for name in parameter_shapes(spec) if any(fnmatchcase(name, glob) for glob in of.frozen)]
        assert held
        for trace in traces:
            assert not set(held) & set(trace.gradients)
            assert all(torch.equal(trace.weights[name], first(name, spec)) for name in held), of
            trained = set(trace.weights) - set(held)
            assert not any(torch.equal(trace.weights[name], first(name, spec)) for name in trained), of


def first(name: str, spec: ModelSpec) -> torch.Tensor:
    shape = parameter_shapes(spec)[name]
    return init.fill(name, shape, tuple(slice(0, size) for size in shape), 0, spec).double()


def frozen_plan(strategy: str, world: int, frozen: tuple[str, ...], remat: str, accumulation: int) -> Plan:
    return replace(plan(strategy, world, FP64, Remat(remat), accumulation), frozen=frozen)  # type: ignore[arg-type]


CASES = pairwise(FROZEN, STRATEGIES, ("none", "selective", "full"), (1, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("what", FROZEN)
def test_every_strategy(ranks: RankPool, what: str) -> None:
    holds(ranks, UNTIED, [frozen_plan(s, 2, FROZEN[what], remat, m) for of, s, remat, m in CASES if of == what])


@pytest.mark.prove
@pytest.mark.parametrize("what", ["first block and embedding", "all but norms"])
def test_hybrid_and_part_of_the_ranks(ranks: RankPool, what: str) -> None:
    hybrid = frozen_plan("hsdp", 4, FROZEN[what], "full", 2)
    three = frozen_plan("zero3", 4, FROZEN[what], "none", 2)
    holds(ranks, UNTIED, [hybrid, replace(three, shard=replace(three.shard, reshard_after_forward=2))])


@pytest.mark.prove
def test_tied_embedding(ranks: RankPool) -> None:
    holds(ranks, TIED, [frozen_plan(s, 2, ("embed.*",), "none", 2) for s in ("ddp", "zero1", "zero3")])


def test_biases_alone_are_trained(ranks: RankPool) -> None:
    holds(ranks, TIED, [frozen_plan(s, 2, ("*.weight",), "none", 2) for s in ("ddp", "zero3")])
