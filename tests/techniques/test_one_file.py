"""A technique is one file: once in ORDER, the search, checks, prices, runs, proofs and ``--plan`` see it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shardwise import techniques
from shardwise.cli import decide
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.errors import ConfigError
from shardwise.methods.loss import logits
from shardwise.models.config import model_spec, parameter_shapes
from shardwise.models.decoder import Decoder
from shardwise.planner import candidates, sheets
from shardwise.planner.comparison import MARGIN
from shardwise.planner.search import Search, best_of_kinds, choose
from shardwise.prove.drift import drift
from shardwise.runtime import passes
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Precision
from tests.drift.test_drift import layout
from tests.said import refuses, shows
from tests.style.source import ROOT
from tests.techniques import narrow
from tests.techniques.narrow import PlanWithNarrow, RecipeWithNarrow

SPEC = model_spec("half frozen", 32_000, 512, 1_400, 4, 8, 2, 64)
CLUSTER = parse_cluster("2xH100")


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in ORDER and the field of the plan."""
    at = techniques.ORDER.index(techniques.freeze) + 1
    monkeypatch.setattr(techniques, "ORDER", (*techniques.ORDER[:at], narrow, *techniques.ORDER[at:]))
    monkeypatch.setattr(candidates, "Plan", PlanWithNarrow)


def recipe(**sections: object) -> RecipeWithNarrow:
    pinned = {"parallel": {"strategy": "zero3", "tp": 1}, "recompute": {"mode": "none"}}
    batch, model = {"seq_len": 256, "micro_batch_size": 1}, {"frozen": ["layers.*"]}
    return RecipeWithNarrow.model_validate({**pinned, "train": batch, "model": model, **sections})


def fitting(peak_bytes: int) -> Cluster:
    """GPUs on which a plan with this peak is just below the margin."""
    return replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=int(peak_bytes / MARGIN) + 2**16))


def test_the_search_tries_its_choices_in_order_and_says_why() -> None:
    wide, small = (choose(recipe(narrow=on), SPEC, CLUSTER) for on in (False, True))
    assert (wide.why["narrow"], small.why["narrow"]) == ("pinned", "pinned")
    saved = wide.estimate.memory["weights"] - small.estimate.memory["weights"]
    blocks = 4 * (2 * 512 + 512 * 64 * (8 + 2 + 2 + 8) + 3 * 512 * 1_400)
    assert saved == 2 * blocks // 2, "2 bytes a frozen weight, of which each rank has half"
    found = choose(recipe(), SPEC, fitting(wide.estimate.peak_bytes))
    assert isinstance(found, PlanWithNarrow) and not found.narrow and "narrow" not in found.why
    found = choose(recipe(), SPEC, fitting(small.estimate.peak_bytes))
    assert isinstance(found, PlanWithNarrow) and found.narrow
    assert shows(found.why["narrow"], "derived", "not fit")
    rows = best_of_kinds(Search(recipe(), SPEC, fitting(small.estimate.peak_bytes), pinned=False))
    assert len(rows) > 3 and all(isinstance(row, PlanWithNarrow) for row in rows)


def test_its_check_refuses_a_pin() -> None:
    with pytest.raises(ConfigError) as refused:
        choose(recipe(narrow=True, model={}), SPEC, CLUSTER)
    assert [(problem.code, problem.where) for problem in refused.value.problems] == [("PLAN017", "narrow")]


