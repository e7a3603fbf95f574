"""Models that are not supported: told in the field's words, by config.json or by name, before torch is loaded."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from shardwise.errors import ConfigError, MissingInputError
from shardwise.models import known, unserved
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.unserved import parameters_of, refuse_config, refuse_name
from tests.said import shows

DSA = "by an indexer"
EXPERTS = "mixture of experts"
TEXT = {"hidden_size": 64, "num_experts": 8}


@pytest.fixture(autouse=True)
def torch_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that builds a model with transformers and torch cannot be imported; what it counts is not told."""
    monkeypatch.setattr(unserved, "count_in_transformers", lambda config: None)
    monkeypatch.setitem(sys.modules, "shardwise.models.hf_model", None)
    monkeypatch.delattr("shardwise.models.hf_model", raising=False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "granitemoe", "num_local_experts": 32}, EXPERTS),
        ({"model_type": "phimoe", "num_local_experts": 16}, EXPERTS),
        ({"model_type": "deepseek_v32", "n_routed_experts": 256, "kv_lora_rank": 512}, DSA),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512, "index_topk": 2048}, DSA),
        ({"model_type": "glm_moe_dsa", "n_routed_experts": 256}, DSA),
        ({"model_type": "anything_vl", "text_config": TEXT, "vision_config": {"depth": 2}}, EXPERTS),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "multi-head latent attention"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent state"),
        ({"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        ({"model_type": "kimi_linear", "linear_num_value_heads": 4}, "recurrent state"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "sequence to sequence"),
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "text and images"),
        ({"model_type": "falcon", "num_kv_heads": 1}, "let be replaced"),
        ({"model_type": "bloom"}, "uses ALiBi"),
        ({"model_type": "gpt_neox", "quantization_config": {"bits": 4}}, "quantised as they"),
    ],
)
def test_a_config_is_refused_in_the_field_s_words(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"MOD001(.|\\n)*{said}(.|\\n)*docs/own-loop.md"):
        read_spec(config, "odd")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("microsoft/Phi-3.5-MoE-instruct", EXPERTS),
        ("deepseek-ai/DeepSeek-V3.2-Exp", DSA),
        ("moonshotai/Kimi-K2.5", EXPERTS),
        ("zai-org/GLM-4.5V", EXPERTS),
        ("ibm-granite/granite-3.0-1b-a400m-base", EXPERTS),
        ("state-spaces/mamba-2.8b-hf", "recurrent state"),
        ("google/flan-t5-base", "sequence to sequence"),
        ("FacebookAI/xlm-roberta-base", "is an encoder"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "text and images"),
    ],
)
def test_a_name_says_it_where_no_config_is_at_hand(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"MOD001(.|\\n)*{said}"):
        load_spec(name)


def test_what_may_be_supported_is_refused_by_neither() -> None:
    """Of mixtures of experts only the config says for certain, once it is fetched."""
    dense = "DeepSeek-R1-Distill-Qwen-7B GLM-4-9B Phi-3.5-mini-instruct gpt2 falcon-7b tiny-random-LlamaForCausalLM"
    experts = (
        "my-Qwen3-30B-A3B-sft Qwen3-Coder-30B-A3B-Instruct dolphin-2.5-mixtral-8x7b OLMoE-1B-7B-0125 gpt-oss-20b-BF16 "
        "DeepSeek-V2-Chat DeepSeek-V2.5-1210 DeepSeek-Coder-V2-Instruct Kimi-K2-Base MiniMax-M2 MiniMax-M2.1 "
        "GLM-4.5 GLM-4.5-Air GLM-4.6 GLM-4.7 Qwen3.5-122B-A10B Qwen3-Next-80B-A3B-Thinking"
    )
    for name in (*known.configs(), *dense.split(), *experts.split()):
        refuse_name(f"org/{name}")
    for config in known.configs().values():
        if not {"num_experts_per_tok", "linear_num_value_heads"} & config.keys():
            refuse_config(config, "x")
    refuse_config({"model_type": "x", "num_experts": 1, "n_routed_experts": None, "kv_lora_rank": None}, "x")


