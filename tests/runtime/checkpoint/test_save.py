from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import DataError, MissingInputError, OutputError, PolicyError, ShardwiseError
from shardwise.prove.pool import RankFailure, RankPool
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint import save as checkpoint
from shardwise.runtime.checkpoint.inflight import SaveResult
from shardwise.runtime.checkpoint.locate import check_own, newest, verify, with_facts
from shardwise.runtime.checkpoint.manifest import MANIFEST, check, dump
from shardwise.runtime.checkpoint.save import RunCheckpoints, read
from shardwise.runtime.checkpoint.storage import ShardWriter
from shardwise.spec.recipe import Checkpoint
from tests.runtime.checkpoint import checkpoint_ranks as work
from tests.runtime.checkpoint.checkpoint_ranks import same, values
from tests.runtime.nursery import Ask
from tests.said import refuses

LAYOUTS = [("hsdp", 4), ("fsdp-tp", 4), ("plain", 1), ("fsdp", 4), ("fsdp", 2), ("plain", 2)]
LAYOUTS += [("tp", 2), ("tp", 4), ("ddp-tp", 4)]
REASONS = {"ENOSPC": "no space left", "EIO": "input/output error"}
ANSWER_S = 5.0
"""Within this all ranks must have agreed that a save failed."""


def kinds(events: list[SaveResult]) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in events]


def save_steps(directory: Path, *steps: int, **settings: int) -> None:
    checkpoints = RunCheckpoints(directory, Checkpoint(**settings), "run")
    for step in steps:
        checkpoints.save(values(step), {"step": step}, step)
        assert kinds(checkpoints.wait())[0] == ("committed", step)


def resume(
    directory: Path, **choices: bool
) -> tuple[dict[str, Tensor], dict[str, object] | None, list[str], RunCheckpoints]:
    state, lines = values(99), list[str]()
    checkpoints = RunCheckpoints(directory, Checkpoint(), "run")
    return state, checkpoints.resume(state, log=lines.append, **choices), lines, checkpoints


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".generation"))


