"""The fit finds the constants that made its rows, and its band follows from what is left."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from bench.accuracy import fit
from bench.accuracy.rows import Measurement, read
from shardwise.planner.seconds.constants import shipped
from tests.bench.accuracy.published import changed

TRUE = {"best product:A100-SXM-80GB": 0.7, "era:fsdp2": 1.05, "attention flash2 ampere": 0.45}


def made() -> list[tuple[Measurement, float]]:
    """Rows of two sources, each on two programs, and their seconds by the constants of ``TRUE``: in one node, where
    what is computed decides."""
    cases = [
        {"group": group, "framework": framework, "tp": "1", "seq_len": tokens, "mbs": "1", "gbs": "8"}
        for group in ("a", "b")
        for framework in ("torchtitan", "llm-foundry")
        for tokens in ("2048", "16384")
    ]
    found = []
    for case in cases:
        row = read(changed(**case, attn="FA2", num_gpus="8"))
        assert isinstance(row, Measurement), row
        with fit.replaced(TRUE):
            seconds = fit.predicted_s(row)
        assert seconds is not None
        found.append((row, seconds))
    return found


def test_constants_can_be_replaced_for_a_while() -> None:
    before = dict(shipped())
    with fit.replaced({"memory": 0.123}):
        assert shipped()["memory"] == 0.123
    assert shipped() == before


def test_the_constants_of_made_rows_are_found() -> None:
    """Priors that are three times as wide as they are off, so that the rows decide. Nothing of it stays."""
    before, data = dict(shipped()), made()
    free = {name: (before[name], before[name], 3.0) for name in TRUE}
    values, left = fit.fitted(data, free)
    assert values == pytest.approx(TRUE, rel=0.01)
    assert abs(left).max() < 0.01, "what either source says holds for the other"
    assert shipped() == before


def test_a_prior_holds_a_constant_that_no_row_tells_of() -> None:
    """A residual of 0.1 on one row with slope 1, noise 0.08, and a sigma of 0.08: half of it each."""
    moved = fit.solved(np.array([[1.0, 0.0]]), np.array([0.1]), np.array([1.0]), (np.zeros(2), np.full(2, fit.NOISE)))
    assert moved == pytest.approx([-0.05, 0.0])


def test_a_source_counts_as_the_root_of_its_rows() -> None:
    """Four rows of one source weigh twice as much as one of another; a row 0.16 off counts half."""
    one, other = made()[0], made()[4]
    weights = fit.weights([one] * 4 + [other], np.zeros(5))
    assert weights[:4].sum() == pytest.approx(2 * weights[4])
    off = fit.weights([one, one], np.array([0.0, 2 * fit.NOISE]))
    assert off[1] == pytest.approx(off[0] / 2)


def test_the_band_by_hand() -> None:
    """Medians of two sources 0.1 and 0, so 0.08 at four fifths of the way; within, 0 and 0.1 two and two: 0.1."""
    a, b = made()[0], made()[4]
    left = np.array([0.0, 0.2, -0.0, 0.0])
    found = {name: value for name, value in fit.band([a, a, b, b], left).items() if "fine" not in name}
    assert found == pytest.approx({"band source": 0.08, "band row": 0.1})
    width = exp(0.5 * log(0.08**2 + 0.1**2))
    assert width < 0.2
    assert fit.covered([a, a, b, b], left, found) == (0.75, 0.75)
    assert fit.covered([a, a, a, b], np.array([0.2, 0.0, 0.2, 0.0]), found) == (0.5, pytest.approx((1 / 3 + 1) / 2))


@pytest.mark.prove
def test_a_source_that_is_left_out_has_no_say_in_any_constant() -> None:
    """Two sources alike but for one that is 30 % slow: each is off by that as the other sees it, with wide priors."""
    data, before = made(), dict(shipped())
    slow = [(row, seconds * (1.3 if row.source == "b" else 1.0)) for row, seconds in data]
    free = {name: (before[name], before[name], 3.0) for name in TRUE}
    _, left = fit.fitted(slow, free)
    of_b = np.array([row.source == "b" for row, _ in slow])
    assert left[of_b] == pytest.approx(-log(1.3), abs=0.02) and left[~of_b] == pytest.approx(log(1.3), abs=0.02)
