"""Adapters out and in, against PEFT itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.errors import DataError, MissingInputError
from shardwise.models import hf
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.models.hf_model import Model, model_of
from shardwise.models.peft import read_adapter, write_adapter
from shardwise.models.resolve import with_adapter
from shardwise.models.roles import is_adapter
from shardwise.spec.cluster import local_cluster
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.techniques import lora
from tests.models import families, hf_models

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

SPEC = model_spec("small", 96, 32, 48, 2, 4, 2, 8, attention_bias=True)
STACKED = families.spec_of("phi3")
IN_TURN = with_fields(families.spec_of("qwen3_next"), vocab_size=SPEC.vocab_size, num_experts=0)
TURNED = hf_models.spec_of("gpt2")
IDS = torch.arange(40).remainder(96).view(2, 20)
POSITIONS = torch.arange(20).expand(2, 20)


def adapted(settings: Lora, spec: ModelSpec = SPEC) -> Model:
    """A model with random weights, B of its adapters too."""
    torch.manual_seed(0)
    model = model_of(spec)
    lora.apply([model], Plan(lora=settings), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) or name.endswith(("bias", "decay_log")) or ".conv_" in name or settings.saves(name):
                parameter.normal_(std=0.2)
    return model


def write(directory: Path, model: Model, settings: Lora) -> None:
    """The base has other ends than the model where these were trained."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    base = {name: value.flip(0) if settings.saves(name) else value for name, value in named.items()}
    hf.write_weights(directory / "base", model.spec, base.__getitem__)
    adapters = {name: value for name, value in named.items() if is_adapter(name)}
    adapters |= {name: value for name, value in named.items() if settings.saves(name)}
    write_adapter(directory / "adapter", settings, model.spec, str(directory / "base"), adapters, named.__getitem__)


def read(directory: Path, model: Model, settings: Lora) -> None:
    """Give ``model`` the adapter in ``directory``."""
    parameters = dict(model.named_parameters())
    parts = {name: tuple(slice(0, n) for n in value.shape) for name, value in parameters.items()}
    for name, value in read_adapter(directory, parts, settings, model.spec):
        parameters[name].detach().copy_(value)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("spec", [SPEC, STACKED], ids=["llama", "phi3"])
@pytest.mark.parametrize(
    "settings",
    [
        Lora(4, 8.0),
        Lora(4, 8.0, ("q", "k", "v")),
        Lora(8, 4.0, ("gate", "up", "down", "o"), rslora=True),
        Lora(4, 8.0, dropout=0.5, dora=True),
    ],
    ids=["all-linear", "attention", "rslora", "dora"],
)
def test_peft_reads_what_is_written(tmp_path: Path, settings: Lora, spec: ModelSpec) -> None:
    """The same logits within 1e-5 of their norm: fp32 sums in another order; and not those of the base. Phi's files
    stack layers: there the adapters of several are one of PEFT's, of as many times the rank."""
    check_written(tmp_path, settings, spec)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        (Lora(4, 8.0, ("q", "q_gate", "k", "o", "in_q", "in_k", "in_v", "in_z", "in_b", "in_a", "out")), []),
        (Lora(4, 8.0, ("q", "q_gate", "in_b", "in_a"), dora=True), ["q_proj", "in_proj_ba"]),
        (Lora(4, 8.0, ("in_q", "in_k", "in_v", "in_z")), ["in_proj_qkvz"]),
    ],
    ids=["mixers", "dora", "one"],
)
def test_adapters_of_layers_whose_rows_are_in_turn(tmp_path: Path, settings: Lora, layers: list[str]) -> None:
    """Qwen3-Next's files have them head by head; both ways."""
    check_written(tmp_path, settings, IN_TURN)
    if not layers:
        return
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    given: dict[str, Any] = {"use_dora": settings.dora, "init_lora_weights": False}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, **given)
    is_read(peft.get_peft_model(base, config), tmp_path, adapted(settings, IN_TURN), settings)


