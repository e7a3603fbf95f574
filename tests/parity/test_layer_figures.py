"""What a sampled step tells of its layers: what one process counts from what its layers are given, by another rule
(prove/plain_linear.py), and the same under every layout; no number of training is another for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.decoder import Decoder
from shardwise.prove import parity
from shardwise.prove.plain_linear import rounded
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting, random_everywhere
from shardwise.runtime.layer_figures import LayerFigures, Lost
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats, launch
from shardwise.spec.plan import Lora, Plan, Remat
from shardwise.techniques import float8
from shardwise.techniques.tally import OPERANDS, counting, tables
from tests.covering import pairwise
from tests.parity.float8s import ADAPTERS, EXPERTS, FLOAT8, LAYOUTS, ROW, SPEC, legal, plan_of

CPU = torch.device("cpu")
FLIPPED = 1e-4
"""A share: five values of an operand may be rounded the other way, where sums are added in another order."""
TRAINED: dict[str, Lora | None] = {"all": None, "adapters": ADAPTERS}
STRATEGIES = ("ddp", "zero1", "zero3")
CASES = pairwise(LAYOUTS, STRATEGIES, ("none", "selective", "full"), (1, 2), TRAINED, legal=legal)


def outlying(name: str, shape: tuple[int, ...], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    """Channels that are so much larger than others that these become zero beside them."""
    values = random_everywhere(name, shape, part, seed, spec)
    if name.endswith("mlp_norm.weight"):
        values[torch.arange(*part[0].indices(shape[0])) % 128 == 5] *= 3e5
    return values


def outliers(rank: int, world: int, spec: ModelSpec, plan: Plan, samples: bool) -> tuple[parity.Trace, Any]:
    """The trace of two steps, and what was sampled of them."""
    found: list[LayerFigures | None] = []

    def stepped(state: TrainState, *given: Any) -> StepStats:
        stats = launch(state, *given, samples=samples).wait(state)
        found.append(stats.layers)
        return stats

    with patch.object(parity, "step", stepped):
        trace = parity.take_steps(rank, spec, plan, 2, setting=Setting(draw=outlying))
    return trace, found


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, list[LayerFigures]]:
    """The figures of one process, by what is trained."""
    plans = {trained: plan_of("one", lora=lora) for trained, lora in TRAINED.items()}
    return {trained: ranks.run(outliers, SPEC, plan, True, world=1)[0][1] for trained, plan in plans.items()}


@pytest.mark.matrix(24)
@pytest.mark.parametrize(("layout", "strategy", "remat", "accumulation", "trained"), CASES)
def test_every_layout(
    ranks: RankPool,
    one_process: dict[str, list[LayerFigures]],
    layout: str,
    strategy: str,
    remat: str,
    accumulation: int,
    trained: str,
) -> None:
    """All ranks are told what one process finds, and train, to the bit, as they do without."""
    plan = plan_of(layout, strategy, remat, accumulation, TRAINED[trained])
    told = ranks.run(outliers, SPEC, plan, True, world=plan.layout.world)
    plain = ranks.run(outliers, SPEC, plan, False, world=plan.layout.world)
    for (trace, found), (without, nothing) in zip(told, plain, strict=True):
        assert nothing == [None, None]
        assert (trace.losses, trace.norms, trace.held) == (without.losses, without.norms, without.held)
        for one, right in zip(found, one_process[trained], strict=True):
            assert one.norms == pytest.approx(right.norms, rel=1e-9)
            assert math.hypot(*one.norms.values()) == pytest.approx(trace.norms[found.index(one)], rel=1e-9)
            assert one.lost.keys() == right.lost.keys()
            for each, lost in one.lost.items():
                assert lost.largest == pytest.approx(right.lost[each].largest, rel=1e-6), each
                assert tuple(lost[:2]) == pytest.approx(right.lost[each][:2], abs=FLIPPED), each


@pytest.mark.prove
def test_weights_that_are_gathered_as_codes(ranks: RankPool, one_process: dict[str, list[LayerFigures]]) -> None:
    """Counted where a rank codes its rows: the product is given what codes stand for, of which nothing is lost."""
    plan = plan_of("shards", "zero3", "full", 2, precision=replace(FLOAT8, gather="float8"))
    for _, found in ranks.run(outliers, SPEC, plan, True, world=2):
        for one, right in zip(found, one_process["all"], strict=True):
            assert one.lost.keys() == right.lost.keys()
            if one is found[0]:  # of the same weights, each value counted once
                assert all(lost == right.lost[each] for each, lost in one.lost.items() if each[1] == "weight")
            assert max(lost.flushed for (_, operand), lost in one.lost.items() if operand == "weight") > 0
            for each, lost in one.lost.items():
                assert tuple(lost[:2]) == pytest.approx(right.lost[each][:2], abs=FLIPPED), each


def test_something_is_lost(one_process: dict[str, list[LayerFigures]]) -> None:
    """Else little would be shown."""
    for sample in one_process["all"]:
        shares = list(sample.lost.values())
        assert max(lost.flushed for lost in shares) > 0.05 and max(lost.saturated for lost in shares) > 3e-4
        assert len(shares) == 3 * len(float8.layers(SPEC, FLOAT8))


# An independent count ------------------------------------------------------------------------------------------------


LEAST = 2.0**-136
"""Half of the least code times the least scale: a second rule has smaller ones, for float64."""


def lost_of(matrices: list[Tensor], rows: int, columns: int) -> Lost:
    """Counted from what a second rule rounds the matrices to."""
    values = saturated = flushed = 0
    for matrix in matrices:
        flat = matrix.flatten(0, -2)
        wide = columns or flat.shape[1]
        coded = rounded(flat, rows, columns)
        coded[flat.abs() <= LEAST] = 0
        blocks = [each.reshape(len(flat) // rows, rows, -1, wide) for each in (flat, coded)]
        scale = 2 ** torch.ceil(torch.log2(blocks[0].abs().amax((1, 3), keepdim=True) / 448))
        values += flat.numel()
        saturated += int(((blocks[1].abs() == 448 * scale) & (blocks[1] != 0)).sum())
        flushed += int(((coded == 0) & (flat != 0)).sum())
    return Lost(saturated / values, flushed / values, max(float(each.abs().max()) for each in matrices))


def prepared(plan: Plan, spec: ModelSpec = SPEC) -> tuple[Decoder, Tensor]:
    """A model with outliers under the plan, and the table of its layers."""
    torch.manual_seed(0)
    model = Decoder(spec).double()
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data = outlying(name, shape, [slice(0, size) for size in shape], 0, spec).double()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        techniques.apply_inside([model], plan, meshes=None)  # type: ignore[arg-type]
    table = tables([model], [*float8.layers(spec, plan.precision)], CPU)
    assert table is not None
    return model, table


def passes(model: Decoder) -> None:
    """Forward and backward of two micro-batches."""
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(SPEC.vocab_size, (2, 24))
        logits = model(ids, torch.arange(24).expand(2, 24), MaskSpec())
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()


@contextmanager
def watched(model: Decoder, names: Sequence[str]) -> Iterator[dict[tuple[str, str], list[Tensor]]]:
    """What the layers are given, and the gradients of what they return."""
    seen: dict[tuple[str, str], list[Tensor]] = {(name, one): [] for name in names for one in OPERANDS}

    def see(name: str, layer: nn.Linear, given: tuple[Tensor, ...], out: Tensor) -> None:
        seen[name, "input"].append(given[0].detach().clone())
        seen[name, "weight"].append(layer.weight.detach().clone())
        out.register_hook(lambda grad: seen[name, "gradient"].append(grad.clone()))

    hooks = [model.get_submodule(name).register_forward_hook(partial(see, name)) for name in names]  # type: ignore[arg-type]
    yield seen
    for hook in hooks:
        hook.remove()


def read(table: Tensor, names: Sequence[str]) -> dict[tuple[str, str], Lost]:
    rows = zip(((name, one) for name in names for one in OPERANDS), table.flatten(0, 1).tolist(), strict=True)
    return {each: Lost(row[1] / row[0], row[2] / row[0], row[3]) for each, row in rows}


@pytest.mark.parametrize(
    ("scales", "spec"), [("block", SPEC), ("row", SPEC), ("block", EXPERTS)], ids=["block", "row", "experts"]
)
def test_an_independent_count(scales: str, spec: ModelSpec) -> None:
    """Of layers, and of experts: their rows and all their matrices together."""
    precision = FLOAT8 if scales == "block" else ROW
    plan, names = Plan(precision=precision), [*float8.layers(spec, precision)]
    model, table = prepared(plan, spec)
    with watched(model, names) as seen, counting(table):
        passes(model)
    found = read(table, names)
    assert max(lost.flushed for lost in found.values()) > 0.05
    size = 128 if scales == "block" else 0
    for (name, one), matrices in seen.items():
        right = lost_of(matrices, (size or 1) if one == "weight" else 1, size)
        assert tuple(found[name, one]) == pytest.approx(tuple(right), rel=1e-12), (name, one)
    before = table.clone()
    passes(model)
    assert torch.equal(before, table)  # no step that is not sampled counts


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # likewise
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_compiled_blocks_count_the_same_in_one_graph(remat: str) -> None:
    """Whether it is counted or not: nothing is compiled again. In float64, in which codes are the same."""
    tables_found = []
    for plan in (Plan(precision=FLOAT8), Plan(precision=FLOAT8, compile=True, remat=Remat(remat))):  # type: ignore[arg-type]
        model, table = prepared(plan)
        torch._dynamo.utils.counters.clear()
        passes(model)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with counting(table):
            passes(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert bool(graphs) == plan.compile
        tables_found.append(read(table, [*float8.layers(SPEC, FLOAT8)]))
    right, found = tables_found
    for each, lost in right.items():
        assert tuple(found[each]) == pytest.approx(tuple(lost), rel=1e-6, abs=1e-25), each
