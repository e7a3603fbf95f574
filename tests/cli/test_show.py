"""What is printed, and to whom."""

from __future__ import annotations

import os
import subprocess
import sys

PRINTS = """
import sys
from shardwise.cli.show import outlive_terminal
outlive_terminal()
print("before", sys.stdout.isatty(), flush=True)
sys.stdin.readline()
for n in range(3):
    print("after", n, flush=True)
    print("after", n, file=sys.stderr)
open(sys.argv[1], "w").close()
"""


def test_lines_to_a_terminal_that_has_closed_go_nowhere(tmp_path: object) -> None:
    ours, theirs = os.openpty()
    done = f"{tmp_path}/done"
    program = subprocess.Popen(
        [sys.executable, "-c", PRINTS, done], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, text=True
    )
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"before True")
    os.close(ours)
    program.communicate("\n", timeout=20)
    assert program.returncode == 0 and os.path.exists(done)
