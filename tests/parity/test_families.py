"""In float64 a model of another family is trained as the plain loop trains it: the chunked loss with its cap, windows
and two thetas, norms around and inside attention."""

from __future__ import annotations

import pytest

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Remat
from tests.parity.cases import FP64, GEMMA, QWEN, plan
from tests.parity.test_fp64 import holds


@pytest.mark.big
def test_gemma(ranks: RankPool) -> None:
    plans = [plan("ddp", 2, FP64, Remat("full"), 4), plan("zero3", 2, FP64, Remat("selective"), 4)]
    holds(parity.prove(ranks, GEMMA, plans), plans)


@pytest.mark.prove
def test_qwen(ranks: RankPool) -> None:
    plans = [plan("zero1", 2, FP64, Remat("selective"), 4), plan("zero3", 2, FP64, Remat("full"))]
    holds(parity.prove(ranks, QWEN, plans), plans)
