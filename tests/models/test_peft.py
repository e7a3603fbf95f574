"""Adapters out and in, against PEFT itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.errors import DataError
from shardwise.models import hf
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.decoder import Decoder
from shardwise.models.peft import read_adapter, to_peft_name, write_adapter
from shardwise.models.roles import is_adapter
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import lora

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

SPEC = ModelSpec("small", 96, 32, 48, 2, 4, 2, 8, attention_bias=True)
IDS = torch.arange(40).remainder(96).view(2, 20)
POSITIONS = torch.arange(20).expand(2, 20)


def adapted(settings: Lora, seed: int = 0) -> Decoder:
    """A model with random weights, B of its adapters too."""
    torch.manual_seed(seed)
    model = Decoder(SPEC)
    lora.apply([model], Plan(lora=settings), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) or name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def write(directory: Path, model: Decoder, settings: Lora) -> None:
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    hf.write_weights(directory / "base", SPEC, named.__getitem__)
    shapes = {name: tuple(value.shape) for name, value in named.items() if is_adapter(name)}
    write_adapter(directory / "adapter", settings, SPEC, str(directory / "base"), shapes, named.__getitem__)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "settings",
    [
        Lora(4, 8.0),
        Lora(4, 8.0, ("q", "v")),
        Lora(8, 4.0, ("gate", "down", "o"), rslora=True),
        Lora(4, 8.0, dropout=0.5, dora=True),
    ],
    ids=["all-linear", "q and v", "rslora", "dora"],
)
def test_peft_reads_what_is_written(tmp_path: Path, settings: Lora) -> None:
    """The same logits within 1e-5 of their norm: fp32 sums in another order; and not those of the base."""
    model = adapted(settings)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits(base)
    theirs = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    with torch.no_grad():
        ours = model(IDS, POSITIONS, MaskSpec())
    assert (theirs - ours).norm() < 1e-5 * ours.norm()
    assert (plain - ours).norm() > 1e-2 * ours.norm()


@pytest.mark.parametrize("dora", [False, True])
def test_what_peft_writes_is_read(tmp_path: Path, dora: bool) -> None:
    settings = Lora(4, 8.0, ("q", "up"), dora=dora)
    model = adapted(settings)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    layers = ["q_proj", "up_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, init_lora_weights=False, use_dora=dora)
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path / "theirs")
    parameters = dict(model.named_parameters())
    parts = {name: tuple(slice(0, n) for n in value.shape) for name, value in parameters.items()}
    with torch.no_grad():
        for name, value in read_adapter(tmp_path / "theirs", parts, settings, SPEC):
            parameters[name].copy_(value)
        ours = model(IDS, POSITIONS, MaskSpec())
    assert (logits(theirs) - ours).norm() < 1e-5 * ours.norm()


def test_a_slice_of_an_adapter(tmp_path: Path) -> None:
    model = adapted(Lora(4, 8.0))
    write(tmp_path, model, Lora(4, 8.0))
    name = "layers.1.mlp.down.lora_b.weight"
    parts = {other: (slice(0, 0), slice(0, 0)) for other, _ in model.named_parameters() if is_adapter(other)}
    found = dict(read_adapter(tmp_path / "adapter", parts | {name: (slice(3, 9), slice(0, 4))}, Lora(4, 8.0), SPEC))
    assert torch.equal(found[name], model.get_parameter(name)[3:9])


def test_names() -> None:
    assert to_peft_name("layers.3.attention.q.lora_a.weight", SPEC) == (
        "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    )
    assert to_peft_name("layers.0.mlp.down.lora_b.weight", SPEC).endswith("layers.0.mlp.down_proj.lora_B.weight")


def test_an_adapter_that_is_not_the_recipes(tmp_path: Path) -> None:
    """All that differs, at once, with what to write."""
    settings = Lora(4, 8.0, ("q", "v"))
    model = adapted(settings)
    write(tmp_path, model, settings)
    parts = {name: (slice(0, 1), slice(0, 1)) for name, _ in model.named_parameters()}
    with pytest.raises(DataError) as caught:
        list(read_adapter(tmp_path / "adapter", parts, replace(settings, rank=8, rslora=True), SPEC))
    said = [str(problem) for problem in caught.value.problems]
    assert len(said) == 2 and "lora.rank: 4" in said[0] and "use_rslora" in said[1]
    with pytest.raises(DataError, match=r"differ in 4 tensors"):
        list(read_adapter(tmp_path / "adapter", {k: v for k, v in parts.items() if ".v." not in k}, settings, SPEC))
