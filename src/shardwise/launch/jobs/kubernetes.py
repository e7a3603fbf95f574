"""Objects for kubectl: an Indexed Job, whose pods are the nodes, and the headless service by which they find the first.

They need no operator. What an exit code means to the Job is said in its pod failure policy (Kubernetes 1.31).
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    OutputError,
    PolicyError,
    PreemptedError,
    ShardwiseError,
    UsageError,
)
from shardwise.launch.jobs.cluster_job import CARRIED, KEYS, SHARED, ClusterJob, JobKind, remarks
from shardwise.launch.local import SAVE_AND_STOP_S
from shardwise.launch.node import PLACE
from shardwise.spec.document import KeyPath
from shardwise.spec.emit import Verbatim, emit
from shardwise.spec.safe_path import SAFE_PATH

SAME_AGAIN = (UsageError, DataError, MissingInputError, ShardwiseError, OutputError, PolicyError, ConfigError)
"""Errors that would only come again."""
RETRIES = 3
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
WHY = {
    "publishNotReadyAddresses": "the first pod is found by name before it is ready",
    "completions": "the nodes of the plan, all at once",
    "backoffLimit": f"failed pods in all: each node may fail {RETRIES} times",
    "podFailurePolicy": f"{PreemptedError.exit_code}: saved, to be started again; a lost node; what would fail again",
    "terminationGracePeriodSeconds": "the time to save after SIGTERM",
    "claimName": "yours: ReadWriteMany, on a file system with fsync and atomic rename",
    "secretRef": f"yours, with {' and '.join(KEYS)}: kubectl create secret generic shardwise-keys ...",
    "image": "yours: Python with Shardwise in it",
    "workingDir": "on the volume that all pods share: the run's directory, and data with a relative path",
    "medium": "NCCL and data loading use shared memory, of which a container has 64 MiB otherwise",
}


def text(job: ClusterJob) -> str:
    """Return the documents, each with its comments."""
    head = remarks(
        job,
        "kubectl apply -f job.yaml; logs: kubectl logs -f job/" + job.label,
        f"The recipe travels in the ConfigMap; all else is in {SHARED}, a volume that every pod mounts.",
        "A network policy should let nobody else reach the pods: ranks exchange numbers without a password.",
    )
    parts = [emit(each, _why) for each in (_config(job), _service(job), _job(job))]
    return "\n".join(head) + "\n" + "---\n".join(parts)


def _why(path: KeyPath, value: Any) -> str:
    return WHY.get(str(path[-1]), "")


def _named(kind: str, version: str, job: ClusterJob) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.label, "labels": _labels(job)}}


def _labels(job: ClusterJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "shardwise", "app.kubernetes.io/instance": job.label}


def _config(job: ClusterJob) -> dict[str, Any]:
    data = {name: Verbatim(content) for name, content in job.files.items()}
    return {**_named("ConfigMap", "v1", job), "data": data}


def _service(job: ClusterJob) -> dict[str, Any]:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(job)}
    return {**_named("Service", "v1", job), "spec": spec}


def _job(job: ClusterJob) -> dict[str, Any]:
    pod = {
        "subdomain": job.label,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(SAVE_AND_STOP_S),
        "containers": [_container(job)],
        "volumes": [
            {"name": "files", "configMap": {"name": job.label}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "shardwise"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    wrong = sorted(error.exit_code for error in SAME_AGAIN)
    rules = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PreemptedError.exit_code]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": wrong}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RETRIES * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
    }
    return {**_named("Job", "batch/v1", job), "spec": spec}


def _container(job: ClusterJob) -> dict[str, Any]:
    told = job.place("", f"{job.label}-0.{job.label}", job.label)
    env: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in {**told, **SAFE_PATH}.items() if name != PLACE["node"]
    ]
    env.append({"name": PLACE["node"], "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    asked = {"limits": {"nvidia.com/gpu": job.nproc}} if job.gpus else {"requests": {"cpu": job.nproc}}
    return {
        "name": "train",
        "image": job.image,
        "command": ["shardwise", *(_unexpanded(word) for word in job.carried())],
        "workingDir": SHARED,
        "env": env,
        "envFrom": [{"secretRef": {"name": "shardwise-keys", "optional": True}}],
        "resources": asked,
        "volumeMounts": [
            {"name": "files", "mountPath": CARRIED, "readOnly": True},
            {"name": "shared", "mountPath": SHARED},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def _unexpanded(word: str) -> str:
    """A word in which Kubernetes finds no ``$(NAME)`` to put a variable's value in its place; of two dollars it takes
    one."""
    return word.replace("$", "$$")


KIND = JobKind("kubernetes", "a Job, its service and its ConfigMap, for kubectl", text)
