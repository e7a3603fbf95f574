"""NeMo's four kinds of YAML: Megatron-LM's words in sections, and what each kind takes for granted; own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.interop.imports import Imported, foreign, read_files
from shardwise.spec.load import read_settings

BRIDGE = """
train: {train_iters: 200, global_batch_size: 64, micro_batch_size: 2, eval_iters: 4}
optimizer: {lr: 0.0002, min_lr: 0.00002, weight_decay: 0.05}
scheduler: {lr_warmup_fraction: 0.1, lr_decay_style: cosine}
dataset: {seq_length: 2048}
model: {seq_length: 2048, tensor_model_parallel_size: 2, sequence_parallel: true}
ddp: {use_distributed_optimizer: true, grad_reduce_in_fp32: true}
logger: {log_interval: 5}
rng: {seed: 7}
"""
HYDRA = """
trainer: {devices: 8, precision: bf16-mixed, max_steps: 100, gradient_clip_val: 0.5}
exp_manager: {name: mine}
model:
  micro_batch_size: 1
  global_batch_size: 32
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  encoder_seq_length: 1024
  max_position_embeddings: 1024
  num_layers: 8
  hidden_size: 256
  ffn_hidden_size: ${multiply:3, ${.hidden_size}}
  num_attention_heads: 8
  num_query_groups: 2
  hidden_dropout: 0.0
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  tokenizer: {type: Llama2Tokenizer}
  fp8: false
  optim:
    name: distributed_fused_adam
    lr: 1e-4
    betas: [0.9, 0.95]
    weight_decay: 0.1
    sched: {name: CosineAnnealing, warmup_steps: 10, constant_steps: 20, min_lr: 1.0e-05}
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 64, local_batch_size: 2, num_epochs: 3}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: org/model}
distributed: {strategy: fsdp2, tp_size: 2, cp_size: 1}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.98], eps: 1e-7, weight_decay: 0.02}
dataset: {_target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset, path_or_dataset: org/chat}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
"""
RL = """
dpo: {max_num_steps: 50, reference_policy_kl_penalty: 0.2, preference_loss_weight: 1, sft_loss_weight: 0, seed: 3}
policy:
  model_name: org/model
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  max_grad_norm: 0.7
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, activation_checkpointing: true, cpu_offload: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1e-5}}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4, optimizer: {lr: 1.0, clip_grad: 9}}
"""
SAMPLES = {"bridge": BRIDGE, "hydra": HYDRA, "automodel": AUTOMODEL, "rl": RL}


def imported(tmp_path: Path, text: str, world: int = 8, **variables: str) -> Imported:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return read_files([path], world, variables=variables)


def values(tmp_path: Path, text: str, world: int = 8, **variables: str) -> dict[str, Any]:
    found = imported(tmp_path, text, world, **variables)
    return {key: setting.value for key, setting in (found.settings | found.pins).items()}


def refusals(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text)
    return "\n".join(f"{problem.code} {problem.what} {problem.fix}" for problem in caught.value.problems)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_is_recognised_and_is_a_recipe(tmp_path: Path, name: str) -> None:
    found = imported(tmp_path, SAMPLES[name])
    assert foreign(tmp_path / "a.yaml") and [system.name for system in found.systems] == ["nemo"]
    assert found.fates["unread"] == []
    settings = {key: (setting.value, setting.origin) for key, setting in (found.settings | found.pins).items()}
    assert read_settings(settings, [f"{key}=model" for key in found.asked]).recipe.train.seq_len in (1024, 2048, 4096)


def test_overrides_of_bridge_say_what_they_say_and_nothing_else(tmp_path: Path) -> None:
    found = imported(tmp_path, BRIDGE)
    assert values(tmp_path, BRIDGE) == {
        "train.max_steps": 200,
        "train.global_batch_size": 64,
        "train.micro_batch_size": 2,
        "train.seq_len": 2048,
        "optim.learning_rate": 2e-4,
        "optim.min_learning_rate": 2e-5,
        "optim.weight_decay": 0.05,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 20,
        "optim.warmup_from": 0.0,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.strategy": "zero1",
        "run.seed": 7,
    }
    assert set(found.asked) == {"model.path", "data.path"} and "its command line" in found.notes[0]
    assert "says 512" in refusals(tmp_path, BRIDGE.replace("dataset: {seq_length: 2048}", "dataset: {seq_length: 512}"))
    tuned = values(tmp_path, BRIDGE + "peft: {dim: 8, target_modules: [linear_qkv, linear_fc2]}\n")
    assert (tuned["method.name"], tuned["lora.rank"], tuned["lora.alpha"]) == ("sft", 8, 32.0)
    assert tuned["lora.targets"] == ["q", "k", "v", "down"]


def test_hydra_files_hold_the_model_and_a_cosine_that_ends_before_the_run(tmp_path: Path) -> None:
    found = values(tmp_path, HYDRA)
    assert found["model.config"] == {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "max_position_embeddings": 1024,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "intermediate_size": 768,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert (found["optim.warmup_steps"], found["optim.decay_steps"], found["optim.min_learning_rate"]) == (10, 70, 1e-5)
    assert (found["parallel.strategy"], found["parallel.schedule"], found["parallel.stages_per_rank"]) == (
        "zero1",
        "interleaved",
        2,
    )
    assert (found["precision.compute"], found["optim.beta2"], found["optim.max_grad_norm"]) == ("bf16", 0.95, 0.5)
    plain = values(tmp_path, HYDRA.replace(", gradient_clip_val: 0.5", "").replace("distributed_fused_adam", "adamw"))
    assert (plain["parallel.strategy"], plain["optim.max_grad_norm"]) == ("ddp", None)


def test_a_run_that_ends_within_its_warmup_has_the_same_rates(tmp_path: Path) -> None:
    found = values(tmp_path, HYDRA.replace("warmup_steps: 10", "warmup_steps: 400"))
    assert found["optim.warmup_steps"] == 100 and found["optim.learning_rate"] == pytest.approx(1e-4 * 100 / 400)
    assert found["optim.warmup_from"] == 0.0


def test_automodel_takes_full_sharding_and_a_constant_rate_for_granted(tmp_path: Path) -> None:
    found = values(tmp_path, AUTOMODEL)
    assert (found["parallel.strategy"], found["parallel.tp"], found["train.global_batch_size"]) == ("zero3", 2, 64)
    assert (found["optim.schedule"], found["optim.beta2"], found["optim.eps"]) == ("constant", 0.98, 1e-7)
    assert (found["data.packing"], found["train.seq_len"], found["train.num_epochs"]) == (True, 4096, 3.0)
    assert (found["method.name"], found["precision.weights"]) == ("sft", "bf16")
    decayed = values(tmp_path, AUTOMODEL + "lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 5, min_lr: 1e-6}\n")
    assert (decayed["optim.schedule"], decayed["optim.warmup_steps"]) == ("cosine", 5)


def test_of_nemo_rls_two_backends_the_one_that_is_on_counts(tmp_path: Path) -> None:
    found = values(tmp_path, RL)
    assert (found["method.name"], found["method.beta"], found["optim.max_grad_norm"]) == ("dpo", 0.2, 0.7)
    assert (found["parallel.strategy"], found["parallel.tp"], found["recompute.mode"]) == ("zero3", 2, "full")
    assert (found["optim.learning_rate"], found["optim.schedule"]) == (5e-6, "constant")
    other = RL.replace("enabled: true", "enabled: X").replace("enabled: false", "enabled: true").replace("X", "false")
    found = values(tmp_path, other)
    assert (found["parallel.tp"], found["parallel.strategy"], found["optim.learning_rate"]) == (4, "ddp", 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HYDRA.replace("hidden_dropout: 0.0", "hidden_dropout: 0.1"), "dropout"),
        (HYDRA.replace("fp8: false", "fp8: true"), "its own scales"),
        (BRIDGE + "mixed_precision: bf16_with_fp8_mixed\n", "bf16_with_fp8_mixed is none of bf16"),
        (RL.replace("sft_loss_weight: 0", "sft_loss_weight: 0.1"), "the chosen answer"),
        (RL + "  scheduler: {name: torch.optim.lr_scheduler.StepLR}\n", "this schedule (StepLR)"),
        (RL.replace("dpo: {", "grpo: {num_generations_per_prompt: 4}\ndpo: {"), "GRPO"),
        (HYDRA.replace("${.hidden_size}", "${.width}"), "`--set model.width=VALUE`"),
        (HYDRA.replace("num_layers: 8", "num_layers: ${env.layers}"), "`--set env.layers=VALUE`"),
    ],
)
def test_what_is_not_there_or_not_in_the_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusals(tmp_path, text)


def test_a_reference_that_is_not_in_the_file_may_be_given(tmp_path: Path) -> None:
    text = HYDRA.replace("${.hidden_size}", "${.width}")
    assert values(tmp_path, text, **{"model.width": "100"})["model.config"]["intermediate_size"] == 300
