"""What ``shardwise doctor`` finds and says: of sleeps of known length, of numbers by hand, and on two real ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import techniques
from shardwise.launch.doctor import compute, links
from shardwise.launch.doctor.compute import ATTENTION, POINTWISE, PRODUCTS
from shardwise.launch.doctor.machine import describe, machine_lines, obstacles
from shardwise.launch.doctor.rank_work import Found
from shardwise.launch.doctor.verdict import (
    as_measured,
    attention_rate,
    compare,
    product_rate,
    ring_rate,
    shortfalls,
    table,
)
from shardwise.models.lookup import load_spec
from shardwise.planner.seconds.rates import TIMES_AS_FAST, own_traits, rates_of
from shardwise.planner.seconds.step_seconds import optimizer
from shardwise.planner.sheets import sheet_of
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.cluster_file import load_cluster
from shardwise.spec.measured import AttentionTime, Measured, Pointwise, Product, Sent
from shardwise.spec.plan import Offload, Plan, Precision
from shardwise.techniques import float8
from shardwise.techniques.offload import scratch, tiers
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import BLOCK_BYTES
from tests.launch import doctor_ranks
from tests.launch.test_local import alive, until
from tests.said import shows

H100S = parse_cluster("2x8xH100")
GOOD = Measured(
    ranks=8,
    launch_s=4e-6,
    products=(Product("bf16", 8192, 8192, 8192, 1.5e-3), Product("bf16", 64, 64, 64, 6e-6)),
    attention=(AttentionTime("bf16", 2048, 64, 128, 2e-4, 5e-4),),
    pointwise=(Pointwise(2**20, 4e-6), Pointwise(2**31, 7.5e-4)),
    sent=(
        Sent("all_gather", 16, True, 2**12, 3e-5),
        Sent("all_gather", 16, True, 2**28, 8e-4),
        Sent("all_reduce", 8, False, 2**12, 2e-5),
        Sent("all_reduce", 8, False, 2**28, 1.1e-3),
        Sent("all_gather", 8, False, 2**12, 2e-5),
        Sent("all_gather", 8, False, 2**28, 7e-4),
    ),
    to_device_bytes_per_s=5.4e10,
    from_device_bytes_per_s=5.3e10,
    disk_bytes_per_s=2e9,
    host_bytes_per_s=1.2e10,
    disk_read_bytes_per_s=6e9,
)
GPU = torch.device("cuda")


def said(measured: Measured, products_s: tuple[float, ...] = (1.0,), on_core: tuple[float, ...] = ()) -> list[str]:
    return [*shortfalls(list(compare(H100S, measured)), Found(measured, products_s, on_core))]


def test_operations_read_what_was_made_last_and_products_come_in_three_forms(ranks: RankPool) -> None:
    """16 bytes are 2 numbers read and 2 written, and 24 hold three such tensors: each operation gets the result of the
    one before, never one of those that stood there first. All forms are 3 x 7 by 7 x 5."""
    ((seen, products),) = ranks.run(doctor_ranks.operated, world=1)
    assert seen == [(2 * step, 2) for step in range(len(seen))] and len(seen) > 10
    assert set(products) == {3 * 10_000 + 5 * 100 + 7} and len(products) >= 3 * 7


def test_products_in_float8_are_measured_from_codes(ranks: RankPool) -> None:
    """Each kind of scales, of m x k by k x n; only where the device has them, which no CPU does."""
    ((products, seen),) = ranks.run(doctor_ranks.scaled, "both", world=1)
    assert [(one.dtype, one.m, one.n, one.k) for one in products] == [
        (f"float8 {scales}", 256, 384, 128) for scales in ("block", "row")
    ]
    assert all(one.seconds > 0 for one in products)
    assert seen == [((256, 128), (256, 1), (384, 128), (rows, 1)) for rows in (3, 384)]
    for name, served in (("H100", ["block", "row"]), ("B200", ["mx", "row"]), ("A100", []), ("V100", [])):
        assert float8.scales_on(parse_cluster(f"1x{name}").device.capability) == served


def test_products_that_this_torch_refuses_are_not_measured(ranks: RankPool) -> None:
    ((products, seen),) = ranks.run(doctor_ranks.scaled, "row", world=1)
    assert [one.dtype for one in products] == ["float8 row"] and len(seen) == 2


def test_what_was_measured_of_float8_is_told_and_planned_with() -> None:
    """Beside bf16's best: 1.2 ms of 1.5; nothing is said of what it should be. Of other scales the table's rate."""
    found = replace(GOOD, products=(*GOOD.products, Product("float8 block", 8192, 8192, 8192, 1.2e-3)))
    [line] = [line for line in compare(H100S, found) if "float8" in line.what and "best" in line.what]
    assert line.found == pytest.approx(2 * 8192**3 / 1.2e-3) and line.share is None
    narrow = Plan(precision=Precision("bf16", products="float8"))
    machines = replace(H100S, measured=found)
    assert rates_of(narrow, machines, own_traits()).scaled == pytest.approx(1.25)
    rows = replace(narrow, precision=replace(narrow.precision, scales="row"))
    assert rates_of(rows, machines, own_traits()).scaled == TIMES_AS_FAST["row"]


def test_a_measurement_is_that_of_the_slowest_rank(ranks: RankPool) -> None:
    """Sleeps take a little longer than they are asked to, on a busy machine much longer."""
    (first, _), (second, clock) = ranks.run(doctor_ranks.sleeping, world=2)
    assert first == second and 0.02 <= first[0] < 0.1
    assert 1e-5 <= first[1] < first[0] / 10, "what is short is repeated within a sample"
    assert clock.cpu_s < 0.5 * clock.wall_s, "asleep, it is on no core"
    assert clock.own_s >= 0.02


def test_all_ranks_repeat_a_measurement_equally_often(ranks: RankPool) -> None:
    for counts in zip(*ranks.run(doctor_ranks.counted, world=4), strict=True):
        assert len(set(counts)) == 1 and counts[0] >= 5


def test_links_are_measured_over_all_ranks_and_within_a_node(ranks: RankPool) -> None:
    for found in ranks.run(doctor_ranks.sent, 2, world=4):
        groups = {(sent.kind, sent.ranks, sent.across, sent.bytes) for sent in found}
        assert groups == {
            (kind, ranks_, across, size)
            for kind in links.KINDS
            for ranks_, across in ((4, True), (2, False))
            for size in (4096, 65536)
        }
        assert all(1e-6 < sent.seconds < 1 for sent in found)
    alone = ranks.run(doctor_ranks.sent, 1, world=2)[0]
    assert {(sent.ranks, sent.across) for sent in alone} == {(2, False)}


def test_a_disk_that_takes_no_file_has_no_rate(ranks: RankPool, tmp_path: Path) -> None:
    assert all(rate > 1e4 for rates in ranks.run(doctor_ranks.on_disk, tmp_path, world=2) for rate in rates)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a file").touch()
    assert ranks.run(doctor_ranks.on_disk, tmp_path / "a file", world=2) == [(0.0, 0.0)] * 2
    assert any(shows(text, "no file", "written") for text in said(replace(GOOD, disk_bytes_per_s=0.0)))


def test_the_disk_is_read_as_offload_reads_it_and_no_page_cache_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system knows no reads past the page cache, pages are dropped before each. All of the file is read,
    block by block, what is shorter too; five pieces of 0.05 s on three threads take 0.1 s."""
    data, told = os.urandom(4 * BLOCK_BYTES + 4096), list[tuple[str, int]]()

    class Watched(Scratch):
        def settle(self) -> None:
            super().settle()
            told.append(("settled", 0))

        def read(self, place: int, begin: int, into: memoryview) -> None:
            super().read(place, begin, into)
            assert place == 0 and bytes(into) == data[begin : begin + len(into)]
            told.append(("read", begin))
            time.sleep(0.05)

    monkeypatch.setattr(compute, "Scratch", Watched)
    monkeypatch.setattr(compute, "READ_BYTES", {"cuda": len(data)})
    monkeypatch.setattr(compute.os, "urandom", lambda size: data)
    monkeypatch.setattr(scratch, "_opened_direct", lambda name: None)
    rate = compute.disk_read_bytes_per_s(doctor_ranks.Alone(GPU, 0.1), tmp_path)
    assert len(data) / 0.25 < rate < len(data) / 0.1
    assert [what for what, _ in told] == ["settled", *["settled", *["read"] * 5] * 3]
    for first in (2, 8, 14):
        assert sorted(begin for _, begin in told[first : first + 5]) == [i * BLOCK_BYTES for i in range(5)]
    assert list(tmp_path.iterdir()) == []


