"""From the command to the first step: ``shardwise train`` against torchrun with the plain loop of bench/step.py.

    python bench/start.py [--pairs 5] [--case ddp-bf16 zero3-bf16 ...] [--json FILE]

Both train a Llama of 32.5 M parameters at 512 tokens on two gloo ranks of one thread each, in turn, each from a shell's
command to the end of its first optimizer step: of Shardwise the first line of metrics.jsonl, of the plain loop a file
that it writes. Tokens are prepared before, for both. Then every process is killed. ``wall`` is the time on the clock,
``cpu`` the processor time of all processes that the command started, which other programs disturb less; ratios are
medians over pairs.
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
from dataclasses import dataclass
from pathlib import Path

import psutil
import step as steps
import torch
import torch.distributed as dist

CASES = ("ddp-bf16", "zero2-bf16", "zero3-bf16")
RECIPE = """
run: {{device: cpu, nproc: 2}}
model:
  config: {{model_type: llama, vocab_size: 8192, hidden_size: 512, intermediate_size: 1280, num_hidden_layers: 8,
    num_attention_heads: 8, num_key_value_heads: 8, head_dim: 64, max_position_embeddings: 512}}
data: {{path: stdlib, tokenizer: {{vocab_size: 8192}}}}
train: {{seq_len: 512, micro_batch_size: 2, gradient_accumulation_steps: 1, max_steps: 1000}}
parallel: {{strategy: {strategy}}}
precision: {{compute: {compute}}}
recompute: {{mode: none}}
"""


@dataclass(frozen=True)
class Taken:
    wall_s: float
    cpu_s: float


def plain(case: str, done: Path) -> None:
    """One rank of the plain loop: its first step."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plan = steps.plan_of(case, 2)
    train = (steps.plain_ddp if case.startswith("ddp") else steps.plain_fsdp)(plan)
    train(torch.randint(steps.SPEC.vocab_size, (2, steps.SEQ_LEN)))
    if dist.get_rank() == 0:
        done.write_text("done\n")
    time.sleep(600)


def take(command: list[str], done: Path) -> Taken:
    """Start ``command`` and wait until ``done`` holds a line; what that took."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (done.exists() and done.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(process.stderr.read().decode())
        time.sleep(0.02)
    wall_s = time.perf_counter() - begun
    family = [process, *process.children(recursive=True)]
    spent = [each.cpu_times() for each in family]
    cpu_s = sum(times.user + times.system + times.children_user + times.children_system for times in spent)
    for each in family:
        each.kill()
    process.wait()
    return Taken(wall_s, cpu_s)


def measure(case: str, pairs: int, directory: Path) -> dict[str, object]:
    strategy, _, compute = case.partition("-")
    recipe = directory / f"{case}.yaml"
    recipe.write_text(RECIPE.format(strategy=strategy, compute=compute))
    shardwise = [sys.executable, "-m", "shardwise"]
    subprocess.run([*shardwise, "data", "prepare", str(recipe)], check=True, stdout=subprocess.DEVNULL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", __file__]
    taken: dict[str, list[Taken]] = {"shardwise": [], "torchrun": []}
    for number in range(pairs + 1):
        out = directory / f"{case}-{number}"
        ours = [*shardwise, "train", str(recipe), f"run.out={out}", "run.name=run"], out / "run" / "metrics.jsonl"
        theirs = [*torchrun, "--loop", case, str(out) + ".done"], Path(str(out) + ".done")
        sides = {"shardwise": ours, "torchrun": theirs}
        for side in sides if number % 2 else reversed(sides):
            found = take(*sides[side])
            if number:  # the first round fills caches
                taken[side].append(found)
    ratio = {
        clock: statistics.median(
            getattr(a, clock) / getattr(b, clock) for a, b in zip(taken["shardwise"], taken["torchrun"], strict=True)
        )
        for clock in ("wall_s", "cpu_s")
    }
    result = {"case": case, "wall": ratio["wall_s"], "cpu": ratio["cpu_s"]}
    for side, runs in taken.items():
        result[f"{side}_wall_s"] = statistics.median(run.wall_s for run in runs)
        result[f"{side}_cpu_s"] = statistics.median(run.cpu_s for run in runs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--case", nargs="+", default=CASES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--loop", nargs=2, metavar=("CASE", "FILE"), help="be a rank of the plain loop")
    chosen = parser.parse_args()
    if chosen.loop:
        return plain(chosen.loop[0], Path(chosen.loop[1]))
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for case in chosen.case:
            results.append(measure(case, chosen.pairs, Path(directory)))
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in results[-1].items()})
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
