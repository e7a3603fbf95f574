"""Clusters: read from a string, from the table, or found on this machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError, UsageError
from shardwise.spec import cluster as module
from shardwise.spec.cluster import CPU_PROCESS_BYTES, crowding, local_cluster, parse_cluster
from shardwise.spec.devices import devices, find_device
from shardwise.spec.host import available_memory_bytes, cores
from tests.said import shows


def test_the_cluster_of_the_sketch() -> None:
    found = parse_cluster("2x8xRTX-PRO-6000+200Gb/node")
    assert (found.nodes, found.devices_per_node, found.world, found.kind) == (2, 8, 16, "cuda")
    assert found.device.name == "RTX Pro 6000"
    assert 90 * 2**30 < found.device.memory_bytes <= 96 * 2**30
    assert found.network_bytes_per_s == 25e9
    assert found.link_bytes_per_s == 40e9
    network, links, host, figures = found.assumptions
    assert shows(network, "200 Gb/s", "nodes", "shared") and shows(links, "PCIe", "40 GB/s")
    assert shows(host, "1,000.0 GiB", ",host=<N>GB") and shows(figures, "RTX Pro 6000", "partly verified")


@pytest.mark.parametrize(
    ("text", "nodes", "count", "device", "gbit_per_s"),
    [
        ("8xH100", 1, 8, "H100-SXM-80GB", 8 * 400),
        ("h100-80gb", 1, 1, "H100-SXM-80GB", 400),
        ("8 H100", 1, 8, "H100-SXM-80GB", 3200),
        ("8*h100", 1, 8, "H100-SXM-80GB", 3200),
        ("8 x H100", 1, 8, "H100-SXM-80GB", 3200),
        ("H100x8", 1, 8, "H100-SXM-80GB", 3200),
        ("4090x2", 1, 2, "RTX 4090", 100),
        ("RTX 4090 x 4", 1, 4, "RTX 4090", 100),
        ("rtx 4090", 1, 1, "RTX 4090", 100),
        ("8 4090", 1, 8, "RTX 4090", 100),
        ("4x8xH100+400Gb/node", 4, 8, "H100-SXM-80GB", 400),
        ("4x8xH200+8x400Gb/node", 4, 8, "H200-SXM", 3200),
        ("4x8xH200+8x400Gb", 4, 8, "H200-SXM", 3200),
        ("2x4xA100-40GB+50GB/s", 2, 4, "A100-SXM-40GB", 400),
        (" 1xrtx pro 6000 blackwell ", 1, 1, "RTX Pro 6000", 100),
        ("2xMI300X", 1, 2, "MI300X", 800),
        ("MI300Xx8", 1, 8, "MI300X", 3200),
        ("4x4090", 1, 4, "RTX 4090", 100),
        ("2x8x3090+200Gb/node", 2, 8, "RTX 3090", 200),
        ("5090", 1, 1, "RTX 5090", 100),
        ("2x8xL40S+100GbE", 2, 8, "L40S", 100),
        ("2x8xL40S + 2x100gbe", 2, 8, "L40S", 200),
        ("2x8xL40S+25Gbps", 2, 8, "L40S", 25),
        ("2x8xH100+3.2Tb/node", 2, 8, "H100-SXM-80GB", 3200),
        ("2x8xH100+3.2Tb/s/node", 2, 8, "H100-SXM-80GB", 3200),
        ("2x8xH100+400Gb/gpu", 2, 8, "H100-SXM-80GB", 3200),
        ("2x4xH100+400Gb/gpu", 2, 4, "H100-SXM-80GB", 1600),
        ("2x8xH100+IB", 2, 8, "H100-SXM-80GB", 3200),
        ("2x4xH100+ib", 2, 4, "H100-SXM-80GB", 1600),
        ("2x8xA100+InfiniBand", 2, 8, "A100-SXM-80GB", 1600),
        ("2x8xH100+NDR", 2, 8, "H100-SXM-80GB", 3200),
        ("2x8xA100+HDR", 2, 8, "A100-SXM-80GB", 1600),
        ("2x8xA100+4xHDR", 2, 8, "A100-SXM-80GB", 800),
        ("2x8xL40S+NDR", 2, 8, "L40S", 400),
        ("2x8xH100+Ethernet", 2, 8, "H100-SXM-80GB", 100),
        ("2x8xH100", 2, 8, "H100-SXM-80GB", 3200),
        ("2x8xL40S", 2, 8, "L40S", 100),
        ("2048xH100", 256, 8, "H100-SXM-80GB", 3200),
        ("16 H100 + 400Gb", 2, 8, "H100-SXM-80GB", 400),
        ("2xA100-40", 1, 2, "A100-SXM-40GB", 2 * 200),
        ("2xA100-80G", 1, 2, "A100-SXM-80GB", 2 * 200),
        ("1x16xV100", 1, 16, "V100-SXM2-32GB", 1600),
        ("72xGB200", 1, 72, "GB200", 72 * 400),
        ("144xGB200", 2, 72, "GB200", 72 * 400),
        ("8xGH200", 8, 1, "GH200-96GB", 400),
        ("1024x1024xH100", 1024, 1024, "H100-SXM-80GB", 400 * 1024),
    ],
)
def test_strings(text: str, nodes: int, count: int, device: str, gbit_per_s: float) -> None:
    found = parse_cluster(text)
    assert (found.nodes, found.devices_per_node, found.device.name) == (nodes, count, device)
    assert found.network_bytes_per_s == pytest.approx(gbit_per_s * 1e9 / 8, rel=1e-12)
    assert parse_cluster(str(found)) == found


@given(
    st.integers(1, 2**10),
    st.integers(1, 2**10),
    st.sampled_from(sorted(devices())),
    st.none() | st.decimals(min_value="0.01", max_value=100_000, places=3),
)
def test_a_cluster_is_read_back_from_what_it_is_called(nodes: int, count: int, name: str, gbit: object) -> None:
    found = parse_cluster(f"{nodes}x{count}x{name}" + ("" if gbit is None else f"+{gbit}Gb/node"))
    assert (found.nodes, found.devices_per_node, found.device) == (nodes, count, devices()[name])
    assert parse_cluster(str(found)) == found


@given(st.text(max_size=30) | st.text("0123456789xX* +HhLlSsGgBbTt/.nodegpuIiNDR-", max_size=24))
def test_any_text_is_a_cluster_or_an_error_that_says_what_to_write(text: str) -> None:
    try:
        found = parse_cluster(text)
    except ConfigError as error:
        [problem] = error.problems
        assert problem.code in ("CLU001", "CLU002") and problem.fix
    else:
        assert found.world >= 1 and (found.kind == "cpu" or parse_cluster(str(found)) == found)


@pytest.mark.parametrize(
    "text", ["100000000xH100", "1x1025xH100", "131073x8xH100", "999999999x999999999xH100", "1025xCPU", "2000000x1xCPU"]
)
def test_more_devices_than_any_machine_has_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    [problem] = caught.value.problems
    assert problem.code == "CLU001" and "the limit is" in problem.what


def test_more_nodes_like_this_one_than_there_could_be_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        local_cluster(2, "cpu", nodes=2**20)
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("DEV001", "run.nodes")


def test_what_is_assumed_is_said() -> None:
    def said(text: str) -> str:
        return "; ".join(parse_cluster(text).assumptions)

    assert shows(said("2048xH100"), "2,048 GPUs", "256 nodes", 8, "3,200 Gb/s")
    assert shows(said("2x8xH100"), "8 x 400 Gb/s", "+<N>Gb/node")
    assert shows(said("2x8xL40S"), "100 Gb/s", "+<N>Gb/node")
    assert shows(said("2x8xH100+IB"), "8 x 400 Gb/s of InfiniBand")
    assert "(4 x 200 Gb/s a node)" in said("2x8xA100+4xHDR")
    assert "+<N>Gb/node" not in said("2x8xH100+400Gb/node")
    assert shows(said("8xL40S"), "PCIe", "20 GB/s") and "NVLink" in said("8xH100")
    assert parse_cluster("8xL40S").link_bytes_per_s == 20e9
    assert "nodes" not in said("1x16xH100"), "taken as it is written"


def test_other_sizes_of_a_cluster_keep_a_network_that_was_given() -> None:
    usual, given_ = parse_cluster("4xH100"), parse_cluster("2x4xH100+100Gb/node")
    assert usual.resized(2, 8) == parse_cluster("2x8xH100") and given_.resized(4, 8) == parse_cluster(
        "4x8xH100+100Gb/node"
    )
    assert usual.resized(1, 4, devices()["L40S"]) == parse_cluster("4xL40S")


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("8xH101", "CLU002", "did you mean H100-SXM-80GB?"),
        ("0xH100", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("4x4080", "CLU002", "RTX 4090"),
        ("1000x", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("8x8x8x4090", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("8x", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("8xH100+fast", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+0Gb/node", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("8xTPUv4", "CLU002", "known: "),
        ("9" * 5000 + "xH100", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+" + "9" * 5000 + "Gb", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+" + "9" * 5000 + "x1Gb", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+8xIB", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+400", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("2x8xH100+99999999999Gb/node", "CLU001", "write [NODESx]DEVICESxNAME"),
        ("12xH100", "CLU001", "`1x12xH100-SXM-80GB`, or `2x6xH100-SXM-80GB`"),
        ("13xH100+IB", "CLU001", "`1x13xH100-SXM-80GB+IB`, or `13x1xH100-SXM-80GB+IB`"),
        ("100xGB200", "CLU001", "`1x100xGB200`, or `2x50xGB200`"),
        ("8xGTX 1080", "CLU002", "known: "),
    ],
)
def test_strings_that_are_refused(text: str, code: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX Pro 6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_as_drivers_say_them(said: str, name: str) -> None:
    assert find_device(said).name == name


def test_the_table_is_complete_and_says_how_far_it_is_verified() -> None:
    table = devices()
    assert len(table) == 29
    assert {device.verified for device in table.values()} == {"yes", "partial", "no"}
    for device in table.values():
        assert device.memory_bytes > 14 * 2**30 and device.bf16_flops > 5e13 and device.hbm_bytes_per_s > 3e11
        assert device.matmul_share is None or 0.4 < device.matmul_share < 1
        assert (device.capability is None) == device.name.startswith("MI")
        assert device.computes_bf16 == (not device.name.startswith(("T4", "V100")))


def test_cpus_share_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 8 * 2**30)
    found = parse_cluster("2x4xCPU")
    assert (found.kind, found.world, found.device.memory_bytes) == ("cpu", 8, 2 * 2**30 - CPU_PROCESS_BYTES)
    here = local_cluster(1, "cpu")
    assert (here.device.memory_bytes, here.host_memory_bytes) == (8 * 2**30 - CPU_PROCESS_BYTES, 8 * 2**30)


def test_more_cpu_processes_than_cores_are_warned_of_and_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 8 * 2**30)
    assert crowding(local_cluster(2, "cpu")) is None and crowding(parse_cluster("8xH100")) is None
    found = local_cluster(8, "cpu")
    assert (found.world, found.device.memory_bytes) == (8, 2**30 - CPU_PROCESS_BYTES)
    said = crowding(found)
    assert said is not None and said.startswith("warning[DEV002]: 8 processes share 2 cores") and "300.0 MiB" in said
    assert local_cluster(27, "cpu").device.memory_bytes < 8 * 2**20
    with pytest.raises(UsageError) as caught:
        local_cluster(28, "cpu")
    (problem,) = caught.value.problems
    assert problem.code == "DEV001" and problem.what.startswith("28 processes ")
    assert "300.0 MiB" in problem.what and "8.0 GiB" in problem.what and problem.fix == "`--nproc 27`"


def test_this_machine() -> None:
    found = local_cluster(device="cpu")
    assert found.devices_per_node == min(2, cores())
    assert 0 < found.device.memory_bytes * found.devices_per_node <= available_memory_bytes() * 1.5


ELSEWHERE = "`shardwise plan --cluster 8xH100`"


def test_more_processes_than_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """B-75."""
    monkeypatch.setattr(module, "cores", lambda: 4)
    monkeypatch.setattr(module, "gpus", list)
    with pytest.raises(UsageError) as caught:
        local_cluster(8, "cuda")
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == ("DEV001", 2)
    assert problem.what.startswith("8 processes ") and "no GPU" in problem.what
    assert shows(problem.fix, "`--device cpu --nproc 2`", ELSEWHERE)
    gpus = [("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)), ("unheard of", 40 * 2**30, (6, 1))]
    monkeypatch.setattr(module, "gpus", lambda: gpus)
    found = local_cluster()
    assert (found.world, found.kind, found.device.memory_bytes) == (2, "cuda", 40 * 2**30)
    assert not found.device.computes_bf16, "what the driver says, of a card that is in no table too"
    with pytest.raises(UsageError):
        local_cluster(3)


def test_the_host_of_gpus_that_are_here_has_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its control group allows, which does not change from one moment to the next, as what is free does."""
    monkeypatch.setattr(module, "gpus", lambda: [("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0))])
    monkeypatch.setattr(module, "total_memory_bytes", lambda: 125 * 2**30)
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 3 * 2**30)
    here, three = local_cluster(), local_cluster(nodes=3)
    assert here.host_memory_bytes == three.host_memory_bytes == 125 * 2**30
    assert not any("host memory" in text for text in here.assumptions)
    [text] = [text for text in three.assumptions if "host memory" in text]
    assert shows(text, "this machine", "125.0 GiB")
    assert local_cluster(memory_bytes=2**33).host_memory_bytes == 2**33
    assumed = parse_cluster("1xH100")
    assert assumed.host_memory_bytes == 1000 * 2**30
    assert [text for text in assumed.assumptions if shows(text, "1,000.0 GiB", "host memory")]


@pytest.mark.parametrize(
    ("said", "nearest"),
    [("H20", "H200-SXM"), ("A10", "A10G"), ("L40", "L40S"), ("MI300", "MI300X"), ("4xGH20", "GH200")],
)
def test_a_gpu_that_is_none_of_the_table_is_no_other(said: str, nearest: str) -> None:
    """Fewer digits, or no letter behind them, is another GPU: the nearest are named."""
    with pytest.raises(ConfigError) as caught:
        parse_cluster(said)
    [problem] = caught.value.problems
    assert problem.code == "CLU002" and nearest in problem.fix
    assert find_device("rtx pro").name == "RTX Pro 6000" and find_device("A100-PCIe").name == "A100-PCIe-80GB"


def test_a_grace_hopper_has_two_sizes_and_a_fast_way_to_its_host() -> None:
    small, large = find_device("GH200"), find_device("GH200-141GB")
    assert (small.memory_bytes, large.memory_bytes) == (96 * 10**9, 141 * 10**9)
    assert small.host_link_bytes_per_s == large.host_link_bytes_per_s == 450e9
    assert find_device("NVIDIA GH200 480GB") == small
    assert parse_cluster("1xGH200").host_memory_bytes == 480 * 10**9


@pytest.mark.parametrize(
    ("text", "gib"), [("1xRTX-4090", 128), ("8xRTX-4090", 512), ("1xH100", 1000), ("8xA10G", 1000), ("2x4x3090", 256)]
)
def test_a_host_is_that_of_its_kind_of_machine(text: str, gib: int) -> None:
    found = parse_cluster(text)
    assert found.host_memory_bytes == gib * 2**30
    [told] = [words for words in found.assumptions if "host memory" in words]
    assert f"{gib:,}.0 GiB" in told


def test_what_a_machine_has_beside_its_gpus_is_said_behind_commas() -> None:
    found = parse_cluster("2x1xRTX-4090+200Gb/node, host=64GB, disk=2TB@3GB/s")
    assert (found.host_memory_bytes, found.disk_bytes, found.disk_bytes_per_s) == (64 * 2**30, 2 * 10**12, 3e9)
    assert not any("host memory" in words for words in found.assumptions)
    assert parse_cluster(str(found)) == found
    other = found.resized(1, 4, find_device("RTX 5090"))
    assert (other.host_memory_bytes, other.disk_bytes) == (64 * 2**30, 2 * 10**12)
    usual = parse_cluster("1xRTX-4090").resized(1, 4)
    assert usual.host_memory_bytes == 256 * 2**30 and ",host" not in str(usual)
    assert parse_cluster("1xRTX-4090,disk=500GB").disk_bytes_per_s == 0
    assert parse_cluster("2xCPU,host=16GiB").device.memory_bytes == 8 * 2**30 - CPU_PROCESS_BYTES


@pytest.mark.parametrize("part", ["host=1", "host=0GB", "host=64GB@3GB/s", "disk=2TB@", "disk=fast", "ram=64GB", "="])
def test_what_cannot_be_read_of_it_is_told(part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(f"1xH100,{part}")
    assert [problem.code for problem in caught.value.problems] == ["CLU001"]


@pytest.mark.parametrize("text", ["8xH100+4xA100", "4xA100, 8xH100", "4xA100+400Gb/node+2x8xH100"])
def test_of_several_kinds_the_slower_is_planned_and_told(text: str) -> None:
    found = parse_cluster(text)
    assert (found.device.name, found.world) == ("A100-SXM-80GB", 4)
    assert "not supported" in found.assumptions[0] and "A100" in found.assumptions[0]
    with pytest.raises(ConfigError, match="CLU001"):
        parse_cluster("8xH100+8xH100")


def test_gpus_of_several_kinds_in_this_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("NVIDIA GeForce RTX 3090", 24 * 2**30, (8, 6)), ("NVIDIA GeForce RTX 4090", 23 * 2**30, (8, 9))]
    monkeypatch.setattr(module, "gpus", lambda: gpus)
    found = local_cluster()
    assert (found.device.name, found.device.memory_bytes, found.world) == ("RTX 3090", 23 * 2**30, 2)
    assert "RTX 3090" in found.assumptions[0] and "RTX 4090" in found.assumptions[0]
