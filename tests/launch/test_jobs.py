"""Jobs for schedulers, read by others than who wrote them: bash, PyYAML, the schemas of Kubernetes."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli.app import main
from shardwise.launch.jobs.table import KINDS
from shardwise.spec.emit import Verbatim, emit
from shardwise.spec.load import load_recipe
from tests.cli.test_face import WORDS
from tests.launch.waiting import until
from tests.runtime.small_run import write_text
from tests.said import refuses, shows

OBJECTS = ("kubernetes", "jobset", "kubeflow")
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_1_37.json").read_text())
"""Those of Kubernetes 1.37, strict (Apache 2.0, from the package kubernetes-validate 1.37.0), of the objects that a job
has; of properties that it does not use, the names alone."""
OF_OPERATORS = json.loads((Path(__file__).parent / "kubeflow_trainer_2_3.json").read_text())
"""Those of JobSet and Kubeflow's trainer, likewise (Apache 2.0, the models of kubeflow-trainer-api 2.3.0)."""
HOSTILE = "a 'b\" $(touch sprung) `touch sprung` $HOME \\ ; touch sprung # é"
SHOWS = r"""#!/bin/bash
exec > said-$$
env | grep -E "^(PET_|RANK|WORLD_SIZE|LOCAL|MASTER|PYTHONSAFEPATH)"
for word; do echo "<$word>"; done
"""
SSH = '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec bash -c "$*"\n'
SRUN = r"""#!/bin/bash
trap 'echo warned >> calls; exit ${CODE:-75}' USR1
touch started
sleep ${LASTS:-20} & wait $!
exit ${CODE:-75}
"""
RAY = """class Any:
    def __init__(self, *given, **named): self.given = given; vars(self).update(named)
FailureConfig = RunConfig = ScalingConfig = TorchConfig = Any
class TorchTrainer(Any):
    def fit(self):
        import os, sys
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4"}
        assert self.scaling_config.placement_strategy == "STRICT_SPREAD" and self.scaling_config.num_workers == 2
        self.given[0]({})
class get_context:
    def get_world_rank(self): return 1
"""
"""What stands for Ray: one of two workers, in whose environment the variables of Ray's own process group are."""
TOOLS = {
    "ssh": SSH,
    "srun": SRUN,
    "scontrol": '#!/bin/bash\n[ "$1" = show ] && echo n1 || echo "$*" >> calls\n',
}

