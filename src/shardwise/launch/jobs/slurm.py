"""A script for sbatch, in which each task is a rank.

Ten minutes before the time is over, Slurm warns the script, and it the ranks: they save and leave with 75, and the job
is queued again. So it is after a lost node (`--requeue`). Any other end is one.
"""

from __future__ import annotations

import shlex
import sys

from shardwise.errors import PreemptedError
from shardwise.launch.jobs.client import Client, JobKind, Submitted
from shardwise.launch.jobs.cluster_job import ClusterJob, remarks
from shardwise.launch.node import PLACE
from shardwise.launch.slurm import FIRST, PLACES, WARNING_S
from shardwise.spec.safe_path import SAFE_PATH

STRAGGLERS_S = 600
"""How long ranks may go on once one has ended: as long as they may take to save."""
OURS = "shardwise"
"""The comment by which our jobs are known among the user's."""
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
ENDED |= {"TIMEOUT"}


def text(job: ClusterJob) -> str:
    """Return the script."""
    gpus = [f"#SBATCH --gpus-per-node={job.nproc}"] if job.gpus else []
    safe = " ".join(f"{name}={value}" for name, value in SAFE_PATH.items())
    command = shlex.join([sys.executable, "-u", "-m", "shardwise", *job.words])
    start, told, tasks = _nodes(job) if job.stays else _ranks(job)
    lines = [
        "#!/bin/bash",
        *remarks(
            job,
            "Submit it with sbatch from the directory in which it was written, and add what your site asks for:",
            f"--partition, --account, --time, --cpus-per-task (each {'node' if job.stays else 'rank'} is one task).",
            "All nodes must see this directory, the run's and the Python below: a file system that they share.",
        ),
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --comment={OURS}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={tasks}",
        *gpus,
        *["# those that are left go on when a node is lost (run.on_loss)", "#SBATCH --no-kill"] * job.stays,
        f"# {WARNING_S} s before the time is over it is warned: see the trap below",
        f"#SBATCH --signal=B:USR1@{WARNING_S}",
        "# it is queued again when a node is lost, and goes on from its newest checkpoint",
        "#SBATCH --requeue",
        "# what it then says comes below what it has said",
        "#SBATCH --open-mode=append",
        "",
        *(f"export {line}" for line in (f"{told[0]} {safe}", *told[1:])),
        "# of several networks, the one between the nodes, by its interface's name (`ip -br address`):",
        "# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME==ib0",
        "",
        *start[:-1],
        f'{start[-1]} exec "$0" "$@"\' {command} &',
        "step=$!",
        "warned=",
        "trap 'heard=yes; warned=yes; kill -USR1 $step' USR1",
        "trap 'heard=yes; kill -USR1 $step' TERM  # srun hands on USR1; upon TERM it would kill the ranks",
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


def _ranks(job: ClusterJob) -> tuple[list[str], list[str], int]:
    """Return how each rank is started, what all are told, and how many a node has."""
    why = (
        f"# once a rank has ended, the others get {STRAGGLERS_S} s; without --wait one that hangs would hold the nodes"
    )
    told = [f"MASTER_ADDR={FIRST} MASTER_PORT={job.port}"]
    told.append("TORCHELASTIC_RUN_ID=$SLURM_JOB_ID TORCHELASTIC_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}")
    return [why, f"srun --wait={STRAGGLERS_S} bash -c '{PLACES}"], told, job.nproc


def _nodes(job: ClusterJob) -> tuple[list[str], list[str], int]:
    """Return how each node is started, whose launcher stays when another is lost, and what all are told."""
    place = job.place("", FIRST, "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
    told = [" ".join(f"{name}={value}" for name, value in place.items() if value)]
    why = "# the launcher of a node stays when another is lost, so that srun must not end it"
    start = f"srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '{PLACE['node']}=$SLURM_NODEID"
    return [why, start], told, 1


def _listed(said: str) -> list[Submitted]:
    found = []
    for line in said.splitlines():
        number, state, comment, reason, name, log = line.split("|", 5)
        if comment == OURS:
            reason = "" if reason == "None" else reason
            found.append(Submitted(number, name, state, reason, state in ENDED, log.rstrip("|")))
    return found


CLIENT = Client(
    program="sbatch",
    submit=["sbatch --parsable {more} {file}"],
    told=r"(\d+)",
    file="job.sh",
    listed="squeue --me --states=all --noheader --Format=JobID:|,State:|,Comment:|,Reason:|,Name:|,STDOUT:|",
    read=_listed,
    found_by=("--comment", "--job-name", "-J"),
    logs="tail -n +1 {follow} {log}",
    follow=("", "-F"),
    stop=["scancel --state=PENDING {id}", "scancel --batch --signal=TERM --state=RUNNING {id}"],
    fixes={
        "invalid partition": "`--with=--partition=NAME`: `sinfo -s` lists them",
        "account": "`--with=--account=NAME`: one that you may use (`sacctmgr show assoc user=$USER`)",
        "time limit": "`--with=--time=HOURS:00:00`, within the partition's (`sinfo -s`)",
        "node configuration|node count|more processors": "another `--cluster`: `sinfo -N -l` lists the machines",
        "timed out": "look with `shardwise runs --on slurm` before you submit again: it may have been taken",
        "contact|connection|authentication": "`scontrol ping` says whether the controller answers; then again",
    },
)
KIND = JobKind("slurm", text, CLIENT)
