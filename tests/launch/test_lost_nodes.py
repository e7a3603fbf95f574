"""Two nodes of a rank each that train together, one of which is lost, comes back, and is lost again."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from shardwise.runtime.faults.outcome import read_exit
from shardwise.spec.load import dump_recipe
from shardwise.spec.recipe import Recipe
from tests.faults.job import MODEL
from tests.launch.lossy_node import Nodes
from tests.launch.strangers import STRANGERS, greetings, ports, visit
from tests.launch.waiting import until
from tests.said import shows

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
STEPS, SAVE = 48, 8
LOST, ALONE, AGAIN = 13, 19, 44
"""In which step the second node stands still and is killed; the one that is left stands still; and the second again."""
SAME = ("step", "tokens", "loss", "grad_norm", "learning_rate", "supervised_tokens", "skipped")


@dataclass
class Pair:
    """A run of two nodes on this machine, in directories of their own kind of loss."""

    root: Path
    name: str
    nodes: Nodes
    port: int

    @property
    def directory(self) -> Path:
        return self.root / "runs" / self.name

    def write(self, steps: int = STEPS, save: int = SAVE, **run: Any) -> Pair:
        place = {"name": self.name, "out": str(self.root / "runs"), "device": "cpu", "timeout_s": 60.0}
        data = {"path": str(self.root / "text"), "cache": str(self.root / "cache"), "num_proc": 1}
        sections: dict[str, dict[str, Any]] = {
            "run": place | run,
            "data": data | {"tokenizer": {"vocab_size": 320}},
            "model": {"config": MODEL | {"num_key_value_heads": 2}},
            "train": {"seq_len": 32, "global_batch_size": 8, "max_steps": steps},
            "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
            "checkpoint": {"save_steps": save, "asynchronous": False},
            "evaluate": {"max_batches": 2, "sample_prompt": "line 1"},
        }
        (self.root / f"{self.name}.yaml").write_text(dump_recipe(Recipe.model_validate(sections)))
        return self

    def start(
        self, node: int, fault: str = "", nodes: str = "2", more: Mapping[str, str] = MappingProxyType({})
    ) -> int:
        """Start one node, with ``more`` in its environment; its pid."""
        place = {"NNODES": nodes, "NODE_RANK": str(node), "NPROC_PER_NODE": "1", "MASTER_PORT": str(self.port)}
        told = {f"PET_{key}": value for key, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items()}
        words = ["train", str(self.root / f"{self.name}.yaml")]
        return self.nodes.start(words, told | {"SHARDWISE_FAULT": fault} | dict(more), self.log(node))

    def log(self, node: int) -> Path:
        return self.root / f"{self.name}-{node}.log"

    def said(self, node: int) -> str:
        return self.log(node).read_text() if self.log(node).exists() else ""

    def stood_still(self, fault: str) -> None:
        """Wait until the fault has come about."""
        until(lambda: (self.directory / f"fault-{fault}").exists(), 150)

    def kill(self, pid: int) -> None:
        """Kill a node: its launcher and its ranks at once."""
        os.killpg(pid, signal.SIGKILL)
        assert self.nodes.finish(pid) == -signal.SIGKILL

    def numbers(self) -> list[tuple[Any, ...]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [tuple(json.loads(line)[key] for key in SAME) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def weights(self) -> str:
        return hashlib.sha256((self.directory / "hf" / "model.safetensors").read_bytes()).hexdigest()


def pair(root: Path, nodes: Nodes, name: str, **changes: Any) -> Pair:
    """A run that is not started; ``changes`` of its steps, its saves, and its section ``run``."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return Pair(root, name, nodes, one.getsockname()[1]).write(**changes)


@pytest.fixture(scope="module")
def whole(root: Path, nodes: Nodes) -> Pair:
    """The run that nothing disturbed."""
    made = pair(root, nodes, "whole")
    both = made.start(0), made.start(1)
    assert [nodes.finish(pid) for pid in both] == [0, 0], made.said(0)[-3000:]
    return made


def test_a_lost_node_is_waited_for(root: Path, nodes: Nodes, whole: Pair) -> None:
    """The other stays, and both go on from the newest checkpoint, to the same bits."""
    made = pair(root, nodes, "waits", on_loss="wait")
    first, second = made.start(0), made.start(1, f"forward:{LOST}:1:hang")
    made.stood_still(f"forward-{LOST}-1")
    made.kill(second)
    until(lambda: '"lost"' in (made.directory / "nodes/node-00000.json").read_text())
    second = made.start(1)
    assert [nodes.finish(pid) for pid in (first, second)] == [0, 0], made.said(0)[-3000:]
    assert [event["step"] for event in made.events("start")] == [0, SAVE]
    (changed,) = made.events("nodes changed")
    assert shows(changed["what"], "node 1 (", "lost", "came back", "2 nodes", "same plan", f"step {SAVE}")
    assert "warning[LOST002]: node 1" in made.said(0) and "warning[LOST002]: node 1" in made.said(1)
    assert made.numbers() == whole.numbers() and made.weights() == whole.weights()


