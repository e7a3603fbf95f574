"""Whether a board slows the run that it shows.

    python -m bench.board [--minutes 4] [--window-s 10]

One rank of a small model trains on one core; on another a board of its directory is asked for both pages every 5
seconds, as a browser asks, in every other window of time. Printed: the median over the windows of a step's time with
the board over that of the windows beside it without, and the same of windows without a board only (A/A).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

from bench.storm import words, write_text

ASK_S = 5.0


def pinned(command: list[str], core: int, **more: object) -> subprocess.Popen[str]:
    """Start a command on one core."""
    return subprocess.Popen(["taskset", "-c", str(core), *command], text=True, **more)  # type: ignore[call-overload]


def lines(run: Path) -> int:
    """How many steps are logged."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def windows(run: Path, address: str, count: int, window_s: float) -> list[tuple[int, int]]:
    """The first and last step of each window; in those of odd number the board is asked."""
    found = []
    for number in range(count):
        begun, until_s = lines(run), time.monotonic() + window_s
        while (left_s := until_s - time.monotonic()) > 0:
            for page in ("", f"run/{run.name}") if number % 2 else ():
                urllib.request.urlopen(address + page, timeout=30).read()
            time.sleep(max(0.0, min(ASK_S, left_s, until_s - time.monotonic())))
        found.append((begun + 1, lines(run)))
    return found


def main() -> None:
    """Print the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--window-s", type=float, default=10.0)
    given = parser.parse_args()
    mine, other = sorted(os.sched_getaffinity(0))[:2]
    count = round(given.minutes * 60 / given.window_s) | 1
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_text(root)
        command = words(root, "shown", 1_000_000, 1_000_000)
        command[command.index("--nproc") + 1] = "1"
        run = root / "runs/shown"
        ask = [sys.executable, "-u", "-m", "shardwise", "board", str(root / "runs")]
        train = pinned(command, mine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while lines(run) < 20:
                time.sleep(0.5)
            with pinned(ask, other, stdout=subprocess.PIPE) as board:
                assert board.stdout is not None
                address = next(line.split()[-1] for line in board.stdout if "http://" in line)
                found = windows(run, address, count, given.window_s)
                board.terminate()
        finally:
            train.terminate()
            train.wait()
        took = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    medians = [statistics.median(took[first:last]) for first, last in found]
    beside = [medians[n] / statistics.fmean((medians[n - 1], medians[n + 1])) for n in range(1, count, 2)]
    alike = [two / one for one, two in pairwise(medians[::2])]
    for name, ratios in (("with a board over without", beside), ("A/A", alike)):
        low, high = min(ratios), max(ratios)
        print(f"{name}: {statistics.median(ratios):.4f}, {low:.4f} to {high:.4f} of {len(ratios)} windows")


if __name__ == "__main__":
    main()
