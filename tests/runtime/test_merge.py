"""Adapters merged into their weights: the same model, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.data.whole import becoming
from shardwise.errors import TrainingError
from shardwise.models.attention import MaskSpec
from shardwise.models.config import model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.resolve import resolve
from shardwise.models.roles import is_adapter
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.export import load_run, merge
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.spec.recipe import Checkpoint, Recipe
from shardwise.techniques import lora
from tests.said import shows

SPEC = model_spec("small", 96, 32, 48, 2, 4, 2, 8)
SETTINGS = Lora(4, 8.0)


def adapted(dtype: torch.dtype, size: float) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SPEC).to(dtype)
    lora.apply([model], Plan(lora=SETTINGS), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.fill_(size)
            elif parameter.ndim == 2:
                parameter.copy_(1.0 + parameter)
    return model


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-14)])
def test_the_merged_model_is_the_same_model(dtype: torch.dtype, within: float) -> None:
    """To the precision of its own dtype: nothing on the way is in a narrower one."""
    model = adapted(dtype, 0.1)
    first = model.get_parameter("layers.0.attention.q.weight").clone()
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        before = model(ids, ids, MaskSpec())
        assert merge([model], SETTINGS).startswith("14 adapters merged")
        after = model(ids, ids, MaskSpec())
    assert not any(is_adapter(name) for name, _ in model.named_parameters())
    # B A is 4 x 0.1 x 0.1, its scale 8 / 4.
    merged = model.get_parameter("layers.0.attention.q.weight")
    torch.testing.assert_close(merged, first + 0.08, rtol=within, atol=within)
    assert (after - before).norm() < within * before.norm()


def test_a_run_in_fp64_is_merged_in_fp64(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 96, **sizes}
    sections = {"model": {"config": config}, "precision": {"weights": "fp64"}, "lora": {"rank": 4}}
    recipe = Recipe.model_validate(sections)
    spec, settings = resolve(recipe), lora.settings(recipe.lora, Precision(weights="fp64"))
    assert settings is not None
    shapes = lora.adapters(spec, settings)
    trained = {f"model.{name}": 0.1 * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", Checkpoint(), "run")
    checkpoints.save(trained, {"step": 1}, 1)
    assert checkpoints.wait()[0].kind == "committed"
    model = load_run(tmp_path, recipe, spec, quantised=False)
    assert shows(merge([model], settings), "14 adapters", "logits differ")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_magnitudes_are_merged_too() -> None:
    settings = Lora(4, 8.0, dora=True)
    torch.manual_seed(0)
    model = Decoder(SPEC)
    lora.apply([model], Plan(lora=settings), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.uniform_(0.1, 0.5)
        ids = torch.arange(10).view(1, 10)
        before = model(ids, ids, MaskSpec())
        merge([model], settings)
        after = model(ids, ids, MaskSpec())
    assert not any(is_adapter(name) for name, _ in model.named_parameters())
    rows = torch.linalg.vector_norm(model.get_parameter("layers.1.mlp.up.weight"), dim=1)
    assert rows.min() >= 0.1 and rows.max() <= 0.5, "the magnitudes themselves"
    assert (after - before).norm() < 1e-5 * before.norm()


def test_what_the_weights_type_cannot_hold_is_refused() -> None:
    """A change of 8e-6 beside weights around 1: fp32 holds it, bf16 (2^-8) does not."""
    with pytest.raises(TrainingError, match=r"LORA001.*14 of 14 "):
        merge([adapted(torch.bfloat16, 1e-3)], SETTINGS)
    merge([adapted(torch.float32, 1e-3)], SETTINGS)


def test_an_export_that_fails_leaves_what_stood_and_no_more(tmp_path: Path) -> None:
    """A part of a model on a disk that it has filled would keep everything else from being written."""
    target = tmp_path / "hf"
    target.mkdir()
    (target / "old").write_text("")
    with pytest.raises(OSError, match="full"), becoming(target) as draft:
        (draft / "new").write_text("")
        raise OSError("full")
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "old"]