def test_one_goes_on_alone_takes_the_other_in_and_goes_on_alone_again(root: Path, nodes: Nodes, whole: Pair) -> None:
    """2, 1, 2 and 1 nodes: the same batch and samples, and losses within 1e-6 of the undisturbed run's, since sums are
    taken in another order."""
    made = pair(root, nodes, "replans", on_loss="replan")
    first, second = made.start(0, f"data:{ALONE}:0:SIGSTOP"), made.start(1, f"forward:{LOST}:1:hang")
    made.stood_still(f"forward-{LOST}-1")
    made.kill(second)
    made.stood_still(f"data-{ALONE}-0")
    second = made.start(1, f"forward:{AGAIN}:1:hang")
    until(lambda: "next checkpoint" in made.said(0), 60)
    (rank,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    os.kill(int(rank), signal.SIGCONT)
    made.stood_still(f"forward-{AGAIN}-1")
    made.kill(second)
    assert nodes.finish(first) == 0, made.said(0)[-3000:]
    assert [event["ranks"] for event in made.events("start")] == [2, 1, 2, 1]
    begun = [event["step"] for event in made.events("start")]
    assert begun[:2] == [0, SAVE] and 3 * SAVE < begun[2] < AGAIN and begun[3] >= begun[2]
    lost, taken, again = (event["what"] for event in made.events("nodes changed"))
    assert shows(lost, "node 1 (", "lost", "1 node now", "2 -> 1", f"step {SAVE}")
    assert shows(taken, "node 1 (", "taken in", "2 nodes now", "1 -> 2", f"step {begun[2]}")
    assert shows(again, "lost", "1 node now")
    assert made.said(0).count("warning[LOST002]") == 2 and f"nodes: {taken}" in made.said(0)
    assert lost in (made.directory / "report.md").read_text()
    assert [line[0] for line in made.numbers()] == list(range(1, STEPS + 1))
    for mine, theirs in zip(made.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[4:] == theirs[4:] and mine[:2] == theirs[:2]


def test_one_node_of_one_to_two_is_asked_to_stop(root: Path, nodes: Nodes) -> None:
    """It begins alone, with the batch of two; asked to stop it saves and leaves with 75; where ranks cannot be planned
    for again, the run ends and says why."""
    made = pair(root, nodes, "alone", on_loss="replan")
    first = made.start(0, f"data:{LOST}:0:SIGSTOP", nodes="1:2")
    made.stood_still(f"data-{LOST}-0")
    os.kill(first, signal.SIGTERM)
    (rank,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    os.kill(int(rank), signal.SIGCONT)
    assert nodes.finish(first) == 75, made.said(0)[-3000:]
    assert shows(made.said(0), "1 node now", "2 -> 1")
    told = read_exit(made.directory)
    assert told is not None and told.kind == "preempted" and made.events("start")[-1]["ranks"] == 1


def test_strangers_change_nothing(root: Path, nodes: Nodes, whole: Pair) -> None:
    """What they say is neither run nor believed: while the first node waits for the second, and again while both
    train."""
    mark, loud = root / "was-run", root / "can-be-run"
    said = greetings(mark)
    pickle.loads(next(each for each in greetings(loud) if str(loud).encode() in each))  # noqa: S301
    assert loud.exists(), "whoever unpickles it is seen"
    made = pair(root, nodes, "visited")
    first = made.start(0)
    until(lambda: made.port in ports(first), 60)
    left = visit(made.port, said)
    second = made.start(1, f"data:{LOST}:1:SIGSTOP")
    made.stood_still(f"data-{LOST}-1")
    found = ports(first) | ports(second)
    assert made.port in found and len(found) >= 3, "the store's, and one of gloo's for each rank"
    for port in sorted(found):
        left += visit(port, said)
    (rank,) = Path(f"/proc/{second}/task/{second}/children").read_text().split()
    os.kill(int(rank), signal.SIGCONT)
    assert [nodes.finish(pid) for pid in (first, second)] == [0, 0], made.said(0)[-3000:]
    for stranger in left:
        stranger.close()
    assert len(left) > STRANGERS // 2 and not mark.exists()
    assert made.numbers() == whole.numbers() and made.weights() == whole.weights()
