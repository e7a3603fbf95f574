"""Objects for kubectl: an Indexed Job, whose pods are the nodes, and the headless service by which they find the first;
or the same Job in a JobSet, or in the runtime of a TrainJob of Kubeflow's trainer.

The Job needs no operator. What an exit code means to it is said in its pod failure policy (Kubernetes 1.31).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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
from shardwise.launch.jobs.client import Client, JobKind, Submitted
from shardwise.launch.jobs.cluster_job import CARRIED, KEYS, SHARED, ClusterJob, remarks
from shardwise.launch.local import SAVE_AND_STOP_S
from shardwise.launch.node import PLACE
from shardwise.spec.document import KeyPath
from shardwise.spec.emit import Verbatim, emit
from shardwise.spec.safe_path import SAFE_PATH

SAME_AGAIN = (UsageError, DataError, MissingInputError, ShardwiseError, OutputError, PolicyError, ConfigError)
"""Errors that would only come again."""
RETRIES = 3
NODE = "node"
"""The container, and the Job of a JobSet: Kubeflow's trainer knows them by this name."""
TRAINER = "trainer.kubeflow.org"
FIRST_POD = "batch.kubernetes.io/job-completion-index=0"
Document = Callable[[ClusterJob], dict[str, Any]]
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
WHY = {
    "publishNotReadyAddresses": "the first pod is found by name before it is ready",
    "completions": "the nodes of the plan, all at once",
    "backoffLimit": f"failed pods in all: each node may fail {RETRIES} times",
    "maxRestarts": "all pods are started again, so often; what would only fail again is not",
    "runtimeRef": "above, where it is said what runs",
    "podFailurePolicy": f"{PreemptedError.exit_code}: saved, to be started again; a lost node; what would fail again",
    "terminationGracePeriodSeconds": "the time to save after SIGTERM",
    "claimName": "yours: ReadWriteMany, on a file system with fsync and atomic rename",
    "secretRef": f"yours, with {' and '.join(KEYS)}: kubectl create secret generic shardwise-keys ...",
    "image": "yours: Python with Shardwise in it",
    "workingDir": "on the volume that all pods share: the run's directory, and data with a relative path",
    "medium": "NCCL and data loading use shared memory, of which a container has 64 MiB otherwise",
}


def text(job: ClusterJob, documents: tuple[Document, ...]) -> str:
    """Return the documents, each with its comments."""
    head = remarks(
        job,
        "kubectl apply -f job.yaml; logs: kubectl logs -f -l app.kubernetes.io/instance=" + job.label,
        f"The recipe travels in the ConfigMap; all else is in {SHARED}, a volume that every pod mounts.",
        "A network policy should let nobody else reach the pods: ranks exchange numbers without a password.",
    )
    return "\n".join(head) + "\n" + "---\n".join(emit(each(job), _why) for each in documents)


def _why(path: KeyPath, value: Any) -> str:
    if (path[-1], value) == ("backoffLimit", 0):
        return "any pod that fails ends the Job: see maxRestarts"
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
    place = job.place("", f"{job.label}-0.{job.label}", job.label)
    spec = _job_spec(job, place, RETRIES * job.nodes)
    spec["template"]["spec"]["subdomain"] = job.label
    return {**_named("Job", "batch/v1", job), "spec": spec}


def _job_set(job: ClusterJob) -> dict[str, Any]:
    place = job.place("", f"{job.label}-{NODE}-0-0.{job.label}", job.label)
    return {**_named("JobSet", "jobset.x-k8s.io/v1alpha2", job), "spec": _set_spec(job, place, {})}


def _runtime(job: ClusterJob) -> dict[str, Any]:
    """A runtime of the trainer, for this job alone: the trainer tells each pod its place by torchrun's variables."""
    spec = _set_spec(job, {PLACE["start"]: job.label}, {f"{TRAINER}/trainjob-ancestor-step": "trainer"})
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": spec}}
    return {**_named("TrainingRuntime", f"{TRAINER}/v1alpha1", job), "spec": runtime}


