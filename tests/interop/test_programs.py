"""Configurations in Python are read, never run: literal keywords, and a placeholder for what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.interop.imports import Imported, foreign, read_files
from shardwise.interop.programs import read_program
from tests.said import shows

PROGRAM = '''"""Runs of one's own."""

from torchtitan.trainer import Trainer

from . import model_registry

raise SystemExit("this file is read, and not run")


def llama3_small() -> Trainer.Config:
    model_spec = model_registry("8B")
    tokens = 2048
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab(model_spec))),
        hf_assets_path="./assets",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4, betas=(0.9, 0.98)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.5, decay_type="cosine"),
        training=TrainingConfig(local_batch_size=2, seq_len=tokens, steps=10 * 20),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        checkpoint=CheckpointManager.Config(interval=steps_between()),
        activation_checkpoint=FullAC.Config(),
    )
'''
TOKENS = PROGRAM.replace(
    "local_batch_size=2, seq_len=tokens,",
    "num_tokens_per_microbatch_per_dp_rank=4 * 2048, max_context_length=2048, num_tokens_per_train_step=64 * 2048,",
)
SECOND = """

def llama3_longer():
    config = llama3_small()
    config.training.steps = 500
    config.activation_checkpoint = None
    if os.environ["BIG"]:
        config.training.seq_len = 8192
    return config


def other() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("70B"))
"""


def imported(tmp_path: Path, text: str, **variables: str) -> Imported:
    path = tmp_path / "config_registry.py"
    path.write_text(text)
    return read_files([path], 8, variables=variables)


def values(tmp_path: Path, text: str, **variables: str) -> dict[str, Any]:
    found = imported(tmp_path, text, **variables)
    return {key: setting.value for key, setting in (found.settings | found.pins).items()}


def refusals(tmp_path: Path, text: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text, **variables)
    return "\n".join(f"{problem.code} {problem.what} {problem.fix}" for problem in caught.value.problems)


def test_literal_keywords_of_calls_are_read(tmp_path: Path) -> None:
    found = values(tmp_path, PROGRAM)
    assert foreign(tmp_path / "config_registry.py")
    assert (found["model.path"], found["parallel.tp"], found["recompute.mode"]) == (
        "meta-llama/Llama-3.1-8B",
        2,
        "full",
    )
    assert (found["train.seq_len"], found["train.max_steps"], found["train.global_batch_size"]) == (2048, 200, 8)
    assert (found["optim.schedule"], found["optim.decay_steps"], found["optim.warmup_steps"]) == ("wsd_cosine", 100, 20)
    assert (found["optim.learning_rate"], found["optim.beta2"]) == (3e-4, 0.98)
    assert imported(tmp_path, PROGRAM).fates["unread"] == []
    assert (
        imported(tmp_path, PROGRAM)
        .settings["optim.learning_rate"]
        .origin.endswith("config_registry.py:17 optimizer.lr: 0.0003")
    )


def test_batches_may_be_tokens(tmp_path: Path) -> None:
    found = values(tmp_path, TOKENS)
    assert (found["train.micro_batch_size"], found["train.global_batch_size"], found["train.seq_len"]) == (4, 64, 2048)
    assert values(tmp_path, TOKENS.replace("num_tokens_per_train_step=64 * 2048,", ""))["train.global_batch_size"] == 16
    stages = TOKENS.replace("num_tokens_per_train_step=64 * 2048,", "").replace(
        "degree=2", "degree=2, num_pp_microbatches=4"
    )
    assert values(tmp_path, stages)["train.global_batch_size"] == 16, "there is no pipeline"
    stages = stages.replace("tensor_parallel", "pipeline_parallel")
    assert values(tmp_path, stages)["train.global_batch_size"] == 4 * 4 * 4
    assert "no multiple of 2048" in refusals(tmp_path, TOKENS.replace("4 * 2048", "3000"))


def test_what_is_not_literal_is_asked_for_by_name(tmp_path: Path) -> None:
    text = PROGRAM.replace("steps=10 * 20", "steps=int(sys.argv[1])")
    assert shows(refusals(tmp_path, text), "training.steps", "`--set training.steps=VALUE`")
    assert values(tmp_path, text, **{"training.steps": "70"})["train.max_steps"] == 70
    fp8 = PROGRAM.replace(
        'model_registry("8B")', 'model_registry("8B", converters=[Float8LinearConverter.Config(on=f())])'
    )
    assert "products in fp8" in refusals(tmp_path, fp8)
    talks = PROGRAM.replace(
        "        parallelism=", "        dataloader=ChatDataLoader.Config(dataset=talks()),\n        parallelism="
    )
    assert (values(tmp_path, PROGRAM)["method.name"], values(tmp_path, talks)["method.name"]) == ("pretrain", "sft")
    assert "another loss" in refusals(tmp_path, PROGRAM.replace("ChunkedLossWrapper.Config", "MoEAuxLoss.Config"))


def test_one_of_several_functions_is_named(tmp_path: Path) -> None:
    said = refusals(tmp_path, PROGRAM + SECOND)
    assert "several configurations: llama3_small, other" in said and "--set config=NAME" in said
    assert foreign(tmp_path / "config_registry.py")
    assert "no configuration `nobodys`" in refusals(tmp_path, PROGRAM, config="nobodys")
    assert values(tmp_path, PROGRAM + SECOND, config="llama3_small")["train.max_steps"] == 200
    longer = SECOND.replace("llama3_longer():", "llama3_longer() -> Trainer.Config:")
    found = {"config": "llama3_longer", "training.seq_len": "4096"}
    wanted = values(tmp_path, PROGRAM + longer, **found)
    assert (wanted["train.max_steps"], wanted["recompute.mode"], wanted["train.seq_len"]) == (500, "none", 4096)
    assert shows(refusals(tmp_path, PROGRAM + longer, config="llama3_longer"), "training.seq_len", "file")


def test_a_program_without_a_configuration_is_told_so(tmp_path: Path) -> None:
    """It is no recipe either, whose errors would be of YAML."""
    for text, where in (("import os\n", "config_registry.py"), ("x = 1\ndef f(:\n", "config_registry.py:2")):
        with pytest.raises(ConfigError) as caught:
            imported(tmp_path, text)
        [problem] = caught.value.problems
        assert problem.code == "CFG007" and problem.where.endswith(where) and foreign(tmp_path / "config_registry.py")


DAMAGED = ["def f(:", "(" * 5000, "\x00", "x = " + "-" * 100_000 + "1", "1" * 6000, "f(" * 60 + ")" * 60]


@pytest.mark.parametrize("text", DAMAGED)
def test_what_is_no_python_is_told(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_program(text, "a.py", {})
    assert [problem.code for problem in caught.value.problems] == ["CFG007"]
