"""Configs from and to Hugging Face, the built-in table, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from shardwise.errors import ConfigError, DataError, MissingInputError, PolicyError, ShardwiseError
from shardwise.models import known
from shardwise.models.config import (
    RopeScaling,
    active_parameter_count,
    from_hf,
    parameter_count,
    to_hf,
    with_fields,
)
from shardwise.models.kinds import GroupedRouting
from shardwise.models.lookup import load_spec, read_spec
from tests.models.llama import random_config

# Parameters as the models' pages on the Hub give them.
COUNTS = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-70b": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama-1.1B": 1_100_048_384,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-2407": 12_247_782_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Gemma-2-2b": 2_614_341_888,
    "Gemma-2-9b": 9_241_705_984,
    "Gemma-2-27b": 27_227_128_320,
    "Gemma-3-1b": 999_885_952,
    "Phi-3-mini-4k": 3_821_079_552,
    "Phi-4": 14_659_507_200,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-2-1124-7B": 7_298_617_344,
    "OLMo-2-1124-13B": 13_716_198_400,
    "Granite-3.3-8b-instruct": 8_170_864_640,
}
# In billions, of all experts and of those that a token goes to, as their pages and reports say.
EXPERTS = {
    "Mixtral-8x7B-v0.1": (46.7, 12.9),
    "Mixtral-8x22B-v0.1": (140.6, 39.0),
    "OLMoE-1B-7B-0924": (6.9, 1.3),
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "Qwen2-57B-A14B": (57.4, 14.2),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-30B-A3B-Instruct-2507": (30.5, 3.3),
    "Qwen3-235B-A22B": (235.0, 22.0),
    "Qwen3-235B-A22B-Instruct-2507": (235.0, 22.0),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "DeepSeek-V3": (671.0, 37.6),
}
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("name", COUNTS)
def test_built_in_models_have_the_published_size(name: str) -> None:
    assert parameter_count(load_spec(name)) == COUNTS[name]


@pytest.mark.parametrize("name", EXPERTS)
def test_built_in_mixtures_of_experts_have_the_published_sizes(name: str) -> None:
    """Within 0.4% and 2%, which is less than what the published numbers are rounded by. Those of gpt-oss's active
    parameters leave the embedding out, as its model card says."""
    spec, (total, active) = load_spec(name), EXPERTS[name]
    embedding = spec.vocab_size * spec.hidden_size if spec.family == "gpt_oss" else 0
    assert parameter_count(spec) / 1e9 == pytest.approx(total, rel=0.004)
    assert (active_parameter_count(spec) - embedding) / 1e9 == pytest.approx(active, rel=0.02)
    dense = with_fields(spec, num_experts=0, dense_layers=(), shared_expert_gate=False)
    assert active_parameter_count(dense) == parameter_count(dense)


@pytest.mark.parametrize(("name", "total", "active"), [("GLM-4.5", 355, 32), ("GLM-4.5-Air", 106, 12.2)])
def test_glm_has_the_published_sizes(name: str, total: float, active: float) -> None:
    """Within 1 %: what is published counts the layer behind the last too, and of those that compute a token neither
    embedding nor output layer."""
    spec = load_spec(f"zai-org/{name}-Base")
    ends = 2 * spec.vocab_size * spec.hidden_size
    assert parameter_count(spec) / 1e9 == pytest.approx(total, rel=0.01)
    assert (active_parameter_count(spec) - ends) / 1e9 == pytest.approx(active, rel=0.01)


def test_deepseek_v2_lite_has_the_published_size() -> None:
    """Its paper has 15.7 B parameters; how many of them it counts for a token it does not say exactly."""
    assert parameter_count(load_spec("DeepSeek-V2-Lite")) / 1e9 == pytest.approx(15.7, rel=0.004)


def test_deepseek_v2_has_the_published_sizes() -> None:
    """236 B, 21 B active (arXiv 2405.04434). It chooses six of 160 experts, in three of eight groups."""
    for name in ("DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Chat"):
        spec = load_spec(name)
        assert parameter_count(spec) / 1e9 == pytest.approx(236, rel=0.004)
        assert active_parameter_count(spec) / 1e9 == pytest.approx(21, rel=0.02)
        assert spec.experts.softmax_groups == GroupedRouting(8, 3, 16.0) and spec.experts.sigmoid is None
    assert load_spec("DeepSeek-V2-Lite").experts.softmax_groups is None


def test_every_built_in_mixture_of_experts_is_tested() -> None:
    mixtures = {name for name in known.configs() if load_spec(name).experts}
    others = {"GLM-4.5", "GLM-4.5-Air", "DeepSeek-V2", "DeepSeek-V2-Lite", *NETS} - {"Qwen3.5-9B"}
    assert mixtures == EXPERTS.keys() | others


NETS = {"Qwen3-Next-80B-A3B": (80, 79), "Qwen3.5-35B-A3B": (35, None), "Qwen3.5-9B": (9, None)}
"""Of gated delta nets the billions of parameters, and those without the ends where these are published."""


@pytest.mark.parametrize("name", NETS)
def test_models_of_gated_delta_nets_have_the_published_sizes(name: str) -> None:
    spec, (total, inner) = load_spec(name), NETS[name]
    assert round(parameter_count(spec) / 1e9) == total
    ends = 2 * spec.vocab_size * spec.hidden_size
    assert inner is None or round((parameter_count(spec) - ends) / 1e9) == inner


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("meta-llama/Llama-3.1-70B", "Llama-3.1-70B"),
        ("META-LLAMA/meta-llama-3.1-8b-instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-2-70b-chat-hf", "Llama-2-70b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama-1.1B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("llama-3.2-1b", "Llama-3.2-1B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Base-2407", "Mistral-Nemo-2407"),
        ("google/gemma-3-4b-it", "Gemma-3-4b"),
        ("microsoft/Phi-3-mini-4k-instruct", "Phi-3-mini-4k"),
        ("ibm-granite/granite-3.1-2b-base", "Granite-3.1-2b-base"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "OLMoE-1B-7B-0924"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen1.5-MoE-A2.7B"),
        ("Qwen/Qwen3-30B-A3B-Base", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B-Instruct-2507"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_built_in_models_by_hub_id_and_short_name(name: str, known_as: str) -> None:
    assert load_spec(name).name == known_as


def test_what_a_run_will_leave_is_not_there_yet() -> None:
    with pytest.raises(MissingInputError, match="the run runs/quickstart-1 "):
        load_spec("runs/quickstart-1/hf")


def test_somebody_elses_model_of_the_same_name_is_not_the_built_in_one() -> None:
    assert known.find("somebody/Llama-3.1-8B") is None


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-72B-Instruct", "ibm-granite/granite-3.1-8b-instruct", "mistralai/Mixtral-8x22B-Instruct-v0.1"],
)
def test_a_chat_model_that_differs_from_its_base_is_not_the_base(name: str) -> None:
    """In the epsilon of its norms, in its vocabulary."""
    assert known.find(name) is None


def test_every_built_in_model_is_read_back_from_what_is_written_of_it() -> None:
    for name in known.configs():
        spec = load_spec(name)
        assert from_hf(json.loads(json.dumps(to_hf(spec))), name) == with_fields(spec, stored="")


@pytest.mark.parametrize("seed", range(8))
def test_configs_survive_transformers(seed: int) -> None:
    """ours -> transformers -> ours, and transformers' own defaults are ours."""
    spec = from_hf(LlamaConfig(**random_config(seed)).to_dict(), "test")
    again = LlamaConfig(**to_hf(spec))
    assert from_hf(again.to_dict(), "test") == spec
    assert from_hf(to_hf(spec), "test") == spec
    bare = LlamaConfig(**{k: v for k, v in SMALL.items() if k != "model_type"})
    assert from_hf(SMALL | {"bos_token_id": 1, "eos_token_id": 2}, "bare") == from_hf(bare.to_dict(), "bare")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_list_of_special_tokens_is_read_and_written(key: str) -> None:
    """As a tuple: a search keeps what it has read of a model, and finds it by the spec."""
    spec = from_hf(SMALL | {key: [0, 2]}, "x")
    assert hash(spec) == hash(from_hf(SMALL | {key: [0, 2]}, "x"))
    assert json.loads(json.dumps(to_hf(spec)))[key] == [0, 2]


