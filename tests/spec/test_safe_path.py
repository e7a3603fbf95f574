"""Code that lies in the working directory is not run by what we start there."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from shardwise.spec.safe_path import safe_path
from tests.traps import set_traps, sprung


def environment(directory: Path) -> None:
    """What a process has that was started by multiprocessing, and its children have."""
    (directory / "told").write_text(f"{sys.flags.safe_path} {os.environ.get('PYTHONSAFEPATH')} {'' in sys.path}")


def told_by_child(directory: Path) -> str:
    process = get_context("spawn").Process(target=environment, args=(directory,))
    process.start()
    process.join(60)
    return (directory / "told").read_text()


def test_what_multiprocessing_starts_does_not_look_where_it_stands_and_the_script_keeps_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(set_traps(tmp_path / "traps"))
    with safe_path():
        assert told_by_child(tmp_path) == "True 1 False"
    assert sprung(tmp_path / "traps") == [] and "PYTHONSAFEPATH" not in os.environ
    print_it = "import sys; print(sys.flags.safe_path)"
    assert subprocess.run([sys.executable, "-c", print_it], capture_output=True).stdout == b"False\n"


def test_a_command_that_python_dash_m_starts_does_not_look_where_it_stands(tmp_path: Path) -> None:
    traps = set_traps(tmp_path / "traps")
    known = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-m", "shardwise", "--version"]
    done = subprocess.run(command, cwd=traps, env=known, capture_output=True, text=True)
    assert done.stdout.startswith("shardwise ") and sprung(traps) == []