def flip_last(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


# Layouts ------------------------------------------------------------------------------------------------------------


def written(directory: Path) -> dict[str, int]:
    """Elements of each tensor in all slices of the only checkpoint."""
    [verdict] = verify(directory)
    tensors = json.loads((verdict.path / MANIFEST).read_bytes())["manifest"]["tensors"]
    return {
        name: sum(torch.Size(part["sizes"]).numel() for part in tensor["slices"]) for name, tensor in tensors.items()
    }


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_saved_in_any_layout_loads_bitwise_in_every_other(
    ranks: RankPool, tmp_path: Path, layout: str, world: int
) -> None:
    events = ranks.run(work.save, str(tmp_path), layout, 3, world=world)
    assert all(kinds(per_rank) == [("committed", 3)] for per_rank in events)
    assert written(tmp_path) == {name: tensor.numel() for name, tensor in values(0).items()}, (
        "replicas are written once"
    )
    for other, size in LAYOUTS:
        for found in ranks.run(work.load, str(tmp_path), other, 3, world=size):
            assert found == {"facts": {"step": 3, "cursor": 30}, "same": True, "lines": []}, (other, size)


@pytest.mark.prove
def test_ranks_that_hold_other_layers_save_and_load_them_together(ranks: RankPool, tmp_path: Path) -> None:
    """Names are compared over all ranks: what another one asks for is not unexpected, what nobody does is."""
    assert ranks.run(work.stages, str(tmp_path / "whole"), world=2) == [(True, [])] * 2
    for _, problems in ranks.run(work.stages, str(tmp_path / "less"), "model.head.bias", world=2):
        assert [text[:62] for text in problems] == ["CKPT003 0 missing, 1 unexpected (model.head.bias)"]


def test_stock_dcp_drives_the_storage_pair(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(work.stock, str(tmp_path), world=4) == [True] * 4
    assert [verdict.problem for verdict in verify(tmp_path)] == [None]


def test_files_are_safetensors_and_json_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks.run(work.save, str(tmp_path), "fsdp", 3, world=2)
    path = tmp_path / "step-00000003"
    rows = []
    for file in files_of(path):
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            assert file.suffix == ".safetensors"
            rows.append(load_file(file).get("model.embed.weight"))
    assert torch.equal(torch.cat([part for part in rows if part is not None]), values(3)["model.embed.weight"])


# Faults -------------------------------------------------------------------------------------------------------------


def after(directory: Path, allowed: tuple[int, ...]) -> list[str]:
    """What is wrong after a fault: a torn step, or a state that is neither the old nor the new one, whole."""
    wrong = [f"step {verdict.step}: {verdict.problem}" for verdict in verify(directory) if verdict.problem]
    state, facts, _, checkpoints = resume(directory)
    step = facts["step"] if facts else None
    if step not in allowed or not same(state, values(int(str(step)))):
        wrong.append(f"resumed at {step}")
    checkpoints.save(values(3), {"step": 3}, 3)
    if kinds(checkpoints.wait())[0] != ("committed", 3):
        wrong.append("the next save did not commit")
    left = [name for name in os.listdir(directory) if name.startswith((".tmp-", ".trash-"))]
    return wrong + [f"{name} was left" for name in left]


def start(tmp_path: Path, name: str) -> Path:
    """A copy of a directory with steps 0 and 1 and a dead attempt, so that sweeping and retention happen too."""
    first = tmp_path / "first"
    if not first.exists():
        save_steps(first, 0, 1)
        (first / ".tmp-step-00000002-g1").mkdir()
        (first / ".tmp-step-00000002-g1" / "model").write_bytes(b"half")
    return Path(shutil.copytree(first, tmp_path / name))


SAVE = "tests.runtime.checkpoint.checkpoint_ranks:save_with_fault"


@pytest.mark.prove
def test_killed_at_every_system_call_of_two_ranks(ask: Ask, tmp_path: Path) -> None:
    deaths, wrong = 0, []
    directory = start(tmp_path, "control")
    calls = [child.result[1] for child in ask(SAVE, 2, str(directory), 0, "", 0)]
    assert after(directory, (2,)) == [] and len(calls[0]) >= 25 and len(calls[1]) >= 8
    for victim, made in enumerate(calls):
        for at, name in enumerate(made, start=1):
            for fault in ("kill", "torn") if name == "write" else ("kill",):
                directory = start(tmp_path, f"{fault}-{victim}-{at}")
                children = ask(SAVE, 2, str(directory), victim, fault, at)
                assert children[victim].status == -9, "the fault must fire"
                events, _, seconds = children[1 - victim].result
                assert seconds < ANSWER_S and events[-1]["kind"] in ("failed", "committed", "unverified", "undeleted")
                deaths += 1
                wrong += [f"{fault} of rank {victim} at {at} ({name}): {what}" for what in after(directory, (1, 2))]
    assert deaths >= 40 and wrong == []


@pytest.mark.prove
def test_killed_while_writing_in_place_leaves_torn_checkpoints(ask: Ask, tmp_path: Path) -> None:
    """The enumeration can fail: the same save, without the temporary directory and the rename."""
    save_steps(tmp_path / "first", 1)
    directory = Path(shutil.copytree(tmp_path / "first", tmp_path / "control"))
    wrong = []
    control = ask(SAVE, 2, str(directory), 0, "", 0, True)[0].result
    assert control[0][0]["kind"] == "committed" and not verify(directory)[0].problem
    for at in range(1, len(control[1]) + 1):
        directory = Path(shutil.copytree(tmp_path / "first", tmp_path / f"kill-{at}"))
        assert ask(SAVE, 2, str(directory), 0, "kill", at, True)[0].status == -9
        wrong += [verdict.step for verdict in verify(directory) if verdict.problem]
    assert len(wrong) >= 8


@pytest.mark.prove
@pytest.mark.parametrize("error", ["ENOSPC", "EIO for good"])
def test_an_error_at_every_system_call_is_agreed_on(ranks: RankPool, tmp_path: Path, error: str) -> None:
    """Once, and the save is made again; for good, and it has failed on both ranks."""
    control = ranks.run(work.save_with_fault, str(start(tmp_path, "control")), 0, "", 0)
    assert all(kinds(events) == [("committed", 2), ("removed", 0)] for events, _, _ in control)
    outcomes = set()
    for victim, (_, calls, _) in enumerate(control):
        for at, name in enumerate(calls, start=1):
            directory = start(tmp_path, f"{victim}-{at}")
            results = ranks.run(work.save_with_fault, str(directory), victim, error, at)
            events, made, _ = results[victim]
            assert len(made) >= at, "the fault must fire"
            assert results[0][0][0].kind == results[1][0][0].kind, "the ranks must agree"
            assert max(seconds for _, _, seconds in results) < ANSWER_S
            outcome = events[0]
            outcomes.add(outcome.kind)
            if outcome.kind == "failed":
                assert f"rank {victim}: " in outcome.what and REASONS[error.split()[0]] in outcome.what.lower(), outcome
            else:
                expected = ["removed"] if outcome.kind == "committed" else []
                last = events[-1]
                assert [event.kind for event in events[1:]] in (expected, ["undeleted"]), events
                assert last.kind != "undeleted" or REASONS[error.split()[0]] in last.what.lower()
            allowed = {"failed": (1,), "committed": (2,), "maybe committed": (2,)}[outcome.kind]
            assert after(directory, allowed) == [], (victim, at, name, outcome)
    wanted = {"committed", "maybe committed", "failed"}
    assert outcomes == wanted if "for good" in error else outcomes < wanted


@pytest.mark.parametrize(("calls", "outcome"), [(2, "committed"), (3, "failed")])
def test_a_rename_that_fails_is_tried_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, outcome: str
) -> None:
    """What is written then is the state of the call, however much it has changed since."""
    monkeypatch.setattr(checkpoint, "RETRIES_S", (0.0, 0.0))
    refused: list[Path] = []

    def rename(source: Path, target: Path) -> None:
        if target.name == "step-00000001" and len(refused) < calls:
            refused.append(target)
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run", disk=commit.Disk(rename=rename))
    state = values(1)
    checkpoints.save(state, {"step": 1}, 1)
    checkpoints.copied()
    for tensor in state.values():
        tensor.fill_(7)
    assert kinds(checkpoints.wait()) == [(outcome, 1)] and len(refused) == calls
    if outcome == "committed":
        loaded, facts, _, _ = resume(tmp_path)
        assert same(loaded, values(1)) and facts == {"step": 1}


def test_a_disk_that_is_full_for_a_moment_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "RETRIES_S", (0.0, 0.0))
    said = iter([0, 10**12])
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, next(said)))
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run")
    checkpoints.save(values(1), {"step": 1}, 1)
    assert kinds(checkpoints.wait()) == [("committed", 1)]


