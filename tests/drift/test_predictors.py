"""Plans of models with a layer that predicts a further token say what is sent, held and saved, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import model_spec
from shardwise.models.predictor import with_predictor
from shardwise.prove.drift import drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Dtype, Pipeline, Plan, Precision, Remat, Shard
from tests.parity.predictors import CASES, MODELS, PLANS

DTYPES: tuple[Dtype, Dtype] = ("fp32", "bf16")


@pytest.mark.matrix(21)
@pytest.mark.parametrize(("name", "model"), CASES)
def test_plans(name: str, model: str) -> None:
    """Each layout, in one dtype or the other."""
    compute = DTYPES[([*PLANS].index(name) + [*MODELS].index(model)) % 2]
    of = replace(PLANS[name], precision=Precision(compute, "fp32"))
    of = replace(of, expert_imbalance=1.0) if of.layout.ep > 1 else of
    for rank in {0, of.layout.world - 1}:
        assert not drift(MODELS[model], of, rank).differences()


LARGE = with_predictor(model_spec("drift-mtp-large", 32_000, 1024, 2816, 6, 16, 4, 64), 0.1)


@pytest.mark.matrix
@pytest.mark.parametrize("remat", ["none", "full"])
def test_peaks(remat: str) -> None:
    """Of more than a GiB, within a hundredth."""
    plan = Plan(Layout(dp_shard=4), Batch(2, 2, 1024, 512), Shard("zero3"), Precision("bf16"), Remat(remat))  # type: ignore[arg-type]
    found = drift(LARGE, plan, 3)
    assert found.measured.peak_bytes > 2**30 and not found.differences() and abs(found.peak_error) < 0.01


def test_a_gradient_takes_the_place_of_what_went_behind() -> None:
    """In the last stage's backward, whose peak is at its end, where all gradients of weights are there."""
    spec = with_predictor(model_spec("drift-mtp-behind", 64, 256, 4096, 9, 2, 2, 128), 0.1)
    pipeline, dtypes = Pipeline("gpipe", 1, (1, 9)), Precision("bf16", "bf16")
    plan = Plan(Layout(pp=2), Batch(1, 1, 256, 256), precision=dtypes, remat=Remat("full"), pipeline=pipeline)
    assert abs(drift(spec, plan, 1).peak_error) < 1e-4