ENDS = Lora(4, 8.0, ("q", "v"), modules_to_save=("embed", "head"))


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SPEC, ENDS),
        (SPEC, replace(ENDS, modules_to_save=("head",))),
        (SPEC, replace(ENDS, modules_to_save=("embed",))),
        (replace(SPEC, tie_word_embeddings=True), ENDS),
        (STACKED, replace(ENDS, targets=())),
        (TURNED, replace(ENDS, targets=())),
    ],
    ids=["both", "output layer", "embedding", "tied", "phi3", "gpt2"],
)
def test_peft_reads_ends_that_were_trained_whole(tmp_path: Path, spec: ModelSpec, settings: Lora) -> None:
    """As its ``modules_to_save``; of a tied weight under both names."""
    check_written(tmp_path, settings, spec)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    names = {"embed": "wte" if spec is TURNED else "embed_tokens", "head": "lm_head"}
    assert config["modules_to_save"] == [names[end] for end in settings.modules_to_save]


@pytest.mark.parametrize("tied", [False, True])
def test_ends_that_peft_trained_are_read(tmp_path: Path, tied: bool) -> None:
    """Also where the recipe says nothing of them: its settings are then the adapter's."""
    spec = replace(SPEC, tie_word_embeddings=tied)
    model = adapted(ENDS, spec)
    write(tmp_path, model, ENDS)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head", "embed_tokens"],
        ensure_weight_tying=tied,
    )
    theirs = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    is_read(theirs, tmp_path, model, ENDS)
    recipe = load_recipe(None, [f"model.path={tmp_path / 'base'}", f"lora.path={tmp_path / 'theirs'}"])
    found = lora.settings(with_adapter(recipe).lora, Precision())
    assert found is not None and found.modules_to_save == ("embed", "head")


def test_a_stage_reads_its_own_part(tmp_path: Path) -> None:
    """Of a pipeline each rank has some blocks, and one end."""
    model = adapted(ENDS)
    write(tmp_path, model, ENDS)
    parameters = dict(model.named_parameters())
    last = {name: value for name, value in parameters.items() if name.startswith(("layers.1.", "head."))}
    parts = {name: tuple(slice(0, n) for n in value.shape) for name, value in last.items()}
    found = dict(read_adapter(tmp_path / "adapter", parts, ENDS, SPEC, lora.trained(SPEC, ENDS)))
    assert found.keys() == {name for name in last if is_adapter(name)} | {"head.weight"}
    assert all(torch.equal(value, parameters[name]) for name, value in found.items())


def test_ends_and_recipe_must_agree(tmp_path: Path) -> None:
    write(tmp_path, adapted(ENDS), ENDS)
    for other, said in (((), "recipe nothing"), (("head",), "recipe head")):
        with pytest.raises(DataError, match=f"CKPT003.*embed, head whole .*{said}"):
            settings = replace(ENDS, modules_to_save=other)
            read(tmp_path / "adapter", adapted(settings), settings)


@pytest.mark.parametrize(
    "settings",
    [
        Lora(4, 8.0),
        Lora(8, 4.0, ("c", "c_fc"), rslora=True),
        Lora(4, 8.0, ("c_attn", "c"), dropout=0.5, dora=True),
    ],
    ids=["all-linear", "rslora", "dora"],
)
def test_peft_reads_what_is_written_of_turned_layers(tmp_path: Path, settings: Lora) -> None:
    """Each block has two layers called c_proj: both or none have adapters, here and there."""
    check_written(tmp_path, settings, TURNED)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = {"c": "c_proj"}
    targets = [names.get(role, role) for role in settings.targets]
    assert config["fan_in_fan_out"] and (not targets or config["target_modules"] == sorted(targets))


def check_written(tmp_path: Path, settings: Lora, spec: ModelSpec) -> None:
    """Of an adapter that moves the logits by a hundredth at least."""
    is_written(tmp_path, settings, lambda: adapted(settings, spec), AutoModelForCausalLM.from_pretrained, 1e-2)


def is_written(
    tmp_path: Path, settings: Lora, make: Callable[[], Model], load: Callable[[Path], Any], least: float
) -> None:
    """PEFT computes the same logits, within 1e-5 of their norm, and not those of the base, by ``least`` of it; and we
    read the same values. ``load`` makes transformers' model of the base in a directory."""
    model = make()
    write(tmp_path, model, settings)
    base = load(tmp_path / "base")
    plain = logits(base)
    theirs = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    with torch.no_grad():
        ours = model(IDS, POSITIONS, MaskSpec())
    assert (theirs - ours).norm() < 1e-5 * ours.norm()
    assert (plain - ours).norm() > least * ours.norm()
    again = make()
    for name, parameter in again.named_parameters():
        if is_adapter(name):
            parameter.detach().zero_()
    read(tmp_path / "adapter", again, settings)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