def test_a_rename_whose_answer_was_lost_has_been_made(tmp_path: Path) -> None:
    def rename(source: Path, target: Path) -> None:
        os.rename(source, target)
        raise FileNotFoundError(2, "No such file or directory")

    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run", disk=commit.Disk(rename=rename))
    checkpoints.save(values(1), {"step": 1}, 1)
    assert kinds(checkpoints.wait()) == [("committed", 1)] and resume(tmp_path)[1] == {"step": 1}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("object", "rank 1: TypeError: model.half"),
        ("dtype", "rank 1: TypeError: model.half is torch.complex64"),
        ("facts", "rank 0: TypeError: Object of type set is not JSON serializable"),
        ("finite", "not finite on some"),
    ],
)
def test_what_one_rank_cannot_save_no_rank_saves(ranks: RankPool, tmp_path: Path, how: str, what: str) -> None:
    begun = time.monotonic()
    for first, second in ranks.run(work.save_unlike, str(tmp_path), how):
        assert kinds(first) == [("skipped" if how == "finite" else "failed", 1)]
        assert what in first[0].what
        assert kinds(second) == [("committed", 2)]
    assert time.monotonic() - begun < ANSWER_S
    assert [verdict.step for verdict in verify(tmp_path)] == [2]


def test_a_slice_that_was_not_written_forbids_the_commit(ranks: RankPool, tmp_path: Path) -> None:
    for events in ranks.run(work.save_forgetful, str(tmp_path)):
        assert kinds(events) == [("failed", 1)]
        assert "error[CKPT015]" in events[0].what and "elements were written" in events[0].what
    assert verify(tmp_path) == []


# Asynchronous saving ------------------------------------------------------------------------------------------------


class Gate:
    """A disk that writes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.disk = commit.Disk(write=self.write)

    def write(self, descriptor: int, data: memoryview) -> int:
        assert self.opened.wait(30)
        return os.write(descriptor, data)


def test_saving_goes_on_while_the_state_changes(tmp_path: Path) -> None:
    """The state may change before a byte is written, once copied returns; what is written is the state at the call."""
    gate = Gate()
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run", disk=gate.disk)
    state, facts = values(1), {"step": 1, "list": [1]}
    assert checkpoints.save(state, facts, 1)
    checkpoints.copied()
    for tensor in state.values():
        tensor.fill_(7)
    facts["list"].append(2)
    assert checkpoints.poll() == [] and newest(tmp_path) is None
    gate.opened.set()
    assert kinds(checkpoints.wait()) == [("committed", 1)]
    loaded, found, _, _ = resume(tmp_path)
    assert same(loaded, values(1)) and found == {"step": 1, "list": [1]}


def test_an_optimizer_waits_for_the_copy_of_what_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the copy takes: without the wait, the saved weight would be the one after the step."""
    stage = ShardWriter.stage

    def slow(*args: Any) -> int:
        time.sleep(0.3)
        return stage(*args)

    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run")
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    checkpoints.guard(optimizer)
    weight.grad = torch.ones(4)
    monkeypatch.setattr(ShardWriter, "stage", slow)
    begun = time.monotonic()
    checkpoints.save({"model.weight": weight.detach()}, {}, 1)
    assert time.monotonic() - begun < 0.2, "save itself does not wait for the copy"
    optimizer.step()
    assert weight.detach().eq(0).all()
    checkpoints.wait()
    loaded = {"model.weight": torch.zeros(4)}
    read(tmp_path, loaded)
    assert loaded["model.weight"].eq(1).all()


