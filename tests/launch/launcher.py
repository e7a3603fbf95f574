"""The launcher in a process of its own, so that tests can send it signals: ``launcher <directory> <deed>``."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.launch.local import launch

if __name__ == "__main__":
    ended = launch(sys.argv[1:], 2, Path(sys.argv[1]), module="tests.launch.fake_rank")
    print(ended.exit_code, ended.problem.code if ended.problem else "-", flush=True)
    sys.exit(ended.exit_code)
