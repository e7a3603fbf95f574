"""A run on a real Ray of two nodes on this host. Needs `pip install "ray[train,default]"`, which nothing else does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest

from shardwise.cli.app import main
from tests.cli.test_face import WORDS
from tests.launch.waiting import until
from tests.runtime.small_run import write_text
from tests.said import shows

pytestmark = [pytest.mark.prove, pytest.mark.skipif(find_spec("ray") is None, reason="no ray here")]


def processes() -> Iterator[psutil.Process]:
    return psutil.process_iter(["cmdline"])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two raylets with a CPU each; ``ray`` and ``python`` are those of this Python. The test stands in a directory of
    its own, which is the one that nodes share."""
    (tmp_path / "bin").mkdir()
    for name, words in (("ray", "-m ray.scripts.scripts"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\nexec {sys.executable} {words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    port, board, place = free_port(), free_port(), mkdtemp(prefix="r")  # of sockets, whose names must be short
    settings = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{board}"}
    settings |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    paths = [os.environ.get("PYTHONPATH", ""), *sys.path]
    settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("shardwise.launch.jobs.ray.SHARED", str(tmp_path / "here"))
    head = ["--head", f"--port={port}", f"--dashboard-port={board}", f"--temp-dir={place}", "--include-dashboard=true"]
    before = {each.pid for each in psutil.process_iter()}
    try:
        for words in (head, [f"--address=127.0.0.1:{port}"]):
            done = subprocess.run(["ray", "start", "--num-cpus=1", *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        yield tmp_path / "here"
    finally:
        for each in processes():
            if each.pid not in before and (place in " ".join(each.info["cmdline"] or []) or each.name()[:5] == "ray::"):
                with suppress(psutil.Error):
                    each.send_signal(signal.SIGKILL)


def job(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The only job."""
    capfd.readouterr()
    assert main(["runs", "--on", "ray", "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)
    return dict(found)


@pytest.mark.timeout(1800)  # Ray takes minutes on two cores that others use
def test_it_is_submitted_followed_and_stopped(cluster: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ray's workers start the ranks, which find one another; a run that ends by itself has succeeded for Ray too. Ray
    stops a job at once: no rank is left behind, and none has saved."""
    write_text(Path("text"))
    words = ["launch", *WORDS, "--on", "ray", "--cluster", "2x1xCPU", "--run", "mine", "--port", str(free_port())]
    assert main([*words, "train.max_steps=3", "evaluate.max_batches=1", "--submit"]) == 0
    assert shows(capfd.readouterr().out, "submitted: job mine", "ray", "run mine")
    until(lambda: job(capfd)["ended"], 600)
    subprocess.run(["ray", "job", "logs", "mine"])
    told = capfd.readouterr().out
    assert job(capfd)["state"] == "SUCCEEDED" and "2 x CPU (gloo" in told, told[-5000:]
    assert json.loads(Path("runs/mine/exit.json").read_text())["kind"] == "done"
    assert len(Path("runs/mine/metrics.jsonl").read_text().splitlines()) == 3
    longer = [*words, "train.max_steps=3000", "evaluate.max_batches=1", "--run", "longer", "--submit"]
    assert main([*words, "--submit"]) == 73 and "removes it" in capfd.readouterr().err
    assert main(["stop", "mine", "--on", "ray"]) == 0 and "removed: mine" in capfd.readouterr().out
    assert main(longer) == 0
    log = Path("runs/longer/metrics.jsonl")
    until(lambda: log.exists() and len(log.read_text().splitlines()) > 3, 600)
    row = job(capfd)
    assert (row["id"], row["state"]) == ("longer", "RUNNING") and row["step"].endswith("/3,000")
    assert main(["stop", "longer", "--on", "ray"]) == 0
    until(lambda: job(capfd)["ended"], 240)
    assert job(capfd)["state"] == "STOPPED"
    until(lambda: not any("--run=longer" in (each.info["cmdline"] or []) for each in processes()), 60)
