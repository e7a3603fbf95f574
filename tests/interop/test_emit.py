"""A plan that is written in another system's terms and read again pins the same, but for what it says it cannot say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise import techniques
from shardwise.interop.emit_files import EMITTED, emitted
from shardwise.interop.imports import read_files
from shardwise.spec.layout import Layout
from shardwise.spec.load import read_settings
from shardwise.spec.plan import Batch, Offload, Pipeline, Plan, Precision, Remat, Shard
from tests.said import shows

FILES = {"deepspeed": "a.json", "accelerate": "a.yaml", "megatron": "a.sh", "torchtitan": "a.toml"}
EIGHT = Layout(dp_shard=8, ranks_per_node=8)
PLANS: dict[str, tuple[Layout, str, dict[str, Any], str]] = {
    "replicas": (EIGHT, "ddp", {"remat": Remat("full")}, "deepspeed accelerate megatron torchtitan"),
    "zero1": (EIGHT, "zero1", {}, "deepspeed accelerate megatron"),
    "zero1, on the host": (EIGHT, "zero1", {"offload": Offload("host")}, "deepspeed accelerate megatron"),
    "zero2": (EIGHT, "zero2", {"remat": Remat("full")}, "deepspeed accelerate megatron torchtitan"),
    "zero3": (EIGHT, "zero3", {"remat": Remat("full")}, "deepspeed accelerate megatron torchtitan"),
    "all on the host": (
        EIGHT,
        "zero3",
        {"offload": Offload("host", weights="host")},
        "deepspeed accelerate torchtitan",
    ),
    "part on the host": (EIGHT, "zero3", {"offload": Offload("host", optimizer_fraction=0.5)}, "deepspeed"),
    "hybrid": (Layout(dp_replicate=2, dp_shard=4, ranks_per_node=4), "zero3", {}, "deepspeed accelerate torchtitan"),
    "hybrid, zero1": (Layout(dp_replicate=2, dp_shard=4, ranks_per_node=4), "zero1", {}, "megatron"),
    "tensors": (Layout(dp_shard=4, tp=2), "zero1", {"sequence_parallel": True}, "megatron"),
    "tensors, all sharded": (Layout(dp_shard=4, tp=2), "zero3", {"sequence_parallel": True}, "torchtitan megatron"),
    "contexts": (Layout(dp_shard=4, cp=2, ulysses=2), "zero2", {"cp_kind": "ulysses"}, "deepspeed megatron"),
    "a pipeline": (Layout(dp_shard=2, tp=2, pp=2), "zero1", {"sequence_parallel": True}, "megatron"),
    "stages in turn": (
        Layout(dp_shard=4, pp=2),
        "zero1",
        {"pipeline": Pipeline("interleaved", 4), "remat": Remat("selective")},
        "megatron",
    ),
    "a pipeline of shards": (Layout(dp_shard=4, pp=2), "zero3", {"pipeline": Pipeline("1f1b")}, "torchtitan"),
    "experts": (Layout(dp_shard=8, ep=4), "zero3", {}, "torchtitan megatron"),
}
"""Layout, strategy, the rest, and the systems that can say all of it but what another file of theirs says."""
SCRIPTS = {
    "deepspeed": {"recompute.mode"},
    "accelerate": {"recompute.mode", "train.micro_batch_size"},
    "megatron": set[str](),
    "torchtitan": set[str](),
}
"""What the training script of a system says, and no file of this kind."""


def plan_of(name: str) -> Plan:
    layout, strategy, others, _ = PLANS[name]
    batch, precision = Batch(2, 4, 1024), Precision("bf16")
    return replace(Plan(), layout=layout, shard=Shard(strategy), batch=batch, precision=precision, **others)  # type: ignore[arg-type]


def read_again(path: Path, text: str, plan: Plan) -> tuple[dict[str, tuple[object, object]], int | None]:
    """What the plan and the recipe that a file becomes have of each technique's settings, and its micro-batch."""
    path.write_text(text)
    found = read_files([path], plan.layout.world)
    settings = {key: (setting.value, setting.origin) for key, setting in (found.settings | found.pins).items()}
    recipe = read_settings(settings, ["model.path=model", "seq_len=1024", "data.path=data.jsonl"]).recipe
    sizes = recipe.train.micro_batch_size
    return techniques.pins(recipe, plan), sizes


@pytest.mark.parametrize("system", EMITTED)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_written_and_read_again_is_the_same_plan(tmp_path: Path, name: str, system: str) -> None:
    plan = plan_of(name)
    text = emitted(plan, system)
    head = re.search(r"not said .*?: ([^\n\"]*)", text)
    unsaid = {words.split()[0] for words in head.group(1).split(", ")} if head else set()
    assert (unsaid <= SCRIPTS[system]) == (system in PLANS[name][3])
    pins, rows = read_again(tmp_path / FILES[system], text, plan)
    pinned = [key for key in pins if key.startswith(("parallel.", "offload.", "recompute.")) and key not in unsaid]
    wrong = {key: pins[key] for key in pinned if pins[key][1] not in ("auto", pins[key][0])}
    assert not {key for key in wrong if key not in ("offload.optimizer_fraction",) or "offload.optimizer" not in unsaid}
    assert "parallel.strategy" in unsaid or pins["parallel.strategy"][1] == plan.shard.strategy
    assert "recompute.mode" in unsaid or pins["recompute.mode"][1] == plan.remat.mode
    for axis in ("dp_replicate", "tp", "pp", "cp", "ep"):
        said = pins[f"parallel.{axis}"][1] == plan.layout.degree(axis)
        assert said or plan.layout.degree(axis) == 1 or f"parallel.{axis}" in unsaid
    assert rows == 2 or "train.micro_batch_size" in unsaid


def test_what_cannot_be_said_stands_above(tmp_path: Path) -> None:
    text = emitted(plan_of("stages in turn"), "torchtitan")
    assert shows(text, "8 processes", "not said", "parallel.strategy zero1", "parallel.stages_per_rank 4")
    assert text.startswith("# ")
    assert '"_comment": "A plan for 8 processes; not said here: parallel.pp 2, ' in emitted(
        plan_of("stages in turn"), "deepspeed"
    )
