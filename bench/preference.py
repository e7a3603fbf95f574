"""The cost of a run's metrics: the time of a step with them over that of a step without, beside two series of steps
without.

    python bench/preference.py [--method dpo|sft] [--entropy] [--steps 60] [--tokens 512] [--threads 2]

The three take turns within each round, in another order each time, so that whatever else the machine does meets all
alike; what is told is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.methods.loss import Finish, Loss, Output
from shardwise.models.config import model_spec
from shardwise.runtime.build import build
from shardwise.runtime.fit import longest_batch
from shardwise.runtime.passes import finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepRules, step
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Method, OptimSection, Recipe

SPEC = model_spec("preference", 8192, 256, 704, 6, 8, 4, 32)


def without(finish: partial[Loss]) -> Finish:
    """The loss alone: what is told of tokens is not looked for, and of pairs not told."""
    silent = partial(finish, figures=()) if "figures" in finish.keywords else finish

    def bare(hidden: Tensor, head: Output, batch: MicroBatch, denominator: float) -> Loss:
        return Loss(silent(hidden, head, batch, denominator).value)

    return bare


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    for name, default in (("steps", 60), ("tokens", 512), ("threads", 2)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--method", choices=("dpo", "sft"), default="dpo")
    options.add_argument("--entropy", action="store_true")
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = "dpo" if asked.method == "dpo" else "cross_entropy"
    plan = Plan(batch=Batch(4, 2, asked.tokens), loss=loss, entropy=asked.entropy)  # type: ignore[arg-type]
    method = Method(name=asked.method)
    state = build(Recipe(method=method), SPEC, plan, Meshes(), device)
    batches = [longest_batch(plan, SPEC.vocab_size, device)] * 2
    full = StepRules(plan, Meshes(), OptimSection(learning_rate=1e-6), 10**6, finish_of(method, plan))
    assert isinstance(full.finish, partial)
    bare = replace(full, finish=without(full.finish))
    series = [bare, bare, full]
    for rules in series * 2:
        timed(state, batches, rules, device)
    one, two = [], []
    for number in range(asked.steps):
        order = [(number + place) % 3 for place in range(3)]
        took = {place: timed(state, batches, series[place], device) for place in order}
        one.append(took[1] / took[0])
        two.append(2 * took[2] / (took[0] + took[1]))
    for name, ratios in (("without, twice (A/A)", one), ("with over without (A/B)", two)):
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:<24} median {middle:.4f}  quartiles {low:.4f} {high:.4f}  ({asked.steps} rounds, {device})")


def timed(state: TrainState, batches: list[MicroBatch], rules: StepRules, device: torch.device) -> float:
    """Seconds of one step, of the process's own time on a CPU."""
    clock: Callable[[], float] = time.perf_counter if device.type == "cuda" else time.process_time
    begun = clock()
    step(state, batches, 8, rules)
    return clock() - begun


if __name__ == "__main__":
    main()
