"""Calls between the modules of a package are counted as the script says."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOM = Path(__file__).resolve().parents[2] / "bench" / "rooms.py"
FILES = {
    "runtime/loop.py": (
        "from walked.runtime.passes import forward\n"
        "from walked.techniques.optim import update\n"
        "def train(outside):\n"
        "    forward(lambda: outside(seen))\n"
        "    import walked.late\n"
        "    update(outside)\n"
        "def seen(): pass\n"
    ),
    "runtime/passes.py": "from walked.spec import nouns\ndef forward(call): [nouns.noun(call) for _ in range(2)]\n",
    "spec/nouns.py": "def noun(call): call()\n",
    "late.py": "from walked.spec.nouns import noun\nnoun(int)\n",
    "techniques/optim.py": "def update(outside): outside(None)\n",
}
LIBRARY = "def outside(call): call() if call else step()\ndef step(): pass\n"


def test_calls_between_modules_are_doors_once_and_those_of_imports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / "walked" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "walked" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "/lib/torch/optim/adam.py", "exec"), library)
    seen = runpy.run_path(str(ROOM))["Walk"](tmp_path / "walked")
    train = importlib.import_module("walked.runtime.loop").train
    before = sys.getprofile()
    sys.setprofile(seen)
    train(library["outside"])
    sys.setprofile(before)
    assert seen.ended
    assert {(one[0], other[0]) for one, other in seen.doors} == {
        ("runtime/loop", "runtime/passes"),
        ("runtime/passes", "spec/nouns"),
        ("spec/nouns", "runtime/loop"),
        ("runtime/loop", "techniques/optim"),
    }
    assert len(seen.doors) == 4, "what is called twice is one door"
