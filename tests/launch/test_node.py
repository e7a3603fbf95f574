"""One node of several: how it is known, how its ranks are started, and with which code they end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.errors import ConfigError, TrainingError, UnavailableError
from shardwise.launch.node import Node, await_first, run, this_node
from tests.said import refusal, shows
from tests.style.source import ROOT

GIVEN = {"NNODES": "4", "NODE_RANK": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "a-0.a", "MASTER_PORT": "29501"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a pod of Kubeflow's trainer."""
    for name, value in GIVEN.items():
        monkeypatch.setenv(f"PET_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "PET_RDZV_ID"):
        monkeypatch.delenv(name, raising=False)


def test_it_is_known_by_the_variables_of_torchrun(given: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_node(["train", "recipe.yaml"]) == Node(4, 2, 8, "a-0.a", 29501)
    assert this_node(["train", "recipe.yaml", "--dry-run"]) is None
    monkeypatch.delenv("PET_MASTER_PORT")
    monkeypatch.setenv("PET_RDZV_ID", "start-7")
    assert this_node(["train"]) == Node(4, 2, 8, "a-0.a", 29500, "start-7")
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert this_node(["train"]) == Node(4, 2, 8, "a-0.a", 29500, "start-7", 1)
    monkeypatch.setenv("PET_NNODES", "1")
    assert this_node(["train"]) is None


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("NNODES", "5:4", ["`PET_NNODES` is 5:4"]),
        ("NNODES", "0:4", ["PET_NNODES:", "whole number", "from 1"]),
        ("NNODES", "1:4:4", ["`PET_NNODES` is 1:4:4"]),
        ("NODE_RANK", "", ["`PET_NODE_RANK` is not set"]),
        ("NODE_RANK", "4", ["below 4", "PET_NNODES"]),
        ("NPROC_PER_NODE", "gpu", ["PET_NPROC_PER_NODE:", "whole number", "1 to 1024"]),
        ("NPROC_PER_NODE", "0", ["`PET_NPROC_PER_NODE` is 0"]),
        ("MASTER_ADDR", "", ["PET_MASTER_ADDR:", "first node's", "address"]),
        ("MASTER_PORT", "٣", ["PET_MASTER_PORT:", "whole number", "1 to 65535"]),
    ],
)
def test_what_they_must_say(
    name: str,
    value: str,
    values: list[str],
    given: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"PET_{name}", value)
    with pytest.raises(ConfigError, match="RUN007") as told:
        this_node(["train"])
    assert shows(told.value, *values)
    assert main(["train"]) == 78 and "RUN007" in capsys.readouterr().err


def test_other_commands_and_ranks_are_none(given: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.node.run", lambda *given: pytest.fail("it was started"))
    assert main(["runs", "nowhere"]) != 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "32")
    assert main(["train", "no-such-recipe.yaml"]) == 66


def ended(directory: Path, deed: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a node with two ranks that do so."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    monkeypatch.setattr("shardwise.launch.node.await_first", lambda node: None)
    node = Node(3, 1, 2, "localhost", 1234, "start-7")
    return run([str(directory), deed], node, module="tests.launch.node_rank")


def test_ranks_are_told_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert ended(tmp_path, "fine", monkeypatch) == 0
    assert (tmp_path / "rank-0").read_text() == "2 0 6 2 localhost 1234 start-7"
    assert (tmp_path / "rank-1").read_text() == "3 1 6 2 localhost 1234 start-7"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("deed", "code"), [("save", 75), ("fail", 78), ("asked", 143), ("warned", 138)])
def test_it_ends_with_the_code_of_its_ranks(
    deed: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """75 where they have saved; else that of the first that failed; of ranks that were ended before they could, 143."""
    assert ended(tmp_path, deed, monkeypatch) == code
    assert shows(capfd.readouterr().err, ": saving", "stopping") == (deed != "fail")


def test_ranks_that_do_not_end_when_asked_have_not_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.local.SAVE_AND_STOP_S", 0.3)
    assert ended(tmp_path, "hang", monkeypatch) == 143


def test_a_killed_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match=refusal("RUN004", "rank 2 (pid ", "SIGKILL")) as told:
        ended(tmp_path, "killed", monkeypatch)
    assert told.value.exit_code == 1


def test_the_first_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows its own name before its ranks start; the others start theirs when its first rank listens."""
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    first.close()
    listening: list[socket.socket] = []
    monkeypatch.setattr("time.sleep", lambda _: listening.append(socket.create_server(("127.0.0.1", port))))
    await_first(Node(2, 1, 1, "127.0.0.1", port))
    assert len(listening) == 1, "the first look found nobody"
    listening[0].close()
    await_first(Node(2, 0, 1, "127.0.0.1", port), most_s=0.0)
    with pytest.raises(UnavailableError, match=refusal("NET002", "127.0.0.1", "not answer", f"port {port}", "0 s")):
        await_first(Node(2, 1, 1, "127.0.0.1", port), most_s=0.0)
    with pytest.raises(UnavailableError, match=r"NET002.*no such name"):
        await_first(Node(2, 0, 1, "no such name."), most_s=0.0)
