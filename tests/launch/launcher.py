"""The launcher in a process of its own, so that tests can look at it and send it signals: ``launcher <directory>
<deed>``."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.launch.local import run_ranks

if __name__ == "__main__":
    module = "tests.launch.network_rank" if sys.argv[2] == "network" else "tests.launch.fake_rank"
    ended = run_ranks(sys.argv[1:], 2, Path(sys.argv[1]), module=module)
    print(ended.exit_code, ended.problem.code if ended.problem else "-", flush=True)
    sys.exit(ended.exit_code)
