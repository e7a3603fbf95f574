"""Weights of experts in and out of files: one by one, in stacks, and in 4 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwise.errors import DataError
from shardwise.models import hf, tensorfile
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, parameter_shapes, with_fields
from shardwise.models.families import FAMILIES
from shardwise.models.hf_names import locations, tensors
from shardwise.models.stored import dequantised
from tests.models.families import LENGTH, config_of, in_memory, pair, random_model, spec_of
from tests.models.growth import grown
from tests.models.llama import relative, tokens

EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss")
WEIGHTS = [f"layers.2.mlp.experts.expert_{name}.weight" for name in ("gate", "up", "down")]


def everything(spec: ModelSpec) -> dict[str, tuple[slice, ...]]:
    return {name: tuple(slice(0, n) for n in shape) for name, shape in parameter_shapes(spec).items()}


def written(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, dict[str, Tensor]]:
    spec = spec_of(family, 1)
    state = random_model(spec).to(dtype).state_dict()
    hf.write_weights(directory, spec, state.__getitem__, dtype)
    return spec, state


def packed(directory: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """gpt-oss in MXFP4 with random bytes, and the values that transformers reads there."""
    spec, _ = written(directory, "gpt_oss", torch.bfloat16)
    held, values = load_file(directory / hf.SINGLE), {}
    torch.manual_seed(0)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = held.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(held, directory / hf.SINGLE)
    return spec, {**held, **values}


@pytest.mark.parametrize("family", EXPERTS)
def test_slices_of_experts(tmp_path: Path, family: str) -> None:
    """Within one and over several; no more is allocated than what was asked for."""
    spec, state = written(tmp_path, family)
    for name in WEIGHTS:
        rows, columns = state[name].shape
        each = rows // spec.experts.num_experts
        for start, stop in ((0, 1), (each - 1, each + 1), (3, 3 * each - 2), (rows - 1, rows), (5, 5)):
            part = {name: (slice(start, stop), slice(2, columns - 3))}
            [(_, value)] = hf.read_weights(tmp_path, part, spec)
            assert torch.equal(value, state[name][part[name]]) and value.is_contiguous()
            assert value.untyped_storage().nbytes() == value.numel() * 4
    if spec.experts.expert_bias:
        part = {"layers.0.mlp.experts.expert_up.bias": (slice(3, 3 * spec.experts.expert_size - 2),)}
        for name, value in hf.read_weights(tmp_path, part, spec):
            assert torch.equal(value, state[name][part[name]])


@pytest.mark.parametrize("family", EXPERTS)
def test_files_have_the_names_of_the_published_ones(tmp_path: Path, family: str) -> None:
    """Not those that transformers 5 has in memory."""
    spec, _ = written(tmp_path, family)
    expert = {
        "mixtral": "block_sparse_moe.experts.3.w2.weight",
        "gpt_oss": "mlp.experts.down_proj",
    }.get(family, "mlp.experts.3.down_proj.weight")
    router = {"mixtral": "block_sparse_moe.gate.weight", "gpt_oss": "mlp.router.weight"}.get(family, "mlp.gate.weight")
    shapes = {name: tuple(value.shape) for name, value in load_file(tmp_path / hf.SINGLE).items()}
    assert shapes[f"model.layers.2.{router}"] == (spec.experts.num_experts, spec.hidden_size)
    own = (spec.hidden_size, spec.experts.expert_size)
    count = spec.experts.num_experts
    assert shapes[f"model.layers.2.{expert}"] == ((count, *own[::-1]) if family == "gpt_oss" else own)


@pytest.mark.parametrize("family", EXPERTS)
def test_what_transformers_has_in_memory_is_read(tmp_path: Path, family: str) -> None:
    """As it is saved on request: all experts of a layer in two tensors."""
    ours, theirs = pair(family)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in load_file(tmp_path / hf.SINGLE))
    read = dict(hf.read_weights(tmp_path, everything(ours.spec), ours.spec))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in read.items())


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000, 1_500, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_writing_is_told_beforehand(tmp_path: Path, family: str, max_shard_bytes: int) -> None:
    """By which ranks that do not write take part in gathering: each parameter once, however files are cut."""
    spec = spec_of(family)
    state, fetched = random_model(spec).state_dict(), []

    def fetch(name: str) -> Tensor:
        fetched.append(name)
        return state[name]

    hf.write_weights(tmp_path, spec, fetch, max_shard_bytes=max_shard_bytes)
    assert fetched == hf.order_of_writing(spec)
    assert sorted(fetched) == sorted(parameter_shapes(spec))


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    spec, values = packed(tmp_path)
    named = {name: value.dtype for name, value in values.items()}
    plain = in_memory(spec, {name: torch.zeros(shape) for name, shape in parameter_shapes(spec).items()}, ())
    assert plain.keys() < named.keys()
    read = dict(hf.read_weights(tmp_path, everything(spec), spec))
    again = in_memory(spec, read, ())
    for name in plain:
        assert again[name].dtype == torch.bfloat16 and torch.equal(again[name], values[name].bfloat16()), name


def test_slices_of_mxfp4(tmp_path: Path) -> None:
    """Also such as begin and end within the 32 values of one scale."""
    spec, _ = packed(tmp_path)
    whole = dict(hf.read_weights(tmp_path, everything(spec), spec))
    for name in WEIGHTS:
        each, columns = whole[name].shape[0] // spec.experts.num_experts, whole[name].shape[1]
        for chosen in (slice(0, columns), slice(3, 20), slice(columns - 5, columns), slice(31, 32), slice(7, 7)):
            part = {name: (slice(each - 2, 3 * each + 1), chosen)}
            [(_, value)] = hf.read_weights(tmp_path, part, spec)
            assert torch.equal(value, whole[name][part[name]])
            assert value.untyped_storage().nbytes() == value.numel() * 2


def test_every_byte_of_mxfp4() -> None:
    """By the definition: a sign, two bits of exponent, one of mantissa, and the scale's power of two."""

    def value(code: int) -> float:
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        return -size if code & 8 else size

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    for scale in (0, 1, 100, 126, 127, 128, 200, 252):
        found = dequantised(blocks, torch.full((1, 16), scale, dtype=torch.uint8))
        expected = [value(code) * 2.0 ** (scale - 127) for byte in range(256) for code in (byte & 15, byte >> 4)]
        assert found.dtype == torch.bfloat16 and found[0].tolist() == expected
    assert dequantised(blocks, torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all()


def test_a_model_in_mxfp4_computes_what_transformers_computes(tmp_path: Path) -> None:
    """transformers dequantises too where it has no kernel: the logits are within the roundings of fp32."""
    spec, values = packed(tmp_path)
    config = config_of("gpt_oss", 1)
    ours = random_model(spec)
    ours.load_state_dict(dict(hf.read_weights(tmp_path, everything(spec), spec)), strict=not spec.tie_word_embeddings)
    state = {name: value.float() for name, value in values.items() if value.dtype != torch.uint8}
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    theirs.load_state_dict(state, strict=not spec.tie_word_embeddings)
    theirs.tie_weights()
    ids, positions = tokens(spec.vocab_size, length=LENGTH)
    reference = theirs.eval()(ids, use_cache=False).logits
    assert relative(ours(ids, positions, MaskSpec()), reference) < 2e-5


@pytest.mark.prove
def test_reading_a_slice_of_a_stack_allocates_the_slice_alone(tmp_path: Path) -> None:
    """Anonymous memory of a fresh process grows by less than 8 MiB when 1 MiB of a stack of 256 MiB is read."""
    shape = (8, 2048, 4096)
    tensorfile.write(tmp_path / "big.safetensors", {"x": shape}, torch.float32, [torch.ones(shape)])
    first = """
locations = [Location(2048 * e, 2048 * (e + 1), 'x', entry.shape, 1, 2, e, True) for e in range(8)]
stored = StoredParameter(tuple(StoredRows(location, entry) for location in locations))
"""
    read = "stored.read_finite([slice(2000, 2128), slice(0, 2048)])"
    grown_bytes, total = grown(tmp_path / "big.safetensors", read, first)
    assert grown_bytes < 8 * 2**20 and total == 128 * 2048


Change = Callable[[dict[str, Tensor]], None]
ONE = "model.layers.1.mlp.experts.3.up_proj.weight"


def without_one(held: dict[str, Tensor]) -> None:
    del held[ONE]


def one_more(held: dict[str, Tensor]) -> None:
    held[ONE.replace(".3.", ".6.")] = held[ONE].clone()


def one_wider(held: dict[str, Tensor]) -> None:
    held[ONE] = torch.zeros(held[ONE].shape[0] + 1, held[ONE].shape[1])


def one_quantised(held: dict[str, Tensor]) -> None:
    held[ONE] = held[ONE].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "code", "what", "fix"),
    [
        (without_one, "CKPT003", f"1 tensors missing ({ONE}), 0 unexpected", "6 experts"),
        (one_more, "CKPT003", f"0 tensors missing, 1 unexpected ({ONE.replace('.3.', '.6.')})", "6 experts"),
        (one_wider, "CKPT002", f"`{ONE}` file [", "fix the config"),
        (one_quantised, "CKPT004", f"1 tensors are quantised (torch.int8): {ONE}", "unquantised"),
    ],
)
def test_a_fault_in_one_expert_is_told(tmp_path: Path, change: Change, code: str, what: str, fix: str) -> None:
    spec, _ = written(tmp_path, "qwen3_moe")
    held = load_file(tmp_path / hf.SINGLE)
    change(held)
    save_file(held, tmp_path / hf.SINGLE)
    with pytest.raises(DataError) as caught:
        list(hf.read_weights(tmp_path, {}, spec))
    [problem] = caught.value.problems
    assert problem.code == code and what in problem.what and fix in problem.fix and problem.where == str(tmp_path)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    """By the parameter's name where it is one tensor, by the tensor's where it is one of several."""
    spec, _ = written(tmp_path, "qwen3_moe")
    held = load_file(tmp_path / hf.SINGLE)
    for change in (one_more, one_wider):
        change(held)
    del held["model.norm.weight"], held["model.layers.2.mlp.experts.0.gate_proj.weight"]
    save_file(held, tmp_path / hf.SINGLE)
    with pytest.raises(DataError) as caught:
        list(hf.read_weights(tmp_path, {}, spec))
    told = str(caught.value)
    assert [problem.code for problem in caught.value.problems] == ["CKPT003", "CKPT002"]
    assert "2 tensors missing (" in told and "1 unexpected" in told and "1 of " in told
    assert "model.layers.2.mlp.experts.0.gate_proj.weight" in told and " norm.weight" in told


