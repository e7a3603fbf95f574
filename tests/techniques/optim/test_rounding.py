"""Stochastic rounding: no bias, no layout, no interruption in it; AdamW on top of it; bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.runtime.loop import train
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.cluster import Cluster
from shardwise.spec.devices import find_device
from shardwise.spec.plan import Optim, Plan, Precision
from shardwise.spec.recipe import OptimSection
from shardwise.techniques import optim
from shardwise.techniques.optim.rounding import RoundedAdamW, noise, stochastic
from tests.drift.test_drift import SPEC, plan_of
from tests.runtime.small_run import directory, numbers, plan, recipe, weights_hash
from tests.techniques.optim import moment_ranks

KEY = torch.tensor(-(2**62) + 12345)
SIGMAS = 4
"""A right generator fails one such comparison in 16,000; the draws are fixed, so that it fails never or always."""


def draws(count: int, key: int = 0) -> Tensor:
    return noise(KEY + key, (slice(0, count),), (count,))


def field(random: Tensor, number: int) -> Tensor:
    return (random >> (16 + 16 * number) & 0xFFFF).double()


def test_the_golden_bits() -> None:
    """As written here in whole numbers of Python, so that a checkpoint goes on alike on any machine and version."""

    def mixed(place: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            signed = place - 2**64 if place >= 2**63 else place
            place = (place ^ ((signed >> shift) % 2**64)) * factor % 2**64
        return place - 2**64 if place >= 2**63 else place

    assert draws(50).tolist() == [mixed((place + int(KEY)) % 2**64) for place in range(50)]


def test_a_slice_draws_what_the_whole_has_there() -> None:
    whole = noise(KEY, (slice(0, 7), slice(0, 5), slice(0, 3)), (7, 5, 3))
    part = noise(KEY, (slice(2, 6), slice(1, 5), slice(2, 3)), (7, 5, 3))
    assert torch.equal(whole[2:6, 1:5, 2:3], part) and whole.unique().numel() == 105
    assert noise(KEY, (), ()).shape == ()


def test_bits_are_uniform_and_fields_steps_and_neighbours_independent() -> None:
    count = 2**18
    one, other = draws(count), draws(count, key=-0x61C8864680B583EB)  # this update, and the next
    fields = [field(random, number) for random in (one, other) for number in range(3)]
    fields += [fields[0].roll(1), fields[0].roll(256)]
    unit = [(values / 65536 - 0.5 + 2**-17) * math.sqrt(12) for values in fields]  # mean 0, variance 1
    for index, left in enumerate(unit):
        assert abs(float(left.mean())) < SIGMAS / math.sqrt(count)
        assert abs(float(left.square().mean()) - 1) < SIGMAS * math.sqrt(0.8 / count)  # the variance of a square: 0.8
        for right in unit[index + 1 :]:
            assert abs(float((left * right).mean())) < SIGMAS / math.sqrt(count)
    for bit in range(16):
        ones = (fields[0].long() >> bit & 1).double().mean()
        assert abs(float(ones) - 0.5) < SIGMAS * 0.5 / math.sqrt(count)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("value", [1.001, -1.001, math.pi * 1e-9, 3.0000001e30, -1e-39, 0.1])
def test_rounding_keeps_the_mean(value: float, number: int) -> None:
    """One of the two neighbours, and their mean over 2^18 draws is the number, within 4 sigma."""
    wide = torch.full((2**18,), value)
    kept = stochastic(wide, draws(2**18, key=7), number).double()
    down = (wide[:1].view(torch.int32) & -0x10000).view(torch.float32).double()
    up = ((wide[:1].view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    assert set(kept.tolist()) == {float(down), float(up)}
    share = float((wide[0].double() - down) / (up - down))
    sigma = float((up - down).abs()) * math.sqrt(share * (1 - share) / 2**18)
    assert abs(float(kept.mean()) - float(wide[0].double())) < SIGMAS * sigma


def test_what_needs_no_rounding_stays() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, math.inf, -math.inf])
    wide = special.repeat_interleave(1000)
    kept = stochastic(wide, draws(len(wide)), 0)
    assert torch.equal(kept.float().view(torch.int32), wide.view(torch.int32))
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32).repeat(1000)
    assert bool(stochastic(payloads, draws(3000), 0).isnan().all())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_unrounded_it_is_adamw(decay: float) -> None:
    """In fp32 nothing is rounded: the update is torch's own (fp64) to a few units of fp32."""
    torch.manual_seed(0)
    start = torch.randn(33, 7)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.double())
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    one = RoundedAdamW([{"params": [ours], "weight_decay": decay}], moments=torch.float32, **settings)
    other = torch.optim.AdamW([theirs], weight_decay=decay, **settings)
    for step in range(5):
        ours.grad = torch.randn(33, 7, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.double()
        one.step()
        other.step()
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def train_on(size: float, weight: torch.dtype, moments: torch.dtype | None) -> tuple[float, float]:
    """4,096 weights of 1: a first gradient of 1, then 1,000 of ``size``. Means of weights and second moments.
    ``moments`` None: torch's own AdamW, which rounds to the nearest."""
    parameter = nn.Parameter(torch.ones(4096, dtype=weight))
    betas = (0.0, 0.999)
    made = (
        torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.0, betas=betas, fused=True)
        if moments is None
        else RoundedAdamW([parameter], lr=1e-5, betas=betas, moments=moments)
    )
    for step in range(1001):
        parameter.grad = torch.full_like(parameter, size if step else 1.0)
        made.step()
    return float(parameter.detach().double().mean()), float(made.state[parameter]["exp_avg_sq"].double().mean())


