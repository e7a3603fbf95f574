"""The ranges of a profiled step: their names and order, and that they leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shardwise.models.attention import MaskSpec
from shardwise.models.config import model_spec
from shardwise.models.decoder import Decoder
from shardwise.runtime.metrics.ranges import StepRanges, renamed, unit_of

SPEC = model_spec(
    name="test",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=100.0,
)


def decoder(numbers: tuple[int, ...] = (0, 1)) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SPEC, numbers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def passes(model: Decoder) -> list[Tensor]:
    """Forward and backward, twice; the gradients of the second time."""
    ids = torch.arange(16).reshape(2, 8)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        logits = model(ids, torch.arange(8).expand(2, 8), MaskSpec())
        logits.float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def hooks(model: nn.Module) -> int:
    """How many hooks the modules of a model have."""
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def recorded(tmp_path: Path, model: Decoder, phases: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The ranges of a step, in the order in which they begin; the one around first."""
    ranges = StepRanges([model])
    with profile(activities=[ProfilerActivity.CPU]) as profiler, ranges.recorded():
        passes(model)
        for phase in phases:
            ranges.enter(phase)
            torch.ones(1).add(1)
    ranges.enter("clip")  # not within a step
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [one for one in events if one.get("cat") == "user_annotation"]
    return sorted(found, key=lambda one: (one["ts"], -one["dur"]))


def test_units_follow_one_another_and_the_gradients_are_the_same(tmp_path: Path) -> None:
    model, plain = decoder(), passes(decoder())
    found = recorded(tmp_path, model)
    order = ["embedding", "block 0", "block 1", "head"]
    each = [*(f"forward {unit}" for unit in order), *(f"backward {unit}" for unit in reversed(order))]
    assert [one["name"] for one in found] == 2 * each
    ends = [one["ts"] + one["dur"] for one in found]
    assert all(end <= later["ts"] + 1e-3 for end, later in zip(ends, found[1:], strict=False))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))


def test_no_hook_is_left_even_by_a_step_that_breaks() -> None:
    model = decoder()
    ranges = StepRanges([model])
    assert hooks(model) == 0
    with ranges.recorded():
        assert hooks(model) == 8
    assert hooks(model) == 0 and not ranges.on
    try:
        with ranges.recorded():
            raise KeyError
    except KeyError:
        assert hooks(model) == 0 and not ranges.on


def test_phases_of_stages_and_what_follows_all_passes_are_ranges(tmp_path: Path) -> None:
    model = decoder((1,))
    phases = ("forward 3.0", "waits 1 3.0", "backward 3.0", "reduce", "clip", "optimizer")
    names = [one["name"] for one in recorded(tmp_path, model, phases)]
    assert names[-3:] == ["forward stage 3", "backward stage 3", "optimizer"]
    assert "forward block 1" in names and "forward block 0" not in names


def test_what_fsdp_sends_is_named_by_its_unit() -> None:
    text = b'"name": "FSDP::all_gather (layers.11)", "x": "FSDP::all_gather_copy_out (layers.11)"'
    assert renamed(text) == b'"name": "all-gather weights of block 11", "x": "FSDP::all_gather_copy_out (layers.11)"'
    reduced = b'"FSDP::post_backward_reduce (layers.0.mlp.experts) [pg=2]"'
    assert renamed(reduced) == b'"reduce-scatter gradients of experts of block 0"'
    assert renamed(b'"FSDP::all_gather"') == b'"all-gather weights of head"'
    assert [unit_of(name) for name in ("embed", "norm, head", "")] == ["embedding", "head", "head"]
