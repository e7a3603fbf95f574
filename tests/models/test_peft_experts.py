"""Adapters of experts out and in, against PEFT itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import DataError
from shardwise.models.config import ModelSpec
from shardwise.models.decoder import Decoder
from shardwise.models.peft import adapter_settings, read_adapter
from shardwise.models.roles import is_adapter
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import lora
from tests.models import families
from tests.models.test_peft import is_read, is_written, write
from tests.said import refusal

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, about its own names
    # PEFT looks for the names among modules only, and then does use them of parameters.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

SETTINGS = {
    "all-linear": Lora(4, 8.0),
    "experts alone": Lora(4, 8.0, ("expert_gate", "expert_up", "expert_down"), rslora=True, dropout=0.5),
    "gate alone": Lora(4, 8.0, ("expert_gate", "k")),
    "down alone": Lora(4, 8.0, ("expert_down",)),
}
FAMILIES = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "dots1",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_moe_text",
)


def adapted(settings: Lora, spec: ModelSpec) -> Decoder:
    model = families.random_model(spec)
    lora.apply([model], Plan(lora=settings), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.2)
    return model


def base_of(directory: Path) -> PreTrainedModel:
    """With products one expert after another, of any sizes."""
    given = {"dtype": torch.float32, "experts_implementation": "eager"}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, **given)
    return model


@pytest.mark.matrix(7)
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_what_is_written(tmp_path: Path, family: str, what: str) -> None:
    """And read as it was."""
    spec, settings = families.spec_of(family), SETTINGS[what]
    is_written(tmp_path, settings, lambda: adapted(settings, spec), base_of, 1e-3)
    found = adapter_settings(tmp_path / "adapter", spec)
    assert found["dropout"] == 0 and found["rank"] == 4
    if what != "gate alone":  # of which up's is there too, and is zero
        assert found["targets"] == "all-linear" if what == "all-linear" else {*found["targets"]} == {*settings.targets}


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.prove)])
def test_what_peft_writes_is_read(tmp_path: Path, family: str) -> None:
    """Its A of gate and up is one: each gets a copy."""
    spec, settings = families.spec_of(family), Lora(4, 8.0, ("q", "expert_gate", "expert_up", "expert_down"))
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    base = base_of(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False
    )
    is_read(peft.get_peft_model(base, config), tmp_path, model, settings)
    assert {*adapter_settings(tmp_path / "theirs", spec)["targets"]} == {*settings.targets}


def test_what_the_recipe_does_not_have_is_told(tmp_path: Path) -> None:
    spec, settings = families.spec_of("mixtral"), Lora(4, 8.0, ("expert_down",))
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    parts = {name: tuple(slice(0, n) for n in value.shape) for name, value in model.named_parameters()}
    other = {name.replace("_down", "_up"): part for name, part in parts.items() if ".lora_" in name}
    with pytest.raises(DataError, match=refusal("CKPT003", "down_proj", "gate_up_proj")):
        list(read_adapter(tmp_path / "adapter", other, replace(settings, targets=("expert_up",)), spec))
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"target_parameters": ["mlp.gate"]}))
    with pytest.raises(DataError, match="uses target_parameters"):
        list(read_adapter(tmp_path / "adapter", parts, settings, spec))


def test_a_rank_reads_what_it_has(tmp_path: Path) -> None:
    """Of two ranks each has half of the experts."""
    spec, settings = families.spec_of("qwen2_moe"), Lora(4, 8.0, ("expert_gate", "expert_up"))
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    named = {name: value.detach() for name, value in model.named_parameters() if is_adapter(name)}
    halves = {name: (slice(len(value) // 2, len(value)), slice(0, value.shape[1])) for name, value in named.items()}
    for name, value in read_adapter(tmp_path / "adapter", halves, settings, spec):
        assert torch.equal(value, named[name][halves[name]])


def test_an_adapter_of_experts_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    """Of gate and up as one matrix, where what one has of rank is not zero in the rows of the other."""
    spec, settings = families.spec_of("mixtral"), Lora(4, 8.0, ("expert_gate", "expert_up"))
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    parts = {name: tuple(slice(0, n) for n in value.shape) for name, value in model.named_parameters()}
    own = {name: part for name, part in parts.items() if is_adapter(name)}
    assert {name for name, _ in read_adapter(tmp_path / "adapter", own, settings, spec)} == own.keys()
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: torch.ones_like(value) for name, value in tensors.items()}, file)
    with pytest.raises(DataError, match="is not block-diagonal"):
        list(read_adapter(tmp_path / "adapter", own, settings, spec))
