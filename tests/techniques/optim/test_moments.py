"""Moments in 8 bits: the code, the update, its bytes, and that no layout changes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.prove.drift import drift
from shardwise.prove.pool import RankFailure, RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Optim, Plan, Precision
from shardwise.techniques import device_tables, optim
from shardwise.techniques.optim.moments import BLOCK, TABLE, AdamW8bit, decode, encode
from shardwise.techniques.quantised import LEAST, moment_bytes, quantised
from tests.drift.test_drift import SPEC, plan_of
from tests.techniques.optim import moment_ranks


@pytest.mark.parametrize("signed", [True, False])
def test_the_table(signed: bool) -> None:
    """256 different values, ascending, that hold 0 and 1 exactly and reach down to 1e-7."""
    values = torch.tensor(TABLE[signed])
    assert values.shape == (256,) and bool((values.diff() > 0).all())
    assert 0.0 in values and values[-1] == 1.0
    assert values[0] == (-1.0 if signed else 0.0)
    assert 1e-7 < float(values[values > 0].min()) < 1e-6


def test_tables_are_sent_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host would make it wait in every update of every block of rows."""
    layer = nn.Linear(300, 200)
    optimizer = AdamW8bit(layer.parameters(), 1e-3)
    for number in range(2):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if number == 0:
            monkeypatch.setattr(device_tables.torch, "tensor", None)
    monkeypatch.undo()
    elsewhere = torch.empty(1, device="meta")
    assert device_tables.constant(elsewhere, "one", [1.0]) is device_tables.constant(elsewhere, "one", [1.0])


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_kept_is_near(signed: bool) -> None:
    """The nearest value of the table: a block's largest exactly, others within half a step of the top decade."""
    wide = torch.randn(7, 2 * BLOCK + 13)
    wide = wide if signed else wide.square()
    codes, scales = encode(wide, signed)
    assert codes.shape == wide.shape and codes.dtype == torch.uint8 and scales.shape == (7, 3)
    kept = decode(codes, scales, signed)
    span = scales.repeat_interleave(BLOCK, 1)[:, : wide.shape[1]]
    assert bool(((kept - wide).abs() <= 0.9 / (64 if signed else 128) / 2 * 1.01 * span).all())
    largest = wide.abs()[:, :BLOCK].max(1)
    assert torch.equal(kept.gather(1, largest.indices[:, None]).abs()[:, 0], largest.values)
    again = encode(kept, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_rounding_keeps_the_mean(signed: bool) -> None:
    """Values over five decades: up or down to a neighbour, and in the mean over 4,096 numbers that are spread evenly
    itself, within 1/4096 of the step between both. (Below 4e-6 it is another matter: the smallest negative value has no
    byte, and what is positive in an unsigned block does not become zero.)"""
    draws = 4096
    wide = torch.logspace(-5.4, 0, 200)
    wide = torch.cat([wide, -wide]) if signed else wide
    random = torch.arange(draws).mul(16).add(8).to(torch.int32)[:, None].expand(draws, len(wide))
    codes, scales = encode(wide.expand(draws, -1), signed, random.contiguous())
    kept = decode(codes, scales, signed)
    step = kept.amax(0) - kept.amin(0)
    slack = 1e-6 * wide.abs()
    assert bool(((kept.amin(0) <= wide + slack) & (wide <= kept.amax(0) + slack)).all())
    assert bool(((kept.double().mean(0) - wide).abs() <= step / draws + slack).all())


def test_a_moment_that_falls_slowly_does_fall() -> None:
    """By 1 % a step, less than half a step of the table, beside one that keeps its size and with it the block's scale:
    without gradients 200 steps leave 0.99^200 = 0.134 of the second moments, within 10 %. Rounded to the nearest, the
    larger ones stay where they are."""
    draw = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW8bit([parameter], lr=0.0, betas=(0.9, 0.99))
    state = optimizer.state[parameter]

    def rest() -> float:
        return float(decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], False)[:, 1:].square().sum())

    parameter.grad = torch.rand(64, 256, generator=draw)
    parameter.grad[:, 0] = 1.0
    optimizer.step()
    before = rest()
    parameter.grad = torch.zeros(64, 256)
    parameter.grad[:, 0] = 0.1  # 0.99 x 0.01 + 0.01 x 0.01 is 0.01 again
    for _ in range(200):
        optimizer.step()
    assert rest() / before == pytest.approx(0.99**200, rel=0.1)


def test_zeros_stay_zeros() -> None:
    for signed in (True, False):
        codes, scales = encode(torch.zeros(2, 300), signed)
        assert not decode(codes, scales, signed).any() and not scales.any()


