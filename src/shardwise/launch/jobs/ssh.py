"""A script that starts the run over ssh, on machines that nobody schedules: one connection a node, all closed when one
of them fails."""

from __future__ import annotations

import shlex
import sys

from shardwise.launch.jobs.cluster_job import ClusterJob, JobKind, remarks
from shardwise.spec.safe_path import SAFE_PATH
from shardwise.spec.units import counted


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
        'close() { asked=yes; kill -TERM "${connections[@]}" 2>/dev/null; }',
        "trap close INT TERM HUP",
        "code=0",
        "left=${#connections[@]}",
        'while [ "$left" -gt 0 ]; do',
        "    asked=",
        "    wait -n",
        "    ended=$?",
        '    [ -n "$asked" ] && continue  # it was a signal that ended the waiting',
        "    left=$((left - 1))",
        '    if [ "$ended" != 0 ] && [ "$code" = 0 ]; then',
        "        code=$ended  # the first; 75: everything is saved, and there is more to do",
        "        close",
        "    fi",
        "done",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


KIND = JobKind("ssh", "a shell script that starts it over ssh", text)
