"""Dropout in adapters: while training alone, the share that was asked for, and the same after an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.models.attention import MaskSpec
from shardwise.models.config import model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.roles import is_adapter
from shardwise.runtime.loop import train
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.plan import Lora, Plan, Remat
from shardwise.techniques import lora
from shardwise.techniques.share import LayerShare
from tests.runtime.small_run import directory, numbers, plan, recipe

SPEC = model_spec("small", 96, 32, 48, 2, 4, 2, 8)


def stop(state: TrainState, stats: StepStats) -> None:
    if state.step == 4:
        raise KeyboardInterrupt


@pytest.mark.prove
def test_a_run_that_broke_drops_what_it_would_have_dropped(tmp_path: Path) -> None:
    """To the bit, with recomputation, which draws again what forward drew."""
    settings = Lora(4, 8.0, dropout=0.3)
    of = replace(plan(), lora=settings, remat=Remat("full"))
    asked = {"lora": {"rank": 4, "dropout": 0.3}, "train": {"max_steps": 6}}
    asked["run"] = {"seed": 20_261_121_000_000}  # a time stamp
    whole, broken = (recipe(tmp_path, name, **asked) for name in ("whole", "broken"))
    train(whole, of)
    with pytest.raises(KeyboardInterrupt):
        train(broken, of, (stop,))
    train(broken, of)
    assert numbers(directory(whole)) == numbers(directory(broken))
    without = recipe(tmp_path, "without", **asked | {"lora": {"rank": 4}})
    train(without, replace(of, lora=Lora(4, 8.0)))
    same, other = numbers(directory(without)), numbers(directory(whole))
    assert same[0][2] == other[0][2], "B is zero at first"
    assert same[-1][2] != other[-1][2]


def test_what_an_adapter_reads_is_dropped_and_only_in_training() -> None:
    """The mean over 400 draws is the whole within 5 standard errors at every place."""
    torch.manual_seed(0)
    model = Decoder(SPEC)
    lora.apply([model], Plan(lora=Lora(4, 8.0, ("q",), dropout=0.25)), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.2)
    layer = model.get_submodule("layers.0.attention.q")
    x = torch.randn(3, 32)
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(layer(x), whole)
        ids = torch.arange(8).view(1, 8)
        assert torch.equal(model(ids, ids, MaskSpec()), model(ids, ids, MaskSpec()))
    draws = torch.stack([layer(x).detach() for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    error = draws.std(0) / 20
    assert ((draws.mean(0) - whole).abs() <= 5 * error + 1e-6).all()


def test_an_adapter_of_which_ranks_hold_columns_drops_others_on_each() -> None:
    """With its place set, a layer draws from it: alike without, or with the same."""
    torch.manual_seed(0)
    model = Decoder(SPEC)
    lora.apply([model], Plan(lora=Lora(4, 8.0, ("o",), dropout=0.25)), None)
    layer = model.get_submodule("layers.0.attention.o")
    torch.nn.init.ones_(layer.lora_b.weight)
    found = []
    for place in (None, None, 0, 0, 1):
        torch.manual_seed(1)
        layer.share = LayerShare(place=place)
        found.append(layer(torch.ones(6, layer.in_features)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[2], found[4])