def test_small_parameters_are_updated_as_adamw_does() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 30).view(5, 6)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    one, other = AdamW8bit([ours], **settings), torch.optim.AdamW([theirs], weight_decay=0.0, **settings)
    for step in range(4):
        ours.grad = theirs.grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        one.step()
        other.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_gradients_of_very_different_sizes_in_one_block() -> None:
    """Sizes over a factor of e^6 either way, and rows that are seldom seen, as an embedding's. The last of 60 updates
    is within 15 % of the one with fp32 moments, half a step of the table being up to 8 % of a small value. With the
    square itself in the table, the smallest became zero and were divided by eps: updates 300 times as large."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.exp(1.5 * torch.randn(256, 256, generator=draw)) * 1e-3
    ours, theirs = (nn.Parameter(torch.zeros(256, 256)) for _ in range(2))
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    one, other = AdamW8bit([ours], **settings), torch.optim.AdamW([theirs], weight_decay=0.0, **settings)
    before = [ours.detach().clone(), theirs.detach().clone()]
    for _ in range(60):
        before = [ours.detach().clone(), theirs.detach().clone()]
        seen = torch.rand(256, 1, generator=draw) < 0.3
        ours.grad = theirs.grad = torch.randn(256, 256, generator=draw) * sizes * seen
        one.step()
        other.step()
    moved, right = ours.detach() - before[0], theirs.detach() - before[1]
    assert (moved - right).norm() < 0.15 * right.norm()
    assert moved.abs().max() < 2 * right.abs().max()


def test_large_ones_nearly() -> None:
    """After 20 steps the weights have moved the same way (cosine 0.99) as with fp32 moments."""
    torch.manual_seed(0)
    start = torch.randn(64, 300)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    one, other = AdamW8bit([ours], **settings), torch.optim.AdamW([theirs], weight_decay=0.0, **settings)
    for step in range(20):
        ours.grad = theirs.grad = torch.randn(64, 300, generator=torch.Generator().manual_seed(step))
        one.step()
        other.step()
    moved, right = ((p.detach() - start).flatten() for p in (ours, theirs))
    assert float(torch.nn.functional.cosine_similarity(moved, right, dim=0)) > 0.99
    held = sum(value.nbytes for value in one.state[ours].values())
    assert held == 4 + moment_bytes((64, 300), 64 * 300) < 0.3 * 8 * 64 * 300


@pytest.mark.parametrize("number", ["fp64", "fp16"])
def test_other_types_of_weights_are_refused(number: str) -> None:
    plan = Plan(optim=Optim("adamw8bit"), precision=Precision("fp32", number))  # type: ignore[arg-type]
    (problem,) = optim.check(SPEC, plan, parse_cluster("1xH100"))
    assert (problem.code, problem.where) == ("PLAN012", "optim.name")


def test_what_is_quantised() -> None:
    assert quantised((64, LEAST // 64)) and not quantised((63, LEAST // 64)) and not quantised((LEAST,))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3", "hsdp-zero2"])
def test_bytes(sharding: str) -> None:
    plan = replace(plan_of(sharding, 8), optim=Optim("adamw8bit"))
    for rank in (0, 7):
        assert not drift(SPEC, plan, rank).differences()


@pytest.mark.prove
def test_no_layout_changes_it(ranks: RankPool, tmp_path: Path) -> None:
    """Rows are updated alike wherever they are; saved from four shards, it loads whole and goes on as if never cut."""
    one = ranks.run(moment_ranks.train, "ddp", 6, "", world=1)[0]
    four = ranks.run(moment_ranks.train, "zero3", 3, str(tmp_path), world=4)[0]
    assert four["step"] == 3
    two = ranks.run(moment_ranks.train, "zero2", 6, str(tmp_path), world=2)[0]
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["8 bit", "bf16"])
def test_no_cut_by_tensor_parallelism_changes_it(ranks: RankPool, kind: str) -> None:
    """Weights, codes and scales, bit by bit: of rows and of columns, with rows cut once more by FSDP2."""
    [one] = ranks.run(moment_ranks.cut, 1, kind, world=1)
    assert ("columns exp_avg_scale" in one) == (kind == "8 bit")
    for world, tp in ((2, 2), (4, 4), (4, 2)):
        for found in ranks.run(moment_ranks.cut, tp, kind, world=world):
            assert found.keys() == one.keys()
            for name, value in one.items():
                assert torch.equal(value, found[name]), (world, tp, name)


def test_a_block_that_is_divided_is_refused(ranks: RankPool) -> None:
    """Where no plan was checked: in a loop of one's own."""
    with pytest.raises(RankFailure, match=r"150,.* no multiple of 256"):
        ranks.run(moment_ranks.divided, world=2)
