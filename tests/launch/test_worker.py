"""What a rank sets before torch is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.launch.worker import ALLOCATOR, set_up_torch

RANK = """
import json, os, sys
from shardwise.cli import app, train

def work(recipe, *given, **named):
    print(json.dumps(["torch" in sys.modules, {name: os.environ[name] for name in os.environ if "CONF" in name}]))
    return 0

train.work = work
sys.exit(app.main(sys.argv[1:]))
"""


def rank(directory: Path, *words: str, **variables: str) -> dict[str, str]:
    """The variables with ``CONF`` in their names that a rank has when its work begins; torch is not loaded by then."""
    kept = {name: value for name, value in os.environ.items() if name not in (*ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG")}
    environment = kept | {"RANK": "0", "WORLD_SIZE": "1", **variables}
    command = [sys.executable, "-c", RANK, "train", "--run", "r", *words]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded, found = json.loads(done.stdout)
    assert not loaded
    return {name: found[name] for name in (*ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG") if name in found}


def test_segments_grow_in_place(tmp_path: Path) -> None:
    [(name, value)] = rank(tmp_path).items()
    assert (name, value) == ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings(value)  # torch refuses what it cannot read
    with pytest.raises(ValueError):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:maybe")


def test_a_deterministic_run_gives_cublas_its_workspaces(tmp_path: Path) -> None:
    """Those that torch asks for in its refusal, which the plan prices; what the user set stands."""
    assert rank(tmp_path, "run.deterministic=true")["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    kept = rank(tmp_path, "run.deterministic=true", CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert kept["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ALLOCATOR:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    set_up_torch(deterministic=False)
    assert {each: os.environ[each] for each in ALLOCATOR if each in os.environ} == {name: "max_split_size_mb:512"}
