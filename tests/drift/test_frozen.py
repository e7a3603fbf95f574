"""Frozen parameters: what a plan sends, holds and saves with them is what was predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwise import techniques
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.prove.drift import drift
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from tests.covering import pairwise
from tests.drift.test_drift import PRECISIONS, REMATS, SPEC, check, plan_of

TIED = replace(SPEC, tie_word_embeddings=True)
DEEP = replace(SPEC, num_hidden_layers=4)
BIASED = with_fields(SPEC, attention_bias=True, mlp_bias=True)
FROZEN: dict[str, tuple[ModelSpec, tuple[str, ...]]] = {
    "embedding": (SPEC, ("embed.*",)),
    "feed-forward layers": (SPEC, ("*.mlp.*",)),
    "first block and embedding": (SPEC, ("embed.*", "layers.0.*")),
    "all but norms": (SPEC, ("embed.*", "*.attention.*", "*.mlp.*", "head.*")),
    "head": (SPEC, ("head.*",)),
    "tied embedding": (TIED, ("embed.*",)),
}
ODD: dict[str, tuple[ModelSpec, tuple[str, ...]]] = {
    "all but the head": (SPEC, ("embed.*", "layers.*", "norm.*")),
    "three blocks of four": (DEEP, ("embed.*", "layers.[012].*")),
    "all but a feed-forward layer": (
        SPEC,
        ("embed.*", "layers.0.*", "layers.1.attention*", "*norm.weight", "norm.*", "head.*"),
    ),
    "all but v": (SPEC, ("embed.*", "layers.0.*", "layers.1.attention.[qko].*", "*norm.weight", "head.*", "*.mlp.*")),
    "half a gate": (SPEC, ("embed.*", "layers.0.*", "layers.1.attention*", "layers.1.mlp.[gd]*", "*norm.weight")),
    "last block": (DEEP, ("layers.3.*", "norm.*", "head.*")),
    "all but biases": (BIASED, ("*.weight",)),
}
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "hsdp-zero3")
GRID = list(product(("fp32", "bf16"), ("none", "selective", "full"), (1, 2)))


def frozen_plan(sharding: str, frozen: tuple[str, ...], precision: str, remat: str, m: int) -> Plan:
    plan = plan_of(sharding, 8, batch=Batch(2, m, 32, 40), precision=PRECISIONS[precision], remat=REMATS[remat])
    return replace(plan, frozen=frozen)


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("what", "sharding", "precision", "remat", "m"),
    pairwise(FROZEN, SHARDINGS, ("fp32", "bf16"), ("none", "selective", "full"), (1, 2)),
)
def test_frozen(what: str, sharding: str, precision: str, remat: str, m: int) -> None:
    spec, frozen = FROZEN[what]
    check(frozen_plan(sharding, frozen, precision, remat, m), spec, ranks=(7,))


@pytest.mark.big
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("what", [*FROZEN, *ODD])
def test_frozen_with_every_setting(what: str, sharding: str) -> None:
    spec, frozen = (FROZEN | ODD)[what]
    for precision, remat, m in GRID:
        check(frozen_plan(sharding, frozen, precision, remat, m), spec)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("what", ODD)
def test_where_backward_begins_late(what: str) -> None:
    spec, frozen = ODD[what]
    for sharding, precision, remat, m in (("ddp", "bf16", "none", 1), ("zero3", "fp32", "full", 3)):
        check(frozen_plan(sharding, frozen, precision, remat, m), spec)


def test_reshard_to_part_of_the_ranks() -> None:
    """A block without a backward is gathered once a micro-batch, from all ranks."""
    for m in (1, 3):
        plan = frozen_plan("zero3", ("embed.*", "layers.[01].*"), "bf16", "none", m)
        check(replace(plan, shard=Shard("zero3", 4)), DEEP)


@pytest.mark.parametrize("sharding", ["ddp", "zero2"])
def test_together_with_types_by_module(sharding: str) -> None:
    precision = Precision("bf16", modules=(("*norm", "fp32"), ("*.down", "fp32")))
    for frozen in (("*.mlp.*",), ("embed.*", "layers.0.*")):
        plan = replace(frozen_plan(sharding, frozen, "bf16", "none", 1), precision=precision)
        check(plan, SPEC)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("what", "sharding", "remat"),
    pairwise(("first block and embedding", "all but norms"), ("ddp", "zero3"), ("none", "full")),
)
def test_peak(what: str, sharding: str, remat: str) -> None:
    spec = model_spec("drift-large", 32_000, 2048, 5632, 3, 16, 4, 128)
    plan = replace(frozen_plan(sharding, FROZEN[what][1], "bf16", remat, 2), batch=Batch(8, 2, 1024, 1024))
    plan = replace(plan, shard=Shard(plan.shard.strategy))
    found = drift(spec, plan, 0)
    assert found.measured.peak_bytes > 2**29
    assert not found.differences()
    assert abs(found.peak_error) < 0.03


CLUSTER = parse_cluster("8xH100")


@pytest.mark.parametrize(
    ("spec", "frozen", "what", "fix"),
    [
        (SPEC, ("embde.*",), "`embde.*`", "did you mean `embed.*`?"),
        (SPEC, ("*.mpl.*",), "`*.mpl.*`", "did you mean `*.mlp.*`?"),
        (SPEC, ("layers.2.*",), "`layers.2.*`", "`layers."),
        (TIED, ("head.*",), "`head.*`", "the embedding's"),
        (SPEC, ("*",), "every parameter", "remove a pattern"),
    ],
)
def test_patterns_that_cannot_be_meant(spec: ModelSpec, frozen: tuple[str, ...], what: str, fix: str) -> None:
    (problem,) = techniques.check(spec, replace(plan_of("ddp", 8), frozen=frozen), CLUSTER)
    assert problem.what.startswith(what) and (problem.code, problem.where) == ("PLAN017", "model.frozen")
    assert fix in problem.fix
