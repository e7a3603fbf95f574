"""Ranks on this machine: started with the right environment, stopped together, and their first cause told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import Problem
from shardwise.launch import local
from shardwise.launch.local import run_ranks
from shardwise.launch.worker import LAUNCHER, STORE
from shardwise.runtime.faults.outcome import Exit, read_exit
from tests.launch.waiting import until
from tests.said import shows
from tests.traps import set_traps, sprung

ROOT = Path(__file__).resolve().parents[2]
RANK = "tests.launch.fake_rank"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(directory: Path) -> list[int]:
    return [int((directory / f"rank-{rank}").read_text().split()[0]) for rank in range(2)]


def test_ranks_get_their_environment_and_leave_ours_alone(tmp_path: Path) -> None:
    handlers, before = signal.getsignal(signal.SIGTERM), dict(os.environ)
    ended = run_ranks([str(tmp_path), "fine"], 2, tmp_path, module=RANK)
    assert (ended.exit_code, ended.problem) == (0, None)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        words = (tmp_path / f"rank-{rank}").read_text().split()[1:]
        assert words[:2] == [f"RANK={rank}", "WORLD_SIZE=2"]
        assert words[2] == f"OMP_NUM_THREADS={threads}" and words[3].startswith(f"{STORE}=/")
    assert dict(os.environ) == before and LAUNCHER not in os.environ
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_ranks_run_no_code_of_the_directory_that_they_are_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(set_traps(tmp_path / "traps"))
    assert run_ranks([str(tmp_path), "fine"], 2, tmp_path, module=RANK).exit_code == 0
    assert sprung(tmp_path / "traps") == []


def test_the_exit_code_and_the_cause_are_the_first_failing_ranks(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{}")
    ended = run_ranks([str(tmp_path), "fail"], 2, tmp_path, module=RANK)
    assert ended.exit_code == 78
    assert ended.problem == Problem("CFG001", "unknown key `x`", "r.yaml:1 (rank 0, step 7)", "remove it")
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_the_cause_is_told_once_where_the_disk_is_full(tmp_path: Path) -> None:
    ended = run_ranks([str(tmp_path), "full"], 2, tmp_path, module=RANK)
    assert ended.exit_code == 73 and ended.problem is not None
    assert ended.problem.code == "OUT002" and "x: no space" in ended.problem.what


@pytest.mark.parametrize(
    ("said", "phase", "whose"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "forward", "device"),
        ("DefaultCPUAllocator: can't allocate memory", "forward", "host"),
        ("can't start new thread", "forward", ""),
        ("CUDA out of memory. Tried to allocate 2 GiB", "", ""),
    ],
)
def test_whose_memory_ran_out_is_told_of_ranks_that_train(
    said: str, phase: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = {"code": "MEM001", "what": f"out of memory while training: {said}"}
    told = Exit("memory", 1, "out of memory", 1, phase=phase, problems=[problem])
    monkeypatch.setattr(local, "read_exit", lambda _: told)
    ended = run_ranks([str(tmp_path), "full"], 2, tmp_path, module=RANK)
    assert (ended.exit_code, ended.ran_out) == (1, whose)


@pytest.mark.parametrize(
    ("kills", "values", "fix"),
    [
        ((4, 5), ("exit code 137", "memory ran out", "3.0 GiB"), "train.micro_batch_size=1"),
        ((4, 4), ("another process", "killed nothing"), "`shardwise train /"),
        ((None, None), (), "if"),
    ],
)
def test_a_rank_that_was_killed_is_named_by_the_signal_and_not_by_what_others_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int | None, ...], values: tuple[str, ...], fix: str
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(local, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(local, "total_memory_bytes", lambda: 3 * 2**30)
    ended = run_ranks([str(tmp_path), "killed"], 2, tmp_path, module=RANK)
    assert ended.exit_code == 1 and ended.problem is not None
    assert ended.problem.code == "RUN004" and ended.ran_out == ("host" if kills == (4, 5) else "")
    assert shows(ended.problem.what, f"rank 0 (pid {pids(tmp_path)[0]})", "SIGKILL", *values)
    assert ended.problem.what.endswith("SIGKILL") is not bool(values)
    assert ended.problem.fix.startswith(fix)
    assert shows(ended.problem.fix, "dmesg", "train.micro_batch_size=1") is (fix == "if")
    assert f"`shardwise train {tmp_path}` goes on" in ended.problem.fix  # there is no checkpoint
    outcome = read_exit(tmp_path)
    assert outcome is not None and (outcome.kind, outcome.rank, outcome.restartable) == ("crash", 0, True)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_rank_that_crashes_is_named_by_its_signal_and_not_taken_for_one_without_memory(
    tmp_path: Path, name: str
) -> None:
    ended = run_ranks([str(tmp_path), name], 2, tmp_path, module=RANK)
    assert ended.exit_code == 1 and ended.problem is not None and ended.problem.code == "RUN004"
    assert shows(ended.problem.what, f"rank 0 (pid {pids(tmp_path)[0]})", name)
    assert "memory" not in str(ended.problem)


def test_a_disk_that_refuses_the_outcome_hides_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local, "write_exit", full)
    ended = run_ranks([str(tmp_path), "killed"], 2, tmp_path, module=RANK)
    assert ended.exit_code == 1 and ended.problem is not None and "SIGKILL" in ended.problem.what


def test_a_rank_that_leaves_no_cause(tmp_path: Path) -> None:
    ended = run_ranks([str(tmp_path), "vanish"], 2, tmp_path, module=RANK)
    assert ended.exit_code == 5 and ended.problem is not None
    assert shows(ended.problem.what, f"rank 0 (pid {pids(tmp_path)[0]})", "exit code 5")


def start(directory: Path, deed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.launch.launcher", str(directory), deed]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_request_to_stop_is_passed_on_once_and_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start(tmp_path, "stop")
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=20)
    told, *rest = output.splitlines()
    assert told.startswith(f"{signal.Signals(number).name}: saving, then stopping")
    assert (launcher.returncode, rest) == (75, ["75 STOP001"])
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2


def test_under_nohup_a_closing_terminal_stops_nothing(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "tests.launch.launcher", str(tmp_path), "stop"]
    launcher = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    for pid in (launcher.pid, *pids(tmp_path)):
        ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
        assert int(ignored.split()[1], 16) >> (signal.SIGHUP - 1) & 1
        os.kill(pid, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.communicate(timeout=0.3)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=20)
    told, ended = output.splitlines()[-2:]
    assert shows(told, "SIGTERM: saving", "stopping") and ended == "75 STOP001"
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == [str(int(signal.SIGTERM))] * 2


def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher = start(tmp_path, "sleep")
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    ranks = pids(tmp_path)
    assert all(alive(pid) for pid in ranks)
    launcher.kill()
    launcher.communicate(timeout=10)
    until(lambda: not any(alive(pid) for pid in ranks), seconds=5.0)