def test_of_another_number_of_experts(tmp_path: Path) -> None:
    spec, _ = written(tmp_path, "mixtral")
    with pytest.raises(DataError, match=r"18 tensors missing \(model\.layers\.0\.block_sparse_moe\.experts\.\d"):
        list(hf.read_weights(tmp_path, {}, with_fields(spec, num_experts=spec.experts.num_experts + 2)))
    spec, _ = written(tmp_path, "gpt_oss")
    with pytest.raises(DataError, match=r"experts\.gate_up_proj` file \[6, 64, \d+\], model \[7, 64, \d+\]"):
        list(hf.read_weights(tmp_path, {}, with_fields(spec, num_experts=7)))


@pytest.mark.parametrize(
    ("name", "to", "code", "what"),
    [
        ("gate_up_proj_scales", None, "CKPT003", "1 tensors missing (model.layers.1.mlp.experts.gate_up_proj_scales)"),
        ("down_proj_blocks", torch.int8, "CKPT004", "model.layers.1.mlp.experts.down_proj_blocks"),
    ],
)
def test_faults_of_mxfp4(tmp_path: Path, name: str, to: torch.dtype | None, code: str, what: str) -> None:
    spec, _ = packed(tmp_path)
    held = load_file(tmp_path / hf.SINGLE)
    value = held.pop(f"model.layers.1.mlp.experts.{name}")
    held |= {} if to is None else {f"model.layers.1.mlp.experts.{name}": value.to(to)}
    save_file(held, tmp_path / hf.SINGLE)
    with pytest.raises(DataError) as caught:
        list(hf.read_weights(tmp_path, {}, spec))
    assert [problem.code for problem in caught.value.problems] == [code]
    assert what in caught.value.problems[0].what


