"""A check that a machine has what torch.compile needs besides torch, without which the first step would end in a
compiler error. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from shardwise.spec.cluster import Kind

COMPILERS: dict[Kind, tuple[str, str, tuple[str, ...]]] = {
    "cuda": ("CC", "a C compiler", ("gcc", "clang")),
    "cpu": ("CXX", "a C++ compiler", ("g++", "clang++")),
}
"""By device kind: the environment variable that may name a compiler, what it is, and the commands that are tried
otherwise. triton compiles its launchers in C, torch its CPU kernels in C++."""


def compiler_lacks(kind: Kind) -> str:
    """Return in words what this machine lacks to compile for ``kind``; empty where it has all."""
    if kind == "cuda" and find_spec("triton") is None:
        return "triton"
    variable, words, names = COMPILERS[kind]
    chosen = os.environ.get(variable, "").split()[:1]
    if not any(map(shutil.which, chosen or names)):
        return f"{words} ({' or '.join(chosen or names)})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers (python3-dev)"
    return ""
