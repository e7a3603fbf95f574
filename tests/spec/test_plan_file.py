"""A plan as a file: read back equal, edited by a person, refused when it says nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, Problem
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Batch, Estimate, Plan, Precision, Remat, Shard, Traffic
from tests.said import shows

PLAN = Plan(
    layout=Layout(dp_replicate=2, dp_shard=8, ranks_per_node=8),
    batch=Batch(2, 4, 4096, 512),
    shard=Shard("zero3", reshard_after_forward=4),
    precision=Precision(compute="bf16", modules=(("*norm*", "fp32"), ("head.weight", "fp32"))),
    remat=Remat("full", 2),
    estimate=Estimate(
        {"weights": 17_616_076_800, "accumulated gradients": 5},
        99,
        85_000_000_000,
        (Traffic("dp_shard", "all_gather", "weights", 7, 3),),
        11,
    ),
    why={"shard.strategy": "derived: the first that fits", "remat.mode": "pinned"},
    model="meta-llama/Llama-3.1-70B",
    cluster="2x8xH100-SXM-80GB+400Gb/node",
)


def test_a_plan_survives_being_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for plan in (PLAN, Plan()):
        path.write_text(dump_plan(plan))
        assert load_plan(path) == plan


@pytest.mark.prove
@settings(max_examples=40, deadline=None)
@given(reason=st.text(max_size=40), name=st.text(max_size=40), key=st.text(min_size=1, max_size=20))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, reason: str, name: str, key: str) -> None:
    plan = Plan(why={key: reason}, model=name)
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(dump_plan(plan), encoding="utf-8")
    if "${" in reason + name + key:
        return
    assert load_plan(path) == plan


def test_reasons_and_sizes_stand_beside_the_values() -> None:
    lines = dump_plan(PLAN).splitlines()
    assert any(shows(line, "strategy: zero3", "# derived") for line in lines)
    assert "    weights: 17616076800  # 16.4 GiB" in lines
    assert "  dp_shard: 8" in lines


@pytest.mark.parametrize(
    ("before", "after", "code", "what", "fix"),
    [
        ("dp_shard: 8", "dp_shrad: 8", "CFG001", "unknown key `layout.dp_shrad`", "did you mean `layout.dp_shard`?"),
        (
            "dp_shard: 8",
            "dp_shard: 0",
            "CFG005",
            "`layout.dp_shard` must be a whole number ≥ 1, got 0",
            "give 1 or more",
        ),
        (
            "dp_shard: 8",
            "dp_shard: 1.5",
            "CFG004",
            "`layout.dp_shard` must be a whole number, got 1.5",
            "give a whole number",
        ),
        (
            "strategy: zero3",
            "strategy: zero4",
            "CFG005",
            '`shard.strategy` must be one of ddp, zero1, zero2, zero3, got text "zero4"',
            "give one of ddp, zero1, zero2, zero3",
        ),
        (
            "format: 1",
            "format: 2",
            "CFG009",
            "written for format 2, this program reads up to 1",
            "upgrade: pip install -U shardwise",
        ),
    ],
)
def test_an_edited_plan_is_checked(tmp_path: Path, before: str, after: str, code: str, what: str, fix: str) -> None:
    text = dump_plan(PLAN)
    assert before in text
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace(before, after))
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if before in line)
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert caught.value.problems == (Problem(code, what, f"{path}:{line}", fix),)
