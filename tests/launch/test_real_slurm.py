"""A run that is submitted to a real Slurm: two nodes on this host. Needs Debian's slurm-wlm and munge, and root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from tests.cli.test_face import WORDS
from tests.launch.waiting import until
from tests.runtime.small_run import write_text
from tests.said import shows

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
PLACE = os.environ["PATH"] + ":/usr/sbin"
HERE = all(shutil.which(name, path=PLACE) for name in PROGRAMS) and os.geteuid() == 0
pytestmark = [pytest.mark.prove, pytest.mark.skipif(not HERE, reason="no Slurm here, or not root")]
SETTINGS = """ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/ctl
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/ctl.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/ctl.log
SlurmdLogFile={place}/%n.log
SlurmctldPort={port}
KillWait=5
MinJobAge=300
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
SCONTROL = '#!/bin/bash\n[ "$2" = hostnames ] && echo localhost || exec /usr/bin/scontrol "$@"\n'
"""The nodes' names are known to Slurm alone; ranks find the first by its name."""


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cluster; the test stands in a directory of its own."""
    host, port = socket.gethostname().partition(".")[0], 17900 + os.getpid() % 90
    for name in ("ctl", "n1", "n2", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/scontrol").write_text(SCONTROL)
    (tmp_path / "bin/scontrol").chmod(0o755)
    place = {"place": tmp_path, "host": host, "port": port, "first": port + 100, "second": port + 200}
    (tmp_path / "slurm.conf").write_text(SETTINGS.format(**place))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{PLACE}")
    if subprocess.run(["munge", "-n"], capture_output=True).returncode:
        for directory in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
            Path(directory).mkdir(exist_ok=True)
            shutil.chown(directory, "munge", "munge")
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True, capture_output=True)
    subprocess.run(["slurmctld"], check=True, capture_output=True)
    for name in ("n1", "n2"):
        done = subprocess.run(["slurmd", "-N", name], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        until(lambda: said("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"], 60)
        yield tmp_path
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], capture_output=True)
        for path in tmp_path.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def job(out: str) -> dict[str, Any]:
    """The only job of what `runs --json` prints."""
    (found,) = json.loads(out)
    return dict(found)


def test_it_is_submitted_followed_and_stopped(slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It trains on both nodes; asked to stop, it saves, and Slurm does not start it again."""
    for name in ("RANK", "WORLD_SIZE"):
        assert name not in os.environ
    write_text(Path("text"))
    port = ["--port", str(29900 + os.getpid() % 90)]
    words = ["launch", *WORDS, "--on", "slurm", "--cluster", "2x1xCPU", "--run", "mine", *port, "--submit"]
    words += ["train.max_steps=3000", "evaluate.max_batches=1"]
    assert main([*words, "--with=--partition=nope"]) == 69
    told = capfd.readouterr()
    assert "JOB002" in told.err and "invalid partition" in told.err and "`sinfo -s`" in told.err
    assert said("squeue", "--noheader", "--states=all") == ""
    assert main([*words, "--with=--partition=all --overcommit"]) == 0
    assert shows(capfd.readouterr().out, "submitted: job 1", "slurm", "run mine")
    assert main([*words]) == 73 and "JOB003" in capfd.readouterr().err
    log = Path("runs/mine/metrics.jsonl")
    until(lambda: log.exists() and len(log.read_text().splitlines()) > 3, 200)
    assert main(["runs", "--on", "slurm", "--json"]) == 0
    row = job(capfd.readouterr().out)
    assert (row["id"], row["name"], row["state"]) == ("1", "mine", "RUNNING") and row["step"].endswith("/3,000")
    assert main(["logs", "mine", "--on", "slurm"]) == 0 and "step" in capfd.readouterr().out
    assert main(["stop", "mine", "--on", "slurm"]) == 0 and "asked to stop" in capfd.readouterr().out
    until(lambda: main(["runs", "--on", "slurm", "--json"]) == 0 and job(capfd.readouterr().out)["ended"], 120)
    assert Path("runs/mine/exit.json").exists(), Path("slurm-1.out").read_text()
    outcome = json.loads(Path("runs/mine/exit.json").read_text())
    assert outcome["kind"] == "preempted", outcome
    assert [path.name for path in Path("runs/mine/checkpoints").glob("step-*")] == [f"step-{outcome['step']:08}"]
    assert main(["runs", "--on", "slurm", "--json"]) == 0
    row = job(capfd.readouterr().out)
    assert row["ended"] and row["state"] == "FAILED" and row["reason"] == outcome["message"]
    assert main(["stop", "mine", "--on", "slurm"]) == 0 and "has ended" in capfd.readouterr().out
