"""Muon against torch.optim.Muon, who has which matrix, and what plans say of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.blocks import named
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.decoder import Decoder
from shardwise.planner.seconds.rates import own_traits
from shardwise.planner.seconds.step_seconds import multiplied_s
from shardwise.planner.sheets import sheet_of
from shardwise.planner.trace import traced_here
from shardwise.prove import fake_run
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Plan, Precision, Shard
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.spec.recipe import OptimSection, ParameterGroup
from shardwise.techniques import cost, on_whole_matrices, optim
from shardwise.techniques.optim import dealt, muon
from shardwise.techniques.optim.dealt import Weight
from tests.said import refusal

NAME = "muon"
SPEC = model_spec("tiny", 37, 12, 20, 2, 4, 2, 5, attention_bias=True)
MOE = with_fields(SPEC, num_experts=3, experts_per_token=2, expert_size=8)
SIZES = {"dense": SPEC, "experts": MOE}
STEPS = 6


def built(spec: ModelSpec, section: OptimSection, dtype: torch.dtype) -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(spec).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    plan = Plan(optim=Optim(NAME), precision=Precision(weights="fp64" if dtype == torch.float64 else "fp32"))
    optim.apply([model], plan, muon.Meshes())
    return model, optim.build([model], section, plan)


def torchs(model: Decoder, spec: ModelSpec, section: OptimSection) -> tuple[dict[str, list[Tensor]], list[object]]:
    """Return copies of the weights, of experts one tensor each, and torch's optimizers over them."""
    count = {name: dealt.matrices(name, each.ndim, spec.experts.num_experts) for name, each in named([model]).items()}
    copies = {
        name: [nn.Parameter(part.clone()) for part in each.detach().chunk(max(1, count[name]))]
        for name, each in named([model]).items()
    }
    decays = [{"params": each, "weight_decay": 0.0 if each[0].ndim < 2 else 0.1} for each in copies.values()]
    matrices, rest = (
        [one for one, n in zip(decays, count.values(), strict=True) if bool(n) is own] for own in (True, False)
    )
    given = {"momentum": section.momentum, "nesterov": section.nesterov, "adjust_lr_fn": section.adjust_lr_fn}
    rate = section.adam_learning_rate or section.learning_rate
    betas = section.beta1, section.beta2
    mine = torch.optim.Muon(matrices, lr=section.learning_rate, **given)
    return copies, [mine, torch.optim.AdamW(rest, lr=rate, betas=betas, eps=section.eps)]


def stepped(
    spec: ModelSpec, section: OptimSection, dtype: torch.dtype, *, scaled: bool
) -> list[tuple[str, Tensor, Tensor]]:
    """Return each weight after some steps, ours and torch's. A skipped step comes after each."""
    model, ours = built(spec, section, dtype)
    copies, theirs = torchs(model, spec, section)
    optim.set_learning_rate(ours, section.learning_rate, section)
    for number in range(STEPS):
        for name, parameter in named([model]).items():
            gradient = 0.3**number * torch.randn(parameter.shape, dtype=dtype)
            for one, part in zip(copies[name], gradient.chunk(len(copies[name])), strict=True):
                one.grad = part * (0.5 if scaled else 1.0)
            parameter.grad = gradient.clone()
        for each in theirs:
            each.step()
        optim.update(ours, torch.tensor(False), torch.tensor(0.5, dtype=dtype) if scaled else None)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        optim.update(ours, torch.tensor(True), None)
    assert {float(state["step"]) for state in ours.state.values()} == {STEPS}
    kept = Counter(len(state) - 1 for state in ours.state.values())
    assert kept[1] == sum(dealt.matrices(n, p.ndim, 3) > 0 for n, p in named([model]).items()) and set(kept) == {1, 2}
    return [(name, each.detach(), torch.cat(list(copies[name])).detach()) for name, each in named([model]).items()]


@pytest.mark.parametrize(("model", "scaled"), [("dense", True), ("experts", False)])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_the_formula(model: str, scaled: bool, adjust: str | None) -> None:
    """torch.optim.Muon itself, whose cast to bf16 is made one to float64, of each matrix and of each expert's; and
    torch's AdamW of everything else, at its own rate. A skipped step changes nothing."""
    nesterov = adjust is None
    said = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust, "adam_learning_rate": 0.003}
    section = OptimSection(name=NAME, learning_rate=0.02, **said)
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        found = stepped(SIZES[model], section, torch.float64, scaled=scaled)
    for name, mine, other in found:
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}")