def is_read(theirs: Any, tmp_path: Path, model: Model, settings: Lora) -> None:
    """PEFT saves it, we read it, and both compute the same."""
    theirs.save_pretrained(tmp_path / "theirs")
    read(tmp_path / "theirs", model, settings)
    with torch.no_grad():
        ours = model(IDS, POSITIONS, MaskSpec())
    assert (logits(theirs) - ours).norm() < 1e-5 * ours.norm()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("spec", "targets", "layers"),
    [
        (SPEC, ("q", "up"), ["q_proj", "up_proj"]),
        (STACKED, ("q", "k", "v"), ["qkv_proj"]),
        (TURNED, ("c_attn", "c_fc"), ["c_attn", "c_fc"]),
        (TURNED, ("c",), ["c_proj"]),
    ],
    ids=["llama", "phi3", "gpt2", "gpt2's two of one name"],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_writes_is_read(
    tmp_path: Path, dora: bool, rslora: bool, spec: ModelSpec, targets: tuple[str, ...], layers: list[str]
) -> None:
    """PEFT's adapter of a stacked layer has one A: each of the layers in it gets a copy."""
    settings = Lora(4, 8.0, targets, rslora=rslora, dora=dora)
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    given: dict[str, bool] = {"use_dora": dora, "use_rslora": rslora, "fan_in_fan_out": spec is TURNED}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, init_lora_weights=False, **given)
    is_read(peft.get_peft_model(base, config), tmp_path, model, settings)


def test_an_adapter_of_stacked_layers_that_was_trained_on_as_one(tmp_path: Path) -> None:
    """It has no counterpart of the recipe's rank: what stands outside the blocks would be lost."""
    settings = Lora(4, 8.0, ("q", "k", "v"))
    model = adapted(settings, STACKED)
    write(tmp_path, model, settings)
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, -1] = 1e-3
    save_file(tensors, file)
    with pytest.raises(DataError, match=r"qkv_proj.lora_B.weight .*block-diagonal"):
        read(tmp_path / "adapter", model, settings)


def test_an_adapter_of_stacked_layers_that_is_not_the_recipes(tmp_path: Path) -> None:
    """What differs is named, and nothing else; targets as a recipe has them."""
    settings = Lora(4, 8.0, ("q", "k", "v", "down"))
    write(tmp_path, adapted(settings, STACKED), settings)
    for other, said in (
        (replace(settings, rank=2), "lora.rank: 4"),
        (replace(settings, alpha=2.0), "lora.alpha: 8.0"),
        (replace(settings, targets=("q", "k", "v")), "lora.targets: [down, q, k, v]"),
    ):
        with pytest.raises(DataError) as caught:
            read(tmp_path / "adapter", adapted(other, STACKED), other)
        assert [problem.fix for problem in caught.value.problems] == [said]
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(config.read_text().replace('"qkv_proj": 12', '"qkv_proj": 8'))
    with pytest.raises(DataError, match="rank_pattern"):
        read(tmp_path / "adapter", adapted(settings, STACKED), settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"modules_to_save": ["lm_head", "norm"]}, "modules_to_save a list"),
        ({"bias": "lora_only"}, "bias lora_only"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # PEFT takes the bias of a B for a shard
def test_what_peft_can_do_beside_is_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    """Some of it would load and be wrong: PiSSA and OLoRA take what the adapter begins with out of the model."""
    settings = Lora(4, 8.0, ("q",))
    model = adapted(settings)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **given}
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(DataError, match=f"{said}.*, .*not supported"):
        read(tmp_path / "theirs", model, settings)


