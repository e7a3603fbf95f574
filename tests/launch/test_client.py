"""Jobs that are submitted, listed, read and stopped by programs that stand for the schedulers' own.

They say what the real ones said: sbatch, squeue, scancel of Slurm 22.05 by hand; kubectl's, sky's and ray's words from
their sources."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.launch.jobs.table import KINDS
from tests.cli.test_face import WORDS
from tests.launch.waiting import until
from tests.said import refuses, shows

SAYS = '#!/bin/bash\necho "$(basename $0) $*" >> {there}/calls\n'
SBATCH = """case "$*" in *=nope*) echo "sbatch: error: invalid partition specified: nope" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2; exit 1;; esac
cp "${@: -1}" {there}/job; echo "job 17 says" > {there}/log
echo 17
"""
KUBECTL = """case "$1" in
apply) if grep -q refused {there}/state 2>/dev/null; then cat {there}/state >&2; exit 1; fi
for word; do case "$word" in --filename=*) cp "${word#*=}" {there}/job;; esac; done; echo created;;
get) [ -e {there}/listed ] && cat {there}/listed || echo '{"items": []}';;
logs) echo "job mine-1 says";;
esac
"""
SKY = r"""[ "$2" = launch ] && [ -e {there}/state ] && { cat {there}/state >&2; exit 1; }
case "$2" in
launch) cp "${@: -1}" {there}/job; printf 'Useful\nManaged Job ID: \e[36m5\e[0m\n';;
queue) [ -e {there}/listed ] && cat {there}/listed || echo '[]';;
logs) echo "job 5 says";;
esac
"""
SSH = r"""case "$*" in *away*) echo "ssh: Could not resolve hostname away: Name not known" >&2; exit 255;; esac
while [ "$1" != -- ]; do shift; done
shift 2
case "$*" in *"test -x"*) exec bash -c "$*";; esac
trap 'echo stopped >> {there}/calls; kill $waits; exit 143' TERM
echo "ssh says"; sleep 60 & waits=$!
wait $waits
"""
RAY = r"""[ "$2" = submit ] && [ -e {there}/state ] && { cat {there}/state >&2; exit 1; }
case "$2" in
submit) for word; do case "$word" in --working-dir=*) cp "${word#*=}/job.py" {there}/job;; esac; done; echo Next steps;;
list) echo 'INFO cli.py:42 -- Job submission server address: http://head:8265'
[ -e {there}/listed ] && cat {there}/listed || echo 'INFO cli.py:600 -- []';;
logs) echo "job mine-1 says";;
esac
"""
FAKES = {
    "ray": RAY,
    "sbatch": SBATCH,
    "squeue": "cat {there}/listed 2>/dev/null; exit 0\n",
    "scancel": "",
    "kubectl": KUBECTL,
    "sky": SKY,
    "ssh": SSH,
}


def objects(*conditions: dict[str, str], ready: int = 0) -> str:
    status = {"conditions": [{"status": "True", **each} for each in conditions], "ready": ready}
    return json.dumps({"items": [{"metadata": {"name": "mine-1"}, "status": status}]})


def queued(state: str, reason: str) -> Callable[[Path], str]:
    """Our job and another's."""
    return lambda there: f"17|{state}|shardwise|{reason}|mine.1|{there}/log|\n18|RUNNING|(null)|None|mine.1|/a|b|\n"


def managed(state: str, reason: str = "") -> str:
    return json.dumps([{"job_id": 5, "job_name": "mine-1", "status": state, "failure_reason": reason}])


def details(state: str, message: str = "None") -> str:
    """As ``ray job list`` of Ray 2.60 prints it, with a job of somebody else."""
    jobs = []
    for name, by in (("other", "{}"), ("mine-1", "{'by': 'shardwise'}")):
        head = f"JobDetails(type=<JobType.SUBMISSION: 'SUBMISSION'>, job_id=None, submission_id='{name}', "
        status = f"driver_info=None, status=<JobStatus.{state}: '{state}'>, entrypoint='python job.py', "
        tail = f"message={message}, error_type=None, start_time=1796044925341, metadata={by}, driver_exit_code=3)"
        jobs.append(head + status + tail)
    return f"INFO cli.py:600 -- [{', '.join(jobs)}]"


@dataclass(frozen=True)
class Words:
    """What is expected of a scheduler: its job's id, what it lists of one that waits, runs and has failed, and the
    commands of a stop."""

    id: str
    waits: Any
    runs: Any
    failed: Any
    stop: list[str]
    more: str = ""
    states: tuple[str, str, str] = ("Pending", "Running", "Failed")
    reasons: tuple[str, str] = ("", "BackoffLimitExceeded: too many")
    frees: bool = False
    remove: list[str] = field(default_factory=list)


