"""The seconds of a step as planned and as measured, on two CPU ranks.

    python bench/seconds.py [--rounds 2] [--steps 16] [--case quickstart ...] [--json FILE]

For each recipe in turn, for some rounds: ``shardwise doctor`` measures the machine, ``shardwise plan`` predicts the
time of a step from what it found, and ``shardwise train`` takes some; what was measured is the median of the run's
steps after the first ones, as its report says. Everything happens in directories of its own, so that no earlier run
corrects a plan. The run takes the plan whose time was predicted (``train --plan``). ``others`` is how many cores other
programs used meanwhile, on average: medians of doctor's short samples miss what a step is slowed by, so that a ratio
counts only where this is next to nothing.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def words(seq_len: int, batch: int, **settings: object) -> list[str]:
    """A recipe on the command line."""
    named = {"train.seq_len": seq_len, "train.global_batch_size": batch, **settings}
    return [f"model.config={json.dumps(LLAMA)}", *(f"{key}={value}" for key, value in named.items())]


CASES = {
    "quickstart": [],
    "ddp": words(256, 8, **{"parallel.strategy": "ddp", "parallel.tp": 1}),
    "zero3": words(512, 8, **{"parallel.strategy": "zero3", "parallel.tp": 1, "recompute.mode": "full"}),
    "tp": words(512, 4, **{"parallel.tp": 2}),
    "lora": words(256, 4, **{"parallel.strategy": "ddp", "parallel.tp": 1, "lora.rank": 8}),
}
"""Recipes whose steps take from a third of a second to some seconds."""


@dataclass(frozen=True)
class Pair:
    """One step, as planned and as measured. ``parts`` are the plan's."""

    case: str
    predicted_s: float
    measured_s: float
    others: float
    parts: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


def pair(case: str, steps: int) -> Pair:
    """Measures one case."""
    begun, began_s = busy_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        _run(["doctor", "-o", "cluster.yaml"], at)
        planned = json.loads(_run(["plan", *CASES[case], "--cluster", "cluster.yaml", "--json", "-o", "plan.yaml"], at))
        brief = [f"train.max_steps={steps}", "evaluate.max_batches=1", "checkpoint.save_steps=1000", "run.nproc=2"]
        _run(["train", *CASES[case], *brief, "run.device=cpu", "--run", "timed", "--plan", "plan.yaml"], at)
        (line,) = (at / "shardwise" / "steps.jsonl").read_text().splitlines()
    found = planned["plan"]["estimate"]["seconds"]
    others = (busy_s() - begun) / (time.monotonic() - began_s)
    return Pair(case, found["step_s"], json.loads(line)["measured_s"], others, found)


def busy_s() -> float:
    """Seconds for which cores have worked for other programs since the machine was started: all that Linux counts, but
    for what this process and those that it waited for took."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - ours


def _run(command: list[str], at: Path) -> str:
    environment = {**os.environ, "HOME": str(at), "XDG_STATE_HOME": str(at)}
    asked = [sys.executable, "-m", "shardwise", *command]
    done = subprocess.run(asked, cwd=at, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`shardwise {' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def told(pairs: list[Pair]) -> list[str]:
    """The table, and what it comes to."""
    lines = [f"{'case':12} predicted  measured  ratio  others"]
    for each in pairs:
        figures = f"{each.predicted_s:8.3f} s {each.measured_s:7.3f} s  {each.ratio:5.2f}  {each.others:6.2f}"
        lines.append(f"{each.case:12} {figures}")
    ratios = sorted(each.ratio for each in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    lines.append(f"ratio: median {middle:.2f}, quartiles {low:.2f} and {high:.2f}, of {len(ratios)}")
    by = {side: order([(each.case, getattr(each, side)) for each in pairs]) for side in ("predicted_s", "measured_s")}
    same = "the measured one" if by["predicted_s"] == by["measured_s"] else f"measured {' < '.join(by['measured_s'])}"
    return [*lines, f"order as predicted: {' < '.join(by['predicted_s'])}; {same}"]


def order(times: list[tuple[str, float]]) -> list[str]:
    """Cases by their median time, the fastest first."""
    cases = {case: statistics.median(s for name, s in times if name == case) for case, _ in times}
    return sorted(cases, key=lambda case: cases[case])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pairs: list[Pair] = []
    for _ in range(given.rounds):
        for case in given.case:
            pairs.append(pair(case, given.steps))
            print(told(pairs)[len(pairs)], flush=True)
    print("\n".join(["", *told(pairs)]))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(each) for each in pairs], indent=1))


if __name__ == "__main__":
    main()