def test_in_bf16_its_matrices_are_torchs_to_the_bit() -> None:
    found = stepped(SPEC, OptimSection(name=NAME, learning_rate=0.02), torch.float32, scaled=False)
    assert all(torch.equal(mine, other) for name, mine, other in found if dealt.matrices(name, mine.ndim, 1))


def test_matrices_at_once_are_those_one_by_one() -> None:
    """As on a GPU, where those of experts are multiplied together."""
    torch.manual_seed(0)
    for shape in ((3, 5, 9), (3, 9, 5)):
        stack = torch.randn(shape, dtype=torch.float64)
        together = muon.newton_schulz(stack)
        torch.testing.assert_close(together, muon.orthogonal(stack), rtol=1e-12, atol=1e-13)
        assert 0.5 < float(torch.linalg.svdvals(together).min()) < float(torch.linalg.svdvals(together).max()) < 1.3


def test_groups_say_rates_of_what_adamw_updates() -> None:
    said = [ParameterGroup(pattern="embed.*", learning_rate=0.5)]
    section = OptimSection(name=NAME, learning_rate=0.02, adam_learning_rate=0.003, groups=said)
    model, made = built(SPEC, section, torch.float32)
    names = {id(parameter): name for name, parameter in named([model]).items()}
    rates = {names[id(each)]: group["base_lr"] for group in made.param_groups for each in group["params"]}
    assert rates["embed.weight"] == 0.5 and rates["head.weight"] == rates["layers.1.attention.q.bias"] == 0.003
    assert rates["layers.1.attention.q.weight"] == 0.02


# Who has which matrix ------------------------------------------------------------------------------------------------

