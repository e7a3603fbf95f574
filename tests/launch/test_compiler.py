"""What a machine lacks to compile, found without torch."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from shardwise.launch import compiler
from tests.said import shows


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with everything: triton, gcc and g++, and Python's headers in the directory that this returns."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    found = {"gcc": "/usr/bin/gcc", "g++": "/usr/bin/g++"}
    monkeypatch.setattr(compiler, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path


def test_a_machine_with_everything(machine: Path) -> None:
    assert compiler.compiler_lacks("cuda") == compiler.compiler_lacks("cpu") == ""


def test_triton_is_for_gpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert (compiler.compiler_lacks("cuda"), compiler.compiler_lacks("cpu")) == ("triton", "")


def test_a_compiler_of_the_users_choice(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icx -O2")
    assert shows(compiler.compiler_lacks("cuda"), "C compiler (icx)")
    assert compiler.compiler_lacks("cpu") == ""


def test_without_a_compiler_or_headers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "Python.h").unlink()
    assert compiler.compiler_lacks("cuda") == "Python's headers (python3-dev)"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert shows(compiler.compiler_lacks("cuda"), "C compiler", "(gcc or clang)")
    assert compiler.compiler_lacks("cpu") == "a C++ compiler (g++ or clang++)"
