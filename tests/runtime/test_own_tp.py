"""A loop of one's own over Shardwise's decoder with tensor parallelism, beside a plain loop in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigError, DataError, MissingInputError
from shardwise.models import hf
from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankPool
from shardwise.runtime import own
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from tests.runtime import own_ranks
from tests.runtime.test_own import plain_decoder, same
from tests.said import refusal

STEPS = 4
SETTINGS = {
    "tp alone": (2, "ddp", {"tp": 2}),
    "beside ddp": (4, "ddp", {"tp": 2}),
    "beside zero3": (4, "zero3", {"tp": 2, "recompute": "full"}),
}


@pytest.mark.prove
@pytest.mark.parametrize("case", SETTINGS)
def test_float64(ranks: RankPool, case: str) -> None:
    """A loss of the logits that ``model()`` returns, whole on every rank; rows are a data-parallel group's."""
    world, strategy, settings = SETTINGS[case]
    same(ranks.run(own_ranks.decoder, strategy, settings, STEPS, world=world), plain_decoder(STEPS))


@pytest.mark.parametrize(
    ("module", "tp", "said"),
    [
        (nn.Linear(4, 4), 2, "Linear"),
        (Decoder(own_ranks.UNTIED), 3, "3 does not divide"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(module: nn.Module, tp: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        own.parallelize(module, Plan(Layout(tp=tp)), None)
    assert [problem.code for problem in refused.value.problems] == ["PLAN022"]


def test_a_degree_that_does_not_divide_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"tp": 3}
    with own_ranks.started(4), pytest.raises(ConfigError, match=refusal("PLAN001", "tp 3", "4 processes")):
        own.make_plan("zero3", **asked)


@pytest.mark.parametrize(("strategy", "settings"), [("zero3", {}), ("ddp", {"tp": 2})], ids=str)
def test_a_decoder_gets_its_trained_weights(
    ranks: RankPool, tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    """Once it is cut, each process its slices; or before."""
    trained = Decoder(own_ranks.UNTIED)
    right = dict(trained.named_parameters())
    hf.write_weights(tmp_path, own_ranks.UNTIED, lambda name: right[name].detach())
    for found in ranks.run(own_ranks.loaded, strategy, settings, str(tmp_path), world=2):
        assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
    other = Decoder(own_ranks.UNTIED)
    shardwise.load_weights(other, tmp_path)
    assert all(torch.equal(p, right[name]) for name, p in other.named_parameters())


def test_weights_that_are_not_there_or_are_of_another_model(tmp_path: Path) -> None:
    decoder = Decoder(own_ranks.UNTIED)
    with pytest.raises(MissingInputError, match=r"CKPT001.*dimensions"):
        shardwise.load_weights(decoder, "meta-llama/Llama-3.2-1B".rpartition("/")[2])
    other = replace(own_ranks.UNTIED, intermediate_size=20)
    hf.write_weights(tmp_path, other, lambda name: Decoder(other).get_parameter(name).detach())
    with pytest.raises(DataError, match="CKPT002"):
        shardwise.load_weights(decoder, tmp_path)
