"""A script that starts the run over ssh, on machines that nobody schedules: one connection a node, all closed when one
of them fails."""

from __future__ import annotations

import fcntl
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardwise.errors import OutputError, Problem, UsageError
from shardwise.launch.jobs.client import Client, JobKind, Submitted, call
from shardwise.launch.jobs.cluster_job import ClusterJob, remarks
from shardwise.spec.safe_path import SAFE_PATH
from shardwise.spec.units import counted

ALL_END = [
    '        if [ "$ended" != 0 ] && [ "$code" = 0 ]; then',
    "            code=$ended  # the first; 75: everything is saved, and there is more to do",
    "            close",
    "        fi",
]
LEFT_GO_ON = ["        code=$ended  # the last: when one ends, those that are left go on (run.on_loss)"]
"""What follows when a connection has ended."""


def text(job: ClusterJob) -> str:
    """Return the script."""
    place = job.place("$node", "$first", "$start")
    settings = " ".join([*(f"{name}={value}" for name, value in {**place, **SAFE_PATH}.items())])
    command = shlex.join([sys.executable, "-u", "-m", "shardwise", *job.words])
    hosts = " ".join(f"HOST{number}" for number in range(1, min(job.nodes, 3) + 1)) + " ..." * (job.nodes > 3)
    lines = [
        "#!/bin/bash",
        *remarks(
            job,
            f"Start it with the names of {counted(job.nodes, 'host')}: bash job.sh {hosts}",
            "Each lets you in without a password, and sees this directory, the run's and the Python below in the same",
            f"place. The first host's port {job.port} must be open to the others, and to nobody else.",
            "Keys of services are read on the hosts: `hf auth login`, a netrc. This script hands on none.",
        ),
        f"if [ $# != {job.nodes} ]; then",
        f'    echo "usage: bash $0 {hosts}: {counted(job.nodes, "host")}, and $# given" >&2',
        "    exit 2",
        "fi",
        "# the first host, as the others know it; of several networks, its address in the one between them",
        'first=$(printf %q "${FIRST_ADDRESS:-${1#*@}}")',
        "start=$(date +%s)-$$",
        f"directory={shlex.quote(shlex.quote(str(job.directory)))}",
        f"command={shlex.quote(command)}",
        "# of several networks, the one between the nodes, by its interface's name (`ip -br address`):",
        "network=  # network='GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME==ib0'",
        "",
        "connections=()",
        "node=0",
        'for host in "$@"; do',
        f'    place="{settings}"',
        "    # -tt: a connection that is closed is a hangup there, upon which the ranks save and stop",
        "    ssh -n -tt -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 -- \\",
        '        "$host" "cd $directory && exec env $place $network $command" &',
        "    connections+=($!)",
        "    node=$((node + 1))",
        "done",
        'close() { kill -TERM "${connections[@]}" 2>/dev/null; }',
        "trap close INT TERM HUP",
        "code=0",
        'while [ "${#connections[@]}" -gt 0 ]; do',
        '    for number in "${!connections[@]}"; do  # `wait -n` would miss one of two that end at once',
        '        kill -0 "${connections[number]}" 2>/dev/null && continue',
        '        wait "${connections[number]}"',
        "        ended=$?",
        '        unset "connections[number]"',
        *(LEFT_GO_ON if job.stays else ALL_END),
        "    done",
        "    sleep 0.2",
        "done",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def start(job: ClusterJob, script: str, hosts: Sequence[str]) -> str:
    """Start the script for these hosts, once each has let us in and shows what it must, and let it go on alone; returns
    its pid. What it says goes to ``ssh.log`` of the run's directory, which it holds locked while it lives. Raises
    UsageError (JOB002) for another number of hosts, OutputError (JOB003) where it runs, UnavailableError of ssh."""
    if len(hosts) != job.nodes:
        what = f"{counted(job.nodes, 'host')} must be named, and {len(hosts)} {'is' if len(hosts) == 1 else 'are'}"
        raise UsageError(Problem("JOB002", what, "--with", "`--submit --with 'HOST1 HOST2 ...'`, the first node first"))
    see = f"cd {shlex.quote(str(job.directory))} && test -x {shlex.quote(sys.executable)}"
    for host in hosts:
        call(["ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "--", host, see], FIXES)
    place = Path(job.out) / job.name
    place.mkdir(parents=True, exist_ok=True)
    with (place / "ssh.log").open("a") as log:
        if not _free(log):
            what = f"run {job.name} was started already, and runs; nothing was started"
            raise OutputError(Problem("JOB003", what, "--run", "stop it first, or give another `--run`"))
        command = ["bash", "-c", script, "job.sh", *hosts]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    started.returncode = 0  # nobody here waits for it
    (place / "ssh.pid").write_text(f"{started.pid} {socket.gethostname()}")
    return str(started.pid)


def found(directory: Path) -> list[Submitted]:
    """Return what was started for the runs of ``directory``; ``id`` is a pid, with its host where that is another."""
    jobs = []
    for path in sorted(directory.glob("*/ssh.pid")):
        (pid, _, host), ended = path.read_text().partition(" "), True
        log = path.parent / "ssh.log"
        with suppress(FileNotFoundError), log.open("r+") as held:
            ended = _free(held)
        where = pid if host == socket.gethostname() else f"{pid}@{host}"
        jobs.append(Submitted(where, path.parent.name, "ended" if ended else "running", "", ended, str(log)))
    return jobs


def _free(log: TextIO) -> bool:
    """Return whether no script holds this log; it is then held by this process, and by whom it hands the file to."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


FIXES = {
    "exit code": "the host must see this directory and this Python in the same place: a file system that they share",
    "no such file": "the host must see this directory and this Python in the same place: a file system that they share",
    "permission denied": "let yourself in without a password: `ssh-copy-id HOST`",
    "verification failed": "`ssh HOST` once by hand, and look at its key",
    "resolve|refused|timed out|no route": "`--with`: names or addresses under which `ssh HOST` lets you in",
}
CLIENT = Client(
    program="ssh",
    start=start,
    found=found,
    logs="tail -n +1 {follow} {log}",
    follow=("", "-F"),
    stop=["kill -TERM {id}"],
    fixes={
        "no such process": "it has just ended: look with `shardwise runs --on ssh`",
        "": "only the machine that started it can stop it: `shardwise stop` there; its name is behind the @",
    },
)
KIND = JobKind("ssh", text, CLIENT)
