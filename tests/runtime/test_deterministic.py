"""``run.deterministic``: torch is asked for deterministic algorithms and has one for all that a step does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.distributed.meshes import Meshes
from shardwise.models.config import model_spec
from shardwise.runtime import fit
from shardwise.runtime.build import build
from shardwise.runtime.loop import train
from shardwise.runtime.passes import finish_of
from shardwise.runtime.step import StepRules
from shardwise.spec.plan import Batch, Lora, Optim, Plan, Precision, Remat
from shardwise.spec.recipe import OptimSection, Recipe
from tests.runtime.small_run import numbers, plan, recipe, train_here

SPEC = model_spec("deterministic", 64, 32, 48, 2, 2, 1, 16, tie_word_embeddings=True)
REFUSED = ["avg_pool", "pool2d", "pool3d", "max_unpool", "upsample", "reflection_pad", "nll_loss", "ctc_loss"]
REFUSED += ["embedding_bag", "histc", "bincount", "median", "kthvalue", "grid_sampler", "cumsum", "scatter_reduce"]
"""What ``torch.use_deterministic_algorithms`` says that it refuses on CUDA, as it stands in the names of operators."""
PLANS = [
    Plan(),
    Plan(remat=Remat("full")),
    Plan(optim=Optim("adamw8bit")),
    Plan(optim=Optim(moments="bf16")),
    Plan(lora=Lora(4, 8.0, dora=True)),
    Plan(loss="dpo"),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", PLANS, ids=lambda plan: f"{plan.optim} {plan.loss} {plan.remat.mode}")
def test_a_step_does_nothing_that_torch_would_refuse_on_a_gpu(given: Plan) -> None:
    """Forward, backward and update, of each kind of loss and optimizer."""
    made = Recipe.model_validate({"method": {"name": "dpo"}} if given.loss == "dpo" else {})
    where = {"batch": Batch(2, 2, 16, 24), "precision": Precision("bf16"), "deterministic": True}
    plan = Plan(**{**vars(given), **where})
    state = build(made, SPEC, plan, Meshes(), torch.device("cpu"))
    with Names() as names:
        rules = StepRules(plan, Meshes(), OptimSection(), 10, finish_of(made.method, plan))
        fit.check_fit(state, rules, SPEC.vocab_size, torch.device("cpu"))
    assert {"attention", "attention_backward", "mm"} <= names.seen and len(names.seen) > 20
    refused = {name for name in names.seen for mark in REFUSED if mark in name or name == "put_"}
    assert not refused


@pytest.mark.prove
def test_torch_is_asked_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    """And what it computes on a CPU does not change. Memory that nothing was written into yet is not filled."""
    asked: list[tuple[bool, bool]] = []

    def after(state: Any, stats: Any) -> None:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        asked.append((torch.are_deterministic_algorithms_enabled(), bool(filled)))

    made = recipe(tmp_path, "one", run={"deterministic": True}, train={"max_steps": 2})
    train(made, Plan(**{**vars(plan()), "deterministic": True}), (after,))
    assert asked == [(True, False)] * 2
    other = recipe(tmp_path, "other", train={"max_steps": 2})
    train_here(other, (after,))
    assert asked[2:] == [(False, False)] * 2, "the next run of this process is as its plan says"
    assert numbers(tmp_path / "runs" / "one") == numbers(tmp_path / "runs" / "other")
