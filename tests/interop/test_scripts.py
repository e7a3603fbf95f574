"""Shell scripts of other systems are read, never run: own small ones, one rule a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.interop.imports import read_files
from shardwise.interop.scripts import read_flags
from tests.said import shows

MODEL = """
    --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 2048
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --tokenizer-type Llama2Tokenizer
"""
MEGATRON = f"""#!/bin/bash
# what is trained
GPUS=8
NNODES=${{SLURM_NNODES:-"2"}}
WORLD=$(($GPUS*$NNODES))
SEQ=2048   # tokens
MODEL_ARGS=({MODEL}
    # --num-layers 99
)
TRAIN="--micro-batch-size 2 --global-batch-size $((WORLD * 4)) --train-iters 100 --lr 3e-4 --min-lr 3e-5 \\
    --lr-decay-style cosine --lr-warmup-fraction .1 --bf16 --seq-length $SEQ"
SPLIT=(--tensor-model-parallel-size ${{TP:-2}} --use-distributed-optimizer)
if [ -n "$WANDB" ]; then
    SPLIT+=(--wandb-project mine)
fi
torchrun --nproc_per_node $GPUS pretrain_gpt.py \\
    ${{MODEL_ARGS[@]}} "${{SPLIT[@]}}" $TRAIN
"""
ARGUMENTS = """
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=8 train.py \\
    --model_name_or_path org/model \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps $(expr 16 / 4) \\
    --learning_rate $RATE \\
    --num_train_epochs 3 \\
    --lr_scheduler_type "cosine" \\
    --fsdp "full_shard auto_wrap" \\
    --bf16 True --output_dir=out
