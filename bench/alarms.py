"""Does a certificate ever fail what is right? All small proofs of each recipe's plan, on several draws of first weights
and rows, in float64 and in the dtypes that are named.

usage: python bench/alarms.py [--seeds 3] [--only NAME] [--machines 8xH100] [--dtypes bf16 fp16]
       [--proofs derivatives model parity documents dtypes checkpoint]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.data.pack import Sample
from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.models.init import Draw
from shardwise.models.resolve import resolve
from shardwise.prove import certify
from shardwise.prove.certify import Certification
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting, Workload
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
RANKS, APART = 8, 1_000
"""CPU ranks; and steps between the rows of one seed and of the next."""


@dataclass(frozen=True)
class Seeded:
    """A setting's weights and rows, as with another seed."""

    seed: int
    draw: Draw
    rows: Any

    def weights(self, name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
        return self.draw(name, shape, part, seed + self.seed, spec)

    def samples(self, job: Workload, number: int) -> list[Sample]:
        drawn: list[Sample] = self.rows(job, number + APART * self.seed)
        return drawn


def seeded(subject: Certification, seed: int) -> Certification:
    def other(setting: Setting) -> Setting:
        assert setting.draw is not None
        made = Seeded(seed, setting.draw, setting.rows)
        return replace(setting, draw=made.weights, rows=made.samples)

    others = tuple((small, other(setting)) for small, setting in subject.others)
    return replace(subject, setting=other(subject.setting), others=others)


def in_dtype(subject: Certification, dtype: Any) -> Certification:
    assert subject.small is not None
    own = subject.small.own
    precision = replace(own.precision, compute=dtype, weights="fp32", modules=())
    return replace(subject, small=replace(subject.small, own=replace(own, precision=precision)))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--only", default="")
    ask.add_argument("--machines", nargs="+", default=["8xH100"])
    ask.add_argument("--dtypes", nargs="+", default=["bf16", "fp16"])
    ask.add_argument("--proofs", nargs="+", default=list(certify.PROOFS))
    given = ask.parse_args()
    from shardwise.planner.search import choose

    ran = alarms = 0
    with RankPool(RANKS) as pool:
        for path in sorted(RECIPES.glob("*.yaml")):
            if given.only not in path.stem:
                continue
            began, found, plans = time.perf_counter(), list[str](), 0
            for machines in given.machines:
                try:
                    recipe = load_recipe(path, ["data.path=none.jsonl"])
                    spec = resolve(recipe)
                    plan = choose(recipe, spec, parse_cluster(machines))
                    subject = certify.subject_of(recipe, spec, plan, RANKS)
                except ShardwiseError as error:
                    print(f"{path.stem} on {machines}: not planned ({error.problems[0].what})", flush=True)
                    continue
                if subject.small is None:
                    print(f"{path.stem} on {machines}: {subject.why}", flush=True)
                    continue
                plans += 1
                for seed in range(given.seeds):
                    one = seeded(subject, seed + 1)
                    cases = [(one, proof) for proof, _ in one.cases("normal") if proof in given.proofs]
                    cases = [(of, proof) for of, proof in cases if proof != "dtypes"]
                    narrow = given.dtypes if "dtypes" in given.proofs else []
                    cases += [(in_dtype(one, dtype), "dtypes") for dtype in narrow]
                    for of, proof in cases:
                        check = certify.run(of, proof, 0, pool)
                        ran += 1
                        alarms += bool(check.problems)
                        found += [f"{machines}, seed {seed + 1}, {proof}: {line}" for line in check.problems[:2]]
            print(f"{path.stem}: {plans} plans [{time.perf_counter() - began:.0f} s]", *found, sep="\n  ", flush=True)
    print(f"{alarms} alarms in {ran} proofs")


if __name__ == "__main__":
    main()
