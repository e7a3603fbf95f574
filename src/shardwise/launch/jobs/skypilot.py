"""A task for SkyPilot, which rents the machines. As a managed job it is started elsewhere when they are taken away."""

from __future__ import annotations

import json
import shlex
from typing import Any

from shardwise.errors import PreemptedError
from shardwise.launch.jobs.client import Client, JobKind, Submitted
from shardwise.launch.jobs.cluster_job import KEYS, SHARED, ClusterJob, here_document, remarks
from shardwise.spec.document import KeyPath
from shardwise.spec.emit import Verbatim, emit
from shardwise.spec.safe_path import SAFE_PATH

NAMES = {
    "RTX 6000 Ada": "RTX6000-Ada",
    "V100-SXM2-32GB": "V100-32GB",
    "A100-SXM-80GB": "A100-80GB",
    "A100-PCIe-80GB": "A100-80GB",
}
"""What SkyPilot calls those devices whose name is not what stands before the first hyphen of ours."""
RETRIES = 3
WHY = {
    "num_nodes": "those of the plan",
    "accelerators": "so many on each node (`sky show-gpus` lists the names)",
    "image_id": "yours: Python with Shardwise in it",
    "volumes": "yours, on a file system with fsync and atomic rename that every node mounts; a bucket is none",
    "recover_on_exit_codes": "everything is saved, and there is more to do",
    "max_restarts_on_errors": "after any other error",
}


def text(job: ClusterJob) -> str:
    """Return the task, with its comments."""
    head = remarks(
        job,
        "sky launch job.yaml; or, started again when machines are taken away: sky jobs launch job.yaml",
        f"The recipe travels in it; all else is in {SHARED}, a volume that every node mounts.",
        f"Keys of services: sky launch {' '.join(f'--secret {name}' for name in KEYS)}. None is written here.",
    )
    devices = {"accelerators": f"{_sold_as(job.device)}:{job.nproc}"} if job.gpus else {"cpus": f"{job.nproc}+"}
    recovery = {"max_restarts_on_errors": RETRIES, "recover_on_exit_codes": [PreemptedError.exit_code]}
    task = {
        "name": job.label,
        "num_nodes": job.nodes,
        "resources": {**devices, "image_id": f"docker:{job.image}", "job_recovery": recovery},
        "volumes": {SHARED: "shardwise"},
        "run": Verbatim("\n".join(_run(job)) + "\n"),
    }
    return "\n".join(head) + "\n" + emit(task, _why)


def _why(path: KeyPath, value: Any) -> str:
    return WHY.get(str(path[-1]), "")


def _sold_as(device: str) -> str:
    return NAMES.get(device, device.partition("-")[0].replace(" ", ""))


def _run(job: ClusterJob) -> list[str]:
    """The script that each node runs."""
    carried = f"/tmp/shardwise-{job.label}"
    files = [line for name, content in job.files.items() for line in here_document(f"{carried}/{name}", content)]
    place = job.place('"$SKYPILOT_NODE_RANK"', '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"', '"$SKYPILOT_TASK_ID"')
    told = " ".join(f"{name}={value}" for name, value in {**place, **SAFE_PATH}.items())
    return [
        f"rm -rf {carried} && mkdir -m 700 {carried} || exit 73",
        *files,
        f"cd {SHARED} || exit 73",
        f"export {told}",
        f"exec {shlex.join(['shardwise', *job.carried(carried)])}",
    ]


def _listed(said: str) -> list[Submitted]:
    found = []
    for job in json.loads(said[said.index("[") :]):
        state, reason = job["status"], job.get("failure_reason") or ""
        ended = state in ("SUCCEEDED", "CANCELLED") or state.startswith("FAILED")
        found.append(Submitted(str(job["job_id"]), job.get("job_name") or "", state, reason, ended))
    return found


CLIENT = Client(
    program="sky",
    submit=["sky jobs launch --yes --detach-run {more} {file}"],
    told=r"Managed Job ID: (\d+)",
    listed="sky jobs queue --all --output=json",
    read=_listed,
    by_label=True,
    found_by=("--name", "-n"),
    logs="sky jobs logs {id} {follow}",
    follow=("--no-follow", "--follow"),
    stop=["sky jobs cancel --yes {id}"],
    fixes={
        "no cloud|not enabled|credentials": "`sky check` says which clouds you can use",
        "no resource|catalog|not available|not supported": "`sky show-gpus` lists what is sold; `--with=--infra=CLOUD`",
        "volume": "`sky volumes apply`: a volume named shardwise, that every node mounts",
    },
)
KIND = JobKind("skypilot", text, CLIENT)
