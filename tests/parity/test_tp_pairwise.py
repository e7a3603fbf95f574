"""What takes 8 ranks of tensor parallelism, which share one pool: every pair of settings that it meets, in float64 and
for some in fp32 and bf16; runs that go on under another layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.distance import Worst
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from tests.parity import drawn, test_dpo
from tests.parity.cases import BF16, FP32, FP64, ROWS, SEQ_LEN
from tests.parity.moving import goes_on
from tests.parity.pairwise import CASES, EVERY, LORA, MODELS, Case
from tests.parity.test_fp64 import holds


def of_model(model: str) -> list[Case]:
    return [case for case in CASES if case.model == model]


def test_every_pair_is_met() -> None:
    met = set().union(*(case.pairs() for case in CASES))
    assert met == set().union(*(case.pairs() for case in EVERY))
    assert {case.tp for case in CASES} == {2, 4, 8}


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_layouts(eight: RankPool, pairs: Path, model: str) -> None:
    cases = of_model(model)
    for case in cases:
        print(case)
    spec, plans = cases[0].spec, [case.plan for case in cases]
    if model != "pairs":
        holds(drawn.prove(eight, spec, plans), plans)
        return
    for world in {plan.layout.world for plan in plans}:
        test_dpo.holds(eight, pairs, [plan for plan in plans if plan.layout.world == world], spec)


def in_type(case: Case, precision: Precision) -> Plan:
    lora = case.plan.lora
    return replace(
        case.plan, precision=precision, lora=None if lora is None else replace(lora, alpha=1.0, frozen="fp32")
    )


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", [model for model in MODELS if model != "pairs"])
def test_fp32_and_bf16(eight: RankPool, model: str) -> None:
    """Loss and first gradients, with the tolerances of test_fp32_bf16.py; of models that in bf16 the plain loop itself
    trains as it does in fp64, within these tolerances: weights of 0.1, as in test_tp.py, rows of 64, small adapters."""
    columns = max(128, MODELS[model].intermediate_size)
    spec = replace(MODELS[model], initializer_range=0.1, hidden_size=64, intermediate_size=columns)
    cases = of_model(model)[:1]
    wide, narrow = ([in_type(case, precision) for case in cases] for precision in (FP32, BF16))
    for found, of in zip(drawn.prove(eight, spec, wide, steps=1), wide, strict=True):
        assert found.loss.error <= 1e-6 and found.gradient.error <= 1e-5, f"{found}\nunder {of}"
    if narrow[0].lora is None:
        turns = [found.turn for found in drawn.prove(eight, spec, narrow, steps=1)]
    else:
        turns = turned_from_twin(eight, spec, narrow)
    for turn, of in zip(turns, narrow, strict=True):
        assert turn.error <= 1e-3, f"{turn}\nunder {of}"


def turned_from_twin(eight: RankPool, spec: ModelSpec, plans: list[Plan]) -> list[Worst]:
    """1 - cosine of the worst gradient beside the run without the axis: the plain loop adds adapters to their matrices,
    which rounds otherwise in bf16."""
    worst = []
    for of in plans:
        twin = replace(of, layout=replace(of.layout, tp=1), sequence_parallel=False)
        [right], *_ = eight.run(drawn.train_on_rank, spec, [twin], 1, world=twin.layout.world)
        answers = eight.run(drawn.train_on_rank, spec, [of], 1, world=of.layout.world)
        worst.append(parity.compare(right, [found for [found] in answers]).turn)
    return worst


# Runs that go on elsewhere -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A layout that a run is saved from, or goes on under: two data-parallel ranks of ``tp`` each. ``lora``:
    what it trains, if not the model."""

    tp: int
    strategy: str
    lora: Lora | None = None

    @property
    def plan(self) -> Plan:
        layout = Layout(dp_replicate=2, tp=self.tp) if self.strategy == "ddp" else Layout(dp_shard=2, tp=self.tp)
        plan = Plan(layout, Batch(ROWS // 2, 1, SEQ_LEN), Shard(self.strategy), FP64)  # type: ignore[arg-type]
        return replace(plan, sequence_parallel=self.tp > 1, lora=self.lora)


STRATEGIES = ("ddp", "zero1", "zero3")
DEGREES = (1, 2, 4)
MOVES = [
    (Side(DEGREES[a], STRATEGIES[b]), Side(DEGREES[(a + b) % 3], STRATEGIES[(a + 2 * b) % 3]))
    for a in range(3)
    for b in range(3)
]
"""Where a run is saved, and where it goes on."""


def test_every_move_is_made() -> None:
    """From each and to each of nine layouts, and each of nine changes of the degree and of the strategy."""
    for counted in (
        Counter(source for source, _ in MOVES),
        Counter(target for _, target in MOVES),
        Counter((source.tp, target.tp) for source, target in MOVES),
        Counter((source.strategy, target.strategy) for source, target in MOVES),
    ):
        assert len(counted) == 9 and set(counted.values()) == {1}


ODD = replace(MODELS["biased"], hidden_size=17, intermediate_size=28)
"""Beside 67 ids: columns and, with 4 ranks, shares of rows that two data-parallel ranks do not divide."""


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", DEGREES)
def test_a_run_goes_on_under_another_layout(eight: RankPool, tmp_path: Path, tp: int) -> None:
    """Of a biased model with two key heads and sizes that ranks do not divide."""
    for source in [Side(tp, strategy) for strategy in STRATEGIES]:
        targets = [after.plan for before, after in MOVES if before == source]
        goes_on(eight, tmp_path / source.strategy, ODD, source.plan, targets)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("spec", "lora"),
    [(ODD, LORA["adapters"]), (MODELS["four bits"], replace(LORA["four bits"], dora=True))],
    ids=["adapters", "four bits and magnitudes"],
)
def test_adapters_go_on_under_another_layout(eight: RankPool, tmp_path: Path, spec: ModelSpec, lora: Lora) -> None:
    """From both axes to either and neither, and back; the frozen model, which is made anew, is the same too."""
    both, others = Side(2, "zero3", lora), [Side(1, "ddp", lora), Side(4, "ddp", lora), Side(4, "zero3", lora)]
    goes_on(eight, tmp_path / "from", spec, both.plan, [other.plan for other in others])
    goes_on(eight, tmp_path / "to", spec, Side(1, "zero3", lora).plan, [both.plan])
