"""Weights that files hold in float8 with scales, as DeepSeek, transformers and compressed-tensors write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from shardwise.cli.app import main
from shardwise.errors import ConfigError, DataError
from shardwise.models import float8, hf, quantization, tensorfile
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.decoder import Decoder
from shardwise.models.hf_names import Location
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.predictor import with_predictor
from shardwise.models.stored import StoredParameter, StoredRows
from shardwise.techniques.float8 import codes
from tests.models import hf_models
from tests.models.families import config_of, in_memory, random_model, spec_of
from tests.models.llama import relative, tokens
from tests.models.test_stored import everything
from tests.said import refusal, shows

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 120, "qk_rope_head_dim": 8, "qk_nope_head_dim": 56, "v_head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1}
MATRIX = re.compile(r"(_proj|kv_a_proj_with_mqa|experts\.gate_up_proj|experts\.down_proj)(\.weight)?$")


def quantised(value: Tensor, height: int, width: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Values in float8 and their scales in fp32, block by block, with a loop; fewer in a block at the edges."""
    rows, columns = value.shape
    scales, stored = torch.empty(-(-rows // height), -(-columns // width)), torch.empty(rows, columns, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = value[own].abs().max() / torch.finfo(dtype).max
            stored[own] = (value[own] / scales[i, j]).to(dtype)
    return stored, scales


def meant(stored: Tensor, scales: Tensor, height: int, width: int) -> Tensor:
    """The values in float64, one after another."""
    rows, columns = stored.shape
    found = stored.double()
    for row in range(rows):
        for column in range(columns):
            found[row, column] *= scales[row // height, column // width].double()
    return found


def parameter(path: Path, location: Location, blocks: tuple[quantization.Block, ...]) -> StoredParameter:
    """What rows of a tensor in a file are as a parameter."""
    found = tensorfile.entries(path)
    scales, problems = float8.scales_of({location.tensor: found[location.tensor]}, found, blocks, "here")
    assert not problems
    rows = StoredRows(location, found[location.tensor], float8=scales[location.tensor])
    return StoredParameter((rows,))


CUT = [(0, 70, 0, 90), (0, 1, 0, 1), (15, 17, 31, 33), (16, 48, 32, 64), (69, 70, 89, 90), (5, 64, 7, 71), (9, 9, 3, 3)]


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize(("height", "width"), [(16, 32), (128, 128), (1, 90), (70, 90), (1, 8)])
def test_every_slice_is_the_float64_product(tmp_path: Path, height: int, width: int, dtype: torch.dtype) -> None:
    """Blocks whose edges are cut off, a scale for a row, one for the matrix, and for a few values of a row."""
    torch.manual_seed(0)
    stored, scales = quantised(torch.randn(70, 90) * torch.logspace(-4, 2, 70).unsqueeze(1), height, width, dtype)
    save_file({"x": stored, "x_scale_inv": scales}, tmp_path / "x")
    exact = meant(stored, scales, height, width)
    read = parameter(tmp_path / "x", Location(0, 70, "x", (70, 90)), ((height, width),))
    for top, bottom, left, right in CUT:
        found = read.read_finite((slice(top, bottom), slice(left, right)))
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert found.untyped_storage().nbytes() == 4 * found.numel()
        assert torch.equal(found, exact[top:bottom, left:right].float()), "rounded once, to fp32"


def test_rows_of_a_stack_and_columns_of_a_matrix(tmp_path: Path) -> None:
    """Of one expert each second column, as gpt-oss has gate and up: blocks are counted in the file's matrix."""
    torch.manual_seed(0)
    matrices = [quantised(torch.randn(50, 40), 16, 32) for _ in range(3)]
    stored, scales = (torch.stack([one[i] for one in matrices]) for i in range(2))
    save_file({"x": stored, "x_scale_inv": scales}, tmp_path / "x")
    exact = meant(*matrices[1], 16, 32).T[1::2]
    location = Location(20, 40, "x", (3, 50, 40), first=1, step=2, expert=1, transposed=True)
    read = parameter(tmp_path / "x", location, ((16, 32),))
    for top, bottom, left, right in ((0, 20, 0, 50), (7, 9, 15, 33), (19, 20, 49, 50)):
        found = read.read_finite((slice(20 + top, 20 + bottom), slice(left, right)))
        assert torch.equal(found, exact[top:bottom, left:right].float())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix_has_many_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored, scales = quantised(torch.randn(70, 90), 70, 90)
    save_file({"x": stored, "x_scale": scales.view(shape)}, tmp_path / "x")
    read = parameter(tmp_path / "x", Location(0, 70, "x", (70, 90)), ())
    found = read.read_finite((slice(3, 60), slice(5, 80)))
    assert torch.equal(found, (stored.double() * scales.double())[3:60, 5:80].float())


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "group", "mxfp8"])
def test_what_compressed_tensors_wrote_is_what_it_reads(kind: str) -> None:
    """Bitwise in bf16, in which it dequantises (compressed_tensors_fixture.py). Scales of MXFP8 are bytes."""
    file = Path(__file__).with_name("compressed_tensors.safetensors")
    held = load_file(file)
    shape = tuple(held[f"{kind}.weight"].shape)
    assert held[f"{kind}.weight"].dtype == E4M3 and shape in ((44, 72), (44, 96))
    weights: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": kind}
    weights |= {"block": {"block_structure": [16, 32]}, "group": {"group_size": 24}}.get(kind, {})
    weights |= {"strategy": "group", "group_size": 32} if kind == "mxfp8" else {}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    blocks = quantization.blocks({"quantization_config": config})
    read = parameter(file, Location(0, 44, f"{kind}.weight", shape), blocks)
    found = read.read_finite((slice(0, 44), slice(0, shape[1])))
    assert torch.equal(found.bfloat16(), held[f"{kind}.values"])


@pytest.mark.parametrize("shape", [(256, 128), (128, 384)])
def test_what_is_written_is_rounded_once(shape: tuple[int, int]) -> None:
    """By a scale that is the smallest power of two with which no value is above 448, which the search here finds by
    trying; and as products in float8 code a whole matrix."""
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.logspace(-30, 6, shape[0]).unsqueeze(1)
    values[:128, :128] *= 448 / values[:128, :128].abs().max()  # the largest number of the format is told with 1
    stored, scales = float8.coded(values)
    assert stored.dtype == E4M3 and scales.shape == (shape[0] // 128, shape[1] // 128) and scales[0, 0] == 1
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            own = slice(row, row + 128), slice(column, column + 128)
            largest = float(values[own].abs().max())
            power = min(power for power in range(-126, 100) if largest <= 448 * 2.0**power)
            assert scales[row // 128, column // 128] == 2.0**power
            assert torch.equal(stored[own].float(), (values[own].double() / 2.0**power).to(E4M3).float())
    theirs = codes.coded(values, 128, 128)
    assert torch.equal(theirs.codes.float(), stored.float()) and torch.equal(theirs.scales, scales)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.prove) for kind in ("deepseek_v3", "qwen3_moe")), "llama"],
)
def test_what_is_written_is_what_transformers_reads(tmp_path: Path, kind: str) -> None:
    """The matrices of blocks in float8, and with their scales what each was within half a unit of the format; all else
    in bf16. Read again, and by transformers, they have the same values, and written again too."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    latent = LATENT | HEADS | {"attention_bias": False, "head_dim": 8} if kind == "deepseek_v3" else heads
    ours = random_model(read_spec(config_of(kind, 1) | WIDE | latent, "test"), 1)
    assert not float8.unwritable(ours.spec, hf.written(ours.spec))
    hf.write_weights(tmp_path / "one", ours.spec, ours.state_dict().__getitem__, E4M3)
    hf.write_weights(
        tmp_path / "plain", ours.spec, ours.state_dict().__getitem__, torch.bfloat16
    )  # what training codes
    plain, held = (load_file(tmp_path / name / hf.SINGLE) for name in ("plain", "one"))
    inner = [name for name, value in held.items() if value.dtype == E4M3]
    assert len(inner) >= 6 and not any(re.search("norm|embed|lm_head|gate.weight", name) for name in inner)
    for name in inner:
        unit = held[f"{name}_scale_inv"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        found = held[name].double() * unit
        off, exact = (found - plain[name].double()).abs(), plain[name].double().abs()
        assert torch.equal(codes.coded(plain[name], 128, 128).codes.float(), held[name].float()), name
        assert (off <= torch.maximum(exact / 16, unit * 2.0**-10)).all(), name
    spec = load_spec(str(tmp_path / "one"))
    assert shows(spec.stored, "float8", "scale", "128 x 128")
    read = dict(hf.read_weights(tmp_path / "one", everything(spec), spec))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32).state_dict()
    state = in_memory(spec, read, theirs)
    assert not theirs.keys() - state.keys() - {"lm_head.weight"}, "a head that is the embedding"
    for name in state:
        assert torch.equal(state[name].float(), theirs[name].float()), name
    hf.write_weights(tmp_path / "two", spec, read.__getitem__, E4M3)
    for name, value in hf.read_weights(tmp_path / "two", everything(spec), spec):
        assert torch.equal(value, read[name]), name


def test_what_servers_join_is_in_float8_together() -> None:
    """As vLLM joins q_a with kv_a, and q with k and v: one that is no whole number of blocks keeps the others out. What
    joins the inputs of a layer that predicts a further token stays, and the config names all that does."""
    latent = (
        LATENT | HEADS | {"attention_bias": False, "head_dim": 8, "kv_lora_rank": 112, "num_nextn_predict_layers": 1}
    )
    spec = with_predictor(read_spec(config_of("deepseek_v3", 1) | WIDE | latent, "test"), 0.1)
    held = hf.written(spec)
    names = float8.coded_names(held)
    roles = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    assert any("eh_proj" in name for name in held) and {"o_proj", "q_b_proj", "gate_proj"} <= roles
    assert roles.isdisjoint({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj", "gate", "embed_tokens", "head"})
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    few = float8.coded_names(hf.written(read_spec(config_of("llama", 1) | WIDE | heads, "test")))
    assert few and not any(re.search("[qkv]_proj", name) for name in few)


def test_a_config_names_what_is_not_in_float8() -> None:
    found = float8.config_of(["lm_head.weight", "model.layers.3.mlp.gate.weight", "model.layers.9.k_weight_scale_inv"])
    kept = ["lm_head", "model.layers.3.mlp.gate"]
    assert found["quantization_config"] == FP8 | {"modules_to_not_convert": kept}


@pytest.mark.parametrize(
    ("kind", "why"),
    [("gpt_oss", "experts.gate_up_proj"), ("qwen3", "128 x 128"), ("gpt2", "transformers' own modules")],
)
def test_models_that_are_not_written_in_float8(kind: str, why: str) -> None:
    """Whose files stack experts, of which no layer has whole blocks, and whose modules are transformers' own."""
    spec = hf_models.spec_of(kind) if kind == "gpt2" else spec_of(kind)
    assert why in float8.unwritable(spec, hf.written(spec))


