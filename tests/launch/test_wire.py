"""Two nodes over a network that is slow, loses packets, and breaks: for a while, or for good."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwise.runtime.faults.outcome import read_exit
from tests.launch.lossy_node import Nodes
from tests.launch.test_lost_nodes import Pair, pair
from tests.launch.waiting import until
from tests.launch.wire import Wire, joined, possible

pytestmark = [
    pytest.mark.big,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="namespaces and tun devices are root's"),
]
STEPS, SAVE = 5, 2


def begin(made: Pair, wire: Wire | None) -> list[int]:
    """Start both nodes; their pids."""
    return [made.start(node, more=wire.variables(node) if wire else {}) for node in range(2)]


def steps(made: Pair) -> int:
    path = made.directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_slow_wire_that_loses_packets_and_breaks_for_two_seconds(root: Path, nodes: Nodes) -> None:
    """200 ms there and back, 1 % lost: TCP sends again, and no number is another."""
    whole, made = (pair(root, nodes, name, steps=STEPS, save=SAVE) for name in ("near", "far"))
    assert [nodes.finish(pid) for pid in begin(whole, None)] == [0, 0], whole.said(0)[-3000:]
    with joined() as wire:
        both = begin(made, wire)
        until(lambda: steps(made) >= 1, 200)
        wire.delay_s, wire.loss, wire.up = 0.1, 0.01, False
        time.sleep(2.0)
        wire.up = True
        assert [nodes.finish(pid) for pid in both] == [0, 0], made.said(0)[-3000:]
        assert wire.carried > 100 and wire.lost > 0
    assert made.numbers() == whole.numbers() and made.weights() == whole.weights()


def test_a_wire_that_stays_broken_ends_the_run(root: Path, nodes: Nodes) -> None:
    """Both nodes end by themselves soon after `run.timeout_s`, and may be started again."""
    made = pair(root, nodes, "cut", steps=400, save=SAVE, timeout_s=5.0)
    with joined() as wire:
        wire.delay_s = 0.02
        both = begin(made, wire)
        until(lambda: steps(made) > SAVE + 1, 200)
        wire.up = False
        begun = time.monotonic()
        assert [nodes.finish(pid) for pid in both] == [1, 1], made.said(0)[-3000:]
        assert time.monotonic() - begun < 90  # a vote before a save is waited for ten times as long
    told = read_exit(made.directory)
    assert told is not None and told.kind in ("hang", "peer_lost") and told.restartable
    assert {path.name for path in (made.directory / "checkpoints").glob("step-*")} >= {f"step-{SAVE:08d}"}
