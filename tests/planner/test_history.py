"""What earlier runs took is kept, found again on the same machine, and corrects predictions by their median."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.planner.seconds import history
from shardwise.planner.seconds.history import (
    FILE,
    KEPT_LINES,
    About,
    Calibration,
    PastRun,
    PastRuns,
    calibrated,
    calibration,
    imbalance,
    machine_of,
    past_runs,
    remember,
)
from shardwise.spec.cluster import Cluster, local_cluster, parse_cluster
from shardwise.spec.devices import Device
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Lora, Plan, Seconds, Shard
from tests.said import shows

H100 = parse_cluster("8xH100")
DDP = Plan(layout=Layout(dp_shard=8), model="llama")
ZERO3 = replace(DDP, shard=Shard("zero3"))


def run(ratio: float, strategy: str = "ddp", tp: int = 1, model: str = "llama") -> PastRun:
    return PastRun(history.PREDICTOR, machine_of(H100), model, strategy, tp, 2.0, 2.0 * ratio)


def test_what_is_remembered_is_found_again_on_that_machine_only(tmp_path: Path) -> None:
    remember(DDP, H100, 2.0, 3.0, tmp_path)
    remember(replace(ZERO3, layout=Layout(dp_shard=4, tp=2)), H100, 1.0, 0.9, tmp_path)
    remember(DDP, parse_cluster("4xH100"), 1.0, 7.0, tmp_path)
    remember(DDP, replace(H100, measured=Measured()), 1.0, 8.0, tmp_path)
    found = past_runs(H100, tmp_path)
    assert [(r.strategy, r.tp, r.predicted_s, r.measured_s) for r in found.runs] == [
        ("ddp", 1, 2.0, 3.0),
        ("zero3", 2, 1.0, 0.9),
    ]
    assert found.unread == 0
    assert [r.measured_s for r in past_runs(parse_cluster("4xH100"), tmp_path).runs] == [7.0]
    assert past_runs(parse_cluster("8xA100"), tmp_path) == PastRuns()
    assert past_runs(H100, tmp_path / "nowhere") == PastRuns()


def test_free_memory_does_not_make_another_machine() -> None:
    one, two = (local_cluster(2, "cpu", memory_bytes=size) for size in (4 * 2**30, 5 * 2**30))
    assert one != two and machine_of(one) == machine_of(two)
    assert machine_of(one) != machine_of(local_cluster(1, "cpu", memory_bytes=4 * 2**30))


@pytest.mark.parametrize(("predicted_s", "measured_s"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_what_has_no_ratio_is_not_remembered(tmp_path: Path, predicted_s: float, measured_s: float) -> None:
    remember(DDP, H100, predicted_s, measured_s, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_torn_and_foreign_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    remember(DDP, H100, 2.0, 3.0, tmp_path)
    good = (tmp_path / FILE).read_bytes()
    bad = [
        b"not json",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"step": 3}',
        good.strip().replace(b"2.0", b"0.0"),  # no ratio
        good.strip().replace(b"2.0", b"-2.0"),
        good.strip().replace(b"2.0", b"NaN"),
        good.strip().replace(b"2.0", b'"2"'),
        b"[" * 100_000,
    ]
    (tmp_path / FILE).write_bytes(b"\n".join([*bad, b"", good.strip(), good[:40]]))  # and the last line is torn
    remember(DDP, H100, 2.0, 5.0, tmp_path)
    found = past_runs(H100, tmp_path)
    assert [r.measured_s for r in found.runs] == [3.0, 5.0]
    assert found.unread == len(bad) + 1
    current = b'"predictor": %d' % history.PREDICTOR
    newer = good.replace(current, b'"predictor": 1000')  # of other predictions: neither counted nor damaged
    (tmp_path / FILE).write_bytes(newer)
    assert past_runs(H100, tmp_path) == PastRuns()


def test_a_file_that_is_none_is_an_os_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(OSError, match="a pipe"):
        past_runs(H100, tmp_path)
    with pytest.raises(OSError, match="a pipe"):
        remember(DDP, H100, 2.0, 3.0, tmp_path)


def test_the_file_keeps_the_latest_runs_only(tmp_path: Path) -> None:
    remember(DDP, H100, 2.0, 1.0, tmp_path)
    line = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(line * (2 * KEPT_LINES - 2))
    remember(DDP, H100, 2.0, 2.0, tmp_path)
    assert len(past_runs(H100, tmp_path).runs) == 2 * KEPT_LINES - 1
    remember(DDP, H100, 2.0, 3.0, tmp_path)
    remember(DDP, H100, 2.0, 4.0, tmp_path)
    kept = [r.measured_s for r in past_runs(H100, tmp_path).runs]
    assert len(kept) == KEPT_LINES and kept[-4:] == [1.0, 2.0, 3.0, 4.0]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_two_processes_may_write(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from shardwise.planner.seconds.history import remember\n"
        "from shardwise.spec.cluster import parse_cluster\n"
        "from shardwise.spec.plan import Plan\n"
        "plan, cluster = Plan(model='m' * 1000), parse_cluster('8xH100')\n"
        "for number in range(100): remember(plan, cluster, 1.0, int(sys.argv[2]) + number / 1000, Path(sys.argv[1]))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(who)]) for who in (1, 2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    found = past_runs(H100, tmp_path)
    assert found.unread == 0
    for who in (1, 2):
        assert [r.measured_s for r in found.runs if int(r.measured_s) == who] == [who + n / 1000 for n in range(100)]


def test_runs_that_resemble_the_plan_count_first() -> None:
    past = PastRuns((run(1.5, "zero3"), run(1.1, model="gpt"), run(1.2), run(3.0, "zero3", tp=2)))
    assert calibration(PastRuns(), DDP) is None
    one = calibration(past, DDP)  # same model and split
    assert one is not None and (one.ratio, one.runs, one.alike) == (pytest.approx(1.2), 1, True)
    split = calibration(past, replace(DDP, shard=Shard("zero1")))  # same model: the middle of 1.2, 1.5 and 3.0
    assert split is not None and (split.ratio, split.runs, split.alike) == (pytest.approx(1.5), 3, True)
    machine = calibration(past, replace(DDP, model="qwen"))
    assert machine is not None and (machine.runs, machine.alike) == (4, False)
    assert machine.ratio == pytest.approx(math.sqrt(1.2 * 1.5))


def test_like_it_is_the_same_family_and_no_other_size() -> None:
    """Up to four times as many parameters, or as few; of runs whose model nothing is known of, the same name."""
    known = replace(run(1.2, model="8B"), family="llama", parameters=8 * 10**9)
    past = PastRuns((known, run(3.0, model="old")))
    plan = replace(DDP, model="new")
    for family, parameters, alike in (
        ("llama", 2 * 10**9, True),
        ("llama", 32 * 10**9, True),
        ("llama", 33 * 10**9, False),
        ("llama", 10**9, False),
        ("qwen3", 8 * 10**9, False),
        ("", 0, False),
    ):
        found = calibration(past, plan, About(family, parameters))
        assert found is not None and (found.alike, found.runs) == (alike, 1 if alike else 2)
    named = calibration(past, replace(DDP, model="old"), About("llama", 10**9))
    assert named is not None and (named.ratio, named.alike) == (pytest.approx(3.0), True)


def test_the_median_and_the_band_by_hand() -> None:
    """Ratios 1.0, 1.1, 1.2, and a run that something disturbed. In logarithms the middle lies between 1.1 and 1.2; the
    deviations from it are .0435, .0435, .1388 and 2.16, their median .0912, which holds .0912 x 1.4826 x 1.2816."""
    found = calibration(PastRuns((run(1.0), run(10.0), run(1.1), run(1.2)), unread=2), DDP)
    assert found is not None
    assert found.ratio == pytest.approx(1.14891, rel=1e-5)
    assert found.band == pytest.approx(math.sqrt(0.06**2 + (0.0911570 * 1.90010) ** 2), rel=1e-4)
    assert shows(found, 4, "like it", "1.15 x", "2 lines of steps.jsonl")
    single = calibration(PastRuns((run(1.12),)), DDP)
    assert single is not None and single.band == pytest.approx(0.06)
    adapters = calibration(PastRuns((run(1.12),)), replace(DDP, lora=Lora()))
    assert adapters is not None and adapters.band == pytest.approx(0.13)


def test_only_the_latest_runs_count() -> None:
    found = calibration(PastRuns((*[run(5.0)] * 100, *[run(1.1)] * 20)), DDP)
    assert found is not None and (found.ratio, found.runs) == (pytest.approx(1.1), 20)


def test_seconds_are_scaled_whole_and_in_parts_and_only_once() -> None:
    parts = {"compute_s": 1.0, "products_s": 0.6, "attention_s": 0.3, "pointwise_s": 0.1, "optimizer_s": 0.2}
    sides = {
        "exposed_s": {"dp_shard": 0.4},
        "sent_s": {"dp_shard": 0.9},
        "host_s": 0.3,
        "offload_s": 0.1,
        "copied_s": 0.8,
    }
    seconds = Seconds(step_s=2.0, **parts, **sides, low_s=1.0, high_s=4.0, basis="the table")  # type: ignore[arg-type]
    found = calibrated(seconds, Calibration(1.5, math.log(1.25), 3))
    assert found.step_s == 3.0 and found.compute_s == 1.5 and found.scale == 1.5
    assert (found.products_s, found.attention_s, found.pointwise_s) == pytest.approx((0.9, 0.45, 0.15))
    assert (found.offload_s, found.copied_s) == pytest.approx((0.15, 1.2))
    assert found.exposed_s == {"dp_shard": pytest.approx(0.6)} and found.sent_s == {"dp_shard": pytest.approx(1.35)}
    total = found.compute_s + sum(found.exposed_s.values()) + found.optimizer_s + found.offload_s + found.host_s
    assert total == pytest.approx(found.step_s)
    assert (found.low_s, found.high_s) == pytest.approx((2.4, 3.75))  # 3 / 1.25 and 3 x 1.25
    assert shows(found.basis, 3, "this machine", "1.5 x")
    again = calibrated(found, Calibration(0.5, 0.06, 1))
    assert again.step_s == pytest.approx(1.0) and again.scale == 0.5
    assert shows(again.basis, 1, "this machine", "0.5 x")


def test_a_line_is_what_it_was_written_as(tmp_path: Path) -> None:
    card = Cluster(Device("RTX 4090", 24 * 2**30), link_bytes_per_s=1.0)
    remember(DDP, card, 0.5, 0.6, tmp_path, About("llama", 10))
    assert json.loads((tmp_path / FILE).read_text()) == {
        "predictor": history.PREDICTOR,
        "machine": "1x1xRTX 4090 (cuda, 24 GiB)",
        "model": "llama",
        "strategy": "ddp",
        "tp": 1,
        "predicted_s": 0.5,
        "measured_s": 0.6,
        "expert_imbalance": 0.0,
        "family": "llama",
        "parameters": 10,
    }


def test_the_imbalance_of_experts_is_that_of_runs_of_the_model(tmp_path: Path) -> None:
    """The highest; runs without ep know none, and lines of earlier versions have no such field."""
    for model, found in (("llama", 1.25), ("llama", 0.0), ("llama", 1.75), ("other", 3.0)):
        remember(replace(DDP, model=model), H100, 2.0, 3.0, tmp_path, About(expert_imbalance=found))
    line = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    for later in asdict(About()):
        del line[later]
    with (tmp_path / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    past = past_runs(H100, tmp_path)
    assert past.unread == 0 and len(past.runs) == 5
    assert (imbalance(past, "llama"), imbalance(past, "other"), imbalance(past, "none")) == (1.75, 3.0, None)