def test_the_thread_takes_the_device_of_what_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else: a thread begins on the first GPU, where every rank would get a context."""
    done: list[tuple[str, object]] = []

    class Stream:
        device = torch.device("cuda", 3)

    def note(what: str, value: object = None) -> None:
        done.append((f"{what} in {threading.current_thread().name}", value))

    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run")
    stage = checkpoints._writer.stage

    def staged(plan: Any, planner: Any, rank: int, size: int, stream: Any = None) -> int:
        note("staged", stream)
        return stage(plan, planner, rank, size)

    monkeypatch.setattr("shardwise.runtime.checkpoint.save.copy_stream", lambda tensors: Stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("taken", device))
    monkeypatch.setattr(checkpoints._writer, "stage", staged)
    checkpoints.save({"model.w": torch.ones(3)}, {}, 1)
    assert kinds(checkpoints.wait()) == [("committed", 1)]
    assert done == [("taken in checkpoint", Stream.device), ("staged in checkpoint", Stream)]


def test_at_most_one_save_is_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run", disk=gate.disk)
    checkpoints.save(values(1), {"step": 1}, 1)
    threading.Timer(0.2, gate.opened.set).start()
    begun = time.monotonic()
    checkpoints.save(values(2), {"step": 2}, 2)
    assert time.monotonic() - begun >= 0.15, "the second save waits for the first"
    assert kinds(checkpoints.wait()) == [("committed", 1), ("committed", 2)]


@pytest.mark.parametrize("broken", [False, True])
def test_a_save_is_told_while_the_next_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Where saves come faster than they are done, one is always in flight."""
    gate = threading.Event()
    gate.set()

    def write(descriptor: int, data: memoryview) -> int:
        assert gate.wait(30)
        if broken:
            raise OSError(errno.EIO, "input/output error")
        return os.write(descriptor, data)

    save_steps(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "RETRIES_S", (0.01,))
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(save_total_limit=1), "run", disk=commit.Disk(write=write))
    checkpoints.save(values(2), {"step": 2}, 2)
    assert checkpoints.flight.thread is not None
    checkpoints.flight.thread.join()
    gate.clear()
    checkpoints.save(values(3), {"step": 3}, 3)
    assert kinds(checkpoints.poll()) == ([("failed", 2)] if broken else [("committed", 2), ("removed", 1)])
    gate.set()
    assert [step for _, step in kinds(checkpoints.wait())] == ([3] if broken else [3, 2])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_not_known_to_be_good_is_saved_once_it_is(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(asynchronous=asynchronous), "run")
    state = values(1)
    assert checkpoints.save(state, {"step": 1}, 1, known=False) and checkpoints.flight.undecided
    checkpoints.copied()
    state["model.half"].fill_(7)
    assert checkpoints.poll() == [] and newest(tmp_path) is None
    checkpoints.flight.confirm(good=True)
    assert asynchronous or newest(tmp_path) is not None
    assert kinds(checkpoints.wait()) == [("committed", 1)] and same(resume(tmp_path)[0], values(1))


@pytest.mark.parametrize("by", ["confirm", "save", "wait", "beats"])
def test_what_is_not_shown_to_be_good_is_not_saved(tmp_path: Path, by: str) -> None:
    """Every call that waits for the save in flight is its end."""
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(keep_best=True), "run")
    checkpoints.save(values(1), {"step": 1}, 1, known=False)
    if by == "confirm":
        checkpoints.flight.confirm(good=False)
        checkpoints.flight.confirm(good=True)
    elif by == "beats":
        assert checkpoints.beats(1.0)
    elif by == "save":
        checkpoints.save(values(2), {"step": 2}, 2)
    expected = [("skipped", 1)] + [("committed", 2)] * (by == "save")
    results = checkpoints.wait()
    assert kinds(results) == expected
    assert ("not finite" in results[0].what) is (by == "confirm"), "else nothing is known of its weights"
    assert ("next step" in results[0].what) is (by != "confirm")
    assert [verdict.step for verdict in verify(tmp_path)] == [2] * (by == "save")


def test_fifty_saves_are_each_the_state_of_their_call(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run")
    for step in range(50):
        state = values(step)
        checkpoints.save(state, {"step": step}, step)
        checkpoints.copied()
        for tensor in state.values():
            tensor.mul_(0)
        checkpoints.wait()
        loaded = values(99)
        assert read(tmp_path, loaded) == {"step": step} and same(loaded, values(step))


def test_synchronous_saving_is_done_when_it_returns(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(asynchronous=False), "run")
    checkpoints.save(values(1), {"step": 1}, 1)
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert kinds(checkpoints.poll()) == [("committed", 1)]


def test_preparing_takes_the_directory_and_allocates(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path / "new", Checkpoint(), "run")
    state = values(1)
    assert checkpoints.prepare(state) == sum(tensor.nbytes for tensor in state.values())
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"OUT002.*/file/x: not a directory"):
        RunCheckpoints(tmp_path / "file" / "x", Checkpoint(), "run").prepare(state)


