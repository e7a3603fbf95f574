"""The lines that a run begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.decide import with_reasons
from shardwise.models.config import parameter_count, with_fields
from shardwise.runtime.job import open_job
from shardwise.runtime.report import header as headers
from shardwise.runtime.report.header import assumptions, execution, header, of_routers, why_compute
from shardwise.spec import finetune
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Plan, Remat
from shardwise.spec.units import show_count
from tests.parity.cases import UNTIED
from tests.parity.experts import MOE
from tests.runtime.small_run import MODEL, plan, recipe
from tests.said import shows


def test_the_cost_of_compiling_is_said() -> None:
    plan = Plan(batch=Batch(2, 3, 512), remat=Remat("full"))
    eager = ", ".join(["micro-batch 2 x 512", "accumulation 3", "recompute full"])
    assert execution(plan) == eager
    compiled = execution(replace(plan, compile=True))
    assert compiled.startswith(f"{eager}, blocks compiled (") and "`compile=false`" in compiled


def test_the_losses_of_routers_are_said() -> None:
    assert of_routers(MOE) == " + 2 router_aux_loss + 0.5 router_z_loss"
    assert of_routers(with_fields(MOE, router_z_loss_coef=0.0)) == " + 2 router_aux_loss"
    assert of_routers(UNTIED) == of_routers(with_fields(UNTIED, router_aux_loss_coef=0.1)) == ""


def test_a_run_of_a_mixture_tells_how_much_of_it_computes_a_token(tmp_path: Path) -> None:
    """Two of four experts: 2 x 3 x 24 x 16 parameters in each of two layers stand idle."""
    mixture = {**MODEL, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    job = open_job(recipe(tmp_path, model={"config": mixture}), plan())
    whole = parameter_count(job.spec)
    model = next(line for line in header(job).splitlines() if line.startswith("model"))
    assert f", {show_count(whole)} parameters ({show_count(whole - 2 * 2 * 3 * 24 * 16)} active) · " in model


def test_the_tokens_of_text_are_whole_windows(tmp_path: Path) -> None:
    job = open_job(recipe(tmp_path), plan())
    length = next(line for line in header(job).splitlines() if line.startswith("length"))
    assert f"{job.max_steps} steps, {show_count(job.max_steps * job.step_room)} tokens" in length


def test_what_fine_tuning_assumes_is_told_with_its_key() -> None:
    recipe = load_recipe(None, ["model=m", "method=sft", "lora=8"])
    plan = with_reasons(Plan(), recipe)
    epochs, rate, warmup = assumptions(plan, finetune.with_epochs(recipe, 12_000)).split(" · ")
    assert shows(epochs, "`train.num_epochs` 2", 3, "10,000", 2, "100,000", 1)
    assert shows(rate, "`optim.learning_rate` 0.0002", "sft", "adapters")
    assert shows(warmup, "`optim.warmup_steps` 0.03")
    assert assumptions(with_reasons(plan, load_recipe(None, ["model=m"])), recipe) == ""


@pytest.mark.parametrize(
    ("asked", "device", "has", "hint"),
    [
        ("auto", "cpu", True, True),
        ("auto", "cpu", False, False),
        ("fp32", "cpu", True, False),
        ("auto", "cuda", True, False),
    ],
)
def test_what_to_pin_for_bf16_is_said_where_a_cpu_has_it(
    asked: str, device: str, has: bool, hint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "cpu_has_bf16", lambda: has)
    recipe = load_recipe(None, ["model=m", f"precision.compute={asked}"])
    told = why_compute(recipe, Plan(why={"precision.compute": "default on CPUs"}), device)
    assert told.startswith(" (default on CPUs") and ("`precision.compute=bf16`" in told) == hint
