"""The public names: complete, of one another's types; and from Python what the commands do."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise
from shardwise.cli.app import main
from shardwise.errors import ConfigError, DataError, Problem, TrainingError
from shardwise.launch import local
from shardwise.spec.plan import Estimate, Plan
from tests.runtime.small_run import write_text
from tests.said import refusal, shows
from tests.style.source import ROOT

TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["model.config.model_type=llama", *(f"model.config.{key}={value}" for key, value in TINY.items())]
WORDS += ["data.path=text", "data.cache=cache", "data.tokenizer.vocab_size=300", "data.repeat=true"]
WORDS += ["train.seq_len=32", "train.global_batch_size=4", "train.max_steps=4", "run.device=cpu"]
SOURCE = (ROOT / "src/shardwise/__init__.py").read_text()
KNOWN = {"torch", "builtins", *sys.stdlib_module_names}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_text(Path("text"))


def test_type_checkers_see_the_same_names() -> None:
    seen = {
        alias.asname: f"{node.module}".removeprefix("shardwise.")
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise.")
        for alias in node.names
    }
    assert seen == shardwise._MODULES and ["__version__", *seen][1:] != []
    assert sorted(shardwise.__all__) == sorted({"__version__", *seen})
    assert not {name.lower() for name in seen if name != name.lower()} & set(seen), "names that differ by case alone"


def strange(annotation: object, names: dict[str, object]) -> Iterator[str]:
    """The types in an annotation that are neither exported nor Python's or torch's."""
    if isinstance(annotation, str):
        for node in ast.walk(ast.parse(annotation, mode="eval")):
            if isinstance(node, ast.Name):
                yield from strange(names.get(node.id, node.id) if node.id not in shardwise.__all__ else int, names)
    elif typing.get_origin(annotation) is typing.Literal:
        return
    elif typing.get_args(annotation):
        for each in typing.get_args(annotation):
            yield from strange(each, names)
    elif isinstance(annotation, list | tuple):  # of a callable
        for each in annotation:
            yield from strange(each, names)
    elif isinstance(annotation, type) and typing.is_typeddict(annotation):
        for each in typing.get_type_hints(annotation).values():
            yield from strange(each, names)
    elif isinstance(annotation, type) and vars(annotation).get("_is_protocol"):
        return  # whatever has such methods
    elif isinstance(annotation, type) or inspect.ismodule(annotation):
        where = annotation.__name__ if inspect.ismodule(annotation) else annotation.__module__
        if where.partition(".")[0] not in KNOWN and getattr(shardwise, annotation.__name__, None) is not annotation:
            yield f"{where}.{annotation.__name__}"


def public(value: Any) -> Iterator[Any]:
    """What is called: a function, or the methods of a class, and what makes one that is no plain record."""
    if not isinstance(value, type):
        yield value
        return
    for name, method in vars(value).items():
        if issubclass(value, nn.Module) and name not in ("__init__", "forward"):
            continue  # what parts of the model call
        own = inspect.isfunction(method) and method.__module__ == value.__module__
        if own and (not name.startswith("_") or (name == "__init__" and not hasattr(value, "__dataclass_fields__"))):
            yield method


@pytest.mark.parametrize("name", [name for name in shardwise.__all__ if name != "__version__"])
def test_what_is_exported_takes_and_returns_what_is_exported(name: str) -> None:
    for function in public(getattr(shardwise, name)):
        names = {**vars(builtins), **function.__globals__}
        assert function.__doc__ or function.__name__ == "__init__", f"{function.__qualname__} says nothing"
        for argument, annotation in function.__annotations__.items():
            assert not [*strange(annotation, names)], f"{function.__qualname__}: {argument}: {annotation}"


def test_a_search_is_what_the_command_finds(text: None) -> None:
    recipe = shardwise.load_recipe(None, WORDS)
    plan = shardwise.search(recipe, "8xH100")
    assert plan == shardwise.search(recipe, shardwise.parse_cluster("8xH100"))
    Path("mine.yaml").write_text(shardwise.dump_recipe(recipe))
    assert main(["plan", "mine.yaml", "--cluster", "8xH100", "-o", "plan.yaml"]) == 0
    assert shardwise.load_plan("plan.yaml") == plan and plan.why and plan.layout.world == 8
    said = plan.explain().splitlines()
    assert said[0].startswith("It fits: ") and "why" in said
    assert f"{plan.estimate.memory['weights'] / 2**10:.1f}" in next(line for line in said if "  weights" in line)
    assert sum(line.startswith("  parallel.strategy") for line in said) == 1


def test_a_plan_says_what_no_search_has_estimated() -> None:
    said = shardwise.make_plan("zero3", tp=2, processes=8).explain()
    assert shows(said, "ZeRO-3 over 4", "tp 2") and "nothing is estimated" in said.splitlines()[-1]
    tight = Estimate({"weights": 2**30}, 2**30, 2**29)
    assert shows(replace(Plan(), estimate=tight).explain(), "not fit", "DDP over 1")


def test_planning_waits_for_no_torch() -> None:
    program = "import sys, shardwise as s\nr = s.load_recipe(None, sys.argv[1:])\n"
    program += "s.load_model_spec('meta-llama/Llama-3.1-8B')\nprint(s.search(r, '8xH100').explain())\n"
    program += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *WORDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("It fits"), done.stderr


@pytest.mark.prove
def test_a_run_returns_its_report(text: None) -> None:
    recipe = shardwise.load_recipe(None, [*WORDS, "run.nproc=2"])
    plan = shardwise.search(recipe)
    report = shardwise.train(recipe, plan)
    assert report.directory == Path("runs/run-1") and (report.steps, report.estimate) == (4, plan.estimate)
    lines = [json.loads(line) for line in Path("runs/run-1/metrics.jsonl").read_text().splitlines()]
    assert report.losses == {line["step"]: line["loss"] for line in lines} and [*report.losses] == [1, 2, 3, 4]
    assert report.memory is not None and report.memory.state["weights"] == plan.estimate.memory["weights"]
    sent = {(item.axis, item.kind): item.bytes for item in plan.estimate.traffic if item.category != "control"}
    assert sent and {k: v for k, v in [((t.axis, t.kind), t.bytes) for t in report.traffic] if k in sent} == sent
    assert {row[0] for row in report.rows()} >= {"memory: weights", "step time"}
    with pytest.raises(ConfigError, match=refusal("PLAN019", "`train.seq_len` 32", 16)):
        shardwise.train(shardwise.load_recipe(None, [*WORDS, "train.seq_len=16"]), plan)
    done = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": "run-1"})})
    assert shardwise.train(done, plan, resume=True) == report


ENDINGS = [
    (local.Ended(65, Problem("DATA004", "bad line", "rank 1")), DataError),
    (local.Ended(1, Problem("RUN004", "rank 1 was killed")), TrainingError),
    (local.Ended(130), KeyboardInterrupt),
]


@pytest.mark.parametrize(("ended", "kind"), ENDINGS)
def test_a_run_that_fails_raises_its_first_cause(
    text: None, monkeypatch: pytest.MonkeyPatch, ended: local.Ended, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(local, "run_ranks", lambda *_, **__: ended)
    with pytest.raises(kind) as raised:
        shardwise.train(shardwise.load_recipe(None, WORDS))
    assert ended.problem is None or ended.problem.what in str(raised.value)


def test_a_plain_process_starts_no_other_nodes(text: None) -> None:
    with pytest.raises(ConfigError, match=r"RUN001.*`run.nodes` is 2"):
        shardwise.train(shardwise.load_recipe(None, [*WORDS, "run.nodes=2"]))


ALONE = [sys.executable]
SCRIPT = """
import sys, shardwise
recipe = shardwise.load_recipe(None, sys.argv[1:])
report = shardwise.train(recipe, shardwise.search(recipe))
print("losses", report.losses)
"""


@pytest.mark.prove
@pytest.mark.launched
@pytest.mark.parametrize("start", [ALONE, [str(Path(ALONE[0]).with_name("torchrun")), "--nproc-per-node", "2"]])
def test_a_script_trains_alone_and_under_torchrun(text: None, start: list[str]) -> None:
    """Nothing of it stands below ``if __name__ == "__main__"``, and it is run no second time."""
    Path("script.py").write_text(SCRIPT)
    command = [*start, "script.py", *WORDS, "run.name=a", "run.nproc=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("losses")]
    assert len(told) == (1 if start == ALONE else 2) and len(set(told)) == 1
