"""Inputs of blocks that wait on the host, or on NVMe: when they may, what they hold and take by hand, and what is said
of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise import techniques
from shardwise.cli import render
from shardwise.errors import ConfigError
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import fits, seconds
from shardwise.planner.price import price
from shardwise.planner.remedy import remedies
from shardwise.planner.schedule import folded
from shardwise.planner.search import Search, best_of_kinds, choose
from shardwise.planner.seconds.step_seconds import timed
from shardwise.planner.sheets import sheet_of
from shardwise.runtime.report import header
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import execution, memory_lines
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe, read_recipe
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Batch, Offload, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.rank_kind import rank_kind_of
from tests.said import shows

EIGHT_B = load_spec("meta-llama/Llama-3.1-8B")
H100 = parse_cluster("1xH100")
ROWS = 8192
INPUT = ROWS * 4096 * 2
"""Bytes of what a block of an 8B is given for one row, in bf16."""
ONE = Plan(Layout(), Batch(1, 1, ROWS), Shard(), Precision("bf16"), Remat("full"), offload=Offload("none", "host"))


def test_what_waits_by_hand() -> None:
    """That of 31 blocks of 32: backward begins with the last. In four micro-batches the same rooms, four times."""
    there, here = (price(EIGHT_B, replace(ONE, offload=each), H100) for each in (ONE.offload, Offload()))
    assert there.estimate.host == {"activations": 31 * INPUT} and not here.estimate.host
    # One micro-batch's inputs are all there when backward begins; that of a block is held, and of the one before it.
    saved = here.estimate.memory["activations"] - there.estimate.memory["activations"]
    assert 0 <= saved <= 30 * INPUT
    four = replace(ONE, batch=Batch(1, 4, ROWS))
    assert price(EIGHT_B, four, H100).estimate.host == there.estimate.host


def of_bus(bytes_per_s: float, plan: Plan) -> Plan:
    device = replace(H100.device, host_link_bytes_per_s=bytes_per_s)
    return timed(EIGHT_B, price(EIGHT_B, plan, H100), replace(H100, device=device))


def test_what_copies_take() -> None:
    """Beside a block's forward and backward they take no time; from a bus that is slower than these the step waits."""
    fast, without = of_bus(63e9, ONE), of_bus(63e9, replace(ONE, offload=Offload()))
    assert seconds(fast).step_s == pytest.approx(seconds(without).step_s) and seconds(fast).offload_s == 0
    assert seconds(fast).copied_s == pytest.approx(2 * 31 * INPUT / (0.8 * 63e9))
    slow = seconds(of_bus(1e9, ONE))
    assert slow.copied_s == pytest.approx(2 * 31 * INPUT / 0.8e9)
    assert 0.5 * slow.copied_s < slow.offload_s < slow.copied_s
    assert slow.step_s == pytest.approx(seconds(fast).step_s + slow.offload_s, rel=0.01)
    assert slow.compute_s == pytest.approx(seconds(fast).compute_s, rel=0.01)


FILED = replace(ONE, offload=Offload("none", "nvme"))
INPUTS = "inputs of blocks on "


