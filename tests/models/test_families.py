"""Every family against transformers: logits, gradients, names, configs, files; and that each feature matters."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import ConfigError, DataError, PolicyError
from shardwise.models import hf
from shardwise.models.attention import MaskSpec
from shardwise.models.config import (
    HEADS,
    SIZES,
    ModelSpec,
    flat,
    from_hf,
    layer_kinds,
    parameter_shapes,
    problems,
    to_hf,
    with_fields,
)
from shardwise.models.decoder import Decoder
from shardwise.models.families import FAMILIES, FULL, SLIDING
from shardwise.models.hf_names import to_hf_name
from shardwise.models.kinds import DeltaSpec, LatentSpec
from shardwise.models.lookup import load_spec
from shardwise.models.rope import RopeScaling
from tests.models.families import (
    CONFIGS,
    LENGTH,
    NEUTRAL,
    config_of,
    corrections,
    in_memory,
    pair,
    random_model,
    spec_of,
    without,
)
from tests.models.llama import relative, tokens

EXPERT = re.compile(r"(?<=experts)\.\d+\.")
LONG: dict[str, object] = {"rope_type": "longrope"}
OTHERS = [family for family in FAMILIES if family != "llama"]


def test_every_family_is_tested() -> None:
    assert FAMILIES.keys() == CONFIGS.keys()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", OTHERS)
def test_logits_and_gradients_are_those_of_transformers(family: str, seed: int) -> None:
    """2e-5 and 1e-4 relative: the project's bar for fp32, where orders of summation differ."""
    ours, theirs = pair(family, seed)
    ids, positions = tokens(ours.spec.vocab_size, length=LENGTH, seed=seed)
    logits, reference = ours(ids, positions, MaskSpec()), theirs(ids, use_cache=False).logits
    assert relative(logits, reference) < 2e-5
    labels = ids.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    F.cross_entropy(reference.flatten(0, 1), labels).backward()
    given = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    given |= corrections(ours)
    gradients = in_memory(ours.spec, given, theirs.state_dict())
    gradients = {name: value for name, value in gradients.items() if name not in corrections(theirs)}
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, parameter in theirs.named_parameters():
        gradient = gradients.pop(name)
        if float(parameter.grad.norm()) < 1e-6 * largest:  # of k's bias without rotation: nothing but rounding
            assert float(gradient.norm()) < 1e-6 * largest, name
        else:
            assert relative(gradient, parameter.grad) < 1e-4, name
    assert not gradients


def has(spec: ModelSpec, feature: str) -> bool:
    neutral = spec.experts.num_experts == 0 if feature == "experts_per_token" else False
    return bool(flat(spec)[feature] != NEUTRAL[feature]) and not neutral


@pytest.mark.parametrize("family", OTHERS)
def test_each_feature_changes_the_logits(family: str) -> None:
    """So that the comparison above could not pass with one left out: more than 1e-3, of each that the family has."""
    spec = spec_of(family)
    model = random_model(spec)
    ids, positions = tokens(spec.vocab_size, length=LENGTH)
    reference = model(ids, positions, MaskSpec())
    at_work = [feature for feature in NEUTRAL if has(spec, feature)]
    assert at_work
    for feature in at_work:
        other = random_model(without(spec, feature), seed=1)
        shapes = {name: value.shape for name, value in other.state_dict().items()}
        kept = {name: value for name, value in model.state_dict().items() if value.shape == shapes.get(name)}
        other.load_state_dict(kept, strict=False)
        assert relative(other(ids, positions, MaskSpec()), reference) > 1e-3, feature