def test_another_size_is_no_misspelling() -> None:
    """`Qwen3-7B` is not Qwen3-8B: what there is of the family is listed."""
    with pytest.raises(MissingInputError) as raised:
        load_spec("Qwen3-7B")
    fix = raised.value.problems[0].fix
    assert "did you mean" not in fix
    assert "Qwen3-4B, Qwen3-8B, Qwen3-14B" in fix
    with pytest.raises(MissingInputError, match=r"did you mean Llama-3\.1-8B"):
        load_spec("llama3.1-8b")


def test_all_that_a_model_lacks_is_named_with_the_memory_that_it_needs_anyway() -> None:
    """As large as DeepSeek-V3: 671 B parameters of 16 bytes. A name that says nothing of its size tells no memory."""
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280}
    config |= {"intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "v_head_dim": 128}
    config |= {"n_routed_experts": 256, "n_shared_experts": 1, "model_type": "another", **latent}
    count = parameters_of(config)
    assert count is not None and abs(count / 671.0e9 - 1) < 0.001
    sparse = config | {"index_topk": 2048, "index_n_heads": 64}
    for load, lacks, has in (
        (lambda: read_spec(config, "another"), (EXPERTS, "MLA"), (DSA,)),
        (lambda: read_spec(sparse, "another"), (DSA, EXPERTS, "MLA"), ()),
        (lambda: read_spec(sparse | {"model_type": "deepseek_v32"}, "another"), (DSA,), (EXPERTS, "MLA")),
        (lambda: read_spec(sparse | {"model_type": "deepseek_v3"}, "another"), (DSA,), (EXPERTS, "MLA")),
        (lambda: load_spec("deepseek-ai/DeepSeek-V3.2-Exp"), (DSA,), (EXPERTS, "MLA")),
    ):
        with pytest.raises(ConfigError) as caught:
            load()
        [problem] = caught.value.problems
        assert all(word in problem.what for word in lacks) and not any(word in problem.what for word in has)
        assert f"{16 * 671.0e9 / 2**40:.1f} TiB" in problem.what and "671.0 B" in problem.what
    with pytest.raises(ConfigError) as caught:
        load_spec("microsoft/Phi-3.5-MoE-instruct")
    assert "GiB" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_spec("baidu/ERNIE-4.5-21B-A3B-PT")
    assert f"{16 * 21e9 / 2**30:.1f} GiB" in str(caught.value)
    assert parameters_of({"hidden_size": 4}) is None


TEXT_OF_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.mark.parametrize("inner", [False, True])
def test_of_a_model_of_text_and_images_the_text_part_is_counted(inner: bool) -> None:
    """Of Qwen2.5-VL-7B as many as of Qwen2.5-7B, whose 7.62 B are published; and of Qwen3.5 the text part is read."""
    text = {"text_config": TEXT_OF_7B} if inner else TEXT_OF_7B
    with pytest.raises(ConfigError) as caught:
        read_spec({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, **text}, "x")
    assert shows(str(caught.value), "7.6 B", "113.5 GiB")
    served = {"model_type": "qwen3_5", "text_config": known.configs()["Qwen3.5-9B"], "vision_config": {"depth": 27}}
    assert read_spec(served, "x").family == "qwen3_5_text"


def test_what_no_formula_counts_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Mamba-2 a layer has a projection of 2 I + 2 N + H columns of the hidden size (I twice the hidden size, N the
    state, H heads), a convolution of 4 over I + 2 N channels with its bias, two norms, three numbers a head and a
    projection back."""
    monkeypatch.undo()
    d, state, heads, layers, rows = 64, 16, 8, 3, 100
    inner = 2 * d
    block = d * (2 * inner + 2 * state + heads) + 5 * (inner + 2 * state) + 3 * heads + inner + inner * d + d
    config = {"model_type": "mamba2", "hidden_size": d, "num_hidden_layers": layers, "vocab_size": rows}
    config |= {"state_size": state, "num_heads": heads, "head_dim": 16, "n_groups": 1, "tie_word_embeddings": True}
    assert unserved.count_in_transformers(config) == layers * block + d + rows * d
    with pytest.raises(ConfigError, match=r"MOD001.*recurrent state(.|\n)* 90,920 parameters"):
        read_spec(config, "x")
    assert unserved.count_in_transformers({"model_type": "nobody's"}) is None
