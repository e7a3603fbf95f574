"""What expert parallelism cannot do, and what is said instead; and the seconds of what runs beside its exchanges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from shardwise import techniques
from shardwise.cli.app import main
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.planner.price import price
from shardwise.planner.seconds.network import network_of
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, load_recipe
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Seconds, Shard
from shardwise.techniques import ep
from tests.parity.mixtures import MIXTRAL
from tests.parity.pairwise import DENSE

TWELVE, CAPPED = with_fields(MIXTRAL, num_experts=12), with_fields(MIXTRAL, expert_capacity=1.25)
BATCH = Batch(1, 1, 256)
REFUSED: dict[str, tuple[ModelSpec, Plan, str, str]] = {
    "a degree that does not divide the experts": (
        TWELVE,
        Plan(Layout(dp_shard=8, ep=8), BATCH, Shard("zero3")),
        "ep 8 does not divide the 12 experts of a layer",
        "one of 1, 2, 4",
    ),
    "more than there are experts": (
        MIXTRAL,
        Plan(Layout(dp_shard=16, ep=16), BATCH, Shard("zero3")),
        "ep 16 does not divide the 8 experts",
        "one of 1, 2, 4, 8",
    ),
    "more than the ranks of a replica": (
        MIXTRAL,
        Plan(Layout(dp_replicate=4, dp_shard=2, ep=4), BATCH, Shard("zero3")),
        "ep 4 does not divide the 2 ranks of dp_shard x cp x tp",
        "one of 1, 2",
    ),
    "ranks that none of it can be": (
        TWELVE,
        Plan(Layout(dp_shard=4, ep=3), BATCH, Shard("zero3")),
        "ep 3 does not divide the 4 ranks",
        "one of 1, 2, 4",
    ),
    "all ranks replicas, which ddp may arrange otherwise": (
        MIXTRAL,
        Plan(Layout(dp_replicate=8, ep=4), BATCH),
        "ep 4 does not divide the 1 ranks of dp_shard x cp x tp",
        "dp_replicate 2 and dp_shard 4, or `parallel.ep=1`",
    ),
    "more than all ranks under ddp": (
        MIXTRAL,
        Plan(Layout(dp_replicate=2, tp=2, ep=8), BATCH, sequence_parallel=True),
        "ep 8 does not divide the 4 ranks of dp x cp x tp",
        "one of 1, 2, 4",
    ),
    "tp without sequence parallelism": (
        MIXTRAL,
        Plan(Layout(dp_shard=2, tp=2, ep=2), BATCH, Shard("zero3")),
        "ep with tp needs sequence parallelism",
        "`parallel.sequence_parallel=true`, or `parallel.ep=1`",
    ),
    "a model without experts": (
        DENSE,
        Plan(Layout(dp_shard=2, ep=2), BATCH, Shard("zero3")),
        "tiny-tp has no experts",
        "`parallel.ep=1`",
    ),
    "less than an even share": (
        MIXTRAL,
        Plan(Layout(dp_shard=2, ep=2), BATCH, Shard("zero3"), expert_imbalance=0.5),
        "expert_imbalance is 0.5",
        "1.0 or more",
    ),
    "compiled blocks": (
        MIXTRAL,
        Plan(Layout(dp_shard=2, ep=2), BATCH, Shard("zero3"), compile=True),
        "differs in every step, which compiled blocks cannot do",
        "false, or `parallel.ep=1`",
    ),
    "a capacity of experts in compiled blocks": (
        CAPPED,
        Plan(Layout(dp_shard=2), BATCH, Shard("zero3"), compile=True),
        "how many rows experts have room for differs in every step",
        "false, or leave out `model.expert_capacity`",
    ),
    "a capacity by rows that are cut": (
        CAPPED,
        Plan(Layout(cp=2), BATCH),
        "`model.expert_capacity` is counted by whole rows, and context parallelism cuts them",
        "`parallel.cp=1`, or leave out `model.expert_capacity`",
    ),
    "a capacity with sequence parallelism": (
        CAPPED,
        Plan(Layout(tp=2), BATCH, sequence_parallel=True),
        "and sequence parallelism cuts them",
        "`parallel.sequence_parallel=false`, or `parallel.tp=1`",
    ),
    "a capacity with ep and tp": (
        CAPPED,
        Plan(Layout(dp_shard=2, tp=2, ep=2), BATCH, Shard("zero3")),
        "and sequence parallelism, which ep with tp needs, cuts them",
        "`parallel.tp=1` or `parallel.ep=1`",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(what: str) -> None:
    spec, plan, words, fix = REFUSED[what]
    [problem] = techniques.check(spec, plan, parse_cluster("8xH100"))
    assert problem.code == "PLAN027" and words in problem.what and problem.fix == fix


PINS = {
    "parallel.ep=3": ("ep 3 does not divide the 128 experts of a layer", "one of 1, 2, 4, 8"),
    "parallel.ep=16": ("ep 16 does not divide the 8 ranks", "one of 1, 2, 4, 8"),
    "parallel.ep=2 parallel.tp=2 parallel.sequence_parallel=false": (
        "ep with tp needs sequence parallelism",
        "sequence_parallel=true",
    ),
    "model.expert_capacity=1.25 parallel.cp=2": ("context parallelism cuts them", "`parallel.cp=1`"),
    "model.expert_capacity=1.25 parallel.tp=2 parallel.ep=2": ("which ep with tp needs", "or `parallel.ep=1`"),
    "model.expert_capacity=1.25 compile=true": ("experts have room for", "leave out `model.expert_capacity`"),
    "parallel.ep=2 compile=true": ("compiled blocks cannot do", "false, or `parallel.ep=1`"),
    "parallel.ep=2 model.path=Llama-3.1-8B": ("Llama-3.1-8B has no experts", "`parallel.ep=1`"),
}


@pytest.mark.parametrize("pins", PINS)
def test_a_pin_that_cannot_be_ends_with_78_and_what_can(
    pins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However many ways there are to split the devices, nothing is called legal that is not."""
    monkeypatch.chdir(tmp_path)
    what, fix = PINS[pins]
    code = main(["plan", "--cluster", "8xH100", "model.path=Qwen3-30B-A3B", *pins.split()])
    err = capfd.readouterr().err
    assert code == 78 and "error[PLAN027]: " in err and what in err
    fixes = [line.removeprefix("fix:   ") for line in err.splitlines() if line.startswith("fix:")]
    assert fixes and all(fix in line for line in fixes)


