"""Trackers: the real packages, offline; and what happens to a run whose tracker fails, hangs or is not installed."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.data.remote import all_shown
from shardwise.errors import UnavailableError
from shardwise.runtime.metrics import trackers
from shardwise.runtime.metrics.log import Log, Speed
from shardwise.runtime.metrics.trackers import Feed, Outcome, Subject, Tracks, Values, check_installed
from shardwise.spec.recipe import LoraSection, Recipe
from tests.runtime.metrics.test_log import state_at, stats
from tests.runtime.small_run import directory, numbers, recipe, train_here, write_text
from tests.runtime.test_loop import Broken, at, fail
from tests.said import refusal, refuses

ALL = ["tensorboard", "wandb", "mlflow", "trackio"]


class Kept:
    """A tracker that keeps what it gets; it fails at the row of step ``fails``, and at ``hangs`` never returns."""

    def __init__(self, subject: Subject, fails: int = 0, hangs: int = 0) -> None:
        self.subject, self.fails, self.hangs = subject, fails, hangs
        self.rows: list[tuple[int, Values]] = []
        self.outcome: Outcome | None = None

    def row(self, step: int, values: Values) -> None:
        if step == self.fails:
            raise ConnectionError("the service\nhas gone")
        if step == self.hangs:
            threading.Event().wait()
        self.rows.append((step, values))

    def close(self, outcome: Outcome) -> None:
        self.outcome = outcome


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """Put a kept tracker in the place of wandb's."""
    made: list[Kept] = []

    def make(subject: Subject) -> Kept:
        made.append(Kept(subject))
        return made[-1]

    monkeypatch.setattr(trackers, "KINDS", {"wandb": make})
    return made