Written = Callable[..., str]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Written:
    """What is printed for a kind of job, in a directory of its own."""
    here = tmp_path / "it's $(touch sprung) here"
    here.mkdir()
    monkeypatch.chdir(here)

    def write(kind: str, *words: str, cluster: str = "2x2xCPU") -> str:
        assert main(["launch", "--on", kind, "--cluster", cluster, *WORDS, *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return write


def tools(directory: Path, **more: str) -> dict[str, str]:
    """The environment in which commands that stand for others' come first."""
    (directory / "bin").mkdir(exist_ok=True)
    for name, text in {**TOOLS, **more}.items():
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RANK", "WORLD"))}
    return known | {"PATH": f"{directory.resolve()}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def script(text: str) -> str:
    """What of a job is a script: all of it, or what SkyPilot runs."""
    return text if text.startswith("#!") else str(yaml.safe_load(text)["run"])


def directives(text: str) -> dict[str, str]:
    """Those of an sbatch script, which end where its commands begin."""
    head = text.split("\nexport ")[0]
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.MULTILINE))


def job_spec(text: str) -> dict[str, Any]:
    """That of the Job, wherever it stands."""
    objects = {each["kind"]: each["spec"] for each in yaml.safe_load_all(text) if "spec" in each}
    found: dict[str, Any] = objects.get("Job", {})
    sets = [objects["JobSet"]] if "JobSet" in objects else []
    sets += [objects["TrainingRuntime"]["template"]["spec"]] if "TrainingRuntime" in objects else []
    for each in sets:
        (only,) = each["replicatedJobs"]
        found = only["template"]["spec"]
    return found


def constants(text: str) -> dict[str, Any]:
    """What a Python file sets at its top to values."""
    found = {}
    for line in ast.parse(text).body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            found[line.targets[0].id] = ast.literal_eval(line.value)
    return found


def container(text: str) -> dict[str, Any]:
    found: dict[str, Any] = job_spec(text)["template"]["spec"]["containers"][0]
    return found


def asked(kind: str, text: str) -> tuple[int, int, int]:
    """Nodes, processes on each, and its GPUs, as the job's reader understands them."""
    if kind == "slurm":
        found = directives(text)
        return int(found["nodes"]), int(found["ntasks-per-node"]), int(found.get("gpus-per-node", 0))
    if kind in OBJECTS:
        spec, env = job_spec(text), {e["name"]: e for e in container(text)["env"]}
        gpus = container(text)["resources"].get("limits", {}).get("nvidia.com/gpu", 0)
        if kind == "kubeflow":  # the trainer sets the variables
            asked = list(yaml.safe_load_all(text))[-1]["spec"]["trainer"]
            assert spec["parallelism"] == spec["completions"] == asked["numNodes"] and "PET_NNODES" not in env
            return asked["numNodes"], asked["numProcPerNode"], gpus
        assert spec["parallelism"] == spec["completions"] == int(env["PET_NNODES"]["value"])
        return spec["completions"], int(env["PET_NPROC_PER_NODE"]["value"]), gpus
    if kind == "skypilot":
        task = yaml.safe_load(text)
        gpus = task["resources"].get("accelerators", "none:0").split(":")[1]
        told = dict(re.findall(r"(PET_\w+)=(\d+)", task["run"]))
        assert int(told["PET_NNODES"]) == task["num_nodes"]
        return task["num_nodes"], int(told["PET_NPROC_PER_NODE"]), int(gpus)
    if kind == "ray":
        found = constants(text)
        assert int(found["PLACE"]["PET_NNODES"]) == found["NODES"]
        each = found["DEVICES"]["resources_per_worker"]
        assert each == {"GPU" if found["DEVICES"]["use_gpu"] else "CPU": int(found["PLACE"]["PET_NPROC_PER_NODE"])}
        return found["NODES"], int(found["PLACE"]["PET_NPROC_PER_NODE"]), each.get("GPU", 0)
    told = dict(re.findall(r"(PET_\w+)=(\d+)", text))
    return int(told["PET_NNODES"]), int(told["PET_NPROC_PER_NODE"]), 8 * ("run.device=cuda" in text)


@pytest.mark.parametrize("kind", KINDS)
def test_it_asks_for_the_machines_of_the_plan(kind: str, written: Written) -> None:
    assert asked(kind, written(kind)) == (2, 2, 0)
    gpus = written(kind, "train.global_batch_size=32", "run.nproc=3", cluster="4x8xH100")
    assert asked(kind, gpus) == (4, 8, 8)
    assert "nproc=3" not in gpus and "nproc: 3" not in gpus, "the cluster says it"
    if kind == "skypilot":
        assert yaml.safe_load(gpus)["resources"]["accelerators"] == "H100:8"


@pytest.mark.parametrize("kind", ["slurm", "ssh", "skypilot"])
def test_bash_reads_it(kind: str, written: Written) -> None:
    text = script(written(kind, f"data.path={HOSTILE}"))
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


def expanded(word: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of a word: ``$(NAME)`` is the value of a variable that it knows, ``$$`` one dollar."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), word)


def told(kind: str, text: str, tmp_path: Path) -> list[list[str]]:
    """The words with which each process is started, when the job runs."""
    shows = tmp_path / "shows"
    shows.write_text(SHOWS)
    shows.chmod(0o755)
    if kind in OBJECTS:
        env = {each["name"]: each.get("value", "") for each in container(text)["env"]}
        return [[expanded(word, env) for word in container(text)["command"][1:]]]
    if kind == "ray":
        (tmp_path / "ray/train").mkdir(parents=True)
        (tmp_path / "ray/__init__.py").touch()
        (tmp_path / "ray/train/__init__.py").write_text(RAY)
        (tmp_path / "ray/train/torch.py").write_text("from ray.train import *\n")
        keeps = SHOWS.replace("for word", 'cp "${@: -3:1}" carried.yaml; for word', 1)
        shows.write_text(keeps)
        text = text.replace("'/shared'", "'.'").replace("sys.executable", repr(str(shows)))
        environment = tools(tmp_path) | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (said,) = Path(".").glob("said-*")
        places = {line for line in said.read_text().splitlines() if not line.startswith("<")}
        assert {"PET_NODE_RANK=1", "PET_MASTER_ADDR=10.0.0.1", "PET_NNODES=2", "PYTHONSAFEPATH=1"} <= places
        assert not {line for line in places if line.startswith(("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL"))}
        return [re.findall(r"^<(.*)>$", said.read_text(), re.MULTILINE)]
    srun = '#!/bin/bash\nshift\nSLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2 exec "$@"\n'
    run = script(text).replace(sys.executable, str(shows)).replace("/shared", "..")
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "t"}
    environment = tools(tmp_path, srun=srun, shardwise=SHOWS) | sky
    done = subprocess.run(["bash", "-c", run, "job", "one", "me@two"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in sorted([*tmp_path.glob("said-*"), *Path(".").glob("said-*")])]
    places = sorted(line for text in texts for line in text.splitlines() if not line.startswith("<"))
    first = {"slurm": "MASTER_ADDR=n1", "ssh": "PET_MASTER_ADDR=one", "skypilot": "PET_MASTER_ADDR=10.0.0.1"}
    assert first[kind] in places and "PYTHONSAFEPATH=1" in places
    assert ("RANK=1" if kind == "slurm" else "PET_NODE_RANK=1") in places
    return [re.findall(r"^<(.*)>$", text, re.MULTILINE) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_breaks_out(kind: str, written: Written, tmp_path: Path) -> None:
    out = "the runs' $(touch sprung) $(PET_NNODES) $$"
    text = written(kind, f"data.path={HOSTILE}", "--out", out, "--run", "a-1")
    processes = told(kind, text, tmp_path)
    assert len(processes) == {"ssh": 2}.get(kind, 1)
    for words in processes:
        assert "--run=a-1" in words and f"--out={out}" in words
        recipe = f"data.path={HOSTILE}" in words
        if not recipe:  # it travels in the job
            path = tmp_path / "recipe.yaml"
            if kind in OBJECTS:
                path.write_text(next(yaml.safe_load_all(text))["data"]["recipe.yaml"])
            else:
                path = Path("carried.yaml" if kind == "ray" else words[words.index("train") + 1])
            assert load_recipe(path).data.path == HOSTILE
    assert not list(tmp_path.rglob("sprung")) and not list(Path(".").glob("sprung"))


def conforms(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Where ``value`` differs from a JSON schema: types, keys that are required or unknown, and their values."""
    kinds = {"string": [str], "integer": [int], "number": [int, float], "boolean": [bool], "object": [dict]}
    kinds["array"] = [list]
    told = [one["type"] for one in (schema, *schema.get("oneOf", [])) if "type" in one]
    allowed = {name for each in told for name in ([each] if isinstance(each, str) else each)} or {*kinds}
    if not any(type(value) in kinds.get(name, []) for name in allowed):
        return [f"{where}: {value!r} is no {allowed}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r}"]
    found = []
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where}: {key} is missing" for key in schema.get("required", []) if key not in value]
        for key, each in value.items():
            if key in known or other is not False:
                rest = other if isinstance(other, dict) else {}
                found += conforms(each, known.get(key, rest), f"{where}.{key}")
            else:
                found.append(f"{where}: there is no {key}")
    for number, each in enumerate(value if isinstance(value, list) else []):
        found += conforms(each, schema.get("items", {}), f"{where}[{number}]")
    return found


@pytest.mark.parametrize("cluster", ["2x2xCPU", "4x8xH100"])
def test_kubernetes_would_take_it(cluster: str, written: Written) -> None:
    text = written("kubernetes", "train.global_batch_size=32", "--run", "A_long.Name-1", cluster=cluster)
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    assert list(objects) == ["ConfigMap", "Service", "Job"]
    for kind, each in objects.items():
        assert conforms(each, SCHEMAS[kind], kind) == []
        assert each["metadata"]["name"] == "a-long-name-1", "a name of DNS"
    pod = objects["Job"]["spec"]["template"]
    selector = objects["Service"]["spec"]["selector"]
    assert selector.items() <= pod["metadata"]["labels"].items() and pod["spec"]["subdomain"] == "a-long-name-1"
    rules = objects["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {75: "Ignore", **dict.fromkeys((2, 65, 66, 70, 73, 77, 78), "FailJob")}


@pytest.mark.parametrize("cluster", ["2x2xCPU", "4x8xH100"])
def test_the_operators_would_take_theirs(cluster: str, written: Written) -> None:
    """The Job within is the one that Kubernetes takes; all pods are started again together."""
    words = ("train.global_batch_size=32", "--run", "A_long.Name-1")
    alone = job_spec(written("kubernetes", *words, cluster=cluster))
    for kind, kinds in (("jobset", ["JobSet"]), ("kubeflow", ["TrainingRuntime", "TrainJob"])):
        text = written(kind, *words, cluster=cluster)
        _, *objects = yaml.safe_load_all(text)
        assert [each["kind"] for each in objects] == kinds
        for each in objects:
            assert conforms(each, OF_OPERATORS[each["kind"]], each["kind"]) == []
            assert each["metadata"]["name"] == "a-long-name-1"
        spec = job_spec(text)
        assert conforms(spec, SCHEMAS["Job"]["properties"]["spec"]) == []
        changed = {key for key in {*spec, *alone} if spec.get(key) != alone.get(key)}
        assert changed == {"backoffLimit", "template"} and spec["backoffLimit"] == 0
        pod, theirs = (each["template"]["spec"] for each in (spec, alone))
        assert {key for key in {*pod, *theirs} if pod.get(key) != theirs.get(key)} == {"containers", "subdomain"}
        where = {each["name"]: each.get("value") for each in container(text)["env"]}.get("PET_MASTER_ADDR")
        assert where == ("a-long-name-1-node-0-0.a-long-name-1" if kind == "jobset" else None)
    assert objects[1]["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "a-long-name-1",
    }
    step = objects[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} and container(text)["name"] == "node"
    assert objects[0]["spec"]["mlPolicy"]["torch"] == {}, "or the trainer sets no variables"


def test_the_schemas_of_operators_refuse_what_they_would(written: Written) -> None:
    runtime, job = list(yaml.safe_load_all(written("kubeflow")))[1:]
    job["spec"]["trainer"]["numProcPerNode"] = "2"
    job["spec"]["podTemplateOverrides"] = []
    del job["spec"]["runtimeRef"]["name"]
    assert len(conforms(job, OF_OPERATORS["TrainJob"])) == 3
    runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"][0].pop("action")
    assert conforms(runtime, OF_OPERATORS["TrainingRuntime"]) == [
        ".spec.template.spec.failurePolicy.rules[0]: action is missing"
    ]


def test_the_schemas_refuse_what_kubernetes_would(written: Written) -> None:
    job = list(yaml.safe_load_all(written("kubernetes")))[-1]
    job["spec"]["completions"] = "2"
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    del job["spec"]["podFailurePolicy"]["rules"][0]["action"]
    assert len(conforms(job, SCHEMAS["Job"])) == 3


@pytest.mark.parametrize(
    ("words", "ended", "code", "value", "fix"),
    [
        (["--on", "kubernets"], 2, "CLI001", "`kubernets`", "`kubernetes`?"),
        (["--on", "nomad"], 2, "CLI001", "`nomad`", "slurm, kubernetes, jobset, kubeflow, skypilot, ray, ssh"),
        ([], 2, "CLI001", "`--on`", ""),
        (["--on", "slurm", "--submitt"], 2, "CLI001", "`--submitt`", "`--submit`?"),
        (["--on", "slurm", "--submit", "--with", "'a"], 2, "CLI001", "`--with`", ""),
        (["--on", "slurm", "--run", "a; b"], 73, "OUT006", "`a; b`", ""),
        (
            ["--on", "ssh", "--cluster", "2x8xRTX-4090", "strategy=ddp", "llama-8b-hsdp"],
            78,
            "PLAN010",
            "GiB",
            "RTX 4090",
        ),
        (["--on", "ssh", "--cluster", "2x8xH1000"], 78, "CLU002", "`H1000`", ""),
    ],
)
def test_what_cannot_be_ends_before_anything_is_printed(
    words: list[str], ended: int, code: str, value: str, fix: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    fits = [] if "llama-8b-hsdp" not in words else ["parallel.dp_replicate=16", "parallel.dp_shard=1"]
    assert main(["launch", *words, *fits]) == ended
    out, err = capsys.readouterr()
    assert out == "" and refuses(err, code, value, fix=fix)
    assert ("PLAN010" in err) == bool(fits) and not list(tmp_path.iterdir())


def test_a_plan_that_is_given_goes_with_it(written: Written, tmp_path: Path) -> None:
    assert main(["plan", *WORDS, "--cluster", "2x2xCPU", "-o", "plan.yaml"]) == 0
    assert "--plan=plan.yaml" in written("slurm", "--plan", "plan.yaml")
    text = written("kubernetes", "--plan", "plan.yaml")
    assert container(text)["command"][-2:] == ["--plan", "/etc/shardwise/plan.yaml"]
    assert next(yaml.safe_load_all(text))["data"]["plan.yaml"].startswith("# A plan")


def test_a_run_goes_on_elsewhere_under_its_name(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a run's directory is named in place of a recipe."""
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/recipe.yaml").write_text("run: {seed: 3, name: another}\n")
    there = ["runs/mine", "--run=mine", "--out=runs"]
    words = written("slurm", "runs/mine").split()
    assert set(there) <= set(words) and container(written("kubernetes", "runs/mine"))["command"][-2:] == there[1:]
    assert main(["train", *there, *WORDS, "--print-config"]) == 0
    run = yaml.safe_load(capsys.readouterr().out)["run"]
    assert (run["name"], run["out"], run["seed"]) == ("mine", "runs", 3)


def test_a_password_in_a_job_is_warned_of(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    for url, warned in (("https://a.example/b.jsonl", False), ("https://me:secret@a.example/b.jsonl", True)):
        assert main(["launch", "--on", "kubernetes", "--cluster", "2x2xCPU", *WORDS, f"data.path={url}"]) == 0
        assert ("may be secret" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("code", "warned", "again"),
    [
        (75, signal.SIGUSR1, True),
        (75, None, False),
        (75, signal.SIGTERM, False),
        (1, signal.SIGUSR1, False),
        (0, None, False),
    ],
)
def test_slurm_queues_it_again_when_it_was_warned_and_has_saved(
    code: int, warned: signal.Signals | None, again: bool, written: Written, tmp_path: Path
) -> None:
    """Asked to stop for good, ranks hear the same: srun would kill them if it heard SIGTERM itself."""
    Path("job.sh").write_text(written("slurm"))
    environment = tools(tmp_path) | {"CODE": str(code), "LASTS": "20" if warned else "0"}
    job = subprocess.Popen(["bash", "job.sh"], env=environment)
    until(Path("started").exists)
    if warned:
        job.send_signal(warned)
    assert job.wait(20) == code
    calls = Path("calls").read_text().splitlines() if Path("calls").exists() else []
    assert calls == ["warned"] * bool(warned) + ["requeue 7"] * again


def test_ssh_ends_all_when_one_fails(written: Written, tmp_path: Path) -> None:
    Path("job.sh").write_text(written("ssh"))
    one = '#!/bin/bash\necho $$ >> pids\ncase "$*" in *NODE_RANK=1*) sleep 0.3; exit 78;; esac\nexec sleep 60\n'
    environment = tools(tmp_path, ssh=one)
    done = subprocess.run(["bash", "job.sh", "one", "two"], env=environment, capture_output=True, timeout=20)
    assert done.returncode == 78
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    done = subprocess.run(["bash", "job.sh", "one"], env=environment, capture_output=True, timeout=20)
    assert done.returncode == 2 and b"2 hosts, and 1 given" in done.stderr


STAYS = "run.on_loss=replan"


def test_ssh_ends_none_where_those_that_are_left_go_on(written: Written, tmp_path: Path) -> None:
    """The code is that of the last that ends."""
    Path("job.sh").write_text(written("ssh", STAYS))
    for first, last in ((1, 0), (0, 75)):
        one = f'#!/bin/bash\ncase "$*" in *NODE_RANK=1*) exit {first};; esac\nsleep 1; exit {last}\n'
        done = subprocess.run(["bash", "job.sh", "one", "two"], env=tools(tmp_path, ssh=one), timeout=20, check=False)
        assert done.returncode == last


@pytest.mark.parametrize("kind", ["jobset", "kubeflow"])
def test_a_pod_that_failed_is_started_again_alone_where_the_others_go_on(kind: str, written: Written) -> None:
    assert job_spec(written(kind))["backoffLimit"] == 0
    assert job_spec(written(kind, STAYS))["backoffLimit"] == 6


def test_slurm_starts_nodes_that_outlive_a_lost_one(written: Written, tmp_path: Path) -> None:
    text = written("slurm", STAYS)
    assert "no-kill" in directives(text) and directives(text)["ntasks-per-node"] == "1"
    assert "no-kill" not in directives(written("slurm")) and shows(text, "srun", "--no-kill", "--wait=0")
    shows_all, srun = tmp_path / "shows", '#!/bin/bash\nshift 3\nSLURM_NODEID=1 exec "$@"\n'
    shows_all.write_text(SHOWS)
    shows_all.chmod(0o755)
    run = text.replace(sys.executable, str(shows_all))
    done = subprocess.run(["bash", "-c", run], env=tools(tmp_path, srun=srun), capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    (said,) = Path(".").glob("said-*")
    places = said.read_text().splitlines()
    assert {"PET_NNODES=2", "PET_NODE_RANK=1", "PET_NPROC_PER_NODE=2", "PET_MASTER_ADDR=n1"} <= {*places}
    assert "PET_RDZV_ID=7-0" in places and not [line for line in places if line.startswith(("RANK", "WORLD"))]


def test_ssh_hears_all_that_end_at_once(written: Written, tmp_path: Path) -> None:
    """What bash has seen end before it waits has a code too."""
    Path("job.sh").write_text(written("ssh", cluster="4x1xCPU"))
    for code in (0, 75):
        environment = tools(tmp_path, ssh=f"#!/bin/bash\nexit {code}\n")
        for _ in range(5):
            done = subprocess.run(["bash", "job.sh", *"abcd"], env=environment, capture_output=True, timeout=20)
            assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n\nb: 2\n",
        "a\n",
        "  a\n",
        "a",
        "\n",
        "a\n\n",
        "a\tb\n",
        "a\x85b\n",
        "a\n  b \n",
        "",
        "# é\n--- \n...\n",
        "a\r\nb\n",
    ],
)
def test_a_block_of_yaml_reads_back_equal(text: str) -> None:
    written = emit({"a": {"b": Verbatim(text), "c": 1}}, lambda path, value: "why")
    assert yaml.safe_load(written) == {"a": {"b": text, "c": 1}}
    assert (" |" in written) == (text in ("a: 1\n\nb: 2\n", "a\n", "a\n  b \n", "# é\n--- \n...\n"))


@pytest.mark.prove
@pytest.mark.parametrize("stopped", [False, True])
def test_two_nodes_over_ssh_train_together(stopped: bool, written: Written, tmp_path: Path) -> None:
    """Both are this machine; the ranks meet over TCP. Asked to stop, they save, and the script says so by 75."""
    write_text(Path("text"))
    steps = "train.max_steps=3000" if stopped else "train.max_steps=2"
    port = str(29800 + os.getpid() % 100)
    words = ["run.name=a", "--port", port, "evaluate.max_batches=1"]
    Path("job.sh").write_text(written("ssh", steps, *words, cluster="2x1xCPU"))
    job = subprocess.Popen(["bash", "job.sh", "localhost", "127.0.0.1"], env=tools(tmp_path))
    log = Path("runs/a/metrics.jsonl")
    if stopped:
        end = time.monotonic() + 100
        while not (log.exists() and len(log.read_text().splitlines()) > 3):
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
    assert job.wait(120) == (75 if stopped else 0)
    said = json.loads(Path("runs/a/exit.json").read_text())
    assert said["kind"] == ("preempted" if stopped else "done")
    assert "ranks_per_node: 1" in Path("runs/a/plan.yaml").read_text()
    assert "dp_replicate: 2" in Path("runs/a/plan.yaml").read_text()
    if stopped:
        assert [path.name for path in Path("runs/a/checkpoints").glob("step-*")] == [f"step-{said['step']:08}"]
    else:
        assert len(log.read_text().splitlines()) == 2