def test_all_features_are_at_work_somewhere() -> None:
    specs = [spec_of(family, seed) for family in OTHERS for seed in range(3)]
    assert {f for f in NEUTRAL if any(has(spec, f) for spec in specs)} == NEUTRAL.keys()
    kinds = {spec.positions.rope_scaling.kind for spec in specs if spec.positions.rope_scaling is not None}
    assert kinds == {"linear", "dynamic", "llama3", "yarn", "longrope"}
    assert {spec.attention.attention_output_bias for spec in specs} == {None, False}
    longest = {spec.positions.rope_scaling.original_max_position_embeddings for spec in specs if spec.family == "phi3"}
    assert longest == {16, 48}, "longrope within the trained range and beyond it"
    of_all = {*(field.name for field in fields(ModelSpec)[:19]), *SIZES, *HEADS, "rope_theta", "rope_scaling"}
    features = flat(specs[0]).keys() - of_all - {"attention_bias"}
    others = {
        *asdict(LatentSpec()),
        *asdict(DeltaSpec()),
        "mixer_options",
        "stored",
        "attention_output_bias",
        "hf_model",
        "intermediate_sizes",
        "num_experts",
        "expert_size",
        "expert_capacity",
        "predictor_weight",
    }
    assert features <= NEUTRAL.keys() | others | {"router_aux_loss_coef", "router_z_loss_coef", "output_router_logits"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", OTHERS)
def test_configs_survive_transformers(family: str, seed: int) -> None:
    """ours -> transformers -> ours, and ours -> ours."""
    spec = spec_of(family, seed)
    assert spec.family == family
    again = AutoConfig.for_model(**to_hf(spec)).to_dict()
    assert from_hf(again, "test") == spec
    assert from_hf(json.loads(json.dumps(to_hf(spec))), "test") == spec


@pytest.mark.parametrize("family", OTHERS)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    bare = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 7}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    needed = {"num_experts_per_tok": 2} if family in ("deepseek_v2", "dots1") else {}  # transformers has no default
    needed |= {"n_routed_experts": 4, "n_shared_experts": 1} if family == "dots1" else {}
    given = {**bare, **heads, **needed, "model_type": family}
    assert from_hf(given, "x") == from_hf(AutoConfig.for_model(**given).to_dict(), "x")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_a_bijection_with_those_of_transformers(family: str) -> None:
    """Of elements too, in memory and in files: every one of a tensor there is one of a parameter here."""
    ours, theirs = pair(family, 1)
    numbers: dict[str, torch.Tensor] = {}
    total = 0
    for name, parameter in ours.named_parameters():
        numbers[name] = torch.arange(total, total + parameter.numel()).view(parameter.shape)
        total += parameter.numel()
    known = {name: parameter.shape for name, parameter in theirs.named_parameters()}
    known |= {name: value.shape for name, value in corrections(theirs).items()}
    in_model, in_files = (in_memory(ours.spec, numbers, names) for names in (known, ()))
    assert {name: value.shape for name, value in in_model.items()} == known
    for held in (in_model, in_files):
        every = torch.cat([value.flatten() for value in held.values()])
        assert torch.equal(every.sort().values, torch.arange(total))
    assert {to_hf_name(name, family) for name in numbers} == {EXPERT.sub(".*.", name) for name in in_files}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 9_000])