def test_a_damaged_expert_is_told_by_its_own_name(tmp_path: Path) -> None:
    spec, state = written(tmp_path, "mixtral")
    name = WEIGHTS[0]
    state[name][2 * spec.experts.expert_size + 1, 4] = torch.nan
    hf.write_weights(tmp_path, spec, state.__getitem__)
    list(hf.read_weights(tmp_path, {name: (slice(0, 2 * spec.experts.expert_size), slice(0, 8))}, spec))
    with pytest.raises(
        DataError, match=r"MOD006.*`model\.layers\.2\.block_sparse_moe\.experts\.2\.w1\.weight` holds 1 NaN"
    ):
        list(hf.read_weights(tmp_path, {name: (slice(0, 3 * spec.experts.expert_size), slice(0, 8))}, spec))


def test_a_scale_of_mxfp4_that_is_no_number(tmp_path: Path) -> None:
    spec, _ = packed(tmp_path)
    held = load_file(tmp_path / hf.SINGLE)
    held["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 0] = 255
    save_file(held, tmp_path / hf.SINGLE)
    with pytest.raises(DataError, match=r"MOD006.*`model\.layers\.1\.mlp\.experts\.down_proj` holds 32 NaN"):
        list(hf.read_weights(tmp_path, everything(spec), spec))


@pytest.mark.parametrize("family", EXPERTS)
def test_bf16_goes_both_ways(tmp_path: Path, family: str) -> None:
    """Bitwise."""
    spec, state = written(tmp_path, family, torch.bfloat16)
    read = dict(hf.read_weights(tmp_path, everything(spec), spec))
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, state[name]) for name, value in read.items())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {location.tensor for parts in locations(spec).values() for location in parts} == tensors(
        locations(spec)
    ).keys()
