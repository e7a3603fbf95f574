"""Groups, schedules and the optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.models import blocks
from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankPool
from shardwise.spec import plan as plans
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection, ParameterGroup
from shardwise.techniques import optim
from tests.parity.cases import TIED, UNTIED
from tests.parity.mixtures import GPT_OSS
from tests.runtime import rank_work


def test_norms_and_biases_are_not_decayed_and_every_matrix_is() -> None:
    settings = OptimSection(weight_decay=0.1)
    decayed = {
        name.rpartition(".")[0].rpartition(".")[2] + "." + name.rpartition(".")[2]
        for name in blocks.named([Decoder(TIED)])
        if optim.settings(name, settings).weight_decay
    }
    assert decayed == {f"{module}.weight" for module in ("embed", *"qkvo", "gate", "up", "down")}


def test_of_a_mixture_with_sinks_every_matrix_is_decayed_too_and_nothing_else() -> None:
    settings = OptimSection(weight_decay=0.1)
    for name, parameter in blocks.named([Decoder(GPT_OSS)]).items():
        assert bool(optim.settings(name, settings).weight_decay) == (parameter.ndim > 1), name


def test_the_first_matching_group_counts_and_keeps_what_it_does_not_say() -> None:
    groups = [
        ParameterGroup(pattern="layers.0.*", learning_rate=1e-5),
        ParameterGroup(pattern="*.mlp.*", weight_decay=0.5),
    ]
    settings = OptimSection(learning_rate=1e-3, weight_decay=0.1, groups=groups)
    assert optim.settings("layers.0.mlp.up.weight", settings) == optim.Settings(1e-5, 0.1)
    assert optim.settings("layers.1.mlp.up.weight", settings) == optim.Settings(1e-3, 0.5)
    assert optim.settings("layers.0.mlp_norm.weight", settings) == optim.Settings(1e-5, 0.0)
    assert optim.settings("head.weight", settings) == optim.Settings(1e-3, 0.1)


def test_every_trained_parameter_is_in_one_group_with_its_settings() -> None:
    model = Decoder(TIED)
    model.layers[0].attention.q.weight.requires_grad_(False)
    settings = OptimSection(groups=[ParameterGroup(pattern="*.gate.weight", learning_rate=7e-4)])
    optimizer = optim.build([model], settings, Plan())
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)
    for name, parameter in model.named_parameters():
        wanted = optim.settings(name, settings)
        assert (id(parameter) in found) == parameter.requires_grad
        if parameter.requires_grad:
            group = found[id(parameter)]
            assert (group["base_lr"], group["weight_decay"]) == (wanted.learning_rate, wanted.weight_decay)


def test_a_group_follows_the_curve_of_the_run_at_its_own_height() -> None:
    settings = OptimSection(learning_rate=1e-3, groups=[ParameterGroup(pattern="embed.*", learning_rate=1e-4)])
    optimizer = optim.build([Decoder(UNTIED)], settings, Plan())
    optim.set_learning_rate(optimizer, 0.25e-3, settings)
    rates = {group["base_lr"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({1e-3: 0.25e-3, 1e-4: 0.25e-4}, rel=1e-12)


def test_moments_are_there_before_the_first_step_and_the_step_is_torchs() -> None:
    """Five steps equal those of an AdamW without groups, fused kernels or prepared moments (fp64, rounding)."""
    settings = OptimSection(learning_rate=1e-2, weight_decay=0.0, beta1=0.8, beta2=0.9, eps=1e-6)
    mine, theirs = (Decoder(UNTIED).double() for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    optimizer = optim.build([mine], settings, Plan())
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in mine.parameters())
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = a.grad.clone()
        optimizer.step()
        plain.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


KEPT = {
    "fused": plans.Optim(),
    "8 bits": plans.Optim("adamw8bit"),
    "bf16 moments": plans.Optim(moments="bf16"),
    "bf16 weights": plans.Optim(moments="fp32"),
}


def updated(kept: str, factors: list[float], skips: Sequence[int] = (), in_kernel: bool = False) -> dict[str, Tensor]:
    """Weights and state after an update of gradients times each of ``factors``, which the optimizer is told or which
    they are multiplied by before; those of ``skips`` are NaN."""
    precision = plans.Precision(weights="bf16" if kept == "bf16 weights" else "fp32")
    layer = nn.Linear(300, 200).to(torch.bfloat16 if kept == "bf16 weights" else torch.float32)
    draw = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    optimizer = optim.build([layer], OptimSection(learning_rate=1e-2), Plan(precision=precision, optim=KEPT[kept]))
    for number, factor in enumerate(factors):
        for parameter in layer.parameters():
            draw = torch.Generator().manual_seed(number)
            gradient = torch.randn(parameter.shape, generator=draw) * (torch.nan if number in skips else 1)
            parameter.grad = (gradient if in_kernel else gradient * factor).to(parameter.dtype)
        told = torch.tensor(factor, dtype=torch.float64) if in_kernel else None
        optim.update(optimizer, torch.tensor(number in skips), told)
    states = {
        f"{i}.{key}": value for i, p in enumerate(layer.parameters()) for key, value in optimizer.state[p].items()
    }
    return states | {name: parameter.detach() for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("kept", KEPT)
def test_an_update_that_the_device_skips_changes_nothing(kept: str) -> None:
    """Neither weights nor moments nor the count, of which the bias correction and the random bits are made; the first
    update, too."""
    skipping = updated(kept, [1.0] * 5, skips=(0, 3))
    before = updated(kept, [1.0] * 4, skips=(0, 3))
    assert skipping["0.step"] == 3 and before["0.step"] == 2 and all(v.isfinite().all() for v in skipping.values())
    assert all(torch.equal(value, before[key]) for key, value in updated(kept, [1.0] * 3, skips=(0,)).items())
    assert not torch.equal(skipping["weight"], before["weight"])


@pytest.mark.parametrize("kept", KEPT)
def test_the_kernel_clips_as_a_product_before_it_does(kept: str) -> None:
    """A factor that is a power of two is exact in both; of another the quotient rounds otherwise (fp32, or a step of
    what is kept in few bits)."""
    exact = [1.0, 0.25, 0.5]
    for key, value in updated(kept, exact).items():
        assert torch.equal(value, updated(kept, exact, in_kernel=True)[key]), key
    clipped, plain = updated(kept, [0.3] * 3, in_kernel=True), updated(kept, [0.3] * 3)
    near = {"rtol": 1e-5, "atol": 1e-6} if kept == "fused" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(clipped["weight"], plain["weight"], **near)  # type: ignore[arg-type]


def test_an_adamw_that_could_not_skip_is_refused() -> None:
    [problem] = optim.check(UNTIED, Plan(optim=plans.Optim(fused=False)), parse_cluster("1xH100"))
    assert (problem.code, problem.where) == ("PLAN012", "optim.fused")


def test_bias_correction_goes_on_where_a_checkpoint_left_it() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0)
    for parameter in layer.parameters():
        optimizer.state[parameter] = optim.fresh_moments(parameter)
    optim.set_updates(optimizer, 41)
    assert {float(state["step"]) for state in optimizer.state.values()} == {41.0}


def test_sharded_and_plain_parameters_step_together(ranks: RankPool) -> None:
    for separate, stepped in ranks.run(rank_work.mixed_step, world=2):
        assert separate and stepped


HAND = [
    ("constant", 0, 10, 1.0),
    ("constant", 9, 10, 1.0),
    ("linear", 0, 10, 1.0),
    ("linear", 5, 10, 0.55),
    ("linear", 10, 10, 0.1),
    ("cosine", 0, 10, 1.0),
    ("cosine", 5, 10, 0.55),
    ("cosine", 10, 10, 0.1),
    ("wsd", 89, 100, 1.0),
    ("wsd", 90, 100, 1.0),
    ("wsd", 95, 100, 0.55),
    ("wsd", 100, 100, 0.1),
]


@pytest.mark.parametrize(("schedule", "step", "max_steps", "rate"), HAND)
def test_schedules_by_hand(schedule: str, step: int, max_steps: int, rate: float) -> None:
    settings = OptimSection(learning_rate=1.0, min_learning_rate=0.1, schedule=schedule)  # type: ignore[arg-type]
    assert optim.learning_rate(settings, step, max_steps) == pytest.approx(rate, rel=1e-12)


def test_warmup_as_a_share_of_the_run() -> None:
    """Rounded up, as transformers does."""
    share, steps = (OptimSection(learning_rate=1.0, warmup_steps=given) for given in (0.1, 10))
    assert [optim.learning_rate(share, n, 95) for n in range(96)] == [
        optim.learning_rate(steps, n, 95) for n in range(96)
    ]


def test_warmup_starts_above_zero_and_ends_at_the_full_rate() -> None:
    settings = OptimSection(learning_rate=1.0, warmup_steps=4)
    assert [optim.learning_rate(settings, step, 20) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decay_steps_end_the_decay_early_or_bound_its_last_part() -> None:
    cosine = OptimSection(learning_rate=1.0, min_learning_rate=0.2, decay_steps=10)
    assert optim.learning_rate(cosine, 10, 100) == optim.learning_rate(cosine, 99, 100) == pytest.approx(0.2)
    wsd = OptimSection(learning_rate=1.0, schedule="wsd", decay_steps=20)
    assert optim.learning_rate(wsd, 80, 100) == 1.0
    assert optim.learning_rate(wsd, 90, 100) == pytest.approx(0.5)


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 1000),
    st.integers(0, 50),
    st.integers(0, 1200),
)
def test_schedules_in_closed_form(schedule: str, max_steps: int, warmup: int, step: int) -> None:
    low, high = 0.1, 2.0
    settings = OptimSection(learning_rate=high, min_learning_rate=low, schedule=schedule, warmup_steps=warmup)  # type: ignore[arg-type]
    rate = optim.learning_rate(settings, step, max_steps)
    if step < warmup:
        assert rate == pytest.approx(high * (step + 1) / warmup)
        return
    if schedule == "wsd":
        length = max(1, round(max_steps / 10))
        done = (step - max(warmup, max_steps - length)) / length
    else:
        done = (step - warmup) / max(1, max_steps - warmup)
    done = min(1.0, max(0.0, done))
    shape = {"constant": 1.0, "linear": 1 - done, "wsd": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
        schedule
    ]
    assert rate == pytest.approx(low + (high - low) * shape, abs=1e-12)
