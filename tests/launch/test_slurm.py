"""The script for Slurm, run by commands that stand for Slurm's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.launch import slurm
from shardwise.launch.launchers import Launch
from tests.cli.test_face import WORDS
from tests.runtime.small_run import write_text

SCONTROL = "#!/bin/bash\n[ \"$*\" = 'show hostnames node[1-2]' ] && echo localhost && echo node2\n"
SRUN = """#!/bin/bash
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    tasks="$tasks $!"
done
for task in $tasks; do wait $task || exit $?; done
"""
SHOWN = '#!/bin/bash\necho "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" "$@"\n'


def submitted(script: Path, tasks: int, each: int) -> str:
    """What the job says, on one machine that stands for all of its nodes."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (script.parent / name).write_text(text)
        (script.parent / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "SLURM_NTASKS": str(tasks)}
    given |= {"SLURM_NTASKS_PER_NODE": str(each), "PATH": f"{script.parent.resolve()}:{os.environ['PATH']}"}
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(["bash", script], env={**known, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_task_is_told_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "a program"
    program.write_text(SHOWN)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    told = slurm.launch(Launch(["train", "a b.yaml"], 2, 2, tmp_path, 1234, gpus=True))
    assert any("sbatch" in line and str(tmp_path / "train.sbatch") in line for line in told)
    text = (tmp_path / "train.sbatch").read_text()
    for option in ("nodes=2", "ntasks-per-node=2", "gpus-per-node=2", "signal=USR1@600"):
        assert f"#SBATCH --{option}\n" in text
    said = sorted(submitted(tmp_path / "train.sbatch", 4, 2).splitlines())
    places = ["0/4 0/2", "1/4 1/2", "2/4 0/2", "3/4 1/2"]
    assert said == [f"{place} localhost:1234 -u -m shardwise train a b.yaml" for place in places]
    assert slurm.launch(Launch(["train"], 1, 2, tmp_path)) and "gpus" not in (tmp_path / "train.sbatch").read_text()


def test_a_measurement_has_no_run_to_write_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script stands where the user does, under a name that is nobody else's."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "run.launcher=slurm", "run.device=cpu", "run.nproc=2"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.sbatch"]
    assert "#SBATCH --job-name=doctor\n" in Path("doctor.sbatch").read_text()


@pytest.mark.prove
def test_a_job_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_text(Path("text"))
    words = [*WORDS, "run.nproc=2", "run.launcher=slurm", "--run", "a", "--port", "29731"]
    assert main(["train", *words]) == 0, capfd.readouterr().err
    assert "sbatch runs/a/train.sbatch" in capfd.readouterr().out and not Path("runs/a/metrics.jsonl").exists()
    submitted(Path("runs/a/train.sbatch"), 2, 2)
    assert len(Path("runs/a/metrics.jsonl").read_text().splitlines()) == 4
