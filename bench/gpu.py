"""Tokens a second, MFU and memory of a 1 B and an 8 B Llama at 4,096 tokens, under the plan that the planner chooses.

    python bench/gpu.py [--model llama-3.2-1b ...] [--micro-batch 1 4] [--steps 10] [--weights bf16]
                        [--recompute selective] [--documents 512] [--optimizer host] [--activations host]
                        [--frozen host]
                        [--seq-len 65536] [--eager] [--loop] [--cluster FILE] [--json FILE]
    torchrun --nproc-per-node 8 bench/gpu.py            # all GPUs of a machine
    python bench/gpu.py --rehearse                      # a tiny model on the CPU: does all of this run?

Random weights and random tokens; each row is one document, or with ``--documents`` rows are cut into documents of about
so many tokens, at other places in every step. Times are medians of the steps after three to warm up. MFU counts the
arithmetic of the model, recomputation not included, over the bf16 peak of the device. ``allocated`` and ``reserved``
are the most that torch's allocator had, beside what was predicted of the first. Blocks are compiled where the plan says
so; ``--eager`` compiles none. ``--loop`` also runs ``shardwise train`` with the same settings on one process: its data,
counts, copies and logging, whose cost is the ratio of both steps. An 8 B model on 80 GB takes ``--weights bf16
--recompute selective``. A model that does not fit is said not to, and left out; without a CUDA device nothing is
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.slices import kept, local
from shardwise.models.blocks import named
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import resolve
from shardwise.planner.search import choose
from shardwise.runtime.build import build_parts, optimizer_of
from shardwise.runtime.metrics.log import flops_per_token
from shardwise.runtime.passes import finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepRules, step
from shardwise.runtime.world import device_of, process, world
from shardwise.spec.cluster import Cluster, local_cluster
from shardwise.spec.cluster_file import load_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.techniques import offload

WARM_UP = 3
SEQ_LEN = 4096
REHEARSAL = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160}
REHEARSAL |= {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VOCABULARY = 512
"""Of the tokenizer that ``--loop`` trains, in seconds; ids of a larger vocabulary would cost the step the same."""


@dataclass(frozen=True)
class Result:
    """One row: what was run, and what it took on this rank, and should have. ``loop_s``: a step of ``shardwise
    train``."""

    model: str
    plan: str
    step_s: float
    predicted_s: float | None
    tokens_per_s: float
    mfu: float | None
    predicted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    loop_s: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.plan}:"]
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        lines.append(f"    {self.tokens_per_s:,.0f} tokens/s{mfu}, {self.step_s * 1e3:,.0f} ms a step")
        if self.predicted_s is not None:
            off = self.step_s / self.predicted_s - 1
            lines[-1] += f", {self.predicted_s * 1e3:,.0f} predicted ({off:+.1%})"
        if self.loop_s is not None:
            lines.append(
                f"    shardwise train: {self.loop_s * 1e3:,.0f} ms a step, {self.loop_s / self.step_s:.3f} times"
            )
        if self.allocated_bytes:
            off = self.allocated_bytes / self.predicted_bytes - 1
            sizes = [gib(size) for size in (self.predicted_bytes, self.allocated_bytes, self.reserved_bytes)]
            lines.append(
                "    memory {} predicted, {} allocated ({:+.1%}), {} reserved".format(*sizes[:2], off, sizes[2])
            )
        return "\n".join(lines)


def main() -> None:
    """Measure every model and micro-batch asked for and print each as it is known."""
    asked = arguments().parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    device = "cpu" if asked.rehearse else "cuda"
    cluster = load_cluster(asked.cluster) if asked.cluster else local_cluster(process().world_size, device)
    found = []
    for name in ["rehearsal"] if asked.rehearse else asked.model:
        for rows in asked.micro_batch:
            recipe = recipe_of(name, rows, asked)
            spec = resolve(recipe)
            plan = choose(recipe, spec, cluster)
            if plan.estimate.peak_bytes > plan.estimate.capacity_bytes:
                needed, there = gib(plan.estimate.peak_bytes), gib(plan.estimate.capacity_bytes)
                say(f"{name}, {described(plan)}: does not fit, {needed} of {there}")
                continue
            found.append(measure(name, recipe, spec, plan, cluster, asked))
            say(str(found[-1]))
    if asked.json and process().rank == 0:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps([asdict(result) for result in found], indent=1))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-3.2-1b", "llama-3.1-8b"])
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[1])
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--recompute", choices=["auto", "none", "selective", "full"], default="auto")
    parser.add_argument(
        "--documents", type=int, metavar="TOKENS", help="cut rows into documents of about so many tokens"
    )
    parser.add_argument("--optimizer", choices=["none", "host", "nvme"], default="none", help="where AdamW is")
    parser.add_argument("--activations", choices=["none", "host"], default="none", help="where blocks' inputs wait")
    parser.add_argument(
        "--frozen", choices=["none", "host"], help="train adapters; where the frozen weights of blocks are"
    )
    parser.add_argument("--eager", action="store_true", help="compile no block")
    parser.add_argument("--loop", action="store_true", help="beside it `shardwise train`")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="what `shardwise doctor -o FILE` measured")
    parser.add_argument("--json", type=Path)
    return parser


def recipe_of(name: str, rows: int, asked: argparse.Namespace) -> Recipe:
    """What a user would write for this row."""
    seq_len = REHEARSAL["max_position_embeddings"] if asked.rehearse else asked.seq_len
    settings: dict[str, Any] = {
        "model": {"config": REHEARSAL} if asked.rehearse else {"path": name, "init": "random"},
        "data": {"path": "stdlib", "tokenizer": {"vocab_size": VOCABULARY}, "mask_documents": bool(asked.documents)},
        "train": {"seq_len": seq_len, "micro_batch_size": rows, "gradient_accumulation_steps": 1},
        "precision": {"weights": asked.weights},
        "recompute": {"mode": asked.recompute},
        "offload": {"optimizer": asked.optimizer, "activations": asked.activations},
        "run": {"device": "cpu" if asked.rehearse else "cuda"},
    }
    if asked.frozen:
        settings["lora"] = {"rank": 16}
        settings["offload"]["weights"] = asked.frozen
    settings["train"]["max_steps"] = WARM_UP + asked.steps
    return Recipe.model_validate(settings | ({"compile": False} if asked.eager else {}))


def described(plan: Plan) -> str:
    """The settings that decide how fast it is."""
    words = [plan.shard.strategy, f"micro-batch {plan.batch.micro_batch_size} x {plan.batch.seq_len}"]
    words += [
        *plan.offload.words,
        f"recompute {plan.remat.mode}",
        f"weights {plan.precision.weights}",
        f"compute {plan.precision.compute}",
    ]
    return ", ".join([*words, "compiled" if plan.compile else "eager"])


def measure(
    name: str, recipe: Recipe, spec: ModelSpec, plan: Plan, cluster: Cluster, asked: argparse.Namespace
) -> Result:
    """Train some steps under ``plan``, and as many by ``shardwise train`` if that is asked for."""
    kind = cluster.kind
    with world(plan.layout, kind, 600.0) as mesh:
        seconds, allocated, reserved = bare_steps(recipe, spec, plan, mesh, asked)
    rate = plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len / seconds
    peak = (cluster.device.bf16_flops or 0) * plan.layout.world
    predicted = plan.estimate.allocated_bytes
    loop_s = whole_steps(recipe) if asked.loop and plan.layout.world == 1 else None
    mfu = rate * flops_per_token(spec, plan) / peak if kind == "cuda" and peak else None
    expected = plan.estimate.seconds
    sizes = (predicted, allocated, reserved)
    return Result(name, described(plan), seconds, expected and expected.step_s, rate, mfu, *sizes, loop_s)


def bare_steps(
    recipe: Recipe, spec: ModelSpec, plan: Plan, mesh: Any, asked: argparse.Namespace
) -> tuple[float, int, int]:
    """Median seconds of a step, and the most bytes allocated and reserved, on this rank."""
    device = device_of(recipe.run.device)

    state = random_state(recipe, spec, plan, mesh, device)
    rules = StepRules(plan, mesh, recipe.optim, WARM_UP + asked.steps, finish_of(recipe.method, plan))
    times = []
    for number in range(WARM_UP + asked.steps):
        batches = [random_batch(spec, plan, asked.documents, number).to(device)] * plan.batch.accumulation
        supervised = plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wait(device)
        start = time.perf_counter()
        step(state, batches, supervised, rules)
        wait(device)
        times.append(time.perf_counter() - start)
    most = (0, 0)
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        del state
        torch.cuda.empty_cache()
    return statistics.median(times[WARM_UP:]), *most


def random_state(recipe: Recipe, spec: ModelSpec, plan: Plan, mesh: Any, device: torch.device) -> TrainState:
    """Random weights, drawn on the device: drawn as a run draws them, on the CPU, those of an 8 B take a minute."""
    parts = build_parts(spec, plan, mesh, device)
    with torch.no_grad():
        for weight in named(parts).values():
            own = local(kept(weight))  # of one that waits on the host, drawn there
            own.normal_(0.0, spec.initializer_range) if weight.ndim > 1 else own.fill_(1.0)
    host = offload.host_weights(parts, plan)
    return TrainState(parts, optimizer_of(parts, recipe.optim, plan, host, recipe.run.seed), host=host)


def random_batch(spec: ModelSpec, plan: Plan, length: int | None, number: int) -> MicroBatch:
    """Random tokens, in documents of about ``length`` tokens which begin elsewhere in every step."""
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    ids = torch.randint(spec.vocab_size, (b, s))
    if length is None:
        positions = torch.arange(s).expand(b, s).contiguous()
        return MicroBatch(ids, ids.roll(-1, 1), positions, None, s)
    chance, segments = random.Random(number), []
    for _ in range(b):
        starts = sorted({0, s, *(chance.randrange(1, s) for _ in range(max(1, s // length) - 1))})
        segments += [end - start for start, end in pairwise(starts)]
    positions = torch.cat([torch.arange(segment) for segment in segments]).view(b, s)
    bounds = torch.tensor([0, *accumulate(segments)], dtype=torch.int32)
    return MicroBatch(ids, ids.roll(-1, 1), positions, bounds, max(segments))


def whole_steps(recipe: Recipe) -> float:
    """Median seconds of a step of ``shardwise train``, by its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as directory:
        place = {"run": {**recipe.run.model_dump(exclude_unset=True), "out": directory, "name": "loop", "nproc": 1}}
        sections = recipe.model_dump(mode="json", exclude_unset=True) | place
        sections |= {"checkpoint": {"save_steps": 10**6}, "evaluate": {"max_batches": 1}}
        path = Path(directory, "recipe.json")  # JSON is YAML
        path.write_text(json.dumps(sections))
        command = [sys.executable, "-m", "shardwise", "train", str(path)]
        ended = subprocess.run(command, env=child_variables(), capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"`{' '.join(command)}` failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
        lines = [json.loads(line) for line in Path(directory, "loop", "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["seconds"] for line in lines[WARM_UP:])


def child_variables() -> dict[str, str]:
    """The environment of a process that imports what this one does; a launcher's variables are not its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def say(line: str) -> None:
    """Once, not once a rank."""
    if process().rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