# Retention ----------------------------------------------------------------------------------------------------------


def test_retention(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, 6, save_total_limit=2, keep_every=3)
    assert [verdict.step for verdict in verify(tmp_path)] == [6, 5, 3]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """By the loss in the facts that were committed with it: there is no second file to be torn off."""
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(save_total_limit=2, keep_best=True), "run")
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 1.0, 6: 0.5, 7: None, 8: 0.75, 9: None}
    kept = []
    for step, loss in losses.items():
        if loss is not None:
            assert checkpoints.beats(loss) == (step in (1, 2, 6))
        checkpoints.save(values(step), {"step": step} | ({"validation": loss} if loss else {}), step)
        assert ("committed", step) in kinds(checkpoints.wait())
        kept.append([verdict.step for verdict in verify(tmp_path)])
    assert kept[3:] == [[4, 3, 2], [5, 4, 2], [6, 5], [7, 6], [8, 7, 6], [9, 8, 6]]
    assert not checkpoints.beats(math.nan) and not checkpoints.beats(0.5) and checkpoints.beats(0.49)
    assert not RunCheckpoints(tmp_path, Checkpoint(), "run").beats(0.1)


def test_nothing_is_deleted_for_a_checkpoint_that_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)
    publish = commit.publish

    def damaging(*args: object) -> Path:
        path = publish(*args)
        with open(path / "model-00000-of-00001.safetensors", "r+b") as file:
            file.write(b"x")
        return path

    monkeypatch.setattr(commit, "publish", damaging)
    checkpoints = RunCheckpoints(tmp_path, Checkpoint(), "run")
    checkpoints.save(values(3), {"step": 3}, 3)
    events = checkpoints.wait()
    assert kinds(events) == [("committed", 3), ("unverified", 3)] and "fails xxh3" in events[1].what
    assert [(verdict.step, bool(verdict.problem)) for verdict in verify(tmp_path)] == [
        (3, True),
        (2, False),
        (1, False),
    ]


def test_damage_never_leads_to_the_last_good_one(tmp_path: Path) -> None:
    """The newest is damaged after each save: there is always one that verifies, and the run resumes from it."""
    save_steps(tmp_path, 1, 2)
    for step in range(3, 7):
        (tmp_path / f"step-{step - 1:08d}" / "state.json").write_bytes(b"{}")
        assert any(verdict.problem is None for verdict in verify(tmp_path))
        save_steps(tmp_path, step)
        assert resume(tmp_path)[1] == {"step": step}


# Damage -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_steps(ranks: RankPool, tmp_path: Path) -> Path:
    for step in (1, 2):
        ranks.run(work.save, str(tmp_path), "fsdp", step, world=2)
    return tmp_path