def test_rope_of_transformers_4_and_5_are_read_alike() -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = from_hf(SMALL | {"rope_theta": 5e5, "rope_scaling": rope | {"rope_type": "llama3"}}, "x")
    new = from_hf(SMALL | {"rope_parameters": rope | {"rope_type": "llama3", "rope_theta": 5e5}}, "x")
    assert old == new
    assert (old.positions.rope_theta, old.positions.rope_scaling) == (5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    assert from_hf(
        SMALL | {"rope_scaling": {"type": "linear", "factor": 2}}, "x"
    ).positions.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("change", "error", "code", "text"),
    [
        ({"num_attention_heads": 5}, ConfigError, "PLAN008", "48 / 5 heads"),
        ({"head_dim": 7}, ConfigError, "PLAN008", "head_dim 7 is not even"),
        ({"num_key_value_heads": 3}, ConfigError, "PLAN008", "one of 1, 2, 4"),
        ({"num_hidden_layers": 0}, ConfigError, "PLAN008", "num_hidden_layers is 0"),
        ({"vocab_size": "100"}, ConfigError, "CFG004", '`vocab_size` .*"100"'),
        ({"rms_norm_eps": "tiny"}, ConfigError, "CFG004", "`rms_norm_eps` .*'tiny'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, ConfigError, "CFG004", "factor"),
        ({"hidden_size": None}, ConfigError, "CFG004", "hidden_size"),
        (
            {"model_type": "mamba", "architectures": ["MambaLM"]},
            ConfigError,
            "MOD001",
            "one of .*llama",
        ),
        ({"model_type": None}, ConfigError, "MOD001", "supported families"),
        ({"hidden_act": "gelu"}, ConfigError, "MOD001", "gelu"),
        ({"rope_scaling": {"rope_type": "ntk"}}, ConfigError, "MOD001", "one of: default, linear, dynamic, llama3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, ConfigError, "MOD001", "lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ConfigError, "MOD001", "lacks low_freq_factor"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, PolicyError, "SEC008", "never executed"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[ShardwiseError], code: str, text: str) -> None:
    with pytest.raises(error) as caught:
        from_hf(SMALL | change, "x")
    assert caught.value.problems[0].code == code
    assert re.search(text, str(caught.value))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3", "text_config": None},
        {"model_type": ["llama"]},
        {**SMALL, "rope_scaling": "yarn"},
        {**SMALL, "rope_scaling": {"rope_type": ["yarn"]}},
    ],
)
def test_a_value_of_another_kind_is_told(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"CFG004.*wrong type"):
        read_spec(config, "odd")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf(SMALL | {"head_dim": 7, "num_key_value_heads": 3}, "x")
    assert len(caught.value.problems) == 2


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"Llama-3\.1-8B"):
        load_spec("lama-3.1-8b")
    with pytest.raises(MissingInputError, match=r"no config\.json"):
        load_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(DataError, match="is not JSON"):
        load_spec(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert load_spec(str(tmp_path)).hidden_size == 48


def test_a_config_is_read_without_torch() -> None:
    code = "import sys; from shardwise.models.lookup import load_spec as load; load('Llama-3-8B'); print(*sys.modules)"
    environment = {"PYTHONPATH": str(Path(known.__file__).parents[2])}
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert "shardwise.models.config" in modules and "torch" not in modules
