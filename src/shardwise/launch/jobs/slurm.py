"""A script for sbatch, in which each task is a rank.

Ten minutes before the time is over, Slurm warns the script, and it the ranks: they save and leave with 75, and the job
is queued again. So it is after a lost node (`--requeue`). Any other end is one.
"""

from __future__ import annotations

import shlex
import sys

from shardwise.errors import PreemptedError
from shardwise.launch.jobs.cluster_job import ClusterJob, JobKind, remarks
from shardwise.launch.slurm import FIRST, PLACES, WARNING_S
from shardwise.spec.safe_path import SAFE_PATH

STRAGGLERS_S = 600
"""How long ranks may go on once one has ended: as long as they may take to save."""


def text(job: ClusterJob) -> str:
    """Return the script."""
    gpus = [f"#SBATCH --gpus-per-node={job.nproc}"] if job.gpus else []
    safe = " ".join(f"{name}={value}" for name, value in SAFE_PATH.items())
    command = shlex.join([sys.executable, "-u", "-m", "shardwise", *job.words])
    lines = [
        "#!/bin/bash",
        *remarks(
            job,
            "Submit it with sbatch from the directory in which it was written, and add what your site asks for:",
            "--partition, --account, --time, --cpus-per-task (each rank is one task).",
            "All nodes must see this directory, the run's and the Python below: a file system that they share.",
        ),
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={job.nproc}",
        *gpus,
        f"# {WARNING_S} s before the time is over it is warned: see the trap below",
        f"#SBATCH --signal=B:USR1@{WARNING_S}",
        "# it is queued again when a node is lost, and goes on from its newest checkpoint",
        "#SBATCH --requeue",
        "# what it then says comes below what it has said",
        "#SBATCH --open-mode=append",
        "",
        f"export MASTER_ADDR={FIRST} MASTER_PORT={job.port} {safe}",
        "export TORCHELASTIC_RUN_ID=$SLURM_JOB_ID TORCHELASTIC_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}",
        "# of several networks, the one between the nodes, by its interface's name (`ip -br address`):",
        "# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME==ib0",
        "",
        f"# once a rank has ended, the others get {STRAGGLERS_S} s; without --wait one that hangs would hold the nodes",
        f'srun --wait={STRAGGLERS_S} bash -c \'{PLACES} exec "$0" "$@"\' {command} &',
        "step=$!",
        "warned=",
        "trap 'heard=yes; warned=yes; kill -USR1 $step' USR1",
        "trap 'heard=yes; kill -TERM $step' TERM",
        "heard=yes",
        'while [ -n "$heard" ]; do  # a signal ends the waiting too',
        "    heard=",
        "    wait $step",
        "    code=$?",
        "done",
        f"# {PreemptedError.exit_code}: everything is saved, and there is more to do",
        f'if [ "$code" = {PreemptedError.exit_code} ] && [ -n "$warned" ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


KIND = JobKind("slurm", "a script for sbatch", text)