@pytest.mark.parametrize(
    ("pin", "code", "what"),
    [
        ("parallel.expert_imbalance=0.5", "CFG005", "a number ≥ 1"),
        ("model.expert_capacity=0.9", "CFG005", "a number ≥ 1"),
        ("model.expert_capacity=much", "CFG002", "`model.expert_capacity`"),
        ("parallel.ep=0", "CFG005", "`parallel.ep`"),
        ("parallel.ep=some", "CFG002", "`parallel.ep`"),
    ],
)
def test_numbers_that_are_none(
    pin: str,
    code: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--cluster", "8xH100", "model.path=Qwen3-30B-A3B", pin]) == 78
    err = capfd.readouterr().err
    assert f"error[{code}]" in err and what in err


def test_an_edited_plan_of_a_model_without_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    layout = Layout(dp_shard=2, ep=2, ranks_per_node=2)
    Path("plan.yaml").write_text(dump_plan(Plan(layout, shard=Shard("zero3"))))
    assert main(["train", "--plan", "plan.yaml", "--nproc", "2", "--dry-run"]) == 78
    err = capfd.readouterr().err
    assert "error[PLAN027]: " in err and "has no experts" in err


def test_the_reserve_is_the_recipe_s_to_say() -> None:
    """And a plan with another is another recipe's."""
    recipe = load_recipe(None, ["model=m", "parallel.ep=2", "parallel.expert_imbalance=2.5"])
    [made] = ep.choices(recipe, MIXTRAL, parse_cluster("4xH100"), Plan(Layout()))
    assert (made.layout.ep, made.expert_imbalance) == (2, 2.5)
    for plan, agrees in ((made, True), (replace(made, expert_imbalance=1.5), False)):
        assert all(planned == asked for planned, asked in ep.pins(recipe, plan).values()) == agrees


PAIR = parse_cluster("2xH100")
WIDTH, TOKENS, CHOSEN, EXPERTS = 2048, 4096, 8, 64
MIXTURE = model_spec(
    "beside", 1024, WIDTH, 4096, 2, 16, 4, 128, num_experts=EXPERTS, experts_per_token=CHOSEN, expert_size=256
)
SPREAD = Plan(Layout(dp_shard=2, ep=2, ranks_per_node=2), Batch(1, 1, TOKENS), Shard("zero1"), Precision("bf16"))


def seconds(shared: int, plan: Plan = SPREAD) -> Seconds:
    """Of a step, with a shared expert of such a size."""
    spec = with_fields(MIXTURE, shared_expert_size=shared)
    found = timed(spec, price(spec, plan, PAIR), PAIR).estimate.seconds
    assert found is not None
    return found


@pytest.mark.usefixtures("by_table")
@pytest.mark.parametrize("shared", [512, 1280, 16_384])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_takes_the_longer_of_an_exchange_and_its_shared_expert(
    shared: int, remat: Literal["none", "full"]
) -> None:
    """And not the sum of both. By hand: rows go there and back, forward and backward, each time of the same size.
    Beside the way there run the three products of the shared expert, and two kernels between them that move five
    activations; beside the way of the gradients home six products, and five kernels that move eleven, and three
    gradients of the input to add two up. A block that runs again in backward does its forward twice."""
    plan = replace(SPREAD, remat=Remat(remat))
    found, alone = seconds(shared, plan), seconds(0, plan)
    rates, network = rates_of(plan, PAIR, own_traits()), network_of(plan.layout, PAIR)
    way_s = network.seconds("all_to_all", "ep", CHOSEN * TOKENS * WIDTH * 2)
    counts_s = network.seconds("all_to_all", "ep", 8 * EXPERTS)
    layers, forwards = MIXTURE.num_hidden_layers, 2 if remat == "full" else 1
    sent_s = layers * ((2 * forwards + 2) * way_s + forwards * counts_s)
    assert found.sent_s["ep"] == alone.sent_s["ep"] == pytest.approx(sent_s)
    sorted_s = (sent_s - alone.exposed_s["ep"]) / (layers * forwards)
    assert 0 < sorted_s < 0.1 * way_s  # beside the way there in any case: the order of what comes

    into, out_of = (rates.product_s(1, TOKENS, *matrix) for matrix in ((shared, WIDTH), (WIDTH, shared)))
    gradients_s = 2 * rates.product_s(1, shared, WIDTH, TOKENS) + rates.product_s(1, WIDTH, shared, TOKENS)
    inner, outer = (rates.pointwise_s(2 * TOKENS * size) for size in (shared, WIDTH))
    forward_s = sorted_s + 2 * into + out_of + 5 * inner + 5 * rates.gap_s
    backward_s = into + 2 * out_of + gradients_s + 11 * inner + 3 * outer + 11 * rates.gap_s
    hidden_s = layers * (forwards * min(way_s, forward_s) + min(way_s, backward_s))
    assert found.exposed_s["ep"] == pytest.approx(sent_s - hidden_s, rel=1e-3)
    longer = {512: (False, False), 1280: (False, True), 16_384: (True, True)}[shared]
    assert (forward_s > way_s, backward_s > way_s) == longer
