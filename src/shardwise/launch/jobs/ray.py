"""A Python file for Ray: a TorchTrainer of Ray Train, each of whose workers is a whole node.

A worker starts ``shardwise train`` for its node's ranks, and tells it its place, which Ray's rank of the worker is. So
ranks end by themselves when a peer is lost, and the worker's failure has Ray start all of them again.
"""

from __future__ import annotations

import re

from shardwise.launch.jobs.client import Client, JobKind, Submitted
from shardwise.launch.jobs.cluster_job import SHARED, ClusterJob, remarks
from shardwise.spec.safe_path import SAFE_PATH

RETRIES = 3
CARRIED_HERE = "{carried}"
"""What stands in the words for the directory into which a worker writes the job's files."""
BODY = '''
import ctypes, os, signal, subprocess, sys, tempfile
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

OF_THE_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")  # Ray's, not the ranks'


def node(config):
    """Start the ranks of this node, and wait for them; none outlives this worker."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as carried:
        for name, text in FILES.items():
            Path(carried, name).write_text(text, encoding="utf-8")
        told = {name: value for name, value in os.environ.items() if name not in OF_THE_WORKER} | PLACE
        told |= {"PET_NODE_RANK": str(get_context().get_world_rank()), "PET_MASTER_ADDR": os.environ["MASTER_ADDR"]}
        command = [sys.executable, "-u", "-m", "shardwise", *(word.replace("{carried}", carried) for word in WORDS)]
        stops = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        code = subprocess.Popen(command, env=told, cwd=DIRECTORY, preexec_fn=stops).wait()
    if code:
        raise RuntimeError(f"shardwise train ended with exit code {code} (docs/errors.md)")


if __name__ == "__main__":
    TorchTrainer(
        node,
        torch_config=TorchConfig(backend="gloo"),  # of the workers, who need none; ranks make their own
        scaling_config=ScalingConfig(num_workers=NODES, placement_strategy="STRICT_SPREAD", **DEVICES),
        run_config=RunConfig(name=NAME, failure_config=FailureConfig(max_failures=RETRIES)),
    ).fit()
'''


def text(job: ClusterJob) -> str:
    """Return the file."""
    told = {**job.place("", "", job.label), **SAFE_PATH}
    place = {name: value for name, value in told.items() if value}
    devices = {"use_gpu": job.gpus, "resources_per_worker": {"GPU" if job.gpus else "CPU": job.nproc}}
    constants = {
        "NAME": (job.label, ""),
        "NODES": (job.nodes, "those of the plan: each a worker of Ray Train"),
        "DEVICES": (devices, "of each"),
        "DIRECTORY": (SHARED, "yours: a file system that every node mounts, with fsync and atomic rename"),
        "PLACE": (
            place,
            "beside what Ray says: the port of the first node must be open to the others, and to them only",
        ),
        "WORDS": (job.carried(CARRIED_HERE), ""),
        "FILES": (dict(job.files), ""),
        "RETRIES": (RETRIES, "after an error, or a lost node: it goes on from its newest checkpoint"),
    }
    head = remarks(
        job,
        "ray job submit --working-dir DIRECTORY_OF_THIS_FILE -- python job.py",
        "Every node has Shardwise in the Python that Ray's workers run. Keys of services are read there.",
    )
    lines = [f"{name} = {value!r}" + (f"  # {why}" if why else "") for name, (value, why) in constants.items()]
    return "\n".join([*head, *lines]) + "\n" + BODY


OURS = "shardwise"
FIELDS = re.compile(
    r"submission_id='(?P<id>[^']*)'.*?status=<JobStatus\.(?P<state>\w+).*?"
    r"message=(?:None|'(?P<said>[^']*)'|\"(?P<quoted>[^\"]*)\").*?metadata=(?P<metadata>\{[^}]*\}|None)",
    re.DOTALL,
)


def _listed(said: str) -> list[Submitted]:
    """The jobs of ``ray job list``, which prints Python objects."""
    found = []
    for job in FIELDS.finditer(said):
        if OURS in job["metadata"]:
            reason, ended = job["said"] or job["quoted"] or "", job["state"] in ("STOPPED", "SUCCEEDED", "FAILED")
            found.append(
                Submitted(job["id"], job["id"], job["state"], re.split(r", last available|\\n", reason)[0], ended)
            )
    return found


CLIENT = Client(
    program="ray",
    submit=[
        "ray job submit --no-wait --submission-id={name} --working-dir={directory}"
        ' --metadata-json={{"by":"shardwise"}} {more} -- python job.py'
    ],
    file="job.py",
    listed="ray job list {more}",
    read=_listed,
    by_label=True,
    found_by=("--submission-id", "--job-id", "--metadata-json"),
    saves=False,
    logs="ray job logs {id} {follow} {more}",
    stop=["ray job stop --no-wait {id} {more}"],
    remove=["ray job delete {id} {more}"],
    fixes={
        "already exists": "`shardwise stop RUN --on ray` removes it; or another `--run`",
        "connect|address|refused|resolve": "RAY_API_SERVER_ADDRESS=http://HEAD:8265, or `--with=--address=...`",
        "token|unauthenticated|401": "the cluster's token: RAY_AUTH_TOKEN, or `ray get-auth-token` there",
    },
)
KIND = JobKind("ray", text, CLIENT)