def test_a_plan_that_contradicts_its_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "load_plan", lambda file: choose(recipe(narrow=False), SPEC, CLUSTER))
    file = Path("plan.yaml")
    assert decide.plan_of(recipe(), SPEC, CLUSTER, file) == choose(recipe(narrow=False), SPEC, CLUSTER)
    with pytest.raises(ConfigError) as refused:
        decide.plan_of(recipe(narrow=True), SPEC, CLUSTER, file)
    (problem,) = refused.value.problems
    assert refuses(problem, "PLAN019", "`narrow` none", True)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_what_it_applies_is_what_it_costs(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a plan that leaves it out is caught."""
    spec = model_spec("drift", 600, 48, 100, 2, 6, 2, 8)
    strategy = replace(PlanWithNarrow().shard, strategy=sharding, bucket_bytes=100_000)
    plan = PlanWithNarrow(layout(sharding, 8), Batch(2, 2, 32, 64), strategy, Precision("bf16"))
    plan = replace(plan, frozen=("layers.0.*", "embed.*"), narrow=True)
    assert not drift(spec, plan, 7).differences()
    monkeypatch.setattr(narrow, "cost", lambda paper, plan: paper)
    monkeypatch.setattr(narrow, "traced", lambda made, spec, plan, place: made)
    sheets._sheet.cache_clear()
    assert [word.partition(":")[0] for word in drift(spec, plan, 7).differences()][:1] == ["weights"]


def test_what_it_computes_is_the_same_to_the_bit() -> None:
    spec = model_spec("small", 600, 48, 100, 2, 6, 2, 8)
    torch.manual_seed(0)
    values = {name: torch.randn(shape) / 8 for name, shape in parameter_shapes(spec).items()}
    ids = torch.randint(600, (2, 16))
    batch = MicroBatch(ids, ids, torch.arange(16).expand(2, 16), None, 32)
    found = []
    for on in (False, True):
        plan = PlanWithNarrow(precision=Precision("bf16"), frozen=("layers.0.*", "*norm*", "head.*"), narrow=on)
        model = Decoder(spec)
        model.load_state_dict(values)
        (model,) = techniques.apply([model], plan, Meshes())
        assert model.get_parameter("layers.0.mlp.up.weight").dtype == (torch.bfloat16 if on else torch.float32)
        out = passes.forward([model], batch, logits)
        out.float().square().sum().backward()
        found.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + 1 + 7  # the logits; gradients of the embedding and of the products of a block
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_contributing_shows_is_this_technique() -> None:
    """Line by line, where they stand for its code."""
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Adding a technique")[2].partition("\n## ")[0]
    shown = {line.partition("  # ")[0].strip() for line in page.splitlines() if line.startswith("    ")}
    written = {line.strip() for line in Path(narrow.__file__).read_text().splitlines()}
    assert len(shown) > 15 and not shown - written


def test_a_technique_is_three_functions_and_those_that_it_needs() -> None:
    """Of these parameters; more are for who calls it by name. Of what may be left out at least one technique has each,
    or nothing would be folded."""
    asked = {
        "choices": ["recipe", "spec", "cluster", "plan"],
        "pins": ["recipe", "plan"],
        "check": ["spec", "plan", "cluster"],
    }
    optional = {
        "regimes": ["spec", "plan", "trained"],
        "traced": ["made", "spec", "plan", "rank_kind"],
        "cost": ["sheet", "plan"],
        "apply": ["parts", "plan", "meshes"],
        "before_waiting": ["parts", "plan"],
        "before_micro_batch": ["parts", "plan", "last"],
        "after_micro_batch": ["parts", "plan"],
        "before_input_gradients": ["parts", "plan", "last"],
        "after_weight_gradients": ["parts", "plan", "last"],
        "after_backward": ["parts", "plan", "meshes"],
        "after_inference": ["parts", "plan"],
        "wanted": ["slices", "shapes"],
        "store": ["parameters", "name", "part", "values"],
    }
    for name in optional:
        assert any(name in vars(technique) for technique in techniques.ORDER), name
    for technique in techniques.ORDER:
        has = {name: wanted for name, wanted in optional.items() if name in vars(technique)}
        assert has, f"{technique.__name__} does nothing"
        for name, wanted in (asked | has).items():
            found = [*inspect.signature(vars(technique)[name]).parameters.values()]
            assert [parameter.name for parameter in found[: len(wanted)]] == wanted, f"{technique.__name__}.{name}"
            assert all(parameter.default is not parameter.empty for parameter in found[len(wanted) :])


def test_settings_say_which_techniques_a_plan_uses() -> None:
    """A plan that says nothing has each with the value with which it does nothing."""
    for technique in techniques.ORDER:
        for name, idle in vars(technique).get("SETTINGS", {}).items():
            assert attrgetter(name)(PlanWithNarrow()) == idle, f"{technique.__name__}: {name}"

    def used(**settings: Any) -> set[ModuleType]:
        return {*techniques.acting(PlanWithNarrow(**settings), "pins")}

    always = used()
    assert always == {techniques.precision, techniques.optim}
    assert used(narrow=True, compile=True) - always == {narrow, techniques.compile}
    assert used(layout=Layout(dp_shard=2, tp=2)) - always == {techniques.shard, techniques.tp}
    assert used(lora=Lora(2, 4.0)) - always == {
        techniques.freeze,
        techniques.lora,
        techniques.nf4,
        techniques.frozen_float8,
    }