FAILED = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": "too many"}


def of_kubernetes(kinds: str) -> Words:
    select = "--selector=app.kubernetes.io/instance=mine-1"
    stop = [f"kubectl delete {kinds},configmap {select} --wait=false --namespace=team"]
    return Words("mine-1", objects(), objects(ready=1), objects(FAILED), stop, "--namespace=team")


EXPECTED = {
    "ray": Words(
        "mine-1",
        details("PENDING"),
        details("RUNNING", "'Job is currently running.'"),
        details("FAILED", repr("Job entrypoint command failed with exit code 3, last available logs (truncated):\nhi")),
        ["ray job stop --no-wait mine-1 --address=http://head:8265"],
        "--address=http://head:8265",
        ("PENDING", "RUNNING", "FAILED"),
        ("", "Job entrypoint command failed with exit code 3"),
        remove=["ray job delete mine-1 --address=http://head:8265"],
    ),
    "slurm": Words(
        "17",
        queued("PENDING", "Priority"),
        queued("RUNNING", "None"),
        queued("TIMEOUT", "TimeLimit"),
        ["scancel --state=PENDING 17", "scancel --batch --signal=TERM --state=RUNNING 17"],
        "--partition=gpu --time=24:00:00",
        ("PENDING", "RUNNING", "TIMEOUT"),
        ("Priority", "TimeLimit"),
        frees=True,
    ),
    "kubernetes": of_kubernetes("job,service"),
    "jobset": of_kubernetes("jobset"),
    "kubeflow": of_kubernetes("trainjob,trainingruntime"),
    "skypilot": Words(
        "5",
        managed("STARTING"),
        managed("RUNNING"),
        managed("FAILED_NO_RESOURCE", "no H100 anywhere"),
        ["sky jobs cancel --yes 5"],
        "--infra aws",
        ("STARTING", "RUNNING", "FAILED_NO_RESOURCE"),
        ("", "no H100 anywhere"),
        frees=True,
    ),
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the programs, in which a user stands; what they hear is in ``calls``."""
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text((SAYS + text).replace("{there}", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "a place").mkdir()
    monkeypatch.chdir(tmp_path / "a place")
    yield tmp_path


def without_memory(text: str) -> str:
    """A job without what this machine had free when it was planned."""
    return re.sub(r"[\d.]+ GiB", "", text)


def calls(there: Path, *of: str) -> list[str]:
    lines = (there / "calls").read_text().splitlines() if (there / "calls").exists() else []
    return [line for line in lines if not of or line.startswith(of)]


def launch(kind: str, *words: str) -> int:
    given = ["launch", "--on", kind, "--cluster", "2x2xCPU", *WORDS, "--run", "mine.1", *words]
    return main(given)


@pytest.mark.parametrize("kind", EXPECTED)
def test_it_is_submitted_once_and_followed_to_its_end(
    kind: str, there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said, expected = capfd.readouterr, EXPECTED[kind]
    more = f"--with={expected.more}"
    lists = [more] if KINDS[kind].client.listed.endswith("{more}") else []

    def listed(what: Any) -> None:
        (there / "listed").write_text(what(there) if callable(what) else what)

    assert launch(kind) == 0 and calls(there) == []
    printed = said().out
    assert launch(kind, "--submit", more) == 0
    told = said().out
    assert shows(told, f"submitted: job {expected.id}", kind, "run mine.1\n")
    assert without_memory((there / "job").read_text()) == without_memory(printed)
    assert f"shardwise stop mine.1 --on {kind}" in told
    taken = [
        line
        for line in calls(there)
        if "apply" in line or "launch" in line or "job submit" in line or line.startswith("sbatch")
    ]
    assert len(taken) == 1 and expected.more in taken[0]
    for what, state, reason in ((expected.waits, 0, 0), (expected.runs, 1, None)):
        listed(what)
        assert main(["runs", "--on", kind, *lists]) == 0
        row = said().out.splitlines()[1]
        assert expected.id in row and expected.states[state] in row
        assert reason is None or row.endswith(expected.reasons[reason] or "-")
        assert launch(kind, "--submit", more) == 73
        told = said().err
        assert "JOB003" in told and expected.states[state] in told and "nothing was submitted" in told
    assert main(["logs", "mine.1", "--on", kind, *lists]) == 0
    assert f"job {expected.id} says" in said().out
    before = len(calls(there))
    assert main(["stop", "mine.1", "--on", kind, *lists]) == 0
    assert calls(there)[before + 1 :] == expected.stop
    listed(expected.failed)
    assert main(["runs", "--on", kind, "--json", *lists]) == 0
    row = json.loads(said().out.partition("\n")[2])[0]
    assert (row["state"], row["reason"], row["ended"]) == (expected.states[2], expected.reasons[1], True)
    again = launch(kind, "--submit", more)
    assert (again == 0) if expected.frees else (again == 73 and "removes it" in said().err)
    before = len(calls(there))
    assert main(["stop", "mine.1", "--on", kind, *lists]) == 0
    assert calls(there)[before + 1 :] == ([] if expected.frees else expected.remove or expected.stop)
    assert ("has ended" if expected.frees else "removed: mine-1") in said().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_missing(kind: str, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("PATH", str(there / "nowhere"))
    more = ["--with=one two"] if kind == "ssh" else []
    assert launch(kind, "--submit", *more) == 69
    told = capfd.readouterr()
    assert "JOB001" in told.err and "No such file" in told.err and told.out == "" and not Path("runs").exists()


REFUSALS = [
    ("slurm", "--partition=nope", "", ["partition", "nope"], "`sinfo -s` lists them"),
    ("jobset", "", 'refused: no matches for kind "JobSet" in version', ["JobSet"], "`--on kubernetes` needs neither"),
    ("kubernetes", "", "The connection to the server localhost:8080 was refused", ["8080"], "kubectl cluster-info"),
    ("kubernetes", "", "Error (Forbidden): refused: jobs is forbidden", ["forbidden"], "kubectl auth can-i"),
    ("ray", "", "Failed to connect to Ray at address: http://head:8265", ["connect"], "RAY_API_SERVER_ADDRESS"),
    ("ray", "", "401 Unauthenticated: no token", ["401"], "RAY_AUTH_TOKEN"),
    ("skypilot", "", "No cloud is enabled", ["cloud"], "`sky check`"),
    ("skypilot", "", "No resource satisfying H100:8", ["resource"], "`sky show-gpus`"),
    ("skypilot", "", "Volume shardwise not found", ["Volume"], "`sky volumes apply`"),
    ("slurm", "--comment=mine", "", ["`--comment=mine`", "found"], "leave it out"),
    ("slurm", "--partition=gpu --job-name mine", "", ["`--job-name`"], "leave it out"),
    ("slurm", "-Jmine", "", ["`-Jmine`"], "leave it out"),
    ("ray", "--submission-id=other", "", ["`--submission-id=other`"], "leave it out"),
    ("skypilot", "--name other", "", ["`--name`"], "leave it out"),
    ("ssh", "one", "", ["2 hosts", 1], "--submit --with 'HOST1 HOST2 ...'"),
    ("ssh", "one away", "", ["resolve hostname away"], "`ssh HOST`"),
]


@pytest.mark.parametrize(("kind", "more", "state", "values", "fix"), REFUSALS)
def test_what_is_refused(
    kind: str, more: str, state: str, values: list[Any], fix: str, there: Path, capfd: Any
) -> None:
    if state:
        (there / "state").write_text(state)
    assert launch(kind, "--submit", f"--with={more}") == (2 if "leave" in fix or more == "one" else 69)
    told = capfd.readouterr()
    assert refuses(told.err, "JOB002", *values, fix=fix) and told.out == ""
    assert not (there / "job").exists() and not Path("runs").exists()


def test_a_list_that_is_no_list_keeps_it_from_being_submitted(there: Path, capfd: Any) -> None:
    (there / "listed").write_text("slurm is being upgraded\n")
    assert launch("slurm", "--submit") == 69
    assert refuses(capfd.readouterr().err, "JOB002", "`squeue`", "not understood", "slurm is being", where="sbatch")
    assert calls(there, "sbatch") == []


def test_a_job_that_nobody_knows(there: Path, capfd: Any) -> None:
    (there / "listed").write_text(queued("RUNNING", "None")(there))
    for command in ("stop", "logs"):
        assert main([command, "other", "--on", "slurm"]) == 66
        told = capfd.readouterr().err
        assert "JOB004" in told and "one of these: mine.1" in told
    assert main(["stop", "mine.1"]) == 2 and "`--on`" in capfd.readouterr().err
    assert calls(there, "scancel") == []


def test_the_step_is_read_where_the_directory_is(there: Path, capfd: Any) -> None:
    """Kubernetes' name is found again, and what the run says of its end comes first."""
    directory = Path("elsewhere/mine.1")
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text("train: {max_steps: 9}\n")
    (directory / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    exit_json = {"kind": "error", "exit_code": 1, "message": "loss is NaN"}
    (directory / "exit.json").write_text(json.dumps(exit_json))
    (there / "listed").write_text(objects(FAILED))
    assert main(["runs", "elsewhere", "--on", "kubernetes"]) == 0
    row = capfd.readouterr().out.splitlines()[1].split(maxsplit=4)
    assert row == ["mine-1", "mine-1", "Failed", "4/9", "loss is NaN"]


def test_over_ssh_it_goes_on_alone(there: Path, capfd: Any) -> None:
    hosts = ["--submit", "--with=one two"]
    assert launch("ssh", *hosts) == 0
    pid = int(Path("runs/mine.1/ssh.pid").read_text().split()[0])
    assert shows(capfd.readouterr().out, f"submitted: job {pid}", "ssh")
    try:
        seen = [line for line in calls(there, "ssh") if "test -x" in line]
        assert [line.split(" -- ")[1].split()[0] for line in seen] == ["one", "two"]
        until(lambda: Path("runs/mine.1/ssh.log").read_text().count("ssh says") == 2)
        assert launch("ssh", *hosts) == 73 and "JOB003" in capfd.readouterr().err
        assert main(["runs", "--on", "ssh"]) == 0
        assert capfd.readouterr().out.splitlines()[1].split() == ["mine.1", str(pid), "running", "-"]
        assert main(["logs", "mine.1", "--on", "ssh"]) == 0 and "ssh says" in capfd.readouterr().out
        assert main(["stop", "mine.1", "--on", "ssh"]) == 0
        until(lambda: calls(there, "stopped") == ["stopped", "stopped"])
        until(lambda: subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True).stdout[:1] in b"Z")
        assert main(["runs", "--on", "ssh", "--json"]) == 0
        assert json.loads(capfd.readouterr().out.partition("\n")[2])[0]["ended"]
        assert main(["stop", "mine.1", "--on", "ssh"]) == 0 and "has ended" in capfd.readouterr().out
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{pid}"], capture_output=True)


def test_names_that_are_alike_are_told_apart(there: Path, capfd: Any) -> None:
    """Slurm lists runs by their own names: another's is no reason to refuse one, and a word that several could be meant
    by is refused with these."""
    row = "{}|{}|shardwise|None|{}|/log|\n"
    alike = [row.format("18", "RUNNING", "mine-1"), row.format("mine-1", "RUNNING", "19")]
    (there / "listed").write_text("".join(alike))
    assert launch("slurm", "--submit") == 0
    (there / "listed").write_text("".join([*alike, row.format("17", "RUNNING", "mine.1")]))
    capfd.readouterr()
    for name, found in (("mine.1", "17"), ("mine-1", "18"), ("17", "17"), ("19", "mine-1")):
        assert main(["stop", name, "--on", "slurm"]) == 0
        assert f"job {found}" in capfd.readouterr().out.splitlines()[-1]
    before = len(calls(there))
    assert main(["stop", "Mine_1", "--on", "slurm"]) == 66
    assert refuses(capfd.readouterr().err, "JOB004", "Mine_1", "18", "mine-1", "17", "mine.1", fix="id")
    (there / "listed").write_text(row.format("18", "RUNNING", "mine-1") + row.format("17", "FAILED", "mine.1"))
    assert main(["stop", "Mine_1", "--on", "slurm"]) == 66
    assert refuses(capfd.readouterr().err, "JOB004", "Mine_1", "18", "mine-1", "17", "mine.1")
    (there / "listed").write_text(row.format("20", "FAILED", "mine.1") + row.format("21", "PENDING", "mine.1") * 2)
    assert main(["stop", "mine.1", "--on", "slurm"]) == 66 and "JOB004" in capfd.readouterr().err
    assert not any("scancel" in line for line in calls(there)[before:])


def test_a_job_whose_run_is_not_known_for_certain_shows_none(there: Path, capfd: Any) -> None:
    """Kubernetes has a run's name in letters of its own: of two directories it may be either's."""
    for name in ("mine.1", "other"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "recipe.yaml").write_text("train: {max_steps: 9}\n")
        Path("runs", name, "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')

    def step() -> str:
        assert main(["runs", "--on", "kubernetes"]) == 0
        return str(capfd.readouterr().out.splitlines()[1].split()[3])

    (there / "listed").write_text(objects(ready=1))
    assert step() == "4/9"
    Path("runs/other").rename("runs/mine-1")
    assert step() == "-"
    assert launch("kubernetes", "--submit") == 73
    assert refuses(capfd.readouterr().err, "JOB003", "mine-1", "Running")
    (there / "listed").write_text("17|RUNNING|shardwise|None|mine.1|/log|\n")
    Path("runs/mine-1/metrics.jsonl").write_text('{"step": 7, "loss": 2.0}\n')
    assert main(["runs", "--on", "slurm"]) == 0 and "4/9" in capfd.readouterr().out


def test_a_log_with_nothing_in_it_is_said_in_words(there: Path, capfd: Any) -> None:
    queue = "17|PENDING|shardwise|None|mine.1|{}|\n"
    for log in ("", there / "nowhere", there / "empty"):
        (there / "empty").touch()
        (there / "listed").write_text(queue.format(log))
        assert main(["logs", "mine.1", "--on", "slurm"]) == 0
        told = capfd.readouterr()
        assert told.out == "" and shows(told.err, 17, "PENDING") and str(log) in told.err
    (there / "listed").write_text(queue.format(""))
    assert main(["logs", "mine.1", "--on", "slurm", "--follow"]) == 0 and "PENDING" in capfd.readouterr().err


def test_a_log_that_comes_later_is_followed(there: Path) -> None:
    (there / "listed").write_text(f"17|PENDING|shardwise|None|mine.1|{there}/later|\n")
    words = [sys.executable, "-m", "shardwise", "logs", "mine.1", "--on", "slurm", "--follow"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **streams) as follows:
        try:
            assert follows.stderr and "later" in follows.stderr.readline()
            (there / "later").write_text("step 1\n")
            assert follows.stdout and follows.stdout.readline() == "step 1\n"
        finally:
            os.killpg(follows.pid, signal.SIGKILL)


def test_what_programs_read(there: Path, capfd: Any) -> None:
    (there / "listed").write_text(queued("RUNNING", "None")(there))
    assert main(["stop", "mine.1", "--on", "slurm", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["id"], told["name"], told["done"]) == ("17", "mine.1", "asked to stop")
    (there / "listed").write_text(queued("FAILED", "None")(there))
    assert main(["stop", "mine.1", "--on", "slurm", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["id"], told["state"], told["done"]) == ("17", "FAILED", "has ended")
    assert main(["logs", "mine.1", "--on", "slurm", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["problems"][0]["code"] == "CLI001"


def test_ray_stops_a_job_without_saving(there: Path, capfd: Any) -> None:
    (there / "listed").write_text(details("RUNNING"))
    assert main(["stop", "mine-1", "--on", "ray"]) == 0
    assert shows(capfd.readouterr().out, "without saving", "mine-1")


def test_a_log_of_ssh_alone_is_no_job(there: Path, capfd: Any) -> None:
    """It is what a start leaves that came to nothing; and a log that was removed leaves a job that has ended."""
    Path("runs/mine.1").mkdir(parents=True)
    Path("runs/mine.1/ssh.log").touch()
    assert main(["runs", "--on", "ssh"]) == 0 and "no jobs" in capfd.readouterr().out
    Path("runs/mine.1/ssh.log").rename("runs/mine.1/ssh.pid")
    Path("runs/mine.1/ssh.pid").write_text("123 elsewhere")
    assert main(["runs", "--on", "ssh"]) == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:3] == ["mine.1", "123@elsewhere", "ended"]


def test_what_runs_over_ssh_is_neither_started_twice_nor_stopped_from_elsewhere(there: Path, capfd: Any) -> None:
    Path("runs/mine.1").mkdir(parents=True)
    with Path("runs/mine.1/ssh.log").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert launch("ssh", "--submit", "--with=one two") == 73
        assert refuses(capfd.readouterr().err, "JOB003", "mine.1", "runs", fix="another `--run`")
        assert not Path("runs/mine.1/ssh.pid").exists()
        Path("runs/mine.1/ssh.pid").write_text("123 elsewhere")
        assert main(["stop", "mine.1", "--on", "ssh"]) == 69
        assert refuses(capfd.readouterr().err, "JOB002", "123@elsewhere", fix="behind the @")


def test_words_about_the_directory_stay_where_they_belong(there: Path, capfd: Any) -> None:
    assert launch("kubernetes", "--submit", "--out", "my runs", "--with=--namespace=a --context 'b --out c'") == 0
    told = [shlex.split(line) for line in capfd.readouterr().out.splitlines()[1:]]
    more = "--with=--namespace=a --context 'b --out c'"
    assert told[0][1:] == ["shardwise", "runs", "my runs", "--on", "kubernetes", more]
    assert told[2][1:] == ["shardwise", "stop", "mine.1", "--on", "kubernetes", "--out", "my runs", more]