def test_what_a_config_says_of_itself_is_believed(tmp_path: Path) -> None:
    """Words of PEFT's that take more than a model to make an adapter of: here they are written into a plain one's."""
    settings = Lora(4, 8.0, ("q",))
    model = adapted(settings)
    write(tmp_path, model, settings)
    file = tmp_path / "adapter/adapter_config.json"
    plain = json.loads(file.read_text())
    for key, value in (
        *(("init_lora_weights", first) for first in ("pissa_niter_4", "corda", "loftq", "lora_ga")),
        *((key, {"a": 1}) for key in ("layer_replication", "target_parameters", "use_bdlora", "arrow_config")),
    ):
        file.write_text(json.dumps(plain | {key: value}))
        with pytest.raises(DataError, match=f"the adapter uses {key}") as caught:
            read(tmp_path / "adapter", model, settings)
        (problem,) = caught.value.problems
        assert ("save_pretrained" in problem.fix) == (value in ("pissa_niter_4", "corda", "lora_ga"))
    for value in (None, "Gaussian", "eva", "mica"):
        file.write_text(json.dumps(plain | {"init_lora_weights": value}))
        read(tmp_path / "adapter", model, settings)


@pytest.mark.parametrize(
    ("spec", "role", "given"),
    [
        (SPEC, "q", {"target_modules": ["q_proj"], "layers_to_transform": [0]}),
        (SPEC, "q", {"target_modules": ["q_proj"], "layers_to_transform": 0}),
        (TURNED, "c", {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}),
    ],
    ids=["some blocks", "the first block", "one of two layers of a name"],
)
def test_an_adapter_that_no_recipe_can_name(tmp_path: Path, spec: ModelSpec, role: str, given: dict[str, Any]) -> None:
    """Not told to write targets that would be refused next."""
    settings = Lora(4, 8.0, (role,))
    model = adapted(settings, spec)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **given)).save_pretrained(tmp_path / "theirs")
    with pytest.raises(DataError, match="targets differ") as caught:
        read(tmp_path / "theirs", model, settings)
    assert [problem.fix.split()[1] for problem in caught.value.problems] == ["adapter"]


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")  # of other adapters beside it
def test_a_converted_pissa_adapter_is_a_plain_one(tmp_path: Path) -> None:
    """What the refusal says to do: of twice the rank, on the model as it was."""
    settings = Lora(8, 16.0, ("q",))
    model = adapted(settings)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights="pissa")
    theirs = peft.get_peft_model(base, config)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "first")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            value += 0.05 * torch.randn_like(value) if "lora_" in name else 0.0
    right = logits(theirs)
    converted = tmp_path / "theirs"
    theirs.save_pretrained(converted, path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    read(converted, model, settings)
    with torch.no_grad():
        ours = model(IDS, POSITIONS, MaskSpec())
    assert (right - ours).norm() < 1e-4 * ours.norm()  # the model with the first value taken out and put back, in fp32


@pytest.mark.parametrize("first", [True, False, "gaussian", "orthogonal"])
def test_how_an_adapter_began_is_no_hindrance(tmp_path: Path, first: bool | str) -> None:
    settings = Lora(4, 8.0, ("q",))
    model = adapted(settings)
    write(tmp_path, model, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=first)  # type: ignore[arg-type]
    is_read(peft.get_peft_model(base, config), tmp_path, model, settings)


def test_an_adapter_of_another_size(tmp_path: Path) -> None:
    settings = Lora(4, 8.0, ("q", "v"))
    write(tmp_path, adapted(settings, replace(SPEC, hidden_size=24)), settings)
    with pytest.raises(DataError, match=r"lora_A.weight .*\[4, 24\], .*\[4, 32\]"):
        read(tmp_path / "adapter", adapted(settings), settings)


PATTERNS = Precision("bf16", modules=(("*norm", "fp32"),))


@pytest.mark.parametrize(
    ("spec", "plan", "fixes"),
    [
        (STACKED, Plan(lora=Lora(4, 8.0, ("q", "down", "gate"))), ["add k, v", "add up"]),
        (STACKED, Plan(lora=Lora(4, 8.0, ("qkv", "o", "down"))), ["q, k, v"]),
        (SPEC, Plan(lora=Lora(4, 8.0, ("q", "down", "gate"))), []),
        (SPEC, Plan(lora=Lora(4, 8.0, ("gats",))), ["did you mean `gate`?"]),
        (SPEC, Plan(lora=Lora(4, 8.0, ("xyz",))), ["all-linear, or some of q, k, v, o, gate, up, down"]),
        (SPEC, Plan(lora=Lora(17, 8.0)), ["16"]),
        (SPEC, Plan(lora=Lora(4, 8.0), precision=PATTERNS), ["leave out precision.modules"]),
        (TURNED, Plan(lora=Lora(4, 8.0, ("c_attn", "c", "c_fc"))), []),
        (TURNED, Plan(lora=Lora(4, 8.0, ("c_fx",))), ["did you mean `c_fc`?"]),
        (hf_models.spec_of("glm4"), Plan(lora=Lora(4, 8.0, ("gate_up",))), []),
    ],
    ids=[
        "part of a stack",
        "a stack's name",
        "no stack",
        "a typo",
        "unknown",
        "thick",
        "types",
        "turned",
        "turned, a typo",
        "foreign",
    ],
)
def test_what_has_no_adapter_is_told_with_what_to_write(spec: ModelSpec, plan: Plan, fixes: list[str]) -> None:
    problems = lora.check(spec, plan, local_cluster())
    assert [problem.fix for problem in problems] == fixes and {problem.code for problem in problems} <= {"PLAN018"}


@pytest.mark.parametrize("spec", [SPEC, STACKED, TURNED], ids=["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("target", ["all-linear", "some"])
def test_what_an_adapter_says_of_itself_need_not_be_repeated(tmp_path: Path, spec: ModelSpec, target: str) -> None:
    """As a recipe says it, so that the plan's settings are those that it was written with."""
    some = ("c_attn",) if spec is TURNED else ("q", "k", "v")
    asked = Lora(6, 9.0, some if target == "some" else (), rslora=True, dora=True, dropout=0.25)
    write(tmp_path, adapted(asked, spec), asked)
    words = [f"model.path={tmp_path / 'base'}", f"lora.path={tmp_path / 'adapter'}"]
    recipe = with_adapter(load_recipe(None, words))
    assert lora.settings(recipe.lora, Precision()) == asked
    assert with_adapter(load_recipe(None, [*words, "lora.dropout=0", "lora.rank=8"])).lora.model_dump() == {
        **recipe.lora.model_dump(),
        "dropout": 0.0,
        "rank": 8,
    }


def test_an_adapter_whose_own_words_make_no_sense(tmp_path: Path) -> None:
    write(tmp_path, adapted(Lora(4, 8.0)), Lora(4, 8.0))
    file = tmp_path / "adapter" / "adapter_config.json"
    words = [f"model.path={tmp_path / 'base'}", f"lora.path={tmp_path / 'adapter'}"]
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"r": 0, "lora_alpha": "8"}))
    with pytest.raises(DataError, match=r"CKPT009.*adapter_config.json .*r: 0, lora_alpha: text .8."):
        with_adapter(load_recipe(None, words))
    file.unlink()
    with pytest.raises(MissingInputError, match="CKPT001"):
        with_adapter(load_recipe(None, words))