def _train_job(job: ClusterJob) -> dict[str, Any]:
    spec = {
        "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": job.label},
        "trainer": {"numNodes": job.nodes, "numProcPerNode": job.nproc},
    }
    return {**_named("TrainJob", f"{TRAINER}/v1alpha1", job), "spec": spec}


def _set_spec(job: ClusterJob, place: dict[str, str], labels: dict[str, str]) -> dict[str, Any]:
    """The JobSet of one Job. Any failure ends all pods, which are then started together; but where nodes that are left
    go on, only the pod that failed is."""
    once = {"name": "same_again", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = _job_spec(job, place, RETRIES * job.nodes if job.stays else 0)
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": RETRIES, "rules": [once]},
        "replicatedJobs": [
            {"name": NODE, "template": {**({"metadata": {"labels": labels}} if labels else {}), "spec": spec}}
        ],
    }


def _job_spec(job: ClusterJob, place: dict[str, str], retries: int) -> dict[str, Any]:
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(SAVE_AND_STOP_S),
        "containers": [_container(job, place)],
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
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": retries,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
    }


def _container(job: ClusterJob, place: dict[str, str]) -> dict[str, Any]:
    env: list[dict[str, Any]] = [
        {"name": name, "value": value}
        if name != PLACE["node"]
        else {"name": name, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
        for name, value in {**place, **SAFE_PATH}.items()
    ]
    asked = {"limits": {"nvidia.com/gpu": job.nproc}} if job.gpus else {"requests": {"cpu": job.nproc}}
    return {
        "name": NODE,
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


def _listed(said: str) -> list[Submitted]:
    return [_one(item) for item in json.loads(said)["items"]]


def _one(item: dict[str, Any]) -> Submitted:
    """A Job, a JobSet or a TrainJob: they have the same conditions, and count in lists of their own."""
    name, status = item["metadata"]["name"], item.get("status") or {}
    true = {each["type"]: each for each in status.get("conditions") or [] if each["status"] == "True"}
    told = [true[word] for word in ("Failed", "Complete", "Completed", "Suspended") if word in true]
    if told:
        reason = ": ".join(filter(None, (told[0].get("reason"), told[0].get("message"))))
        return Submitted(name, name, told[0]["type"], reason, told[0]["type"] != "Suspended")
    counts = [status, *status.get("replicatedJobsStatus", []), *status.get("jobsStatus", [])]
    return Submitted(name, name, "Running" if any(each.get("ready") for each in counts) else "Pending")


def _client(objects: str) -> Client:
    """The client for jobs that consist of these kinds of objects, the job's own first."""
    ours, main = "--selector=app.kubernetes.io/name=shardwise", objects.partition(",")[0]
    instance = "--selector=app.kubernetes.io/instance={name}"
    delete = [f"kubectl delete {objects},configmap {instance} --wait=false {{more}}"]
    return Client(
        program="kubectl",
        submit=["kubectl apply --filename={file} {more}"],
        listed=f"kubectl get {main} {ours} --output=json {{more}}",
        read=_listed,
        by_label=True,
        logs=f"kubectl logs {instance},{FIRST_POD} --tail=-1 --prefix {{follow}} {{more}}",
        stop=delete,
        remove=delete,
        fixes=FIXES,
    )


FIXES = {
    "no matches for kind|resource type": "install JobSet, or Kubeflow's trainer; `--on kubernetes` needs neither",
    "forbidden": "`kubectl auth can-i create jobs`: ask for that right, or `--with=--namespace=YOURS`",
    "namespaces? .*not found": "`--with=--namespace=NAME`: `kubectl get namespaces` lists them",
    "connection|connect to the server|no such host|unauthorized|credentials|context": (
        "`kubectl cluster-info` says whether the cluster answers; `--with=--context=NAME` another one"
    ),
}
KINDS = [
    JobKind(name, partial(text, documents=documents), _client(objects))
    for name, documents, objects in (
        ("kubernetes", (_config, _service, _job), "job,service"),
        ("jobset", (_config, _job_set), "jobset"),
        ("kubeflow", (_config, _runtime, _train_job), "trainjob,trainingruntime"),
    )
]
