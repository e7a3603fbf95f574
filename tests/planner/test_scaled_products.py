"""What a plan says that products in float8 would bring: what planning them finds, with nothing traced for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner import apart
from shardwise.planner.price import price
from shardwise.planner.remedy import alternatives
from shardwise.planner.scaled_products import in_float8
from shardwise.planner.search import choose
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe

MODEL = "meta-llama/Llama-3.1-8B"


def asked(*words: str) -> Any:
    return load_recipe(None, [f"model={MODEL}", "seq_len=4096", "global_batch=32", *words])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("8xH100", ()),
        ("8xH100", ("parallel.strategy=ddp", "lora.rank=16", "lora.targets=[q,down]")),
        ("8xH100", ("parallel.tp=2", "recompute=full")),
        ("8xH100", ("parallel.pp=2", "compile=false")),
        ("8xB200", ("parallel.strategy=zero3",)),
    ],
    ids=["sharded", "adapters", "tp", "pp", "rows"],
)
def test_it_is_what_planning_finds(cluster: str, words: tuple[str, ...]) -> None:
    """To a thousandth of the seconds of the plan that is traced; and it is what the plan holds."""
    recipe, spec, machines = asked(*words), load_spec(MODEL), parse_cluster(cluster)
    plan = choose(recipe, spec, machines)
    found = in_float8(recipe, spec, machines, plan)
    assert found is not None and found.estimate.seconds is not None and plan.estimate.seconds is not None
    assert found.precision.scales == ("mx" if "B200" in cluster else "block")
    right = timed(spec, price(spec, replace(found, estimate=plan.estimate), machines), machines)
    assert right.estimate.seconds is not None
    assert found.estimate.seconds.step_s == pytest.approx(right.estimate.seconds.step_s, rel=1e-3)
    faster = found.estimate.seconds.step_s < 0.98 * plan.estimate.seconds.step_s
    assert faster == plan.compile  # codes that are made operation by operation take longer than products save
    assert found.estimate.share == pytest.approx(right.estimate.share, rel=0.02)


@pytest.mark.parametrize(
    ("cluster", "words", "told"),
    [
        ("8xH100", (), "precision.products=float8"),
        ("8xB200", (), "precision.products=float8 precision.scales=mx"),
        ("8xA100", (), ""),
        ("8xH100", ("precision.modules={'*norm': fp32}",), ""),
        ("1xCPU", ("precision.compute=bf16", "train.seq_len=16", "global_batch=1"), ""),
    ],
    ids=["Hopper", "Blackwell", "Ampere", "not allowed", "CPU"],
)
def test_where_it_is_told(monkeypatch: pytest.MonkeyPatch, cluster: str, words: tuple[str, ...], told: str) -> None:
    """Beside the other changes, of GPUs that have such products; nothing is traced, and nothing turned on."""
    recipe, spec, machines = asked(*words), load_spec(MODEL), parse_cluster(cluster)
    plan = choose(recipe, spec, machines)
    monkeypatch.setattr(apart, "traced_apart", lambda *given: pytest.fail("traced"))
    assert plan.precision.products == "compute"
    found = in_float8(recipe, spec, machines, plan)
    assert (found is not None) == bool(told)
    if told:
        changes = [each.change for each in alternatives(recipe, spec, machines, plan, [])]
        assert changes[-1] == told
