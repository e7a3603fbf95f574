"""A layer that predicts a further token, trained with its model: N ranks are one process. And faults in it, planted
into the ranks' code, which parity sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods import pretrain
from shardwise.methods.loss import Loss, Output
from shardwise.models.decoder import Decoder
from shardwise.prove import documents, parity, slopes
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.runtime.pipeline import Passed, PipelineRank
from shardwise.techniques.pp.actions import Action, Way
from tests.parity import drawn, planted
from tests.parity.planted import Fault
from tests.parity.predictors import CASES, MODELS, PLANS
from tests.parity.test_fp64 import holds


@pytest.mark.matrix(21)
@pytest.mark.parametrize(("name", "model"), CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str, model: str) -> None:
    of = PLANS[name]
    holds(drawn.prove(ranks, MODELS[model], [of], 3), [of])


@pytest.mark.big
def test_a_compiled_plan(ranks: RankPool) -> None:
    of = replace(PLANS["zero3"], compile=True)
    holds(drawn.prove(ranks, MODELS["dense"], [of], 3), [of])


ahead, twice, added = MicroBatch.looking_ahead, Decoder.embedded_twice, pretrain._with_further
take = PipelineRank._take


def past_the_end(self: MicroBatch) -> MicroBatch:
    """Only rows have ends."""
    return replace(ahead(replace(self, documents=None)), documents=self.documents)


def alone(self: Decoder, ids: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    first, second = twice(self, ids, following)
    return first, second.detach()


def of_a_micro_batch(hidden: Tensor, head: Output, targets: Tensor, denominator: float, chunk: int) -> Loss:
    """The mean of the means of four."""
    assert head.further is not None
    count = 4.0 * int((targets[..., 1] >= 0).sum())
    return added(hidden, replace(head, further=head.further._replace(targets=count)), targets, denominator, chunk)


def of_own_rank(meshes: Meshes, own: int) -> int:
    return own


def given_back(self: PipelineRank[Loss], letter: Way, action: Action) -> Passed:
    """The gradient of what goes behind is lost on the way."""
    hidden, *behind = take(self, letter, action)
    return (hidden, *(torch.zeros_like(each) if letter == "B" else each for each in behind))


ACCUMULATED = PLANS["zero3"]
FAULTS: dict[str, Fault] = {
    "M1: a target of the next document": (
        lambda: patch.object(MicroBatch, "looking_ahead", past_the_end),
        MODELS["dense"],
        PLANS["ring"],
    ),
    "M2: a mean over each micro-batch": (
        lambda: patch.object(pretrain, "_with_further", of_a_micro_batch),
        MODELS["GLM"],
        ACCUMULATED,
    ),
    "M3: further targets are counted on one rank": (
        lambda: patch.object(reduce, "count", of_own_rank),
        MODELS["dense"],
        ACCUMULATED,
    ),
    "M4: the embedding does not learn from what is predicted further": (
        lambda: patch.object(Decoder, "embedded_twice", alone),
        MODELS["dense"],
        PLANS["tp"],
    ),
    "M5: a stage gives the one before it no gradient of what the last block reads": (
        lambda: patch.object(PipelineRank, "_take", given_back),
        MODELS["dense"],
        PLANS["1f1b"],
    ),
}


def train_with_faults(rank: int, world: int, names: Sequence[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))


@pytest.mark.prove
def test_gradients_are_those_of_the_loss() -> None:
    found = slopes.prove(parity.job_of(MODELS["dense"], PLANS["one rank"], 1, drawn.RANDOM))
    assert len(found) > 20 and max(slope.error for slope in found) < 1e-7


@pytest.mark.prove
def test_no_document_of_a_row_changes_another(ranks: RankPool) -> None:
    of = PLANS["zero3"]
    answers = ranks.run(documents.prove_on_rank, MODELS["dense"], of, drawn.RANDOM, world=2)
    assert all(each.tensors > 20 and not each.leaks() for each in answers)