def test_the_host_s_update_is_measured_as_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm, the product and the update of a step (whose number grows by one), each of all numbers once: their bytes
    are those that the planner divides by this rate, here of a 1B's optimizer on the host of one GPU."""
    assert 4 * 4 * compute.HOST_NUMBERS == 2**28, "256 MiB a rank"
    monkeypatch.setattr(compute, "HOST_NUMBERS", 1000)
    seen: list[tuple[str, int]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if any(word in str(func) for word in ("norm", "foreach", "fused")):
                given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
                seen.append((func.overloadpacket.__name__, sum(one.numel() for one in given)))
            return func(*args, **kwargs or {})

    with Watching():
        rate = compute.host_bytes_per_s(doctor_ranks.Alone(GPU, 0.1))
    one = ("_foreach_add_", 1)
    norm = [("linalg_vector_norm", 0), ("linalg_vector_norm", 1000)]  # of whole pieces, and of what is left
    assert seen == [*norm, ("_foreach_mul_", 1000), one, ("_fused_adamw_", 1000)]
    assert rate == compute.HOST_BYTES * 1000 / 0.5
    plan, spec = Plan(offload=Offload("host")), load_spec("Llama-3.2-1B")
    rates = replace(rates_of(plan, parse_cluster("1xH100"), own_traits()), host_bytes_per_s=rate)
    costed = techniques.cost(sheet_of(spec, plan), plan)
    numbers = tiers.trained(costed, plan).numbers
    assert optimizer(costed, plan, rates) * rate == pytest.approx(compute.HOST_BYTES * numbers)


def test_a_rate_of_memory_is_that_of_the_host_or_of_a_cpu() -> None:
    """Nothing asks how fast a GPU updates in place; how fast its host does, GPUs alone are asked."""
    assert compute.memory_bytes_per_s(doctor_ranks.Alone(GPU, 0.1)) == 0.0
    assert compute.host_bytes_per_s(doctor_ranks.Alone(doctor_ranks.CPU, 0.1)) == 0.0
    assert compute.memory_bytes_per_s(doctor_ranks.Alone(doctor_ranks.CPU, 0.1)) == compute.MEMORY_BYTES / 0.5


def test_rates_by_hand() -> None:
    assert product_rate(Product("bf16", 10, 20, 30, 2.0)) == 6000
    attention = AttentionTime("bf16", 4, 2, 8, 0.5, 1.0)
    assert attention_rate(attention) == 4 * 10 * 2 * 8 / 0.5, "1 + 2 + 3 + 4 pairs are not masked"
    assert ring_rate(Sent("all_gather", 4, False, 1000, 0.5)) == 1500, "a rank passes on three of the four parts"
    assert ring_rate(Sent("reduce_scatter", 4, False, 1000, 0.5)) == 1500
    assert ring_rate(Sent("all_reduce", 4, False, 1000, 0.5)) == 3000, "it scatters, then gathers"


def test_a_good_machine_is_left_alone_and_each_fault_is_told() -> None:
    """Figures of an H100 (989 TFLOP/s of which products reach 0.803; 3.35 TB/s; 63 GB/s of PCIe; 360 and 470 GB/s of
    rings; 8 cards of 50 GB/s), first as such machines have them, then each at under 0.7 of it."""
    assert said(GOOD) == []
    faults: dict[str, Measured] = {
        "products in bf16": replace(GOOD, products=(Product("bf16", 8192, 8192, 8192, 2 * 8192**3 / (0.5 * 989e12)),)),
        "read and written, 2.0 GiB": replace(GOOD, pointwise=(GOOD.pointwise[0], Pointwise(2**31, 2**31 / 2e12))),
        "copied to the device": replace(GOOD, to_device_bytes_per_s=2.5e10),
        "copied from the device": replace(GOOD, from_device_bytes_per_s=2.5e10),
        "all-gather over the network": replace(GOOD, sent=(Sent("all_gather", 16, True, 2**28, 4e-3), *GOOD.sent[2:])),
        "all-reduce in a node": replace(GOOD, sent=(*GOOD.sent[:3], Sent("all_reduce", 8, False, 2**28, 4e-3))),
    }
    for start, measured in faults.items():
        [text] = said(measured)
        assert text.startswith(start) and "should be; " in text
    [text] = said(faults["copied to the device"])
    assert "25.0 GB/s is 40% of the 63.0 GB/s" in text
    [text] = said(GOOD, (1.0, 1.0, 1.6, 1.0))
    assert text.startswith("rank 2 ") and shows(text, "1.6 times", "as long")
    [text] = said(GOOD, (1.0, 1.0), (0.99, 0.6))
    assert text.startswith("rank 1 ") and shows(text, "core", "60% of the time")


def test_the_table_has_a_line_for_everything() -> None:
    lines = table(list(compare(H100S, GOOD)))
    text = "\n".join(lines)
    shape = "8,192 x 8,192"
    assert shows(text, "products in bf16", f"{shape} by {shape} ", "733.0 TFLOP/s", "794.2 TFLOP/s", "92%")
    for name in ("attention in bf16", "no work", "2.0 GiB", "copied to", "over the network", "in a node"):
        assert name in text
    assert re.search(r"^weights .*host's memory.* 12\.0 GB/s +-$", text, re.MULTILINE)
    assert re.search(r"^written .*disk.* 2\.0 GB/s +-$", text, re.MULTILINE)
    assert re.search(r"^read from .*disk.* 6\.0 GB/s +-$", text.splitlines()[-1])
    bare = replace(GOOD, host_bytes_per_s=0.0, disk_bytes_per_s=0.0, disk_read_bytes_per_s=0.0)
    on_cpus = [line.what for line in compare(parse_cluster("2xCPU"), bare)]
    assert not any(word in what for what in on_cpus for word in ("copied", "host", "disk"))


def test_the_cluster_that_was_measured() -> None:
    found = as_measured(H100S, GOOD, "measured today")
    assert found.link_bytes_per_s == 2**28 * 7 / 8 / 7e-4
    assert found.network_bytes_per_s == 2**28 * 15 / 16 / 8e-4
    assert (found.measured, found.assumptions, found.nodes) == (GOOD, ("measured today",), 2)
    assert as_measured(replace(H100S, host_memory_bytes=2**37), GOOD, "").host_memory_bytes == 2**37
    bare = as_measured(H100S, replace(GOOD, sent=()), "")
    assert (bare.link_bytes_per_s, bare.network_bytes_per_s) == (H100S.link_bytes_per_s, H100S.network_bytes_per_s)


def test_this_machine_is_described(tmp_path: Path) -> None:
    machine = describe(tmp_path)
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < machine.free_bytes <= machine.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = "\n".join(machine_lines(machine, parse_cluster("2xCPU")))
    assert machine.host in text and "torch " in text and shows(text, "ranks", "1 x 2", "CPU")


def test_obstacles(tmp_path: Path) -> None:
    machine = replace(
        describe(tmp_path),
        gpus=("NVIDIA H100 80GB HBM3",) * 8,
        driver="580.1",
        shared_free_bytes=2**36,
        open_files=2**20,
        disk_free_bytes=2**40,
    )
    assert list(obstacles(machine, H100S)) == []
    for change, words in {
        "shared_free_bytes": "64.0 MiB of shared",
        "open_files": "1,024 open files",
        "disk_free_bytes": "1.0 GiB of disk",
    }.items():
        least = {"shared_free_bytes": 2**26, "open_files": 1024, "disk_free_bytes": 2**30}[change]
        [text] = obstacles(replace(machine, **{change: least}), H100S)
        assert text.startswith(words)
    assert list(obstacles(replace(machine, open_files=resource.RLIM_INFINITY), H100S)) == []
    [text] = obstacles(replace(machine, gpus=()), H100S)
    assert "torch for CUDA" in text
    assert "driver 580.1" in "\n".join(machine_lines(machine, H100S))


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise", "doctor", *words]
    return subprocess.Popen(
        command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.big
def test_two_ranks_measure_this_machine(tmp_path: Path) -> None:
    process = start(tmp_path, "run.device=cpu", "run.nproc=2", "-o", "cluster.yaml", "--json")
    out, err = process.communicate(timeout=270)
    assert (process.returncode, err) == (0, "")
    told, cluster = json.loads(out), load_cluster(tmp_path / "cluster.yaml")
    assert told["cluster"]["devices_per_node"] == cluster.world == 2 and cluster.measured is not None
    measured = cluster.measured
    shapes = [(found.m, found.n, found.k) for found in measured.products if found.dtype == "fp32"]
    assert shapes == list(PRODUCTS["cpu"])
    assert [found.tokens for found in measured.attention if found.dtype == "fp32"] == [
        t for t, _, _ in ATTENTION["cpu"]
    ]
    assert [found.bytes for found in measured.pointwise] == list(POINTWISE["cpu"])
    assert {(found.kind, found.bytes) for found in measured.sent} == {
        (kind, size) for kind in links.KINDS for size in links.SIZES["cpu"]
    }
    rates = [product_rate(found) for found in measured.products]
    assert 1e9 < max(rates) < 1e13 and max(rates) > 2 * rates[0], "a large product is faster than a small one"
    assert measured.disk_read_bytes_per_s > 1e6 and measured.memory_bytes_per_s > 1e8
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.yaml"}
    again = start(tmp_path, "run.device=cpu", "run.nproc=2", "-o", "cluster.yaml")
    assert "error[OUT001]" in again.communicate(timeout=60)[1] and again.returncode == 73


@pytest.mark.prove
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path, "run.device=cpu", "run.nproc=2")
    until(lambda: len(children(process)) == 2, seconds=60)
    ranks = children(process)
    time.sleep(4)  # they measure, or load torch still
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "") and "Traceback" not in err and "saving" not in err
    until(lambda: not any(alive(rank) for rank in ranks), seconds=5)
    assert len(ranks) == 2