@pytest.mark.parametrize("family", OTHERS)
def test_files_go_both_ways(tmp_path: Path, family: str, max_shard_bytes: int) -> None:
    """Bitwise; transformers loads an export with the logits of the same weights, and we what transformers saves."""
    ours, theirs = pair(family, 2)
    spec, state = ours.spec, ours.state_dict()
    hf.write_weights(tmp_path / "ours", spec, state.__getitem__, max_shard_bytes=max_shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    ids, _ = tokens(spec.vocab_size, length=LENGTH)
    assert torch.equal(loaded(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    whole = {name: [slice(0, n) for n in shape] for name, shape in parameter_shapes(spec).items()}
    for directory in ("ours", "theirs"):
        assert replace(load_spec(str(tmp_path / directory)), name="test") == spec
        read = dict(hf.read_weights(tmp_path / directory, whole, spec))
        assert read.keys() == whole.keys() and all(torch.equal(read[name], state[name]) for name in whole)


def test_slices_of_stacked_tensors(tmp_path: Path) -> None:
    """Only the rows asked for are read of a tensor in which several parameters are stacked."""
    spec = spec_of("phi3")
    state = random_model(spec).state_dict()
    hf.write_weights(tmp_path, spec, state.__getitem__)
    assert "model.layers.0.self_attn.qkv_proj.weight" in load_file(tmp_path / hf.SINGLE)
    names = ("attention.k", "attention.v", "mlp.up")
    parts = {f"layers.1.{name}.weight": (slice(3, 9), slice(5, 20)) for name in names}
    for name, value in hf.read_weights(tmp_path, parts, spec):
        assert torch.equal(value, state[name][parts[name]])
        assert value.untyped_storage().nbytes() == value.numel() * 4


def test_a_stack_of_the_wrong_height_is_told(tmp_path: Path) -> None:
    spec = spec_of("phi3")
    hf.write_weights(tmp_path, spec, random_model(spec).state_dict().__getitem__)
    with pytest.raises(DataError, match=r"`model\.layers\.0\.mlp\.gate_up_proj\.weight` file \[\d+, 32\]"):
        list(hf.read_weights(tmp_path, {}, replace(spec, intermediate_size=spec.intermediate_size + 1)))


def test_the_text_part_of_a_model_of_text_and_images(tmp_path: Path) -> None:
    """Gemma 3 from 4B on comes inside such a model; its own names and those of transformers 5."""
    spec = spec_of("gemma3_text")
    state = in_memory(spec, random_model(spec).state_dict(), ())
    text = {key: value for key, value in config_of("gemma3_text").items() if key != "eos_token_id"}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    whole = {name: [slice(0, n) for n in shape] for name, shape in parameter_shapes(spec).items()}
    for index, (prefix, vision) in enumerate((("language_model.model.", ""), ("model.language_model.", "model."))):
        directory = tmp_path / str(index)
        directory.mkdir()
        named = {prefix + name.removeprefix("model."): value for name, value in state.items() if "lm_head" not in name}
        named[("" if vision else "language_model.") + "lm_head.weight"] = state["lm_head.weight"].clone()
        save_file(named | {f"{vision}vision_tower.x.weight": torch.zeros(2)}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(outer | {"text_config": text}))
        assert replace(load_spec(str(directory)), name="test") == replace(spec, eos_token_id=(1, 106))
        read = dict(hf.read_weights(directory, whole, spec))
        assert read.keys() == whole.keys()


def test_the_text_of_qwen3_5(tmp_path: Path) -> None:
    """Beside it the files have images, and heads of several tokens."""
    spec = spec_of("qwen3_5_text")
    state = in_memory(spec, random_model(spec).state_dict(), ())
    named = {name.replace("model.", "model.language_model.", 1): value.clone() for name, value in state.items()}
    beside = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(named | beside, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_5", "text_config": config_of("qwen3_5_text"), "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(load_spec(str(tmp_path)), name="test") == spec
    whole = {name: [slice(0, n) for n in shape] for name, shape in parameter_shapes(spec).items()}
    assert dict(hf.read_weights(tmp_path, whole, spec)).keys() == whole.keys()


@pytest.mark.parametrize("family", OTHERS)
def test_packed_documents_give_what_each_gives_alone(family: str) -> None:
    """Windows, stretched positions and all: fp64, so that nothing but a fault could make a difference."""
    spec = spec_of(family)
    model = random_model(spec, dtype=torch.float64)
    ids, _ = tokens(spec.vocab_size, rows=2, length=LENGTH)
    lengths = [14, 26, 40]
    bounds = torch.tensor([0, 14, 40, 80], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, LENGTH)
    packed = model(ids, positions, MaskSpec(documents=bounds, longest=40))
    pieces = zip(ids.flatten().split(lengths), lengths, strict=True)
    alone = torch.cat([model(piece[None], torch.arange(n)[None], MaskSpec())[0] for piece, n in pieces])
    torch.testing.assert_close(packed.flatten(0, 1), alone, rtol=1e-11, atol=1e-11)


def test_a_window_that_holds_the_sequence_is_none() -> None:
    """So that a kernel serves."""
    model = Decoder(spec_of("mistral"))
    kinds, _ = layer_kinds(model.spec)
    assert [model.masks(kinds, length, MaskSpec())[0].window for length in (6, 7, 8)] == [None, None, 7]
    documents = torch.tensor([0, 5, 12], dtype=torch.int32)
    assert model.masks(kinds, 12, MaskSpec(documents=documents, longest=7))[0].window is None


def test_long_and_short_factors_are_chosen_by_sequence() -> None:
    """transformers chooses once for a batch; here what is in the other rows changes nothing."""
    spec = with_fields(spec_of("phi3"), sliding_window=None)
    assert spec.positions.rope_scaling is not None
    spec = with_fields(spec, rope_scaling=replace(spec.positions.rope_scaling, original_max_position_embeddings=16))
    model = random_model(spec, dtype=torch.float64)
    ids, positions = tokens(spec.vocab_size, rows=2, length=LENGTH)
    positions = torch.stack([positions[0], positions[0] % 10])
    together = model(ids, positions, MaskSpec())
    for row in range(2):
        torch.testing.assert_close(together[row], model(ids[row : row + 1], positions[row : row + 1], MaskSpec())[0])


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_block_compiles_whole(family: str) -> None:
    """fullgraph: no break in a norm, a gate, a part of a head that is turned, or a mask of the layer's own."""
    torch._dynamo.reset()
    model = random_model(spec_of(family))
    kinds, order = layer_kinds(model.spec)
    positions = torch.arange(20).expand(2, 20)
    rotary = model.tables(kinds, positions, torch.float32, MaskSpec())[order[0]]
    mask, hidden = model.masks(kinds, 20, MaskSpec())[order[0]], torch.randn(2, 20, model.spec.hidden_size)
    assert mask.window is not None
    compiled = torch.compile(model.layers[0], fullgraph=True, backend="aot_eager")
    assert relative(compiled(hidden, rotary, mask), model.layers[0](hidden, rotary, mask)) < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_bf16_is_near_fp32(family: str) -> None:
    """Within a few roundings of 2^-8 a layer."""
    spec = spec_of(family)
    ids, positions = tokens(spec.vocab_size)
    model = random_model(spec)
    reference = model(ids, positions, MaskSpec())
    assert relative(model.bfloat16()(ids, positions, MaskSpec()).float(), reference) < 0.06


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("qwen3", {"layer_types": [SLIDING, "linear_attention", FULL]}, "linear_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping: 20.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "in sliding layers"),
        ("phi3", {"rope_parameters": LONG | {"short_factor": [1.0], "long_factor": [1.0]}}, "1 numbers"),
        ("phi3", {"rope_parameters": LONG | {"short_factor": 1, "long_factor": [1.0]}}, "list"),
        ("phi3", {"rope_parameters": LONG}, "lacks short_factor, long_factor"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "an even number"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {"layer_types": [SLIDING, FULL]}, "2 layer_types for 3 layers"),
        ("deepseek_v2", {"v_head_dim": 21}, "21 .*heads of 20"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "`topk_method: noaux_tc` is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "`norm_topk_prob: True` is not supported"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "`n_group` .*whole number"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 16, "topk_group": 1}, "16 groups of "),
        ("qwen3_next", {"layer_types": [SLIDING, FULL, FULL]}, "'sliding_attention'"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("qwen3_5_text", {"linear_num_key_heads": "2"}, "`linear_num_key_heads` .*whole number"),
    ],
)
def test_what_is_refused(family: str, change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_hf(config_of(family) | change, "x")


def test_a_mixer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family whose package has lost its other half, or names it otherwise."""
    other = replace(FAMILIES["llama"], fields={"mixer": "gated_mean"})
    monkeypatch.setitem(FAMILIES, "llama", other)
    with pytest.raises(ConfigError, match=r"MOD001(.|\n)*'gated_mean' is not installed(.|\n)*softmax, latent"):
        from_hf(config_of("llama"), "x")


def test_latents_have_a_head_of_keys_for_each_of_queries() -> None:
    spec = spec_of("deepseek_v2")
    [problem] = problems(with_fields(spec, num_key_value_heads=1, num_attention_heads=4))
    assert problem.code == "PLAN008" and problem.fix == "num_key_value_heads: 4"


def test_code_in_a_models_directory_is_never_run() -> None:
    """Phi's files name code that transformers has made its own; that of others may do anything."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}
    assert from_hf(config_of("phi3") | code, "test") == spec_of("phi3")
    with pytest.raises(PolicyError, match="never executed"):
        from_hf(config_of("qwen3") | code, "test")


def test_ropes_of_old_configs() -> None:
    """As the files on the Hub have them."""
    phi = {"rope_theta": 1e4, "rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}}
    old = {k: v for k, v in config_of("phi3").items() if k != "rope_parameters"} | {"partial_rotary_factor": 0.75}
    spec = from_hf(old | phi | {"original_max_position_embeddings": 32}, "x")
    assert spec.positions.rope_scaling is not None and spec.positions.rope_scaling.kind == "longrope"
    assert (spec.positions.rope_scaling.factor, spec.positions.rope_scaling.original_max_position_embeddings) == (
        2.0,
        32,
    )
    assert spec.positions.partial_rotary_factor == 0.75
    gemma = {k: v for k, v in config_of("gemma3_text").items() if k not in ("rope_parameters", "layer_types")}
    gemma |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    spec = from_hf(gemma | {"sliding_window_pattern": 2}, "x")
    assert (spec.positions.rope_theta, spec.positions.local_rope_theta, spec.positions.rope_scaling) == (
        1e6,
        1e4,
        RopeScaling("linear", 8.0),
    )
    assert spec.attention.layer_types == (SLIDING, FULL, SLIDING)
