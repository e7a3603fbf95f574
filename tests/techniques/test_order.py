"""What is folded over all techniques."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.models.lookup import load_spec
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Shard
from shardwise.techniques import shard, tp

SPEC = load_spec("SmolLM2-135M")
PLAN = Plan(Layout(dp_shard=4), shard=Shard("zero3"))


def test_within_a_step_each_technique_is_called_that_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """After backward the last applied comes first: tp adds up what replicas have summed."""
    called: list[tuple[str, ...]] = []

    def acting(name: str, *moments: str) -> ModuleType:
        technique = ModuleType(name)
        for moment in moments:
            vars(technique)[moment] = lambda *args, moment=moment, **named: called.append((name, moment, *named))
        return technique

    moments = ("before_waiting", "before_micro_batch", "after_micro_batch", "after_backward", "after_inference")
    order = (acting("a", *moments), acting("silent"), acting("b", *moments[:4]), acting("c", "after_inference"))
    monkeypatch.setattr(techniques, "ORDER", order)
    techniques.before_waiting([], PLAN)
    techniques.before_micro_batch([], PLAN, last=True)
    techniques.after_micro_batch([], PLAN)
    techniques.after_backward([], PLAN, Meshes())
    techniques.after_inference([], PLAN)
    assert called == [
        ("a", "before_waiting"),
        ("b", "before_waiting"),
        ("a", "before_micro_batch", "last"),
        ("b", "before_micro_batch", "last"),
        ("a", "after_micro_batch"),
        ("b", "after_micro_batch"),
        ("b", "after_backward"),
        ("a", "after_backward"),
        ("a", "after_inference"),
        ("c", "after_inference"),
    ]


def test_tensor_parallelism_adds_what_the_replicas_have_summed() -> None:
    assert techniques.ORDER.index(tp) < techniques.ORDER.index(shard)


def test_a_technique_that_replaces_a_weight_says_what_it_must_be_given_and_stores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``halved`` was applied to what ``summed`` left, so it stores first, and the other is told half; who does not ask
    for the values does not have them made."""
    stored: dict[str, float] = {}

    def store(name: str, factor: float) -> Callable[..., Callable[[], torch.Tensor]]:
        def act(
            parameters: object, weight: str, part: object, values: Callable[[], torch.Tensor]
        ) -> Callable[[], torch.Tensor]:
            assert part == (slice(0, 4), slice(0, 4))
            stored[name] = float(values().sum())
            return lambda: values() * factor

        return act

    summed, halved, last = ModuleType("summed"), ModuleType("halved"), ModuleType("last")
    vars(summed).update(
        wanted=lambda slices, shapes: {name: part for name, part in slices.items() if name != "norm.sum"},
        store=store("summed", 1.0),
    )
    vars(halved).update(
        wanted=lambda slices, shapes: slices | {"norm.weight": tuple(slice(0, size) for size in (4, 4))},
        store=store("halved", 0.5),
    )
    vars(last)["store"] = lambda parameters, name, part, values: values
    monkeypatch.setattr(techniques, "ORDER", (summed, ModuleType("silent"), halved, last))
    parameters = {"norm.sum": torch.zeros(1), "norm.half": torch.zeros(2, 4)}
    slices = techniques.wanted(parameters, SPEC, Plan())
    assert slices == {"norm.half": (slice(0, 2), slice(0, 4)), "norm.weight": (slice(0, 4), slice(0, 4))}
    techniques.store(parameters, "norm.weight", slices["norm.weight"], torch.ones(4, 4), Plan())
    assert stored == {"halved": 16.0, "summed": 8.0}
