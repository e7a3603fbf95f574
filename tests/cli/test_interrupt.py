"""Ctrl-C ends a command within a second, also inside of a library that does not look at signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.data import tokens

PROGRAM = """
import sys
from shardwise.data.conversations import Encoder
encode = Encoder.encode
def begin(self, rendered):
    print("begun", file=sys.stderr, flush=True)
    return encode(self, rendered)
Encoder.encode = begin
sys.argv = ["shardwise", *sys.argv[1:]]
from shardwise.cli.app import main
sys.exit(main())
"""
WORDS = ["data", "prepare", "method=sft", "data.path=a.jsonl", "data.cache=cache", "data.tokenizer.path=."]


@pytest.mark.prove
def test_ctrl_c_while_the_tokenizer_works(tmp_path: Path) -> None:
    """One record that takes it 40 s of the processor's time, in one call."""
    tokens.train_tokenizer(["some words"], 300, tmp_path)
    record = {"prompt": "a", "completion": "some words " * 5_000_000}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    command = [sys.executable, "-c", PROGRAM, *WORDS, "data.num_proc=1", "data.validation_share=0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline() == "begun\n"
        begun_s = _processor_s(process.pid)
        while (before_s := _processor_s(process.pid)) < begun_s + 2:  # by then it is inside
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert (process.returncode, process.stderr.read()) == (130, "interrupted\n")
    assert usage.ru_utime + usage.ru_stime - before_s < 5
    assert not list((tmp_path / "cache" / "data").glob("[!.]*"))


EARLY = """
import builtins, os, signal, sys
usual = builtins.__import__
def begin(name, *given, **named):
    if name == "typer":
        os.kill(os.getpid(), signal.SIGINT)
    return usual(name, *given, **named)
builtins.__import__ = begin
sys.argv = ["shardwise", "--version"]
import runpy
runpy.run_module("shardwise", run_name="__main__")
"""


def test_ctrl_c_while_a_command_is_being_loaded() -> None:
    """Which takes some 0.2 s; a traceback of Python's would tell nothing."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


LIGHT = """
import re, sys, warnings
before = {*sys.modules}
import shardwise.__main__
print(*sorted({*sys.modules} - before))
"""


def test_until_ctrl_c_is_heard_next_to_nothing_is_loaded() -> None:
    """Beside what the script that pip writes loads by itself. Any module there was one in which it could strike."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    ours = ["shardwise", "shardwise.__main__", "shardwise.launch", "shardwise.launch.ranks"]
    frozen = ["importlib", "importlib._bootstrap", "importlib._bootstrap_external"]
    assert set(done.stdout.split()) <= {*ours, *frozen, "signal", "types"}


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ENDED = """
import os, signal
from multiprocessing import get_context
from types import SimpleNamespace
from shardwise import __main__ as begin

def work():
    lock = get_context("spawn").Lock()
    print(lock._semlock.name, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

begin.import_module = lambda name: SimpleNamespace(main=work)
begin.main()
"""


def test_what_a_signal_leaves_is_removed_without_a_word() -> None:
    """Locks of the processes that prepare the data, in a run's start: multiprocessing's own process removes them."""
    command = [sys.executable, "-c", ENDED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (-signal.SIGTERM, "")
    assert found.stdout.startswith("/mp-") and not Path(f"/dev/shm/sem.{found.stdout.strip()[1:]}").exists()
