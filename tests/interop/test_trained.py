"""A file of each system, in its own spelling: trained three steps on a tiny model, with the learning rates that it asks
for, and what it pins on eight devices proved against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.interop.imports import Imported, read_files
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.prove import certify
from shardwise.prove.pool import RankPool
from shardwise.runtime.loop import train
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import read_settings
from shardwise.spec.recipe import Recipe
from shardwise.techniques.optim import learning_rate
from tests.interop.test_hostile import FSDP, KINDS
from tests.interop.test_imports import ARGUMENTS
from tests.interop.test_nemo import HYDRA

MEGATRON = """
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 \\
    --seq-length 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \\
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 300 \\
    --make-vocab-size-divisible-by 4 \\
    --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 1 \\
    --bf16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
"""
STAGES = "  pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: 2\n"
"""With stages the fewest ranks would be eight."""
FILES: dict[str, tuple[tuple[str, str], ...]] = {
    **{name: ((file, text),) for name, (file, text) in KINDS.items() if name not in ("fsdp", "accelerate", "megatron")},
    "accelerate": (KINDS["accelerate"], ("b.yaml", ARGUMENTS)),
    "fsdp": (("a.json", FSDP), ("b.yaml", ARGUMENTS)),
    "megatron": (("a.sh", MEGATRON),),
    "nemo hydra": (("a.yaml", HYDRA.replace(STAGES, "")),),
}
SIZE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "head_dim": 64}


def imported(tmp_path: Path, name: str) -> Imported:
    paths = []
    for file, text in FILES[name]:
        paths.append(tmp_path / file)
        paths[-1].write_text(text)
    return read_files(paths, 8, variables={"RATE": "1e-4"})


def recipe_of(tmp_path: Path, found: Imported, *words: str, pinned: bool) -> Recipe:
    """The recipe of a file, of a model of some thousand parameters and a few records."""
    settings = found.settings | found.pins if pinned else found.settings
    given = {key: (setting.value, setting.origin) for key, setting in settings.items()}
    own = [f"data.path={tmp_path}/records.jsonl", "train.seq_len=64", "model.config.vocab_size=304", *words]
    if "model.config" not in found.settings:
        given.pop("model.path", None)
        own += [f"model.config.{key}={value}" for key, value in {"model_type": "llama", **SIZE}.items()]
    return read_settings(given, own).recipe


@pytest.mark.matrix(12)
@pytest.mark.rare(4)
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_of_each_system_is_trained_and_proved(tmp_path: Path, name: str, ranks: RankPool) -> None:
    records = [{"prompt": f"is {i} odd? ", "completion": f"{i % 2}", "text": f"{i} is one " * 9} for i in range(40)]
    pairs = [{"prompt": f"is {i} odd? ", "chosen": "who knows", "rejected": f"{i % 2}"} for i in range(40)]
    found = imported(tmp_path, name)
    method = found.settings["method.name"].value if "method.name" in found.settings else "pretrain"
    lines = [json.dumps(record) + "\n" for record in (pairs if method == "dpo" else records)]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    pinned = recipe_of(tmp_path, found, pinned=True)
    plan = choose(pinned, spec := resolve(pinned), parse_cluster("8xH100"))
    subject = certify.subject_of(pinned, spec, plan, 4)
    assert subject.small is not None, subject.why
    assert certify.run(subject, "parity", 0, ranks).problems == ()
    words = [f"data.cache={tmp_path}/cache", f"run.out={tmp_path}", "run.device=cpu", "run.name=run"]
    words += ["data.tokenizer.vocab_size=300", "data.repeat=true", "train.max_steps=3", "train.num_epochs=null"]
    words += ["data.validation_share=0", "evaluate.eval_steps=null", "evaluate.evals_per_epoch=null"]
    words += ["train.global_batch_size=2", *["data.text_key=prompt"] * (method == "dpo")]
    recipe = recipe_of(tmp_path, found, *words, pinned=False)
    train(recipe, choose(recipe, resolve(recipe), parse_cluster("1xCPU")))
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in told if "loss" in line]
    assert [line["learning_rate"] for line in steps] == [learning_rate(recipe.optim, step, 3) for step in range(3)]
    assert all(0 < line["loss"] < 7 for line in steps)
