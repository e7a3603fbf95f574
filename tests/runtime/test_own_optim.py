"""Which of torch's optimizers compute in a loop of one's own what they do in one process, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.prove.pool import RankPool
from shardwise.runtime import own_optim
from tests.runtime import own_optim_ranks
from tests.runtime.own_optim_ranks import SETTINGS, Model, loop, make, rows

LAYOUTS = {"zero3": (2, "zero3", 1), "ddp": (2, "ddp", 1), "tp": (2, "ddp", 2), "zero3 beside tp": (4, "zero3", 2)}


def test_every_optimizer_that_may_step_slices_is_tested() -> None:
    assert {kind.__name__ for kind in own_optim.ON_SLICES} == {name for name, _ in SETTINGS}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_optimizers_step_as_in_one_process(ranks: RankPool, layout: str) -> None:
    """In float64, within 1e-9. Under ddp every rank holds whole weights, so that Adafactor, Rprop and Muon serve."""
    world, strategy, tp = LAYOUTS[layout]
    cases = [*SETTINGS, *(() if layout != "ddp" else own_optim_ranks.WHOLE)]
    found = ranks.run(own_optim_ranks.train, strategy, tp, cases, world=world)
    for case, *weights in zip(cases, *found, strict=True):
        right = own_optim_ranks.plain(case, tp)
        for each in weights:
            for name, value in right.items():
                assert torch.allclose(each[name], value, rtol=1e-9, atol=1e-12), (case, name)


@pytest.mark.parametrize(
    ("strategy", "name", "said"),
    [
        *(("zero3", name, f"{name} does not") for name in ("Adafactor", "Rprop", "Muon")),
        *((strategy, "LBFGS", "LBFGS does not") for strategy in ("ddp", "zero1")),
    ],
)
def test_others_are_refused_by_name_before_they_change_a_weight(
    ranks: RankPool, strategy: str, name: str, said: str
) -> None:
    for error, changed in ranks.run(own_optim_ranks.refused, strategy, name, world=2):
        assert said in error and "OWN003" in error and "AdamW" in error
        assert not changed


def test_of_an_optimizer_that_is_not_torchs_the_user_is_warned(ranks: RankPool) -> None:
    for said in ranks.run(own_optim_ranks.foreign, world=2):
        assert len(said) == 1 and said[0].startswith("Foreign ")


def test_in_one_process_any_optimizer_steps() -> None:
    model = shardwise.parallelize(nn.Linear(6, 3), shardwise.make_plan(), None)
    before = model.weight.detach().clone()
    optimizer = torch.optim.LBFGS(model.parameters())
    loss = model(rows(0)[0].float()).square().mean()
    shardwise.backward(model, loss)
    optimizer.step(lambda: loss)
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("case", [*SETTINGS, *own_optim_ranks.WHOLE], ids=str)
def test_a_resumed_loop_steps_on_as_if_it_had_not_stopped(tmp_path: Path, case: own_optim_ranks.Case) -> None:
    """To the bit: all that an optimizer keeps is in the checkpoint."""
    right, model = (
        shardwise.parallelize(Model().double(), shardwise.make_plan(compute="fp64"), None) for _ in range(2)
    )
    model.load_state_dict(right.state_dict())
    loop(right, make(case, right), None, range(4))
    optimizer = make(case, model)
    loop(model, optimizer, None, range(2))
    kept = shardwise.Checkpoints(tmp_path, model, optimizer)
    kept.save(2)
    kept.close()
    again = shardwise.parallelize(Model().double(), shardwise.make_plan(compute="fp64"), None)
    optimizer = make(case, again)
    assert shardwise.Checkpoints(tmp_path, again, optimizer).resume() == {"step": 2}
    loop(again, optimizer, None, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), right.parameters(), strict=True))
