"""A training step makes no host wait for its device: its figures are read once, when the next step is under way."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.errors import TrainingError
from shardwise.methods import pretrain
from shardwise.methods.loss import Loss
from shardwise.runtime import loop
from shardwise.runtime.faults.guard import Guard
from shardwise.runtime.faults.outcome import read_exit
from shardwise.runtime.metrics.pending import PendingSteps
from shardwise.runtime.step import Launched
from tests.runtime.small_run import directory, numbers, recipe, train_here, weights_hash
from tests.said import refusal

SOURCES = str(Path(shardwise.__file__).parent)
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "equal", "allclose", "unique", "masked_select"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "is_nonzero", "synchronize"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""What makes the host wait for a CUDA device: of Python's calls, and of those that torch's own code makes."""
HOST = {("reduce.py", "count_tokens"), ("kernels.py", "_segments")}
"""Who may read tensors: these are on the host. The second is the attention of a CPU."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


class Watch:
    """Who made the host wait, by step: (what, file, function) of the innermost of our own frames."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: dict[int, Counter[tuple[str, str, str]]] = {}

    def note(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(SOURCES):
            frame = frame.f_back
        place = (Path(frame.f_code.co_filename).name, frame.f_code.co_name) if frame else ("", "")
        self.seen.setdefault(self.step, Counter())[what, *place] += 1


class Calls(TorchFunctionMode):
    """Sees what is called from Python."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.__name__, kwargs or {}
        to_host = name == "to" and any(isinstance(to, str) and to == "cpu" for to in (*args[1:], *named.values()))
        from_host = name in ("tensor", "as_tensor") and "device" in named
        with torch._C.DisableTorchFunction():
            if name in READS or to_host or from_host:
                self.watch.note(name)
            return func(*args, **named)


class Operations(TorchDispatchMode):
    """Sees the operations that are run, whoever asked for them."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        masked = name in ("index", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and len(args) < 3
        if name in WAITS or masked or unsized:
            self.watch.note(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches this thread in steps 4 to 6 of a run."""
    found, fetch = Watch(), Guard.fetch
    with ExitStack() as modes:

        def fetching(self: Guard, step: int, batches: Iterator[Any]) -> Any:
            found.step = step
            if step == 4:
                modes.enter_context(watched(found))
            if step == 7:
                modes.close()
            return fetch(self, step, batches)

        monkeypatch.setattr(Guard, "fetch", fetching)
        yield found


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    with Calls(watch), Operations(watch):
        yield


def waits(watch: Watch, step: int) -> dict[tuple[str, str, str], int]:
    """Of ``step``, those that a device would be waited for."""
    return {seen: count for seen, count in watch.seen[step].items() if seen[1:] not in HOST}


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": {"name": "adamw8bit"}},
        {"precision": {"compute": "fp16"}},
    ],
    ids=lambda changes: next(iter(changes), "fp32"),
)
def test_a_step_waits_for_nothing_but_the_figures_of_the_one_before(
    root: Path, watch: Watch, changes: dict[str, Any]
) -> None:
    """Of the real loop: batches, forward, backward, norm, clipping, skipping, AdamW, metrics. Steps 4 to 6 save
    nothing and are not measured."""
    train_here(recipe(root, "watched", train={"max_steps": 7}, checkpoint={"save_steps": 9}, **changes))
    for step in (4, 5, 6):
        assert waits(watch, step) == {("tolist", "transfer.py", "read"): 1}, watch.seen[step]


def test_the_watch_sees_what_waits(watch: Watch) -> None:
    numbers, few = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    acts: list[tuple[str, Callable[[], object]]] = [
        ("item", lambda: numbers[0].item()),
        ("__bool__", lambda: bool(few[0])),
        ("__float__", lambda: float(numbers[0])),
        ("cpu", lambda: numbers.cpu()),
        ("to", lambda: numbers.to("cpu")),
        ("index", lambda: numbers[few]),
        ("nonzero", lambda: numbers.nonzero()),
        ("tensor", lambda: torch.tensor(1.0, device="cpu")),
        ("repeat_interleave", lambda: numbers.repeat_interleave(torch.tensor([1, 2]))),
    ]
    for watch.step, (name, act) in enumerate(acts):
        with watched(watch):
            act()
        assert name in {what for what, *_ in watch.seen[watch.step]}, name
    watch.step = -1
    with watched(watch):
        assert torch.add(numbers, 1).sum().sqrt() is not None
    assert watch.step not in watch.seen


class Told(Exception):
    pass


def order_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What will have happened: (launched or read, step)."""
    seen: list[tuple[str, int]] = []
    launch, wait = loop.launch, Launched.wait

    def launching(state: Any, *args: Any) -> Any:
        seen.append(("launched", state.step + 1))
        return launch(state, *args)

    def waiting(self: Launched, state: Any) -> Any:
        seen.append(("read", self.known.step))
        return wait(self, state)

    monkeypatch.setattr(loop, "launch", launching)
    monkeypatch.setattr(Launched, "wait", waiting)
    return seen


@pytest.mark.prove
def test_figures_come_a_step_late_and_before_a_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's at once: somebody waits to see it; so does the save of step 4, whose weights step 5 shows to be
    good. Every step's are in metrics.jsonl."""
    seen = order_of(monkeypatch)
    made = recipe(root, "late", train={"max_steps": 6}, checkpoint={"save_steps": 4})
    train_here(made)
    steps = [f"{what[0]}{step}" for what, step in seen]
    assert steps == ["l1", "r1", "l2", "l3", "r2", "l4", "r3", "r4", "l5", "r5", "l6", "r6"]
    rows = [json.loads(line) for line in (directory(made) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in rows] == [64 * step for step in range(1, 7)]
    assert all(row["seconds"] > 0 for row in rows)


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The loss is NaN in ``steps``."""
    launch, true, at = loop.launch, pretrain.finish, [0]

    def launching(state: Any, *args: Any) -> Any:
        at[0] = state.step + 1
        return launch(state, *args)

    def finish(*args: Any, **given: Any) -> Loss:
        loss = true(*args, **given)
        return Loss(loss.value * torch.nan) if at[0] in steps else loss

    monkeypatch.setattr(loop, "launch", launching)
    monkeypatch.setattr(pretrain, "finish", finish)


@pytest.mark.matrix
@pytest.mark.matrix
@pytest.mark.parametrize(("allowed", "stops_at", "launched"), [(1, 6, 6), (0, 5, 6), (2, 7, 7)])
def test_a_poisoned_run_names_its_step_although_the_figures_come_late(
    root: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, stops_at: int, launched: int
) -> None:
    """After a step that was skipped none is launched before the one before is known. Of the poisoned steps nothing is
    saved, and the run goes on from step 3 as one that was never poisoned."""
    made = recipe(root, "poisoned", run={"max_skipped_steps": allowed})
    with monkeypatch.context() as patch:
        spoil(patch, set(range(5, 9)))
        seen = order_of(patch)
        with pytest.raises(TrainingError, match=refusal("NUM001", "not finite", f"{allowed + 1} steps")) as raised:
            train_here(made)
    [problem] = raised.value.problems
    assert (problem.code, problem.where.partition(",")[0]) == ("NUM001", f"step {stops_at}")
    assert max(step for what, step in seen if what == "launched") == launched
    assert [line[-1] for line in numbers(directory(made))] == [False] * 4 + [True] * (launched - 4)
    assert [path.name for path in (directory(made) / "checkpoints").glob("step-*")] == ["step-00000003"]
    train_here(made)
    whole = recipe(root, "whole")
    train_here(whole)
    assert numbers(directory(made)) == numbers(directory(whole))
    assert weights_hash(directory(made)) == weights_hash(directory(whole))


@pytest.mark.prove
def test_a_skipped_step_costs_one_update_and_the_rest_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of updates in a checkpoint is that of the kernel: bias correction goes on where it was."""
    made = recipe(root, "skipped")
    spoil(monkeypatch, {4})
    train_here(made)
    assert [line[-1] for line in numbers(directory(made))] == [False] * 3 + [True] + [False] * 4
    paths = sorted((directory(made) / "checkpoints").glob("step-*/state.json"))
    kept = [json.loads(path.read_text()) for path in paths]
    assert [(facts["step"], facts["updates"]) for facts in kept] == [(6, 5), (8, 7)]


@pytest.mark.prove
def test_a_run_that_fails_keeps_the_figures_of_its_last_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 6 has no data: step 5 was launched, and its line is not lost."""
    fetch = Guard.fetch

    def failing(self: Guard, step: int, batches: Iterator[Any]) -> Any:
        if step == 6:
            raise Told
        return fetch(self, step, batches)

    monkeypatch.setattr(Guard, "fetch", failing)
    made = recipe(root, "failed")
    with pytest.raises(Told):
        train_here(made)
    assert [line[0] for line in numbers(directory(made))] == [1, 2, 3, 4, 5]
    found = read_exit(directory(made))
    assert found is not None and found.kind == "crash"


def test_what_has_not_arrived_is_not_waited_for_when_a_run_fails() -> None:
    """A device that hangs would keep the failure to itself."""

    class Away:
        def arrived(self) -> bool:
            return False

    pending: Any = PendingSteps(None, None, None, None)  # type: ignore[arg-type]
    launched = Launched(None, Away(), None)  # type: ignore[arg-type]
    with pytest.raises(Told), pending:
        pending._open.append((launched, [], True))
        raise Told