def test_what_rounding_to_the_nearest_would_lose() -> None:
    """A second moment that decays by 1/1000 a step is, after 1,000 steps, 1/e of what it was; steps of 1e-5 on a weight
    of 1 add up. Rounded to the nearest bf16 (steps of 1/256) both stand still."""
    _, right = train_on(1e-4, torch.float64, None)
    _, nearest = train_on(1e-4, torch.bfloat16, None)
    _, ours = train_on(1e-4, torch.bfloat16, torch.bfloat16)
    assert right == pytest.approx(1e-3 / math.e, rel=1e-3)
    assert nearest > 2.5 * right
    assert ours == pytest.approx(right, rel=0.005)  # each is off by 1000 roundings of 1/256: 4 sigma of 4,096

    right, _ = train_on(1.0, torch.float64, None)
    nearest, _ = train_on(1.0, torch.bfloat16, None)
    ours, _ = train_on(1.0, torch.bfloat16, torch.bfloat16)
    assert right == pytest.approx(0.99, abs=1e-4) and nearest == 1
    # A weight is off by 1,000 roundings, each of variance 1e-5 / 256 (0.006 in all), the mean of 4,096 by 1e-4.
    assert ours == pytest.approx(right, abs=4e-4)


def losses(plan: Plan) -> list[float]:
    """A small model learns to say the token that stands two places back, in 300 steps that are the same for every
    plan."""
    torch.manual_seed(0)
    model = Decoder(replace(SPEC, vocab_size=64)).to(torch.bfloat16 if plan.precision.weights == "bf16" else None)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    settings = OptimSection(learning_rate=3e-3, beta2=0.999)
    made, found = optim.build([model], settings, plan), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(300):
        ids = torch.randint(0, 64, (8, 18), generator=draw)
        logits = model(ids, torch.arange(18).expand(8, -1), MaskSpec())[:, 2:].float()
        loss = nn.functional.cross_entropy(logits.reshape(-1, 64), ids[:, :-2].reshape(-1))
        loss.backward()
        made.step()
        made.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.big
def test_a_small_model_trains_as_with_fp32_moments() -> None:
    """With bf16 moments the losses are those of fp32 moments: measured 0.2 % apart on the way down and 0.1 % at the
    end, 5 % allowed. With weights in bf16 too, 4 % and 2 % apart (10 %), where rounding to the nearest ends at three
    times the loss."""

    def means(plan: Plan) -> tuple[float, float]:
        found = losses(plan)
        return sum(found[100:120]) / 20, sum(found[-20:]) / 20

    wide = means(Plan())
    narrow = means(Plan(optim=Optim(moments="bf16")))
    all_bf16 = means(Plan(optim=Optim(moments="bf16"), precision=Precision("bf16", "bf16")))
    nearest = means(Plan(precision=Precision("bf16", "bf16")))
    assert wide[1] < 0.05 * wide[0] < 0.05
    assert narrow == pytest.approx(wide, rel=0.05)
    assert all_bf16 == pytest.approx(wide, rel=0.1)
    assert nearest[1] > 2 * wide[1]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("sharding", "weights", "moments"),
    [("ddp", "fp32", "bf16"), ("zero3", "bf16", "bf16"), ("hsdp-zero2", "fp32", "bf16"), ("zero1", "bf16", "fp32")],
)
def test_bytes(sharding: str, weights: str, moments: str) -> None:
    precision = Precision("bf16", weights)  # type: ignore[arg-type]
    asked = replace(plan_of(sharding, 8), optim=Optim(moments=moments), precision=precision)  # type: ignore[arg-type]
    for rank in (0, 7):
        assert not drift(SPEC, asked, rank).differences()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["bf16 all", "bf16 moments"])
def test_no_layout_changes_it(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Saved from four shards, it loads on two and goes on as one process does that was never cut: bit for bit."""
    one = ranks.run(moment_ranks.train, "ddp", 6, "", kind, world=1)[0]
    four = ranks.run(moment_ranks.train, "zero3", 3, str(tmp_path), kind, world=4)[0]
    assert four["step"] == 3
    two = ranks.run(moment_ranks.train, "zero2", 6, str(tmp_path), kind, world=2)[0]
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name


@pytest.mark.prove
def test_the_recipe_says_so_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """A run with bf16 moments that broke goes on bit for bit, and is another run than with fp32 moments."""

    class Broken(Exception):
        pass

    def fail(state: TrainState, stats: StepStats) -> None:
        if state.step == 5:
            raise Broken

    hashes = {}
    for name, moments in (("whole", "bf16"), ("broken", "bf16"), ("wide", None)):
        made = recipe(tmp_path, name, optim={"moments": moments})
        bf16 = replace(plan(), optim=Optim(moments=moments))  # type: ignore[arg-type]
        if name == "broken":
            with pytest.raises(Broken):
                train(made, bf16, (fail,))
        train(made, bf16)
        hashes[name] = weights_hash(directory(made)), numbers(directory(made))
    assert hashes["whole"] == hashes["broken"] and hashes["whole"][0] != hashes["wide"][0]
    kept = Path(directory(made).parent / "whole" / "checkpoints" / "step-00000006")
    moment = load_file(kept / "optim-00000-of-00001.safetensors")["optim.exp_avg_sq.norm.weight"]
    assert moment.dtype == torch.bfloat16 and bool(moment.any())


def test_what_they_cannot_be_kept_beside() -> None:
    cluster = Cluster(find_device("H100"))
    found = optim.check(SPEC, Plan(optim=Optim(moments="bf16"), precision=Precision("fp64", "fp64")), cluster)
    assert [problem.code for problem in found] == ["PLAN012"] and "weights are in fp64" in found[0].what
    assert not optim.check(SPEC, Plan(optim=Optim(moments="bf16"), precision=Precision("bf16", "bf16")), cluster)
