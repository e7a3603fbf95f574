"""cluster.yaml: written and read back equal; torn, edited and impossible files are refused with the line."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError, MissingInputError, PolicyError
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.cluster_file import LATER, dump_cluster, load_cluster, machines
from shardwise.spec.devices import devices
from shardwise.spec.measured import AttentionTime, Measured, Pointwise, Product, Sent

MEASURED = Measured(
    ranks=8,
    launch_s=4.2e-6,
    products=(Product("bf16", 8192, 4096, 14336, 1.7e-3), Product("fp32", 64, 64, 64, 3e-6)),
    attention=(AttentionTime("bf16", 2048, 32, 128, 1e-4, 2.5e-4),),
    pointwise=(Pointwise(2**20, 1e-5), Pointwise(2**28, 2e-4)),
    sent=(Sent("all_reduce", 8, False, 2**22, 6e-5), Sent("all_gather", 16, True, 2**22, 9e-5)),
    to_device_bytes_per_s=5e10,
    from_device_bytes_per_s=4.5e10,
    disk_bytes_per_s=1.5e9,
    host_bytes_per_s=1.1e10,
    disk_read_bytes_per_s=2.5e9,
)
CLUSTER = replace(parse_cluster("2x8xH100+400Gb/node"), measured=MEASURED)


def written(path: Path, cluster: Cluster = CLUSTER) -> Path:
    path.write_text(dump_cluster(cluster, ("two lines", "of comments")), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "cluster",
    [CLUSTER, parse_cluster("8xMI300X"), parse_cluster("2xCPU"), replace(CLUSTER, measured=Measured(sent=()))],
)
def test_what_is_written_is_read_back(tmp_path: Path, cluster: Cluster) -> None:
    found = load_cluster(written(tmp_path / "cluster.yaml", cluster))
    assert found == cluster and found.assumptions == cluster.assumptions
    assert machines(str(tmp_path / "cluster.yaml")) == cluster


POSITIVE = st.floats(1e-12, 1e15)
COUNTS = st.integers(1, 2**40)
KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])


@pytest.mark.prove
@given(
    st.builds(
        Measured,
        ranks=COUNTS,
        launch_s=st.just(0.0) | POSITIVE,
        products=st.tuples(st.builds(Product, st.sampled_from(["fp32", "bf16"]), COUNTS, COUNTS, COUNTS, POSITIVE)),
        attention=st.tuples(st.builds(AttentionTime, st.just("fp32"), COUNTS, COUNTS, COUNTS, POSITIVE, POSITIVE)),
        pointwise=st.lists(st.builds(Pointwise, COUNTS, POSITIVE), max_size=3).map(tuple),
        sent=st.lists(st.builds(Sent, KINDS, COUNTS, st.booleans(), COUNTS, POSITIVE), max_size=3).map(tuple),
        disk_bytes_per_s=st.just(0.0) | POSITIVE,
        host_bytes_per_s=st.just(0.0) | POSITIVE,
        disk_read_bytes_per_s=st.just(0.0) | POSITIVE,
    ),
    st.sampled_from(sorted(devices())),
    st.text(max_size=20),
)
def test_any_measurements_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, measured: Measured, name: str, said: str
) -> None:
    said = said.replace("${", "")
    cluster = replace(parse_cluster(f"3x4x{name}"), measured=measured, assumptions=(said,))
    found = load_cluster(written(tmp_path_factory.mktemp("files") / "cluster.yaml", cluster))
    assert asdict(found) == asdict(cluster)


def test_a_file_that_ends_at_any_line_is_refused(tmp_path: Path) -> None:
    """None of the beginnings of a file is taken for a whole one."""
    file = written(tmp_path / "cluster.yaml")
    lines = file.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        file.write_text("".join(lines[:count]))
        with pytest.raises(ConfigError) as caught:
            load_cluster(file)
        for problem in caught.value.problems:
            assert problem.code == "CLU003" and str(file) in problem.what and problem.where.startswith(str(file))
            assert "shardwise doctor -o cluster.yaml" in problem.fix
    file.write_text("".join(lines))
    assert load_cluster(file) == CLUSTER


@pytest.mark.prove
def test_a_file_without_any_one_line_is_refused_or_means_the_same(tmp_path: Path) -> None:
    """A line of comments is no loss, nor is one more assumption; of what earlier versions did not measure, its absence
    says that. All else is a loss."""
    file = written(tmp_path / "cluster.yaml")
    lines = file.read_text().splitlines(keepends=True)
    for index in range(len(lines)):
        file.write_text("".join(lines[:index] + lines[index + 1 :]))
        try:
            found = load_cluster(file)
        except ConfigError as error:
            assert {problem.code for problem in error.problems} == {"CLU003"}
            continue
        key = lines[index].strip().partition(":")[0]
        if key in LATER:
            assert found == replace(CLUSTER, **{key: 0})
        elif f"measured.{key}" in LATER:
            assert found == replace(CLUSTER, measured=replace(MEASURED, **{key: 0.0}))
        else:
            assert found == CLUSTER and key.startswith(("#", "-"))


def test_a_file_of_before_hosts_and_reads_were_measured_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "cluster.yaml")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "host_bytes_per_s" not in line and "_read_bytes" not in line))
    found = load_cluster(file)
    assert found == replace(CLUSTER, measured=replace(MEASURED, host_bytes_per_s=0.0, disk_read_bytes_per_s=0.0))
    assert load_cluster(written(file, found)) == found


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("nodes: 2", "nodes: two", "`nodes`: Input should be a valid integer"),
        ("nodes: 2", "nodes: 0", "`nodes` cannot be 0"),
        ("nodes: 2", "nodes: true", "`nodes`: Input should be a valid integer"),
        ("kind: cuda", "kind: tpu", "`kind`: Input should be 'cpu' or 'cuda'"),
        ("launch_s: 4.2e-06", "launch_s: -4.2e-06", "`measured.launch_s` cannot be -4.2e-06"),
        ("seconds: 0.0017", "seconds: .nan", "`measured.products.0.seconds` cannot be nan"),
        ("seconds: 0.0017", "seconds: .inf", "`measured.products.0.seconds` cannot be inf"),
        ("seconds: 0.0017", "seconds: 0", "`measured.products.0.seconds` cannot be 0"),
        ("seconds: 0.0017", "seconds: quick", "`measured.products.0.seconds`: Input should be a valid number"),
        ("across: true", "across: 1", "`measured.sent.1.across`: Input should be a valid boolean"),
        ("disk_bytes_per_s: 1500000000.0", "disk: 1", "unknown key `measured.disk`"),
        ("format: 1", "format: 2", "the format 2, "),
        ("format: 1", "format: 1\nmore: 1", "unknown key `more`"),
        ("nodes: 2", "nodes: 2\nnodes: 2", "`nodes` is set twice"),
        ("nodes: 2", "nodes: [2", "not valid YAML"),
        ("nodes: 2", "nodes: 100000000", "the limit is"),
        ("devices_per_node: 8", "devices_per_node: 100000000", "the limit is"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, before: str, after: str, said: str) -> None:
    file = written(tmp_path / "cluster.yaml")
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    line = text[: text.index(before)].count("\n") + 1
    with pytest.raises(ConfigError) as caught:
        load_cluster(file)
    [problem, *_] = [problem for problem in caught.value.problems if said in problem.what]
    assert problem.code == "CLU003"
    assert problem.where.split(":")[1] in (str(line), str(line + 1)) or "not valid" in said or "twice" in said


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError):
        machines(str(tmp_path / "none.yaml"))
    for text in ("", "8xH100", "- 8xH100", "\x00"):
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            machines(str(file))
        assert caught.value.problems[0].code == "CLU003"
    file.write_text("device: !!python/object:os.system x\n")
    with pytest.raises(PolicyError):
        load_cluster(file)
    assert machines("8xH100") == parse_cluster("8xH100")
