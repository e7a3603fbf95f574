"""Nodes that differ are told of in one report, with their names and values."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.errors import ConfigError
from shardwise.runtime import node_facts
from shardwise.runtime.node_facts import LEAST_BYTES, differences
from shardwise.spec.recipe import Recipe
from tests.cli.test_face import WORDS
from tests.runtime.small_run import write_text
from tests.said import refusal, shows
from tests.style.source import ROOT

SAME = {"torch": "2.13.0", "shardwise's code": "1f3a", "nccl": "2.29.3"}
HERE = Path("runs")


def node(host: str, **facts: Any) -> dict[str, Any]:
    given = {"versions": SAME, "mark": ".node-1", "data": "9c02", "unwritable": "", "free": LEAST_BYTES}
    return {"host": host, **given, **facts}


def test_nodes_that_are_alike_are_no_problem() -> None:
    alike = [node("a"), node("b", free=LEAST_BYTES * 9), node("c", data="")]
    assert differences(alike, [True] * 3, HERE) == [], "what is not yet prepared is compared later"


def test_every_difference_is_told_of_at_once() -> None:
    others = SAME | {"torch": "2.12.1", "shardwise's code": "77aa"}
    nodes = [node("a"), node("b", versions=others, data="e1e1"), node("c", free=2**20), node("d", versions=others)]
    found = differences(nodes, [True, False, True, True], HERE)
    a, b, c, d = (f"node {number} ({host})" for number, host in enumerate("abcd"))
    expected = [
        ("RUN003", "torch:", "2.13.0", a, c, "2.12.1", b, d),
        ("RUN003", "shardwise's code:", "1f3a", a, c, "77aa", b, d),
        ("RUN008", "prepared data:", "9c02", a, c, d, "e1e1", b),
        ("RUN008", "directory", "not shared:", a, "not see", b),
        ("RUN008", c, "1.0 MiB", "1.0 GiB"),
    ]
    for each, (code, *values) in zip(found, expected, strict=True):
        assert each.code == code and shows(each.what, *values)
        assert each.what.count("node ") == len({a, b, c, d} & {*values}), "each is named once"
    assert found[0].fix == "pip install torch==2.13.0 on every node"


def test_of_many_nodes_some_are_named() -> None:
    nodes = [node(f"h{number}", data="e1e1" if number else "9c02") for number in range(12)]
    (found,) = differences(nodes, [True] * 12, HERE)
    assert shows(found.what, "prepared data: 9c02", "node 0 (h0);", "e1e1", "node 1 (h1), ")
    assert found.what.endswith("node 8 (h8) and 3 more") and "h9" not in found.what


def test_a_directory_that_cannot_be_written_is_not_called_hidden() -> None:
    (found,) = differences([node("a"), node("b", unwritable="/x: Permission denied")], [True, True], HERE)
    assert (found.code, found.what) == ("RUN008", "node 1 (b) cannot write /x: Permission denied")


def test_a_node_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "told_by_nodes", lambda make, judge: judge([make(), ""]))
    with pytest.raises(ConfigError, match=refusal("RUN008", "node 1", "not come", "600 s")):
        node_facts.check_nodes(Recipe(), tmp_path / "runs/a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mounted", [False, True])
def test_where_the_mark_lies(mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may see the run's directory later: all look for marks in the one above, unless it is a disk that is
    mounted, as a container's may be: what lies above is then each node's own."""
    (run := tmp_path / "runs/a").mkdir(parents=True)
    seen = list[Path]()

    def told(make: Callable[[], str], judge: Callable[[list[str]], str]) -> str:
        said = make()
        seen.extend(tmp_path.rglob(".node-*"))
        return judge([said])

    monkeypatch.setattr(node_facts, "told_by_nodes", told)
    monkeypatch.setattr(Path, "is_mount", lambda path: mounted and path == run)
    node_facts.check_nodes(Recipe(), run)
    assert [path.parent for path in seen] == [run if mounted else run.parent] and not list(tmp_path.rglob(".node-*"))


PLANTED = {"nothing": 0, "code": 1, "data": 1, "directory": 1, "all": 3}


@pytest.mark.prove
@pytest.mark.parametrize("planted", PLANTED)
def test_two_nodes_with_a_planted_difference(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are this machine, in directories of their own where they are to differ. The report is rank 0's alone."""
    places, code = [tmp_path / name for name in ("first", "second")], [ROOT / "src"] * 2
    planted_all = planted == "all"
    for number, place in enumerate(places):
        place.mkdir()
        monkeypatch.chdir(place)
        write_text(Path("text"))
        if number and (planted_all or planted == "data"):
            Path("text/more.txt").write_text("one more line\n")
        assert main(["data", "prepare", *[word for word in WORDS if word.startswith("data.")]]) == 0
    if planted_all or planted == "code":
        for name in ("src", "recipes"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        with (tmp_path / "src/shardwise/errors.py").open("a") as file:
            file.write("# changed here alone\n")
        code[1] = tmp_path / "src"
    out = [tmp_path / "runs"] * 2
    if planted_all or planted == "directory":
        out = [place / "runs" for place in places]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    known = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "PET_"))}
    known |= {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    nodes = []
    for number, place in enumerate(places):
        environment = known | {"PET_NODE_RANK": str(number), "PYTHONPATH": str(code[number])}
        words = [sys.executable, "-m", "shardwise", "train", *WORDS, "--run=a", f"--out={out[number]}"]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(words, env=environment, cwd=place, **streams))
    said = [each.communicate(timeout=200)[0] for each in nodes]
    codes = [each.returncode for each in nodes]
    if planted == "nothing":
        assert codes == [0, 0], said
        assert json.loads((out[0] / "a/exit.json").read_text())["kind"] == "done"
        return
    assert codes == [78, 78], said
    assert said[0].count("error[RUN00") == PLANTED[planted] and "error" not in said[1], said
    assert said[1].count("log of rank 0") == 1
    host = socket.gethostname()
    expected = {"code": "shardwise's code: ", "data": "prepared data: ", "directory": "directory is not shared: "}
    for name, text in expected.items():
        (line,) = [line for line in said[0].splitlines() if text in line] or [""]
        assert bool(line) == (planted in (name, "all")) and (not line or f"node 1 ({host})" in line), said[0]
    assert not list(tmp_path.rglob(".node-*")) and not (out[0] / "a").exists()
