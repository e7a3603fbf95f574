"""Goodput under a storm of kills: the share of a run's time that goes into steps which count.

    python bench/storm.py [--mean-s 60] [--minutes 15] [--directory DIR]

Two ranks of a small model train; after a time drawn from an exponential distribution one of them, drawn too, is killed,
and the same command is typed again, until all steps are done. The first, short run is left alone: it tells the seconds
of a step, of a save and of a start. Checkpoints are as far apart as Young's formula says for these and the mean time
between kills. What that interval allows is Daly's: with steps of tau seconds between saves that take delta, a restart R
and a mean M, a segment takes M e^(R/M) (e^((tau+delta)/M) - 1), and goodput is tau over that (Daly, A higher order
estimate of the optimum checkpoint interval, 2006, equation 13). At the end the weights are compared to the bit with
those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardwise.spec.units import counted

MODEL = ["hidden_size=192", "intermediate_size=512", "num_hidden_layers=4", "num_attention_heads=4", "vocab_size=300"]
PROBE_STEPS, PROBE_SAVES = 60, 20


@dataclass(frozen=True)
class Undisturbed:
    """Seconds of a step, of a save until it is committed, and from the command to the first step that is typical."""

    step: float
    save: float
    start: float


@dataclass(frozen=True)
class Stormy:
    """``restarts``: seconds from each kill to the first step after it."""

    seconds: float
    kills: int
    restarts: list[float]


def words(root: Path, name: str, steps: int, every: int) -> list[str]:
    """The command of a run of so many steps that saves so often."""
    settings = [f"model.config.{word}" for word in MODEL]
    settings += [f"data.path={root}/text", f"data.cache={root}/cache", "data.tokenizer.vocab_size=300"]
    settings += ["data.repeat=true", "train.seq_len=256", "train.global_batch_size=8", f"run.out={root}/runs"]
    settings += ["evaluate.eval_steps=null", f"checkpoint.save_steps={every}", f"train.max_steps={steps}"]
    return [sys.executable, "-m", "shardwise", "train", *settings, "--run", name, "--nproc", "2"]


def write_text(root: Path) -> None:
    """Write what is trained on."""
    (root / "text").mkdir()
    for number in range(40):
        text = "\n".join(f"line {number} {n} says {n * n % 97} and {n * number % 13}" for n in range(400))
        (root / "text" / f"{number}.txt").write_text(text)


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of one of a run's logs; none before there is one."""
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def starts(run: Path) -> list[float]:
    """When its steps began, at each start."""
    return [event["time_s"] for event in lines(run, "events.jsonl") if event["event"] == "start"]


def undisturbed(root: Path) -> Undisturbed:
    """A short run that nobody kills."""
    begun_s = time.time()
    subprocess.run(words(root, "probe", PROBE_STEPS, PROBE_SAVES), check=True, stdout=subprocess.DEVNULL)
    took = [row["seconds"] for row in lines(root / "runs/probe", "metrics.jsonl")]
    step_s = statistics.median(took)
    slower = sum(max(0.0, one - step_s) for one in took[:4])
    saves = [event["seconds"] for event in lines(root / "runs/probe", "events.jsonl") if "committed" in event["event"]]
    return Undisturbed(step_s, statistics.median(saves), starts(root / "runs/probe")[0] - begun_s + slower)


def storm(root: Path, command: list[str], mean_s: float, seed: int) -> Stormy:
    """Train until all steps are done, however often a rank is killed."""
    drawn, begun_s, kills = random.Random(seed), time.time(), list[float]()
    while True:
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until_s = time.time() + drawn.expovariate(1 / mean_s)
        while launcher.poll() is None:
            time.sleep(0.02)
            if time.time() < until_s:
                continue
            if ranks := psutil.Process(launcher.pid).children(recursive=True):
                kills.append(time.time())
                drawn.choice(ranks).kill()
                launcher.wait()
        if launcher.returncode == 0:
            break
    found = starts(root / "runs/storm")
    after = [min((each for each in found if each > kill), default=math.inf) - kill for kill in kills]
    return Stormy(time.time() - begun_s, len(kills), [one for one in after if one < math.inf])


def weights(run: Path) -> str:
    """A hash of the exported weights."""
    return hashlib.sha256((run / "hf/model.safetensors").read_bytes()).hexdigest()


def allowed(tau_s: float, save_s: float, restart_s: float, mean_s: float) -> float:
    """The goodput that Daly's model gives."""
    return tau_s / (mean_s * math.exp(restart_s / mean_s) * (math.exp((tau_s + save_s) / mean_s) - 1))


def main() -> None:
    """Print what was measured beside what the interval allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mean-s", type=float, default=60.0, help="mean seconds between two kills")
    parser.add_argument("--minutes", type=float, default=15.0, help="how long the steps would take undisturbed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        root = Path(place)
        write_text(root)
        plain = undisturbed(root)
        every = max(1, round(math.sqrt(2 * plain.save * given.mean_s) / plain.step))
        steps = round(given.minutes * 60 / plain.step)
        print(f"a step {plain.step:.3f} s, a save {plain.save:.3f} s, a start {plain.start:.1f} s", flush=True)
        print(f"{counted(steps, 'step')}, a checkpoint every {every}, kills {given.mean_s:.0f} s apart", flush=True)
        found = storm(root, words(root, "storm", steps, every), given.mean_s, given.seed)
        rows = lines(root / "runs/storm", "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, steps + 1)), "a step is missing, or was written twice"
        step_s = statistics.median(row["seconds"] for row in rows)
        restart_s = statistics.fmean(found.restarts) if found.restarts else plain.start
        share = steps * step_s / found.seconds
        came_s = found.seconds / max(1, found.kills)
        bounds = [allowed(every * step_s, plain.save, restart_s, mean_s) for mean_s in (came_s, given.mean_s)]
        print(f"{found.seconds:.0f} s, {counted(found.kills, 'kill')}, {restart_s:.1f} s from one to the next step")
        print(f"goodput {share:.3f} with steps of {step_s:.3f} s", flush=True)
        told = f"{bounds[0]:.3f} at the rate of kills that came, {bounds[1]:.3f} at the one asked for"
        print(f"the interval allows {told}", flush=True)
        subprocess.run(words(root, "plain", steps, steps), check=True, stdout=subprocess.DEVNULL)
        same = weights(root / "runs/storm") == weights(root / "runs/plain")
        print(f"weights are those of a run that nobody killed: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
