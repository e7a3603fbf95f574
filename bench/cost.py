"""How long planning takes: the effect of techniques on the model on paper, and the choice of a plan.

    python bench/cost.py [--plans 1000] [--pairs 30]

Prices that many plans of a 70 B Llama with ``techniques.cost``: every setting of every dial (strategy, hybrid shapes,
precision, recomputation, accumulation, chunks), then times ``search.choose`` for the same model on three clusters. The
sheet of the model is read once, before. Medians over the repetitions; A/A is that of two neighbouring ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise, product

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.models.load import load_spec
from shardwise.planner import search
from shardwise.planner.sheets import sheet_of, variant
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe, Train

MODEL = "llama-3.1-70b"
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
    """The first ``count`` settings of all dials, from the start again if there are fewer."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=30)
    chosen = parser.parse_args()
    spec = load_spec(MODEL)
    listed = plans(chosen.plans)
    sheets = {which: sheet_of(spec, which) for which in ("wide", "narrow")}

    def cost() -> None:
        for plan in listed:
            techniques.cost(sheets[variant(plan.precision)], plan)

    show(f"techniques.cost, {len(listed):,} plans of {MODEL}", seconds(cost, chosen.pairs))
    for name in CLUSTERS:
        cluster = parse_cluster(name)
        show(f"search.choose on {name}", seconds(lambda cluster=cluster: choose(spec, cluster), chosen.pairs))


if __name__ == "__main__":
    main()