def subject(tmp_path: Path, first_step: int = 0) -> Subject:
    return Subject("a-1", "0123456789ab", tmp_path, first_step, {"optim.learning_rate": 1e-3, "data.path": ["x"]})


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")  # theirs, about their own dependencies
@pytest.mark.timeout(280)
def test_the_real_packages_get_what_metrics_jsonl_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, four trackers, no network: each one's files are read back and holds the run's losses (TensorBoard
    stores fp32: 1e-6 of the value)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "CLOSING_S", 200.0)
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    settings |= {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "TRACKIO_DIR": str(tmp_path / "trackio")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    made = recipe(tmp_path, "tracked", run={"trackers": ALL}, train={"max_steps": 4}, evaluate={"eval_steps": 2})
    train_here(made)
    run = directory(made)
    losses = {line[0]: line[2] for line in numbers(run)}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    validation = {e["step"]: e["nats_per_token"] for e in events if e["event"] == "validation"}
    assert sorted(validation) == [2, 4]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board: Any = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert {e.step: e.value for e in board.Scalars("train/loss")} == pytest.approx(losses, rel=1e-6)
    assert {e.step: e.value for e in board.Scalars("validation/nats_per_token")} == pytest.approx(validation, rel=1e-6)

    from mlflow import MlflowClient

    client, found = MlflowClient(), (run / "mlflow-run-id").read_text()
    assert client.get_run(found).info.status == "FINISHED"
    assert client.get_run(found).data.params["optim.learning_rate"] == "0.01"
    assert {m.step: m.value for m in client.get_metric_history(found, "train/loss")} == losses

    assert trackio_history(tmp_path / "trackio" / "shardwise.db", "train/loss") == losses
    assert wandb_history(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")), "train/loss") == losses


def trackio_history(path: Path, name: str) -> dict[int, float]:
    """A metric by step out of trackio's database."""
    with closing(sqlite3.connect(path)) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
    return {step: values[name] for step, values in rows if name in values}


def wandb_history(path: Path, name: str) -> dict[int, float]:
    """A metric by step out of wandb's own file: protobuf records in the frames of a LevelDB log (blocks of 32 KiB; crc,
    length, kind: 1 whole, 4 the last part), after 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts, found = path.read_bytes(), 7, b"", {}
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if name in values:
                found[record.history.step.num] = float(values[name])
            parts = b""
    return found


@pytest.mark.prove
def test_what_is_secret_in_an_address_reaches_no_tracker(tmp_path: Path, kept: list[Kept]) -> None:
    text = b"".join(path.read_bytes() for path in sorted(write_text(tmp_path / "text").iterdir()))
    MemoryFileSystem().pipe("/me:sesame@bucket/text.txt", text)
    made = recipe(tmp_path, data={"path": ["memory://me:sesame@bucket/text.txt"]}, run={"trackers": "wandb"})
    train_here(made)
    assert kept[0].subject.config["data.path"] == ["memory://bucket/text.txt"]
    presigned = made.model_copy(update={"lora": LoraSection(path="https://host/a?X-Amz-Signature=sesame")})
    told = all_shown(presigned.model_dump(mode="json"))
    assert told["lora"]["path"] == "https://host/a" and "sesame" not in json.dumps(told)
    text = 'look at "https://host/?q" and\n"{{ x }}"'
    assert all_shown({"a": [text, 1, None], "b": "no?"}) == {"a": [text.replace('?q"', ""), 1, None], "b": "no?"}


def test_rows_and_outcome_reach_the_tracker(tmp_path: Path, kept: list[Kept]) -> None:
    made = recipe(tmp_path, "kept", run={"trackers": "wandb"}, train={"max_steps": 3})
    train_here(made)
    [tracker] = kept
    rows = [(step, values["train/loss"]) for step, values in tracker.rows if "train/loss" in values]
    assert rows == [line[:3:2] for line in numbers(directory(made))]
    assert [step for step, values in tracker.rows if "validation/bits_per_byte" in values] == [3]
    assert tracker.outcome == "finished" and tracker.subject.config["optim.learning_rate"] == 1e-2
    assert tracker.subject.run_id == json.loads((directory(made) / "run.json").read_text())["run_id"]


@pytest.mark.prove
def test_a_failed_run_is_closed_as_failed_and_a_resumed_one_goes_on(tmp_path: Path, kept: list[Kept]) -> None:
    saved_at_once = {"save_steps": 3, "asynchronous": False}
    made = recipe(tmp_path, "broken", run={"trackers": ["wandb"]}, train={"max_steps": 5}, checkpoint=saved_at_once)
    with pytest.raises(Broken):
        train_here(made, at(4, fail))
    train_here(made)
    assert [tracker.outcome for tracker in kept] == ["failed", "finished"]
    assert [tracker.subject.first_step for tracker in kept] == [0, 3]
    assert kept[0].subject.run_id == kept[1].subject.run_id


def test_a_tracker_that_fails_is_named_once_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good: list[Kept] = []
    feeds = [
        Feed("wandb", lambda subject: Kept(subject, fails=2), subject(tmp_path)),
        Feed("mlflow", lambda subject: good.append(Kept(subject)) or good[0], subject(tmp_path)),  # type: ignore[func-returns-value]
    ]
    with Log(tmp_path, 0, 0, 9, Speed(1.0, 0.0), Tracks(feeds)) as log:
        for step in range(1, 10):
            log.step(state_at(step), stats(step), torch.device("cpu"))
    said = [line for line in capsys.readouterr().out.splitlines() if "TRK002" in line]
    assert len(said) == 1 and said[0].startswith("warning[TRK002]: wandb failed")
    assert said[0].endswith("ConnectionError: the service")
    assert [step for step, _ in good[0].rows] == list(range(1, 10)) and good[0].outcome == "finished"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9


def test_every_so_many_steps(tmp_path: Path) -> None:
    kept: list[Kept] = []
    feed = Feed("mlflow", lambda subject: kept.append(Kept(subject)) or kept[0], subject(tmp_path))  # type: ignore[func-returns-value]
    with Log(tmp_path, 0, 0, 9, Speed(1.0, 0.0), Tracks([feed])) as log:
        log.log_steps = 5
        for step in range(1, 10):
            log.step(state_at(step), stats(step), torch.device("cpu"))
    assert [step for step, _ in kept[0].rows] == [5, 9]


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSING_S", 0.2)
    tracks = Tracks([Feed("wandb", lambda subject: Kept(subject, hangs=1), subject(tmp_path))])
    for step in range(1, 4):
        tracks.row(step, "train", {"step": step, "loss": 1.0})
    [said] = tracks.close("finished")
    assert refuses(said, "TRK002", "wandb", as_warning=True)


def test_numbers_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    made: list[Kept] = []
    tracks = Tracks([Feed("wandb", lambda subject: made.append(Kept(subject)) or made[0], subject(tmp_path))])  # type: ignore[func-returns-value]
    tracks.row(7, "train", {"step": 7, "mfu": None, "skipped": True, "loss": 2})
    assert tracks.close("stopped") == []
    assert made[0].rows == [(7, {"train/skipped": 1.0, "train/loss": 2.0})] and made[0].outcome == "stopped"


def test_what_is_not_installed_is_refused_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name in ("wandb", "mlflow") else object())
    made = Recipe.model_validate({"run": {"trackers": ALL}})
    with pytest.raises(UnavailableError) as raised:
        check_installed(made)
    [problem] = raised.value.problems
    assert (problem.code, problem.fix) == ("TRK001", 'pip install "shardwise[wandb,mlflow]"')
    check_installed(Recipe.model_validate({"run": {"trackers": "trackio"}}))


def test_flash_attention_3_is_asked_for_before_any_process_starts() -> None:
    check_installed(Recipe(attention="flash"))
    with pytest.raises(UnavailableError) as raised:
        check_installed(Recipe(attention="fa3"))
    [problem] = raised.value.problems
    assert (problem.code, problem.where) == ("DEV003", "attention") and "`attention=auto`" in problem.fix


def test_a_tracker_that_is_broken_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose import fails; and a part of MLflow that has no store for where it would write."""
    broken = tmp_path / "wandb"
    broken.mkdir()
    (broken / "__init__.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnavailableError, match=refusal("TRK001", "wandb", "nothing_of_that_name")) as raised:
        check_installed(Recipe.model_validate({"run": {"trackers": "wandb"}}))
    assert raised.value.problems[0].fix.startswith('pip install "shardwise[wandb]"')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unheard-of://here")
    with pytest.raises(UnavailableError, match=refusal("TRK001", "mlflow", "unheard-of")):
        check_installed(Recipe.model_validate({"run": {"trackers": "mlflow"}}))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "kept").as_uri())
    check_installed(Recipe.model_validate({"run": {"trackers": "mlflow"}}))
