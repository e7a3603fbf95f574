"""Launchers are rows: which one is taken, and that each has its program."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.launch import local
from shardwise.launch.launchers import Ended, Launch, launch
from shardwise.spec.launchers import LAUNCHERS, launcher_of
from shardwise.spec.load import load_recipe
from tests.said import refusal


@pytest.mark.parametrize(
    ("name", "nodes", "taken"), [("auto", 1, "local"), ("auto", 2, "torchrun"), ("torchrun", 1, "torchrun")]
)
def test_the_first_that_can_is_taken(name: str, nodes: int, taken: str) -> None:
    assert launcher_of(name, nodes).name == taken


def test_one_that_starts_ranks_here_is_refused_for_several_machines() -> None:
    values = "`run.launcher: local`", "this machine", "`run.nodes` is 2"
    with pytest.raises(ConfigError, match=refusal("CFG008", *values)) as told:
        launcher_of("local", 2)
    assert "run.launcher=torchrun" in told.value.problems[0].fix
    with pytest.raises(ConfigError, match=r"run\.launcher.*one of auto, local, torchrun"):
        load_recipe(None, ["run.launcher=mpirun"])


def test_those_that_wait_run_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(local, "run_ranks", lambda *words, **more: given.append((*words, more)) or Ended(3))
    assert launch(LAUNCHERS["local"], Launch(["train"], 1, 2, Path("runs/a"), saves=False)) == Ended(3)
    assert given == [(["train"], 2, Path("runs/a"), {"saves": False})]


@pytest.mark.parametrize("name", [name for name, spec in LAUNCHERS.items() if not spec.here])
def test_those_that_tell_name_what_is_to_be_run(name: str, tmp_path: Path) -> None:
    words = ["train", str(tmp_path / "a b/recipe.yaml")]
    told = launch(LAUNCHERS[name], Launch(words, 2, 4, tmp_path, 1234))
    written = "".join(path.read_text() for path in tmp_path.glob("*"))
    assert isinstance(told, list) and f"-m shardwise train '{words[1]}'" in "\n".join(told) + written