def test_what_waits_in_a_file_by_hand() -> None:
    """That of 31 blocks on the disk, and on the host three rooms, each from a page on. Four micro-batches use the same
    places, and write four times."""
    for m in (1, 4):
        plan = replace(FILED, batch=Batch(1, m, ROWS))
        found = price(EIGHT_B, plan, parse_cluster("8xH100")).estimate
        assert found.host == {"buffers": 3 * (INPUT + 4096)} and found.host_bytes == 8 * 3 * (INPUT + 4096)
        assert found.disk_bytes == 8 * 31 * INPUT and found.written_bytes == m * found.disk_bytes
        assert found.memory == price(EIGHT_B, replace(plan, offload=ONE.offload), H100).estimate.memory
    [line] = [line for line in memory_lines(found) if "TB" in line]
    assert shows(line, "writes 62.0 GiB", "disks", "9,012 steps", "600 TB")
    assert shows(render.verdict(found), "host (0%)", "15.5 GiB", "disks")
    on_cpu = price(EIGHT_B, FILED, parse_cluster("1xCPU")).estimate
    assert on_cpu.memory["offloaded"] == 3 * (INPUT + 4096)
    assert shows(render.verdict(on_cpu), "1.9 GiB", "disks")
    both = price(EIGHT_B, replace(FILED, offload=Offload("nvme", "nvme")), H100).estimate
    optimizer = price(EIGHT_B, replace(FILED, offload=Offload("nvme")), H100).estimate
    assert both.disk_bytes == both.written_bytes == optimizer.written_bytes + 31 * INPUT
    assert both.host["buffers"] == optimizer.host["buffers"] + 3 * (INPUT + 4096)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_waits_of_stages_by_hand(tier: str) -> None:
    """Of 16 blocks of the first of two stages the inputs of 15, of two forwards in flight; a later stage's first input
    stays with its last, where what was sent lies: 14 inputs of one forward, which is followed by its backward."""
    stages = Pipeline("1f1b", 1, (16, 16))
    plan = replace(ONE, layout=Layout(pp=2), batch=Batch(1, 8, ROWS), pipeline=stages, offload=Offload("none", tier))  # type: ignore[arg-type]
    assert techniques.check(EIGHT_B, plan, parse_cluster("2xH100")) == []
    held = []
    for rank in range(2):
        costed = techniques.cost(sheet_of(EIGHT_B, plan, rank_kind_of(rank, plan.layout, plan.stages(32))), plan)
        span = folded(costed, plan)
        held.append(span.on("host" if tier == "host" else "disk").top["activations"])
        once = (15, 14)[rank] * INPUT
        assert sum(copy.bytes * times for copy, times in span.copied.items() if copy.target == "device") == 8 * once
        if tier == "nvme":
            assert span.on("host").top == {"buffers": 3 * (INPUT + 4096)}
    assert held == [2 * 15 * INPUT, 14 * INPUT]
    found = timed(EIGHT_B, price(EIGHT_B, plan, parse_cluster("2xH100")), parse_cluster("2xH100"))
    rates = 2 / (0.8 * 63e9) + (1 / 2.5e9 + 1 / 1.25e9 if tier == "nvme" else 0)
    assert seconds(found).copied_s == pytest.approx(8 * 15 * INPUT * rates)
    assert found.estimate.written_bytes == (2 * 8 * 15 * INPUT if tier == "nvme" else 0), "as the first, which has more"


def test_what_a_file_takes() -> None:
    """A disk that is faster than blocks takes no time. One that is slower is waited for all the time but at both ends:
    it writes 31 inputs, the first when that has left, and reads 31, after the last of which the first block is left."""
    way_s = INPUT / (0.8 * 63e9)
    for rate, m in ((1e12, 1), (1e8, 1), (1e8, 3)):
        cluster = replace(H100, measured=Measured(1, disk_bytes_per_s=rate, disk_read_bytes_per_s=2 * rate))
        plan = replace(FILED, batch=Batch(1, m, ROWS))
        found, without = (
            seconds(timed(EIGHT_B, price(EIGHT_B, each, cluster), cluster))
            for each in (plan, replace(plan, offload=Offload()))
        )
        disk_s = 31 * (INPUT / rate + INPUT / (2 * rate))
        assert found.copied_s == pytest.approx(m * (disk_s + 2 * 31 * way_s))
        assert found.compute_s == pytest.approx(without.compute_s, rel=0.01)
        if rate == 1e12:
            assert found.offload_s == 0 and found.step_s == pytest.approx(without.step_s)
            continue
        passes_s = found.compute_s + found.offload_s
        ends_s = passes_s / m - (disk_s + 2 * way_s)
        assert 0 < ends_s < 2 * found.compute_s / m / 32, "a block's backward, and what is before and after all blocks"