WIDE, TALL = Weight((16, 48), 1, (("tp", 0), ("fsdp", 0))), Weight((48, 16), 1, (("tp", 1), ("fsdp", 0)))
WHOLE = Weight((16, 16), 1, (("fsdp", 0),))
STACK = Weight((6 * 8, 12), 6, (("fsdp", 0),))
SPREAD = Weight((6 * 8, 12), 6, (("ep", 0), ("expert_fsdp", 0)))
LAYOUTS = {
    "shards and tp": (Layout(dp_shard=3, tp=2), [WIDE, TALL, WHOLE] * 3, "stage"),
    "replicas": (Layout(dp_replicate=2, dp_shard=2, tp=2), [WIDE, WHOLE] * 3, "stage"),
    "stages": (Layout(dp_shard=2, tp=2, pp=2), [WIDE, TALL, WHOLE], "stage"),
    "experts that are cut": (Layout(dp_shard=4), [STACK], "stage"),
    "experts that are whole": (Layout(dp_replicate=2, dp_shard=3), [STACK], "dp_replicate"),
    "experts of their own, cut": (Layout(dp_replicate=2, dp_shard=8, ep=2), [SPREAD], "expert_loss"),
    "experts of their own, whole": (Layout(dp_replicate=2, dp_shard=6, ep=2), [SPREAD], "dp_replicate"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_piece_reaches_one_owner_once(case: str) -> None:
    """Of each matrix exactly one rank of a group is the owner; the pieces that it is given cover it, none twice; costs
    are as even as can be, and what is sent on paper is what is given."""
    layout, weights, group = LAYOUTS[case]
    for ranks in layout.members(group):
        every = [dealt.rounds(weights, group, layout, rank) for rank in ranks]
        assert all(each == every[0] for each in every)
        owned, given, held = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
        for rank_kind, owner, number in ((m.weight, ranks[m.owner], m.number) for one in every[0] for m in one):
            weight = weights[rank_kind]
            seen = torch.zeros(weight.matrix)
            for rank in ranks:
                rows, columns = dealt.piece(weight, number, layout, rank)
                if dealt.gives(weight, group, layout, (rank, owner)):
                    seen[slice(*rows), slice(*columns)] += 1
                    given[rank] += dealt.numel((rows, columns))
            assert bool((seen == 1).all()), (case, rank_kind, number)
            owned[owner] += weight.flops
            held[rank_kind, number] += 1
        assert set(held.values()) == {1}
        most = max(weight.flops for weight in weights)
        assert max(owned.values()) - min(owned[rank] for rank in ranks) <= most
    everywhere = Counter[tuple[int, int]]()
    for ranks in layout.members(group):
        if layout.coordinate(ranks[0], "pp") == 0:
            for one in dealt.rounds(weights, group, layout, ranks[0]):
                everywhere.update((each.weight, each.number) for each in one)
    assert len(everywhere) == sum(weight.stack for weight in weights)


def test_operations_and_bytes_in_closed_form() -> None:
    """5 x (4 m m n + 2 m m m) of a matrix, of a rank's share of them; 2 bytes a weight each way."""
    weight = Weight((96, 64), 1, (("fsdp", 0),))
    assert weight.flops == 5 * (4 * 64 * 64 * 96 + 2 * 64**3)
    layout = Layout(dp_shard=8)
    found = dealt.on_paper(((weight, 128),), layout, 3, 2)
    assert len(found.multiplied) == 128 // 8
    assert {(each.kind, each.axis) for each in found.sent} == {("all_to_all", "stage")}
    assert sum(each.bytes for each in found.sent) == 2 * 2 * 128 * 96 * 64 // 8
    alike = dealt.on_paper(((Weight((96, 64), 1, ()), 128),), Layout(dp_replicate=8), 3, 2)
    assert sum(each.bytes for each in alike.sent) == 2 * 128 * 96 * 64  # gradients are everywhere: results alone
    whole = dealt.on_paper(((Weight((16 * 32, 64), 16, (("fsdp", 0),)), 4),), layout, 3, 2)
    assert whole.sent == () and len(whole.multiplied) == 16 * 4 // 8


# What plans say ------------------------------------------------------------------------------------------------------


def test_seconds_are_those_of_an_h200() -> None:
    """One layer of q 4096 x 4096 and gate 4096 x 14,336 as measured: 3.3 and 8.7 ms; on 8 ranks each has one of few."""
    spec = model_spec("one", 1024, 4096, 14336, 1, 32, 32, 128)
    plan = Plan(Layout(), Batch(1, 1, 128), precision=Precision("bf16"), optim=Optim(NAME), model="one")
    cluster = parse_cluster("1xH200")

    def took(of: Plan) -> float:
        sheet = cost(sheet_of(spec, of, rank_kind_of(0, of.layout, of.stages(1))), of)
        return multiplied_s(sheet, of, cluster, own_traits())

    assert took(plan) == pytest.approx(4 * 3.3e-3 + 3 * 8.7e-3, rel=0.15)
    assert took(replace(plan, layout=Layout(dp_shard=8), shard=Shard("zero3"))) == pytest.approx(8.7e-3, rel=0.15)
    assert took(replace(plan, optim=Optim())) == 0.0


def test_what_it_cannot_do_is_refused() -> None:
    values = "`optim.momentum: 0.5`", "no effect", "`optim.name: adamw`"
    with pytest.raises(ConfigError, match=refusal("CFG008", *values)):
        load_recipe(None, ["model=m", "optim.momentum=0.5"])
    values = "`optim.moments: bf16`", "no effect", "`optim.name: muon`"
    with pytest.raises(ConfigError, match=refusal("CFG008", *values)):
        load_recipe(None, ["model=m", "optim.name=muon", "optim.moments=bf16"])
    whole = Plan(optim=Optim(NAME))
    for plan in (replace(whole, lora=Lora(4, 8.0)), replace(whole, offload=Offload("host"))):
        assert [each.code for each in optim.check(SPEC, plan, None)] == ["PLAN012"]  # type: ignore[arg-type]
    assert not optim.check(SPEC, whole, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [Layout(dp_replicate=4), Layout(dp_replicate=2, dp_shard=4)], ids=str)
def test_what_an_update_takes_for_a_while(layout: Layout) -> None:
    """Of matrices of up to 7 MiB, beside what a CPU does one after another: those of a round on a GPU are together."""
    spec = model_spec("wide", 512, 1024, 3584, 1, 8, 4, 128)
    strategy = "ddp" if layout.dp_shard == 1 else "zero3"
    plan = Plan(layout, Batch(1, 1, 64), Shard(strategy), Precision("bf16"), optim=Optim(NAME))  # type: ignore[arg-type]
    counters, found = list[fake_run.WorldCounter](), list[int]()
    made, step = fake_run.WorldCounter.__init__, muon.Muon.step

    def counted(self: fake_run.WorldCounter, *given: Any) -> None:
        made(self, *given)
        counters.append(self)

    def watched(self: muon.Muon) -> None:
        counters[-1].peak_bytes = before = counters[-1].alive_bytes
        step(self)
        found.append(counters[-1].peak_bytes - before)

    with patch.object(fake_run.WorldCounter, "__init__", counted), patch.object(muon.Muon, "step", watched):
        fake_run.measure(spec, plan, fake=True)
    sheet = cost(sheet_of(spec, plan, rank_kind_of(0, layout, plan.stages(1)), traced_here), plan)
    assert 0.9 < on_whole_matrices(sheet, plan).held_bytes / found[-1] < 1.6