def test_every_flipped_bit_is_found(two_steps: Path) -> None:
    pick = random.Random(0)
    files = files_of(two_steps / "step-00000002")
    for number in range(300):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        bit = pick.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        original = file.read_bytes()
        file.write_bytes(data)
        assert verify(two_steps)[0].problem is not None, (file, bit)
        if number % 10 == 0:
            state, facts, lines, _ = resume(two_steps)
            assert facts == {"step": 1, "cursor": 10} and same(state, values(1))
            assert lines[-1].startswith("using step-00000001; 1 ")
        file.write_bytes(original)
    assert verify(two_steps)[0].problem is None


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda file, data: file.write_bytes(b""),
    "one byte": lambda file, data: file.write_bytes(data[:1]),
    "half": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "one byte short": lambda file, data: file.write_bytes(data[:-1]),
    "appended": lambda file, data: file.write_bytes(data + b"\0"),
    "missing": lambda file, data: file.unlink(),
    "a directory": lambda file, data: (file.unlink(), file.mkdir()),
    "a pipe": lambda file, data: (file.unlink(), os.mkfifo(file)),
    "of the other step": lambda file, data: shutil.copy(str(file).replace("step-00000002", "step-00000001"), file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_passed_over(two_steps: Path, damage: str) -> None:
    shutil.copytree(two_steps / "step-00000002", two_steps / "good")
    for name in os.listdir(two_steps / "good"):
        file = two_steps / "step-00000002" / name
        DAMAGES[damage](file, file.read_bytes())
        state, facts, _, checkpoints = resume(two_steps)
        assert facts == {"step": 1, "cursor": 10} and same(state, values(1)), name
        assert len(checkpoints.rejected) == 1
        shutil.rmtree(two_steps / "step-00000002")
        shutil.copytree(two_steps / "good", two_steps / "step-00000002")


def test_swapped_shards_and_renamed_steps_are_passed_over(two_steps: Path) -> None:
    path = two_steps / "step-00000002"
    left, right = (path / f"model-0000{rank}-of-00002.safetensors" for rank in (0, 1))
    first, second = left.read_bytes(), right.read_bytes()
    left.write_bytes(second)
    right.write_bytes(first)
    assert resume(two_steps)[1] == {"step": 1, "cursor": 10}
    shutil.rmtree(path)
    shutil.copytree(two_steps / "step-00000001", path)
    assert resume(two_steps)[1] == {"step": 1, "cursor": 10}


def reseal(manifest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, and give it the sum of what it says now."""
    body = json.loads(manifest.read_bytes())["manifest"]
    change(body)
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    manifest.write_text(f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","manifest":{text}}}\n')


EMBED = "model.embed.weight"
UNCOVERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a slice is missing": lambda body: body["tensors"][EMBED]["slices"].pop(),
    "a tensor is missing": lambda body: body["tensors"].pop(EMBED),
    "no slice is left": lambda body: body["tensors"][EMBED]["slices"].clear(),
    "a slice stands twice": lambda body: body["tensors"][EMBED]["slices"].append(body["tensors"][EMBED]["slices"][0]),
    "a slice is smaller": lambda body: body["tensors"][EMBED]["slices"][0]["sizes"].__setitem__(0, 1),
    "a slice has no second dim": lambda body: body["tensors"][EMBED]["slices"][0]["sizes"].pop(),
    "a slice begins elsewhere": lambda body: body["tensors"][EMBED]["slices"][1]["offsets"].__setitem__(0, 0),
    "a slice is read from another byte": lambda body: body["tensors"][EMBED]["slices"][0].update(begin=0),
    "a slice is read beyond the file": lambda body: body["tensors"][EMBED]["slices"][0].update(begin=10**9),
    "a slice is read from another file": lambda body: body["tensors"][EMBED]["slices"][0].update(
        file=body["tensors"]["model.half"]["slices"][0]["file"].replace("model", "optim")
    ),
    "another type of the same size": lambda body: body["tensors"][EMBED].update(dtype="I32"),
    "a type that nobody knows": lambda body: body["tensors"][EMBED].update(dtype="F31"),
    "a shape of other dims": lambda body: body["tensors"][EMBED].update(shape=[5, 11]),
    "a file of which nothing is hashed": lambda body: body["files"]["state.json"].update(chunks=[]),
}


@pytest.mark.parametrize("change", UNCOVERED)
def test_a_manifest_that_does_not_cover_its_tensors_is_passed_over(two_steps: Path, change: str) -> None:
    """Sealed again, so that its own sum is right: nothing of it may be loaded, for memory that no slice fills would
    be what happened to be there."""
    reseal(two_steps / "step-00000002" / MANIFEST, UNCOVERED[change])
    state, facts, _, checkpoints = resume(two_steps)
    assert facts == {"step": 1, "cursor": 10} and same(state, values(1))
    [problem] = checkpoints.rejected
    assert problem.code in ("CKPT015", "CKPT009")
    assert newest(two_steps) == two_steps / "step-00000001"
    assert verify(two_steps)[0].problem is not None
    state = values(99)
    assert read(two_steps, state)["step"] == 1 and same(state, values(1))


def test_an_unlisted_file_is_not_read_and_named(two_steps: Path) -> None:
    (two_steps / "step-00000002" / "model-00002-of-00002.safetensors").write_bytes(b"evil")
    state, facts, lines, _ = resume(two_steps)
    assert facts == {"step": 2, "cursor": 20} and same(state, values(2))
    assert len(lines) == 1
    assert lines[0].startswith("warning[CKPT019]: step-00000002/model-00002-of-00002.safetensors ")
    assert verify(two_steps)[0].unlisted == ("model-00002-of-00002.safetensors",)


def test_nothing_good_left_is_not_a_fresh_start(two_steps: Path) -> None:
    (two_steps / "step-00000001" / "state.json").unlink()
    (two_steps / "step-00000002" / MANIFEST).unlink()
    with pytest.raises(DataError) as raised:
        resume(two_steps)
    assert raised.value.exit_code == 65
    assert [problem.code for problem in raised.value.problems] == ["CKPT016", "CKPT008", "CKPT014"]
    assert "--allow-fresh-start" in raised.value.problems[0].fix
    state, facts, lines, _ = resume(two_steps, allow_fresh_start=True)
    assert facts is None and same(state, values(99)) and "state.json is missing" in lines[0]


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    assert resume(tmp_path)[1] is None
    assert resume(tmp_path / "nowhere")[1] is None


def test_ranks_refuse_together(ranks: RankPool, two_steps: Path) -> None:
    for step in (1, 2):
        (two_steps / f"step-0000000{step}" / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(RankFailure, match="CKPT016") as raised:
        ranks.run(work.load, str(two_steps), "fsdp", 2, world=2)
    assert sorted(raised.value.reports) == [0, 1]


def test_one_bad_shard_makes_all_ranks_fall_back(ranks: RankPool, two_steps: Path) -> None:
    shard = two_steps / "step-00000002" / "optim-00001-of-00002.safetensors"
    flip_last(shard)
    found = ranks.run(work.load, str(two_steps), "fsdp", 1, world=4)
    assert all(each["same"] and each["facts"]["step"] == 1 for each in found)
    bad, used = found[0]["lines"]
    assert bad.startswith("error[CKPT007]: step-00000002/optim-00001-of-00002.safetensors ")
    assert used.startswith("using step-00000001; 1 ") and found[1]["lines"] == []


def test_the_disk_failing_while_reading_falls_back_and_changes_nothing(
    two_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in files_of(two_steps)}
    calls = []
    preadv = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if (
            len(calls) == 25
        ):  # beyond four headers, read twice, and five files that are hashed: in the middle of loading
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    state, facts, _, checkpoints = resume(two_steps)
    assert facts == {"step": 1, "cursor": 10} and same(state, values(1))
    assert "cannot be read" in checkpoints.rejected[0].what
    assert before == {path: path.read_bytes() for path in files_of(two_steps)}


# What a user may name -----------------------------------------------------------------------------------------------


def refused(path: Path | str, run: Path, state: dict[str, Tensor] | None = None) -> ShardwiseError:
    before = {name: tensor.clone() for name, tensor in (state or {}).items()}
    with pytest.raises(ShardwiseError) as raised:
        RunCheckpoints(run, Checkpoint(), "run").resume(values(99) if state is None else state, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in (state or {}).items()), "nothing may be touched"
    return raised.value


def test_b29_no_checkpoint_there(two_steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "run2" / "checkpoints"
    shutil.copytree(two_steps / "step-00000001", run / "step-00000001")
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    (tmp_path / "run1").mkdir()
    for path in (tmp_path / "run3", tmp_path / "run1"):
        error = refused(path, run)
        assert type(error) is MissingInputError and error.exit_code == 66
        assert refuses(error, "CKPT001", path, "step-*/manifest.json", where=path, fix=f"{run}/step-00000001")
    assert refused(file, run).problems[0].code == "CKPT001"


def test_b30_shapes_differ(two_steps: Path) -> None:
    state = values(99)
    state["model.embed.weight"] = torch.zeros(12, 5)
    state["model.head.bias"] = torch.zeros(3)
    error = refused(two_steps, two_steps, state)
    assert error.exit_code == 65
    differ = "`model.embed.weight`", "[11, 5]", "[12, 5]", "`model.head.bias`", "[1]", "[3]"
    place = f"{two_steps}/step-00000002"
    assert refuses(error, "CKPT002", 2, 15, *differ, where=place, fix="model.config.vocab_size=11")


def test_b31_names_differ(two_steps: Path) -> None:
    state = values(99) | {"model.layers.1.up.weight": torch.zeros(7, 3)}
    [problem] = refused(two_steps, two_steps, state).problems
    assert (problem.code, problem.where) == ("CKPT003", f"{two_steps}/step-00000002")
    assert problem.what.startswith("1 missing (model.layers.1.up.weight), 0 unexpected")
    assert problem.fix == "model.config.num_hidden_layers=1"
    state = values(99)
    del state["model.scale"]
    error = refused(two_steps, two_steps, state)
    assert (error.exit_code, error.problems[0].what) == (65, "0 missing, 1 unexpected (model.scale)")


def test_b32_data_types_differ(two_steps: Path) -> None:
    state = {name: t.bfloat16() if name.startswith("optim.") else t for name, t in values(99).items()}
    error = refused(two_steps, two_steps, state)
    assert error.exit_code == 65
    [problem] = error.problems
    assert (problem.code, problem.where) == ("CKPT004", f"{two_steps}/step-00000002")
    assert problem.what.startswith("9 of 15 ") and "`optim.exp_avg.embed.weight` is fp32" in problem.what
    assert problem.fix == "optim.moments=fp32"


def test_b33_a_truncated_file(two_steps: Path) -> None:
    file = two_steps / "step-00000002" / "model-00000-of-00002.safetensors"
    size = file.stat().st_size
    os.truncate(file, 100)
    error = refused(file.parent, two_steps)
    assert error.exit_code == 65
    assert error.problems[1].what.startswith("model-00000-of-00002.safetensors is 100 bytes")
    assert f" {size}:" in error.problems[1].what
    assert error.problems[1].code == "CKPT005"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "an HTML"),
        (b"\x1f\x8b\x08\x00", "a gzip archive"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x80\x02}", "a pickle"),
    ],
)
def test_b34_something_else_than_weights(two_steps: Path, content: bytes, name: str) -> None:
    file = two_steps / "step-00000002" / "model-00000-of-00002.safetensors"
    file.write_bytes(content)
    problem = refused(file.parent, two_steps).problems[1]
    assert refuses(problem, "CKPT006", "model-00000-of-00002.safetensors", name, f"({len(content)} bytes)")
    assert refused(file, two_steps).problems[0].code == "CKPT006"


def test_b35_a_checksum(two_steps: Path) -> None:
    file = two_steps / "step-00000002" / "model-00000-of-00002.safetensors"
    size = file.stat().st_size
    flip_last(file)
    lines = resume(two_steps)[2]
    bad, used = lines
    assert bad.startswith(f"error[CKPT007]: step-00000002/{file.name} ") and bad.endswith(f"\nwhere: {file}")
    assert f"between byte 0 and {size}\n" in bad and used.startswith("using step-00000001; 1 ")
    error = refused(file.parent, two_steps)
    assert (error.exit_code, [problem.code for problem in error.problems]) == (65, ["CKPT016", "CKPT007"])


def test_b36_never_committed(two_steps: Path) -> None:
    path = two_steps / ".tmp-step-00000003-g9"
    path.mkdir()
    (two_steps / "step-00000004").mkdir()
    for name in (path, two_steps / "step-00000004"):
        error = refused(name, two_steps)
        assert error.exit_code == 65
        [problem] = error.problems
        assert (problem.code, problem.where) == ("CKPT008", str(name))
        assert "step-00000002" in problem.what and problem.fix == f"--resume {two_steps}/step-00000002"


def test_b37_a_pickle(two_steps: Path) -> None:
    path = two_steps / "legacy.bin"
    torch.save({"a": torch.zeros(2)}, path)
    error = refused(path, two_steps)
    assert type(error) is PolicyError and error.exit_code == 77
    assert error.problems[0].code == "SEC004" and "legacy.bin" in error.problems[0].what


def test_a_checkpoint_of_another_run(two_steps: Path) -> None:
    state = values(99)
    other = RunCheckpoints(two_steps, Checkpoint(), "other")
    with pytest.raises(DataError, match=r'CKPT013.*step-00000002 .*"run".*"other"'):
        other.resume(state)
    assert other.resume(state, two_steps / "step-00000002") == {"step": 2, "cursor": 20} and same(state, values(2))


def test_another_runs_checkpoint_in_a_runs_directory_is_not_this_runs(
    two_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not exported, is not the newest or the best, and its settings are not taken for the run's."""
    run = tmp_path / "runs" / "a"
    (run / "checkpoints").mkdir(parents=True)
    foreign = shutil.copytree(two_steps / "step-00000002", run / "checkpoints" / "step-00000002")
    (run / "run.json").write_text('{"run_id": "mine", "data": "d"}')
    for path in (run, foreign):
        with pytest.raises(DataError, match=r'CKPT013.*step-00000002 .*"run".*"mine"'):
            read(path, values(99))
    assert newest(run / "checkpoints") is None and not [*with_facts(run / "checkpoints")]
    with pytest.raises(DataError, match="CKPT013"):
        check_own(run / "checkpoints")
    own = shutil.copytree(two_steps / "step-00000001", run / "checkpoints" / "step-00000001")
    (own / MANIFEST).write_bytes(dump(replace(check(own), run_id="mine")))
    assert read(run, values(99)) == {"step": 1, "cursor": 10} and newest(run / "checkpoints") == own
    assert "error[CKPT013]" in capsys.readouterr().err
    foreign.rename(foreign.with_name("aside"))
    check_own(run / "checkpoints")


def test_going_back_within_a_run_is_refused(two_steps: Path) -> None:
    error = refused(two_steps / "step-00000001", two_steps)
    assert (error.exit_code, error.problems[0].code) == (65, "CKPT017")


def test_a_reader_says_that_it_takes_an_older_one(two_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two_steps / "step-00000002" / "state.json").unlink()
    assert read(two_steps, values(99)) == {"step": 1, "cursor": 10}
    said = capsys.readouterr().err
    assert "error[CKPT014]: " in said and "state.json" in said
    assert said.endswith("using step-00000001\n")


def test_a_run_and_a_part_of_the_tensors_can_be_read(two_steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    shutil.copytree(two_steps / "step-00000002", run / "checkpoints" / "step-00000002")
    state = {name: tensor for name, tensor in values(99).items() if name.startswith("model.")}
    assert read(run, state) == {"step": 2, "cursor": 20}
    assert same(state, {name: tensor for name, tensor in values(2).items() if name in state})
    with pytest.raises(DataError, match=r"CKPT003.*1 missing"):
        read(run, {"model.new": torch.zeros(1)})