def test_a_pin_has_all_recomputed() -> None:
    words = ["offload.activations=host", f"train.seq_len={ROWS}", "train.global_batch_size=1", "lora.rank=16"]
    chosen = choose(load_recipe(None, words), EIGHT_B, H100)
    assert chosen.remat.mode == "full" and chosen.offload == Offload("none", "host")
    assert chosen.why["offload.activations"] == "pinned" and fits(chosen)


def test_pipelines_are_not_tried_beside_it() -> None:
    """Which the search does by itself elsewhere, and would choose where they are faster."""
    words = [f"train.seq_len={ROWS}", "train.global_batch_size=16"]
    for asked, tried in (("none", True), ("host", False)):
        recipe = load_recipe(None, [f"offload.activations={asked}", *words])
        search = Search(recipe, EIGHT_B, parse_cluster("4xH100"))
        assert bool(search.pipelines) is tried
        assert any(plan.layout.pp > 1 for plan in best_of_kinds(search)) is tried


@pytest.mark.parametrize(
    ("plan", "what", "fix"),
    [
        (
            replace(ONE, remat=Remat("selective")),
            ["inputs of blocks", "host", "`recompute: selective`"],
            "none, or `recompute=full`",
        ),
        (
            replace(FILED, remat=Remat()),
            ["inputs of blocks", "NVMe", "`recompute: none`"],
            "none, or `recompute=full`",
        ),
    ],
    ids=["selective", "none"],
)
def test_what_cannot_wait_is_refused(plan: Plan, what: list[str], fix: str) -> None:
    [problem] = [problem for problem in techniques.check(EIGHT_B, plan, H100) if problem.code == "PLAN028"]
    assert shows(problem.what, *what) and (problem.where, problem.fix) == ("offload.activations", fix)


def test_less_recomputation_beside_it_is_refused() -> None:
    recipe = load_recipe(None, ["offload.activations=host", "recompute=none", f"train.seq_len={ROWS}"])
    with pytest.raises(ConfigError) as raised:
        choose(recipe, EIGHT_B, H100)
    assert "PLAN028" in {problem.code for problem in raised.value.problems}


@pytest.mark.prove
def test_the_remedy_of_long_rows() -> None:
    """An 8B at 1,048,576 tokens on 8 x 80 GB."""
    words = ["model=meta-llama/Llama-3.1-8B", "train.seq_len=1048576", "train.global_batch_size=1", "parallel.cp=8"]
    machines, recipe = parse_cluster("8xH100"), load_recipe(None, words)
    found = {each.change: each for each in remedies(recipe, EIGHT_B, machines, choose(recipe, EIGHT_B, machines))}
    [change] = [change for change in found if change.startswith("offload.activations=host")]
    assert fits(found[change].plan) and found[change].plan.estimate.host["activations"] == 31 * 2**17 * 4096 * 2


def test_it_is_told() -> None:
    """In the line of a plan, and in the header of a run."""
    both = replace(ONE, offload=Offload("nvme", "host"))
    assert FILED.offload.words == [INPUTS + "NVMe"] and both.offload.filed == ["optimizer"]
    assert both.offload.words == ["the optimizer on NVMe", INPUTS + "the host"] and not Offload().words
    assert execution(both).endswith(" · ".join(["", "recompute full", *both.offload.words]))
    assert header.execution(ONE).endswith(f", recompute full, {INPUTS}the host")


NAMES = {
    "activation_offloading: true": "host",
    "activation_offloading: legacy": "host",
    "activation_offloading: disk": "nvme",
    "enable_activation_offloading: false": "none",
}


@pytest.mark.parametrize("line", NAMES)
def test_it_is_read_by_the_names_that_others_give_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(line)
    assert read_recipe(tmp_path / "r.yaml", ()).recipe.offload.activations == NAMES[line]