class Quantizer:
    quantization_config = FineGrainedFP8Config(weight_block_size=(128, 128))


def deepseek(directory: Path, *, fused: bool, vocab_size: int = 100) -> tuple[ModelSpec, dict[str, Any]]:
    """A DeepSeek-V3 whose matrices transformers' own code has put into float8, experts one by one or in stacks."""
    config = config_of("deepseek_v3", 1) | WIDE | LATENT | HEADS | {"attention_bias": False, "head_dim": 8}
    config |= {"tie_word_embeddings": False, "vocab_size": vocab_size}
    ours = random_model(read_spec(config, "test"), 1)
    hf.write_weights(directory, ours.spec, ours.state_dict().__getitem__)
    held = load_file(directory / hf.SINGLE)
    if fused:
        names = {"model.layers.1.mlp.experts.gate_up_proj"} | held.keys()
        held = in_memory(ours.spec, ours.state_dict(), names)
    quantize, written = Fp8Quantize(Quantizer()), dict[str, Tensor]()
    for name, value in held.items():
        written |= quantize._quantize_one(name, value) if MATRIX.search(name) else {name: value}
    save_file({name: value.contiguous() for name, value in written.items()}, directory / hf.SINGLE, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": FP8}
    (directory / "config.json").write_text(json.dumps(config))
    return load_spec(str(directory)), written


@pytest.mark.parametrize("fused", [False, True])
def test_what_transformers_wrote_is_what_it_reads(tmp_path: Path, fused: bool) -> None:
    spec, written = deepseek(tmp_path, fused=fused)
    inner = [name for name, value in written.items() if value.dtype == E4M3]
    assert any("experts" in name for name in inner) and any("kv_a_proj" in name for name in inner) and len(inner) > 10
    assert shows(spec.stored, "float8", "scale", "128 x 128") and spec.experts.num_experts == 8
    hf.check_weights(str(tmp_path), None, spec)
    read = dict(hf.read_weights(tmp_path, everything(spec), spec))
    again, dequantize = in_memory(spec, read, written.keys()), Fp8Dequantize(Quantizer())
    for name in inner:
        theirs = dequantize._dequantize_one(written[name], written[f"{name}_scale_inv"])
        assert theirs.dtype == torch.float32 and torch.equal(again[name], theirs), name


def test_a_model_in_float8_is_the_one_that_transformers_loads(tmp_path: Path) -> None:
    """Which dequantises it too where there is no GPU. Its export in bf16 says nothing of float8, and transformers loads
    it with the same weights."""
    spec, _ = deepseek(tmp_path / "float8", fused=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "float8", dtype=torch.float32, attn_implementation="eager")
    ours = Decoder(spec)
    ours.load_state_dict(dict(hf.read_weights(tmp_path / "float8", everything(spec), spec)))
    state = in_memory(spec, ours.state_dict(), theirs.state_dict())
    matrices = [name for name, value in theirs.state_dict().items() if value.dim() > 1]
    assert len(matrices) > 10
    for name in matrices:
        assert torch.equal(state[name], theirs.state_dict()[name].float()), name
    ids, positions = tokens(spec.vocab_size, length=40)
    reference = theirs.float().eval()(ids, use_cache=False).logits
    assert relative(ours(ids, positions, MaskSpec()), reference) < 2e-5
    hf.write_weights(tmp_path / "bf16", spec, ours.state_dict().__getitem__, torch.bfloat16)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert not load_spec(str(tmp_path / "bf16")).stored
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").state_dict()
    for name in matrices:
        assert torch.equal(exported[name], state[name].bfloat16()), name


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "exaone4"])
def test_models_in_transformers_own_modules_are_read_too(tmp_path: Path, kind: str) -> None:
    """Whose files may have a matrix transposed, or names without a prefix: as from files with the values in fp32."""
    hf_models.theirs_of(kind).save_pretrained(tmp_path / "fp32")
    held, stored = load_file(tmp_path / "fp32" / hf.SINGLE), dict[str, Tensor]()
    matrices = [name for name in held if held[name].dim() == 2 and re.search(r"\b(layers|h)\.\d", name)]
    for name in matrices:
        stored[name], stored[f"{name}_scale"] = quantised(held[name], 16, 24)
        held[name] = meant(stored[name], stored[f"{name}_scale"], 16, 24).float()
    (tmp_path / "float8").mkdir()
    save_file(held, tmp_path / "fp32" / hf.SINGLE, {"format": "pt"})
    bare = {name.removeprefix("transformer."): value for name, value in (held | stored).items()}
    save_file(bare, tmp_path / "float8" / hf.SINGLE, {"format": "pt"})
    config = json.loads((tmp_path / "fp32" / "config.json").read_text())
    settings = group(strategy="block", block_structure=[16, 24])
    (tmp_path / "float8" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    spec = load_spec(str(tmp_path / "float8"))
    assert spec.hf_model is not None and "16 x 24" in spec.stored and len(matrices) >= 12
    read = [dict(hf.read_weights(tmp_path / name, everything(spec), spec)) for name in ("fp32", "float8")]
    assert all(torch.equal(read[0][name], read[1][name]) for name in read[0])
    part = {name: tuple(slice(n // 3, n // 2) for n in value.shape) for name, value in read[0].items()}
    for name, value in hf.read_weights(tmp_path / "float8", part, spec):
        assert torch.equal(value, read[0][name][part[name]]), name


Change = Callable[[dict[str, Tensor]], None]
NAME = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{NAME}_scale_inv"


def without(held: dict[str, Tensor]) -> None:
    del held[SCALE]


def other_shape(held: dict[str, Tensor]) -> None:
    held[SCALE] = torch.ones(2, 2)


def other_dtype(held: dict[str, Tensor]) -> None:
    held[SCALE] = held[SCALE].to(torch.int32)


def in_16_bits(held: dict[str, Tensor]) -> None:
    held[NAME] = held[NAME].bfloat16()


def nan_scale(held: dict[str, Tensor]) -> None:
    held[SCALE][0, 1] = torch.nan


def nan_value(held: dict[str, Tensor]) -> None:
    held[NAME].view(torch.uint8)[3, 4] = 0x7F


def in_int8(held: dict[str, Tensor]) -> None:
    held[NAME] = held[NAME].view(torch.int8)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (without, "CKPT004", ["1 tensors", "float8 without scales", "_scale_inv", "_scale", NAME]),
        (other_shape, "CKPT002", ["128 x 128", "no rows", "no whole matrix", f"`{SCALE}` [2, 2] "]),
        (other_dtype, "CKPT002", [f"`{SCALE}` [1, 2] torch.int32 for [128, 256]"]),
        (in_16_bits, "CKPT003", [f"0 tensors missing, 1 unexpected ({SCALE})"]),
        (in_int8, "CKPT004", [f"1 tensors are quantised (torch.int8): {NAME}"]),
        (nan_scale, "MOD006", [f"`{SCALE}`", "1 NaN", "2 values"]),
        (nan_value, "MOD006", [f"`{NAME}`", "1 NaN", "32,768 values"]),
    ],
)
def test_damage_is_told_by_name(tmp_path: Path, change: Change, code: str, values: list[str]) -> None:
    spec, held = deepseek(tmp_path, fused=False)
    change(held)
    save_file(held, tmp_path / hf.SINGLE, {"format": "pt"})
    with pytest.raises(DataError) as caught:
        if code != "MOD006":  # what headers tell, before a process is started
            hf.check_weights(str(tmp_path), None, spec)
        dict(hf.read_weights(tmp_path, everything(spec), spec))
    [problem] = [each for each in caught.value.problems if each.code == code]
    assert shows(problem.what, *values) and str(tmp_path) in problem.where


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    spec, held = deepseek(tmp_path, fused=False)
    layer = "model.layers.0.self_attn."
    more = ("o_proj.input_scale", "o_proj.activation_scale", "k_scale", "v_scale")
    save_file(held | {f"{layer}{name}": torch.ones(1) for name in more}, tmp_path / hf.SINGLE, {"format": "pt"})
    assert dict(hf.read_weights(tmp_path, everything(spec), spec))
    save_file(held | {f"{layer}o_proj.weight_scale_2": torch.ones(1)}, tmp_path / hf.SINGLE, {"format": "pt"})
    with pytest.raises(DataError, match=r"CKPT003.*1 unexpected \(.*weight_scale_2\)"):
        dict(hf.read_weights(tmp_path, everything(spec), spec))


def group(**weights: Any) -> dict[str, Any]:
    kind = {"type": "float", "num_bits": 8, "strategy": "channel"} | weights
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": kind}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)"),
        (group(num_bits=4) | {"format": "pack-quantized"}, "compressed-tensors (pack-quantized)"),
        (group() | {"transform_config": {"config_groups": {"R1": {}}}}, "compressed-tensors (with transforms)"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    spec, _ = deepseek(tmp_path, fused=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(DataError, match=refusal("CKPT004", "quantised by", f"{words},", "not read")):
        hf.check_weights(str(tmp_path), None, spec)


@pytest.mark.parametrize("settings", [FP8, group(), FP8 | {"weight_block_size": None}, {"quant_method": "fbgemm_fp8"}])
def test_a_config_of_float8_is_that_of_its_model(settings: dict[str, Any]) -> None:
    """Of the decoder's families and of models in transformers' own modules."""
    for config in (config_of("qwen3"), {"model_type": "gpt_neox", "num_hidden_layers": 1, "hidden_size": 64}):
        config |= {"num_attention_heads": 4} if config["model_type"] == "gpt_neox" else {}
        plain, spec = read_spec(config, "a"), read_spec(config | {"quantization_config": settings}, "a")
        assert spec.stored.startswith("float8") and not plain.stored
        assert spec == hf.replace(plain, stored=spec.stored)


@pytest.mark.parametrize("groups", [[], "a", {"a": 1}, {"a": {"weights": 2}}, {"a": {"weights": {}}}])
def test_groups_that_say_nothing_break_nothing(groups: Any) -> None:
    settings = {"quant_method": "compressed-tensors", "config_groups": groups, "format": "x"}
    read_spec(config_of("qwen3") | {"quantization_config": settings}, "a")


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128, 1.5], {"a": 1}])
def test_blocks_that_are_none(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"CFG004.*weight_block_size"):
        read_spec(config_of("qwen3") | {"quantization_config": FP8 | {"weight_block_size": size}}, "a")
    with pytest.raises(ConfigError, match=r"CFG004.*quantization_config"):
        read_spec(config_of("qwen3") | {"quantization_config": [size]}, "a")


def test_a_plan_says_how_its_files_hold_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is the one of the same model in 16 bits."""
    config, said = config_of("qwen3", 1), []
    for name, more in (("a", {}), ("b", {"quantization_config": FP8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        assert main(["plan", "--model", str(tmp_path / name), "--cluster", "2xH100"]) == 0
        said.append(capsys.readouterr().out)
    [line] = [one for one in said[1].splitlines() if "its files" in one]
    assert "its files" not in said[0] and "float8" not in said[0]
    assert shows(line, "float8", "scale", "128 x 128", "read", "exported", "16 or 32 bits")
    told = [[one for one in text.splitlines() if one != line and str(tmp_path) not in one][1:] for text in said]
    assert told[0] == told[1]
    assert spec_of("qwen3", 1) == read_spec(config, "test")
