"""A run that runs out of memory: it is planned again with less, once, and goes on; or its end says why not."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli import start
from shardwise.cli.app import main
from shardwise.cli.replan import AS_BEFORE, BELOW, RunPlan, kept_plan, next_by_memory
from shardwise.errors import Problem, lacked
from shardwise.launch import local, rundir
from shardwise.launch.launchers import Ended
from shardwise.launch.worker import STORE
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.runtime.faults.outcome import Exit, write_exit
from shardwise.runtime.report.run_files import PLANNED_AGAIN, remarkable
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from tests.faults.job import write_text
from tests.said import refuses, shows

MODEL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
WORDS = [f"model.config.{key}={value}" for key, value in MODEL.items()]
WORDS += ["data.path=text", "data.cache=cache", "data.tokenizer.vocab_size=320", "data.num_proc=1", "--nproc", "2"]
WORDS += ["run.device=cpu", "train.seq_len=64", "train.global_batch_size=32", "train.max_steps=9"]
WORDS += ["checkpoint.asynchronous=false", "evaluate.max_batches=1", "optim.warmup_steps=2"]
RUN = Path("runs/a")
RAN_OUT = Ended(1, Problem("MEM001", "out of memory while training", "rank 1"), "device")
KILLED = Ended(1, Problem("RUN004", "rank 1 was killed"), "host")
FULL = ("recompute.mode=full", "train.micro_batch_size=1", "parallel.strategy=zero3", "parallel.dp_shard=2")
Plans = list[Plan]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", STORE):
        monkeypatch.delenv(name, raising=False)
    write_text(tmp_path / "text")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plans]:
    """Ranks that end so, start by start; the plans that they were started with."""

    def made(*ended: Ended) -> Plans:
        left, plans = list(ended), Plans()

        def launch(words: Sequence[str], nproc: int, directory: Path, **_: object) -> Ended:
            plans.append(load_plan(Path(words[3])))
            if (end := left.pop(0)).problem:
                outcome = Exit("memory", 1, "no memory", 1, step=6, phase="forward")
                write_exit(directory, outcome)
            return end

        monkeypatch.setattr(local, "run_ranks", launch)
        return plans

    return made


def events() -> list[dict[str, object]]:
    lines = (RUN / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == PLANNED_AGAIN]


def test_the_next_plan_needs_less_and_trains_the_same(
    ends: Callable[..., Plans], capsys: pytest.CaptureFixture[str]
) -> None:
    plans = ends(RAN_OUT, Ended(0))
    assert main(["train", *WORDS, "--run", "a"]) == 0
    first, second = plans
    assert second.estimate.peak_bytes < BELOW * first.estimate.peak_bytes
    sizes = [(plan.batch.global_batch_size(plan.layout.dp), plan.batch.seq_len) for plan in plans]
    assert sizes == [(32, 64)] * 2
    assert second.why["shard.strategy"] == second.why["precision.compute"] == AS_BEFORE
    rows = first.batch.micro_batch_size, second.batch.micro_batch_size
    told = capsys.readouterr().err
    assert refuses(told, "MEM002", "rank 1", as_warning=True)
    changed = f"train.micro_batch_size {rows[0]} -> {rows[1]}"
    assert shows(told, changed, "predicted", "checkpoint") and "step 6" in remarkable(RUN)[0]
    assert [event["step"] for event in events()] == [6] and changed in str(events()[0]["what"])


def test_it_is_planned_again_once(ends: Callable[..., Plans], capsys: pytest.CaptureFixture[str]) -> None:
    plans = ends(KILLED, RAN_OUT)
    assert main(["train", *WORDS, "--run", "a"]) == 1
    assert len(plans) == 2 and len(events()) == 1
    assert refuses(capsys.readouterr().err, "MEM001", "out of memory", "once")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (FULL, ("`recompute.mode=full`", "`train.micro_batch_size=1`")),
        (("run.on_oom=stop",), ()),
        (("--plan", "p.yaml"), ("--plan",)),
    ],
)
def test_where_nothing_may_be_changed_it_ends_and_says_why(
    ends: Callable[..., Plans], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    assert main(["plan", *WORDS, "--cluster", "local", "-o", "p.yaml"]) == 0
    capsys.readouterr()
    plans = ends(RAN_OUT)
    assert main(["train", *WORDS, *words, "--run", "a"]) == 1
    assert len(plans) == 1 and not (RUN / "events.jsonl").exists()
    told = capsys.readouterr().err
    assert all(each in told for each in said) and refuses(told, "MEM001", "out of memory", where="rank 1")
    assert ("not planned again" in told) is bool(said)


def test_other_ends_are_as_they_were(ends: Callable[..., Plans]) -> None:
    plans = ends(replace(KILLED, ran_out=""))
    assert main(["train", *WORDS, "--run", "a"]) == 1
    assert len(plans) == 1


def attempt(**sections: dict[str, object]) -> RunPlan:
    """A model of a billion parameters on two GPUs."""
    sections = {"model": {"path": "meta-llama/Llama-3.2-1B", "init": "random"}, **sections}
    recipe = Recipe.model_validate({"train": {"seq_len": 2048, "global_batch_size": 8}, **sections})
    spec, cluster = resolve(recipe), parse_cluster("2xH100")
    return RunPlan(recipe, spec, cluster, choose(recipe, spec, cluster))


def test_a_host_that_is_full_limits_what_waits_there() -> None:
    ended = next_by_memory(KILLED, attempt(), "")
    assert isinstance(ended, Ended) and ended.problem and "host" in ended.problem.what
    offloaded = attempt(offload={"optimizer": "host"})
    ended = next_by_memory(KILLED, offloaded, "")
    assert isinstance(ended, Ended) and ended.problem and "`offload.optimizer=host`" in ended.problem.what


def test_what_requires_a_certificate_of_its_plan_is_not_planned_again() -> None:
    asked = attempt(run={"certificate": "require"})
    ended = next_by_memory(RAN_OUT, asked, "")
    assert isinstance(ended, Ended) and ended.problem and "run.certificate" in ended.problem.what


def test_recomputation_gives_way_before_the_split() -> None:
    sharded = attempt()
    found = next_by_memory(RAN_OUT, sharded, "")
    assert isinstance(found, RunPlan) and sharded.plan.shard.strategy != "zero3"
    assert found.plan.layout == sharded.plan.layout and found.plan.shard == sharded.plan.shard
    assert sharded.plan.remat.mode == "none" != found.plan.remat.mode


def test_another_split_is_taken_where_the_same_one_cannot_need_less() -> None:
    fixed: dict[str, object] = {"seq_len": 2048, "global_batch_size": 8, "micro_batch_size": 1}
    wide = attempt(train=fixed, recompute={"mode": "full"})
    found = next_by_memory(RAN_OUT, wide, "")
    assert isinstance(found, RunPlan) and found.plan.estimate.peak_bytes < wide.plan.estimate.peak_bytes
    assert found.plan.shard.strategy != wide.plan.shard.strategy
    assert found.plan.batch.global_batch_size(found.plan.layout.dp) == 8


def test_a_batch_that_follows_from_the_split_is_kept() -> None:
    alone: dict[str, object] = {"seq_len": 8192, "micro_batch_size": 1}
    each = attempt(train=alone, recompute={"mode": "full"}, parallel={"strategy": "zero3"})
    assert each.plan.batch.global_batch_size(each.plan.layout.dp) == 2
    assert isinstance(next_by_memory(RAN_OUT, each, ""), Ended)
    whole = attempt(train={**alone, "global_batch_size": 2}, recompute={"mode": "full"}, parallel={"strategy": "zero3"})
    found = next_by_memory(RAN_OUT, whole, "")
    assert isinstance(found, RunPlan) and found.plan.layout.dp == 1


def logged(*events: dict[str, object]) -> None:
    (RUN / "events.jsonl").write_text("{cut\n" + "".join(json.dumps({"step": 0, **one}) + "\n" for one in events))


def begun(asked: RunPlan, monkeypatch: pytest.MonkeyPatch, changed: bool = False) -> tuple[Plan, Plan | None]:
    """The plan with which a run of ``asked`` went on, and what a later start of it takes."""
    found = next_by_memory(RAN_OUT, asked, "")
    assert isinstance(found, RunPlan)
    (RUN / "plan.yaml").write_text(dump_plan(found.plan))
    monkeypatch.setattr(rundir, "changes", lambda *_: {"train.seq_len": "1 (was 2)"} if changed else {})
    return found.plan, kept_plan(RUN, asked.recipe, asked.spec, asked.cluster)


@pytest.fixture
def directory() -> None:
    RUN.mkdir(parents=True)


AGAIN = {"event": PLANNED_AGAIN, "device": parse_cluster("2xH100").device.name, "what": "it was"}
START = {"event": "start"}


@pytest.mark.usefixtures("directory")
def test_a_later_start_takes_the_plan_that_the_run_went_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search would take another: of all that need less it is not the fastest, and its batch may follow from it."""
    logged(START, AGAIN, START, START | {"step": 4})
    alone: dict[str, object] = {"seq_len": 8192, "micro_batch_size": 2}
    for asked in (attempt(), attempt(train=alone, recompute={"mode": "none"})):
        plan, kept = begun(asked, monkeypatch)
        assert kept is not None and replace(kept, why={}) == replace(plan, why={})


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    "events",
    [
        (START, START | {"step": 4}),
        (START, AGAIN | {"device": "H200"}, START),
        (START, AGAIN, START, START),
        (AGAIN, START, {"event": "checkpoint"}, START, START | {"step": 4}),
    ],
)
def test_what_another_run_needed_there_is_forgotten(
    events: tuple[dict[str, object], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another device, or of what was begun there before."""
    logged(*events)
    assert begun(attempt(), monkeypatch)[1] is None
    assert len(remarkable(RUN)) == (events[1].get("device") == "H200")


@pytest.mark.usefixtures("directory")
def test_another_recipe_or_number_of_devices_is_planned_as_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    logged(START, AGAIN, START)
    asked = attempt()
    assert begun(asked, monkeypatch, changed=True)[1] is None
    assert begun(replace(asked, cluster=parse_cluster("4xH100")), monkeypatch)[1] is not None
    (RUN / "plan.yaml").write_text(dump_plan(asked.plan))
    assert kept_plan(RUN, asked.recipe, asked.spec, parse_cluster("1xH100")) is None


@pytest.mark.parametrize(
    ("said", "whose"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "device"),
        ("NCCL: Failed to CUDA calloc 4194304 bytes", "device"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "host"),
        ("Unable to allocate 3.00 GiB for an array", "host"),
        ("can't start new thread", ""),
    ],
)
def test_whose_memory_ran_out(said: str, whose: str) -> None:
    assert lacked(f"out of memory while training: {said}") == whose


def test_a_disk_that_is_full_hides_nothing(
    ends: Callable[..., Plans], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(start, "record", full)
    plans = ends(RAN_OUT)
    assert main(["train", *WORDS, "--run", "a"]) == 1
    assert len(plans) == 1 and refuses(capsys.readouterr().err, "MEM001", "No space left")


@pytest.mark.parametrize(("saved", "code"), [(True, 75), (False, 128 + signal.SIGTERM)])
def test_a_request_to_stop_is_heard_while_it_is_planned_again(
    saved: bool,
    code: int,
    ends: Callable[..., Plans],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(ended: Ended, failed: RunPlan, barred: str) -> RunPlan | Ended:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(rundir, "newest_step", lambda _: 4 if saved else None)
        return next_by_memory(ended, failed, barred)

    monkeypatch.setattr(start, "next_by_memory", asked)
    plans = ends(RAN_OUT)
    assert main(["train", *WORDS, "--run", "a"]) == code
    told = capsys.readouterr()
    assert len(plans) == 1 and f"shardwise train {RUN}" in told.out + told.err
    assert shows(told.out, "stopped", "SIGTERM") if saved else refuses(told.err, "RUN005", "SIGTERM", where=str(RUN))
