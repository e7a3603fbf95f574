"""How long planning takes: the effect of techniques on the model on paper, and the choice of a plan.

    python bench/cost.py [--plans 1000] [--pairs 30]
    python bench/cost.py --against CHECKOUT [--pairs 5]      # searches, against another version's
    python bench/cost.py --pages [--pairs 3]                 # the page of a plan, against `import torch`

Prices that many plans of a 70 B Llama with ``techniques.cost``: every setting of the sharding (strategy, hybrid
shapes, precision, recomputation, accumulation, chunks), each with its sheet, then times ``search.choose`` for the same
model on three clusters. Medians over the repetitions; A/A is that of two neighbouring ones.

``--against`` runs both versions in turn, a process for each round and cluster: the first search, which reads the units
that ship, and the median of those that follow. Ratios are of this version's time over the other's in the same round.

``--pages`` runs `shardwise plan` and `import torch` in turn, a process for each: of the processor, until the verdict is
printed, and until the page is whole; medians, and their ratios to what torch takes in the same round.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise, product
from pathlib import Path

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.models.lookup import load_spec
from shardwise.planner import search
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe, Train

MODEL = "llama-3.1-70b"
PAGES = (
    ("meta-llama/Llama-3.1-8B", "8xH100"),
    ("meta-llama/Llama-3.1-70B", "2x8xH100"),
    ("mistralai/Mixtral-8x7B-v0.1", "8xH100"),
    ("Qwen/Qwen3-30B-A3B", "2x8xH100"),
    ("meta-llama/Llama-3.1-70B", "64x8xH100"),
    ("meta-llama/Llama-3.1-405B", "2048x8xH100"),
)
CLUSTERS = ("8xH100", "8x8xH100+400Gb/node", "64x8xH100+400Gb/node")
WORLD = 512
PRECISIONS = (Precision(), Precision("bf16"), Precision("bf16", reduce="bf16"), Precision("bf16", "bf16"))
REMATS = (Remat(), Remat("selective"), Remat("full"), Remat("full", 2), Remat("selective", 4))
BATCHES = tuple(Batch(1, m, 4096, chunk) for m in (1, 2, 4, 16) for chunk in (512, 1024, 4096))
SHARDS = (
    (Layout(dp_replicate=WORLD, ranks_per_node=8), Shard("ddp")),
    *((Layout(dp_shard=WORLD, ranks_per_node=8), Shard(strategy)) for strategy in ("zero1", "zero2", "zero3")),
    *((Layout(dp_shard=WORLD, ranks_per_node=8), Shard("zero3", k)) for k in (False, 8, 64)),
    *((Layout(WORLD // n, n, ranks_per_node=8), Shard("zero3")) for n in (8, 16, 64)),
)


def plans(count: int) -> list[Plan]:
    """The first ``count`` settings of all shardings, from the start again if there are fewer."""
    found = [
        Plan(layout, batch, shard, precision, remat)
        for precision, remat, batch, (layout, shard) in product(PRECISIONS, REMATS, BATCHES, SHARDS)
    ]
    return list(islice(cycle(found), count))


def seconds(work: Callable[[], object], repetitions: int) -> list[tuple[float, float]]:
    """What each repetition takes, after one that is not counted: on the clock, and of the processor."""
    taken = []
    for _ in range(repetitions + 1):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        work()
        taken.append((time.perf_counter() - begun, time.process_time() - begun_cpu))
    return taken[1:]


def show(what: str, taken: list[tuple[float, float]]) -> None:
    clock, processor = zip(*taken, strict=True)
    low, middle, high = (1e3 * part for part in statistics.quantiles(clock, n=4))
    same = statistics.median(after / before for before, after in pairwise(clock))
    busy = 1e3 * statistics.median(processor)
    spread = f"quartiles {low:.0f} to {high:.0f}, A/A {same:.3f}"
    print(f"{what:55} {middle:7.0f} ms ({spread}), of the processor {busy:.0f} ms", flush=True)


def choose(spec: ModelSpec, cluster: Cluster) -> None:
    search.choose(Recipe(train=Train(seq_len=4096, global_batch_size=1024)), spec, cluster)


def searches(cluster: Cluster, repetitions: int) -> tuple[float, float]:
    """Seconds of the processor that the first search of this process takes, and the median of later ones."""
    spec = load_spec(MODEL)
    begun = time.process_time()
    choose(spec, cluster)
    first = time.process_time() - begun
    return first, statistics.median(busy for _, busy in seconds(lambda: choose(spec, cluster), repetitions))


def against(checkout: Path, pairs: int) -> None:
    """Prints how long searches take here over how long they take in ``checkout``."""
    sides = (Path(__file__).parents[1] / "src", checkout / "src")
    for name in CLUSTERS:
        rounds = []
        for _ in range(pairs):
            outputs = [
                subprocess.check_output(
                    [sys.executable, __file__, "--search", name], env={**os.environ, "PYTHONPATH": str(side)}
                )
                for side in sides
            ]
            rounds.append([json.loads(output) for output in outputs])
        for index, which in enumerate(("first", "later")):
            here, there = ([side[index] for side in sides] for sides in zip(*rounds, strict=True))
            ratios = [a / b for a, b in zip(here, there, strict=True)]
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            middle = 1e3 * statistics.median(here)
            print(f"{which} search on {name:32} {middle:7.0f} ms, {statistics.median(ratios):.2f} ({span}) of before")


class Noted(io.TextIOBase):
    """An output that notes when the processor had been busy for how long: until the verdict, which names what a rank
    holds, and at the end."""

    verdict_s = 0.0

    def write(self, text: str) -> int:
        if " a rank (" in text and not self.verdict_s:
            self.verdict_s = time.process_time()
        return len(text)


def page(model: str, cluster: str) -> tuple[float, float]:
    """Seconds of the processor, imports included, until the verdict and until the end of a page."""
    kept, noted = sys.stdout, Noted()
    sys.argv, sys.stdout = ["shardwise", "plan", "--model", model, "--cluster", cluster], noted
    try:
        from shardwise.__main__ import main as command

        command()
    except SystemExit:
        pass
    finally:
        sys.stdout = kept
    return noted.verdict_s, time.process_time()


def pages(rounds: int) -> None:
    """Prints the table of pages."""
    torch = "import torch, time; print(time.process_time())"
    print(f"{'':44} {'torch':>7} {'verdict':>17} {'page':>17}")
    for model, cluster in PAGES:
        taken = []
        for _ in range(rounds):
            imported = float(subprocess.check_output([sys.executable, "-c", torch]))
            told = subprocess.check_output([sys.executable, __file__, "--page", model, cluster])
            taken.append((imported, *json.loads(told)))
        columns = [statistics.median(column) for column in zip(*taken, strict=True)]
        ratios = [statistics.median(row[place] / row[0] for row in taken) for place in (1, 2)]
        both = "".join(f" {s:9.2f} s {ratio:4.1f} x" for s, ratio in zip(columns[1:], ratios, strict=True))
        print(f"{f'{model} on {cluster}':44} {columns[0]:5.2f} s{both}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the version in this directory")
    parser.add_argument("--search", metavar="CLUSTER", help=argparse.SUPPRESS)
    parser.add_argument("--pages", action="store_true", help="the page of a plan, against `import torch`")
    parser.add_argument("--page", nargs=2, metavar=("MODEL", "CLUSTER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.page:
        print(json.dumps(page(*chosen.page)))
        return
    if chosen.pages:
        pages(min(chosen.pairs, 3))
        return
    if chosen.search:
        print(json.dumps(searches(parse_cluster(chosen.search), 9)))
        return
    if chosen.against:
        against(chosen.against, chosen.pairs)
        return
    spec = load_spec(MODEL)
    listed = plans(chosen.plans)

    def cost() -> None:
        for plan in listed:
            techniques.cost(sheet_of(spec, plan), plan)

    show(f"techniques.cost, {len(listed):,} plans of {MODEL}", seconds(cost, chosen.pairs))
    for name in CLUSTERS:
        cluster = parse_cluster(name)
        show(f"search.choose on {name}", seconds(lambda cluster=cluster: choose(spec, cluster), chosen.pairs))


if __name__ == "__main__":
    main()
