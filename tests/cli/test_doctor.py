"""``shardwise doctor``: what it prints and writes of measurements that are given, and what it refuses."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli import doctor
from shardwise.cli.app import main
from shardwise.cli.kept_rates import DIRECTORY
from shardwise.errors import ConfigError, Problem
from shardwise.launch import local
from shardwise.launch.doctor import rank_work
from shardwise.launch.doctor.rank_work import Found
from shardwise.launch.worker import LAUNCHER, STORE, state_directory
from shardwise.runtime.faults.outcome import read_exit
from shardwise.spec.cluster import Cluster
from shardwise.spec.cluster_file import load_cluster
from shardwise.spec.measured import Measured, Pointwise, Product
from tests.said import refuses, shows

FOUND = Found(
    Measured(1, 3e-6, (Product("fp32", 64, 64, 64, 8e-6),), pointwise=(Pointwise(2**16, 3e-6),), disk_bytes_per_s=4e8),
    (1.0,),
    (0.99,),
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shardwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, shardwise: Run) -> Run:
    """The same as the only rank of a torchrun, which measures what is given."""

    def measure(cluster: Cluster, directory: Path) -> Found:
        assert directory.is_dir() and cluster.world == 1
        return FOUND

    monkeypatch.setattr(rank_work, "measure", measure)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return shardwise


def test_what_was_measured_is_printed_written_and_planned_with(as_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = as_rank("doctor", "run.device=cpu", "-o", "cluster.yaml")
    assert (code, err) == (0, "")
    assert shows(out, "products in fp32", "64 x 64", "64 x 64", "65.5 GFLOP/s")
    assert "400.0 MB/s" in out and shows(out, "nothing", "below")
    assert shows(out.splitlines()[-1], "written: cluster.yaml", "next: shardwise plan --cluster cluster.yaml")
    cluster = load_cluster(Path("cluster.yaml"))
    assert cluster.measured == FOUND.measured and shows(cluster.assumptions[0], "measured", "shardwise doctor")
    before = Path("cluster.yaml").read_bytes()
    code, _, err = as_rank("doctor", "run.device=cpu", "-o", "cluster.yaml")
    assert code == 73 and "error[OUT001]" in err and Path("cluster.yaml").read_bytes() == before
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    code, out, _ = as_rank("plan", "--cluster", "cluster.yaml")
    assert code == 0 and shows(out, "assumed", "measured", "shardwise doctor") and "1 x CPU" in out
    Path("cluster.yaml").write_bytes(before[:-20])
    code, _, err = as_rank("plan", "--cluster", "cluster.yaml")
    assert code == 78 and "error[CLU003]" in err and "`shardwise doctor -o cluster.yaml`" in err


def test_as_json(as_rank: Run) -> None:
    code, out, err = as_rank("doctor", "run.device=cpu", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["machine"]["cores"] > 0 and told["cluster"]["measured"]["launch_s"] == 3e-6
    assert {line["what"].partition(",")[0] for line in told["compared"]} >= {"products in fp32"}


def test_the_recipe_says_which_ranks_and_what_to_plan_next(as_rank: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {seq_len: 512}\nrun: {nproc: 1, device: cpu}\n")
    code, out, _ = as_rank("doctor", "mine.yaml")
    (kept,) = (state_directory() / DIRECTORY).iterdir()
    assert code == 0 and shows(out, "kept", kept) and out.endswith("\nnext: shardwise plan mine.yaml\n")
    assert load_cluster(kept).measured == FOUND.measured


def test_what_cannot_be_kept_is_told(as_rank: Run) -> None:
    state_directory().mkdir(parents=True)
    (state_directory() / DIRECTORY).write_text("")
    code, out, err = as_rank("doctor", "run.device=cpu")
    assert code == 0 and refuses(err, "OUT002", "not kept", as_warning=True)
    assert shows(out.splitlines()[-1], "shardwise doctor -o cluster.yaml", "shardwise plan --cluster cluster.yaml")


def test_several_nodes_get_a_line_each(shardwise: Run) -> None:
    code, out, _ = shardwise("doctor", "run.nodes=2", "run.device=cpu", "-o", "cluster.yaml")
    lines = [line for line in out.splitlines() if "torchrun" in line]
    assert code == 0 and len(lines) == 2 and "--node-rank 1" in lines[1]
    assert lines[0].endswith("-m shardwise doctor run.nodes=2 run.device=cpu -o cluster.yaml")


def test_what_is_refused_before_anything_is_started(shardwise: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "run_ranks", lambda *given, **named: pytest.fail("ranks were started"))
    Path("taken.yaml").write_text("mine")
    assert shardwise("doctor", "-o", "taken.yaml")[0] == 73 and Path("taken.yaml").read_text() == "mine"
    assert shardwise("doctor", "--nproc", "1024", "run.device=cpu")[0] == 2
    assert shardwise("doctor", "missing.yaml")[0] == 66
    assert shardwise("doctor", "--no-such-flag", "1")[0] == 78


def test_why_ranks_ended(capfd: pytest.CaptureFixture[str]) -> None:
    killed = Problem("RUN004", "rank 1 (pid 7) was killed by SIGKILL", "somewhere", "`shardwise train runs/x` goes on")
    assert doctor._told(local.Ended(1, killed), doctor.Options()) == 1
    assert capfd.readouterr().err.endswith("fix:   `shardwise doctor` again\n")
    stopped = Problem("RUN005", "stopped by SIGINT before the ranks could save", "x", "y")
    assert doctor._told(local.Ended(130, stopped), doctor.Options()) == 130
    assert "train" not in capfd.readouterr().err
    assert doctor._told(local.Ended(1, killed), doctor.Options(json=True)) == 1
    assert json.loads(capfd.readouterr().out)["error"]["problems"][0]["code"] == "RUN004"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711"), "peer_lost", "BUG001"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "error", "MEM001"),
        (OSError(errno.ENOSPC, "No space left on device", "cluster.yaml"), "error", "OUT003"),
        (ConfigError(Problem("RUN001", "another world")), "error", "RUN001"),
    ],
)
def test_a_rank_leaves_its_cause_for_the_launcher(
    shardwise: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, kind: str, code: str
) -> None:
    """What follows from another rank's end never hides why that one ended."""

    def fail(*given: object) -> Found:
        raise error

    monkeypatch.setattr(rank_work, "measure", fail)
    monkeypatch.setattr(doctor.worker, "die_with_launcher", lambda: None)
    monkeypatch.setattr(doctor.signal, "signal", lambda *given: None)
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", LAUNCHER: "1", STORE: f"{tmp_path}/store"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    ended, out, err = shardwise("doctor", "run.device=cpu")
    outcome = read_exit(tmp_path)
    assert outcome is not None and (outcome.kind, outcome.exit_code) == (kind, ended) and (out, err) == ("", "")
    assert outcome.problems[0]["code"] == code


def test_with_a_recipe_it_says_what_a_step_takes_here(as_rank: Run) -> None:
    """Of what was measured: products at the rate of the one that was."""
    model = ("model.path=meta-llama/Llama-3.2-1B", "train.seq_len=128")
    code, out, _ = as_rank("doctor", *model)
    assert code == 0 and shows(out, "recipe", "DDP over 1") and "a step  " in out and "what doctor measured" in out
    _, text, _ = as_rank("doctor", *model, "--json")
    assert json.loads(text)["step"][0].endswith(": DDP over 1")
    _, out, _ = as_rank("doctor", "train.seq_len=128")
    assert "the recipe here" not in out
