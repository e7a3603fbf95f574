"""A job script for Slurm, in which each task is a rank. Slurm's warning that the time is over reaches the ranks, which
save and stop; submitted again, the script goes on."""

from __future__ import annotations

import shlex
import sys

from shardwise.launch.launchers import Launch
from shardwise.spec.safe_path import SAFE_PATH

WARNING_S = 600
"""How long before the end of a job's time its ranks are told."""
PLACES = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE"
FIRST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def launch(asked: Launch) -> list[str]:
    """Write the script into the run's directory; the lines say how it is submitted."""
    options = {"job-name": asked.directory.name or asked.words[0], "nodes": asked.nodes, "ntasks-per-node": asked.nproc}
    options |= {"gpus-per-node": asked.nproc} if asked.gpus else {}
    options["signal"] = f"USR1@{WARNING_S}"
    settings = [f"{name}={value}" for name, value in SAFE_PATH.items()]
    settings += ["TORCHELASTIC_RUN_ID=$SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}"]
    command = shlex.join([sys.executable, "-u", "-m", "shardwise", *asked.words])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        f"export MASTER_ADDR={FIRST} MASTER_PORT={asked.port} {' '.join(settings)}",
        f'srun bash -c \'{PLACES} exec "$0" "$@"\' {command}',
    ]
    script = asked.directory / f"{asked.words[0]}.sbatch"  # of doctor, where the user stands
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [
        f"\nwritten: {script}",
        f"  sbatch {shlex.quote(str(script))}",
        "with --partition, --time and what else is asked for",
    ]