def test_a_slice_of_an_adapter(tmp_path: Path) -> None:
    model = adapted(Lora(4, 8.0))
    write(tmp_path, model, Lora(4, 8.0))
    name = "layers.1.mlp.down.lora_b.weight"
    parts = {other: (slice(0, 0), slice(0, 0)) for other, _ in model.named_parameters() if is_adapter(other)}
    found = dict(read_adapter(tmp_path / "adapter", parts | {name: (slice(3, 9), slice(0, 4))}, Lora(4, 8.0), SPEC))
    assert torch.equal(found[name], model.get_parameter(name)[3:9])


def test_names(tmp_path: Path) -> None:
    settings = Lora(4, 8.0, ("q", "down"))
    write(tmp_path, adapted(settings), settings)
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(found) == 8 and "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in found
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight" in found


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_adapter_is_written_in_its_own_type_and_read_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    settings = Lora(4, 8.0, dora=True)
    model = adapted(settings).to(dtype)
    write(tmp_path, model, settings)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in stored.values()} == {dtype}
    again = adapted(settings).to(dtype)
    for name, parameter in again.named_parameters():
        parameter.data.zero_() if is_adapter(name) else None
    read(tmp_path / "adapter", again, settings)
    kept = dict(model.named_parameters())
    assert all(torch.equal(kept[name], value) for name, value in again.named_parameters() if is_adapter(name))