"""


def values(tmp_path: Path, text: str, world: int = 16, **variables: str) -> dict[str, Any]:
    path = tmp_path / "run.sh"
    path.write_text(text)
    found = read_files([path], world, variables=variables)
    return {key: setting.value for key, setting in (found.settings | found.pins).items()}


def refusal(tmp_path: Path, text: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        values(tmp_path, text, **variables)
    return "\n".join(f"{problem.code} {problem.what} {problem.fix}" for problem in caught.value.problems)


def test_a_script_of_megatron(tmp_path: Path) -> None:
    found = values(tmp_path, MEGATRON)
    assert (found["train.global_batch_size"], found["train.micro_batch_size"]) == (64, 2)
    assert (found["parallel.tp"], found["parallel.strategy"], found["parallel.sequence_parallel"]) == (
        2,
        "zero1",
        False,
    )
    assert (found["optim.schedule"], found["optim.warmup_steps"], found["precision.compute"]) == ("cosine", 10, "bf16")
    assert (found["optim.beta2"], found["optim.weight_decay"]) == (0.999, 0.01)  # Megatron's defaults
    config = found["model.config"]
    assert config["num_hidden_layers"] == 8 and config["vocab_size"] == 32_000 // 256 * 256
    assert config["intermediate_size"] == int(4 * 1024 * 2 / 3 / 64) * 64 == 2688
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, False)
    assert values(tmp_path, MEGATRON, TP="4")["parallel.tp"] == 4


def test_megatrons_defaults_are_gpt2s(tmp_path: Path) -> None:
    plain = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --seq-length 128"
    more = "--micro-batch-size 1 --lr 1e-4 --train-samples 3200 --tokenizer-type GPT2BPETokenizer"
    found = values(tmp_path, f"python pretrain_gpt.py {plain} {more} --tensor-model-parallel-size 1", world=8)
    assert found["model.config"]["model_type"] == "gpt2" and found["model.config"]["tie_word_embeddings"]
    assert found["model.config"]["vocab_size"] == 50_304
    assert (found["precision.compute"], found["train.global_batch_size"], found["train.max_steps"]) == ("fp32", 8, 400)
    assert found["parallel.strategy"] == "ddp"


def test_flags_in_yaml_say_what_they_say_in_a_script(tmp_path: Path) -> None:
    plain = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --seq-length 128"
    flags = f"{plain} --micro-batch-size 1 --lr 1e-4 --train-iters 40 --tokenizer-type GPT2BPETokenizer --bf16 true"
    script = values(tmp_path, f"python pretrain_gpt.py {flags} --tensor-model-parallel-size 2", world=8)
    words = f"{flags} --tensor-model-parallel-size 2".split()
    lines = [f"  {flag}: {value}" for flag, value in zip(words[::2], words[1::2], strict=True)]
    path = tmp_path / "model_config.yaml"
    path.write_text("ENV_VARS: {A: 1}\nMODEL_ARGS:\n" + "\n".join(lines) + "\n")
    found = read_files([path], 8)
    assert [system.name for system in found.systems] == ["megatron"] and not found.fates["unread"]
    assert {key: setting.value for key, setting in (found.settings | found.pins).items()} == script


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--fp8-format hybrid", "fp8"),
        ("--multi-latent-attention", "latent attention"),
        ("--rampup-batch-size 16 16 1000", "batch grows"),
        ("--hidden-dropout 0.1", "dropout"),
        ("--lr-decay-style power", "falls as power"),
        ("--my-loss-scaling 3", "IMP002"),
    ],
)
def test_megatrons_flags_that_are_not_there_are_refused_by_name(tmp_path: Path, flag: str, said: str) -> None:
    assert said in refusal(tmp_path, MEGATRON.rstrip() + f" {flag}\n")


def test_a_script_of_training_arguments(tmp_path: Path) -> None:
    found = values(tmp_path, ARGUMENTS, world=8, RATE="2e-5")
    assert found["train.global_batch_size"] == 2 * 4 * 8 and found["optim.learning_rate"] == 2e-5
    assert (found["parallel.strategy"], found["optim.weight_decay"]) == ("zero3", 0.0)


def test_what_is_not_in_the_script_is_asked_for_by_name(tmp_path: Path) -> None:
    said = refusal(tmp_path, ARGUMENTS)
    assert shows(said, "RATE", "--set RATE=VALUE")
    branch = "RATE=1e-4\nif [ $BIG ]; then\n  RATE=1e-5\nfi\n" + ARGUMENTS
    assert values(tmp_path, branch)["optim.learning_rate"] == 1e-4
    assert "1 is not in" in refusal(tmp_path, ARGUMENTS.replace("$RATE", "$1"))


def test_swift_has_adapters_and_sixteen_sequences_by_default(tmp_path: Path) -> None:
    text = "swift sft --model org/model --train_type lora --dataset a.jsonl --per_device_train_batch_size 2 \\\n"
    text += "    --learning_rate 1e-4 --torch_dtype bfloat16 --target_modules all-linear --deepspeed zero2_offload\n"
    found = values(tmp_path, text, world=4)
    assert found["train.global_batch_size"] == 2 * 2 * 4
    assert (found["lora.rank"], found["lora.alpha"], found["parallel.strategy"]) == (8, 32.0, "zero2")
    assert (found["offload.optimizer"], found["optim.beta2"]) == ("host", 0.95)
    assert found["optim.schedule"] == "cosine"
    text = text.replace("--per_device_train_batch_size 2", "--gradient_accumulation_steps 3")
    assert values(tmp_path, text, world=4)["train.global_batch_size"] == 1 * 3 * 4


def test_nothing_is_run_and_nothing_else_is_read(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = f"X=$(touch {mark})\nY=`touch {mark}`\nsource {mark}\ncat <<EOF > {mark}\n--lr 3\nEOF\n"
    found = read_flags(hostile + ARGUMENTS, "run.sh", {})
    assert not mark.exists() and "learning_rate" in found and "lr" not in found


@pytest.mark.parametrize(
    "text",
    [
        "A=$A$A\n" * 60 + ARGUMENTS,
        "A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 60 + ARGUMENTS,
        "X=$((9**9**9**9))\nY=$((1/0))\nZ=$((((((((((1))))))))))\n" + ARGUMENTS,
        "ARGS=(\n" + ARGUMENTS,
        'S="' + ARGUMENTS,
        "cat <<EOF\n" + ARGUMENTS,
        "if " * 5000 + "\n" + ARGUMENTS,
        "\\\n" * 5000,
        "--" * 50_000,
        "torchrun x.py " + "--a " * 30_000,
        "\x00\x01",
        "${" * 20_000 + "}" * 20_000,
    ],
)
def test_hostile_scripts_end_in_a_coded_error_soon(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    for system in (None, "hf", "megatron"):
        try:
            read_files([path], 8, system)
        except ShardwiseError as error:
            assert all(problem.code for problem in error.problems)
