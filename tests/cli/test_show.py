"""What is printed, and to whom."""

from __future__ import annotations

import os
import subprocess
import sys

PRINTS = """
import sys
from shardwise.cli.show import outlive_output
outlive_output()
print("before", sys.stdout.isatty(), flush=True)
sys.stdin.readline()
for n in range(3):
    print("after", n, flush=True)
    print("after", n, file=sys.stderr)
open(sys.argv[1], "w").close()
"""


def test_lines_that_nobody_reads_or_that_no_disk_can_hold_go_nowhere(tmp_path: object) -> None:
    done = f"{tmp_path}/done"
    program = subprocess.Popen(
        [sys.executable, "-c", PRINTS, done], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert program.stdin is not None and program.stdout is not None
    assert program.stdout.readline() == b"before False\n"
    program.stdout.close()  # as `head -1` does
    program.stdin.write(b"\n")
    program.stdin.close()
    assert program.wait(20) == 0 and os.path.exists(done)
    os.unlink(done)
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PRINTS, done], input=b"\n", stdout=full, stderr=full, timeout=20)
    assert ended.returncode == 0 and os.path.exists(done)


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
