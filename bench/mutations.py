"""How much of what could be wrong does `shardwise prove` see? Small random changes of the code, one at a time, in
places that a few certificates run through; each certificate should fail.

usage: python bench/mutations.py [--count 40] [--seed 0] [--jobs 2] [--only techniques/]

A change is an operator in another's place, a constant one larger, a condition turned round, a call left out. Some
change no number (another size of chunk, a faster path not taken): what survives is printed, to be judged by hand.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
WHERE = ("techniques/", "methods/", "models/")
LIMIT_S = 600.0
CALLS = 40
"""Of a function, whose lines are followed: the rest run the same ones, in a tenth of the time."""
PAIRS = (
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.And, ast.Or),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
SWAPPED: dict[type[ast.AST], type[ast.AST]] = dict(PAIRS) | {second: first for first, second in PAIRS}
ORDER = ("parity", "recipe", "derivatives", "dtypes", "documents", "model", "drift", "checkpoint")
"""Of proofs: what sees most comes first."""


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a file: ``text`` is the file with it, ``words`` the line before and after."""

    file: str
    line: int
    words: str
    text: str


def mutants(file: str, lines: set[int]) -> Iterator[Callable[[], Mutant]]:
    """Yield what makes each change on lines that are run."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    annotated = {id(child) for node in ast.walk(tree) for part in _annotations(node) for child in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", 0) in lines and id(node) not in annotated and _changed(deepcopy(node)):
            yield partial(_mutant, file, source, place, node.lineno)  # type: ignore[attr-defined]


def _annotations(node: ast.AST) -> list[ast.AST]:
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [part for part in parts if isinstance(part, ast.AST)]


def _mutant(file: str, source: str, place: int, line: int) -> Mutant:
    tree = ast.parse(source)
    node = list(ast.walk(tree))[place]
    before = ast.unparse(node).partition("\n")[0]
    _changed(node)
    after = ast.unparse(node).partition("\n")[0]
    return Mutant(file, line, f"{before}  ->  {after or 'nothing'}", ast.unparse(tree))


def _changed(node: ast.AST) -> bool:
    """Change the node in its place, if it is of a kind that can be."""
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPPED:
        node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops[0] = SWAPPED[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value + 1 if type(node.value) is int else node.value * 1.1
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return False
    return True


def subjects() -> dict[str, Any]:
    """Certificates of small plans that have most of the axes and techniques between them."""
    from shardwise.models.lookup import load_spec
    from shardwise.prove import certify
    from shardwise.spec.layout import Layout
    from shardwise.spec.plan import Batch, Lora, Optim, Pipeline, Plan, Precision, Remat, Shard
    from shardwise.spec.recipe import Data, Method, Recipe

    names = ("Llama-3.1-8B", "Gemma-2-2b", "Qwen2.5-1.5B", "Qwen3-30B-A3B")
    llama, gemma, qwen, mixture = map(load_spec, names)
    bf16, fp16, batch = Precision("bf16"), Precision("fp16"), Batch(2, 2, 4096, 1024)
    split = Pipeline("interleaved", 2, (7, 7, 7, 7))
    dpo = Method(name="dpo")
    plans = {
        "tp, zero3": (
            llama,
            Plan(Layout(dp_shard=2, tp=2), batch, Shard("zero3"), bf16, Remat("selective"), sequence_parallel=True),
        ),
        "ep": (mixture, Plan(Layout(dp_shard=2, ep=2), batch, Shard("zero3"), bf16, Remat("full"))),
        "ring": (gemma, Plan(Layout(dp_replicate=2, cp=2), batch, Shard("ddp"), fp16, optim=Optim("adamw8bit"))),
        "stages": (
            qwen,
            Plan(Layout(pp=2), Batch(1, 4, 4096), Shard("ddp"), bf16, pipeline=split, optim=Optim("lion")),
        ),
        "adapters": (
            llama,
            Plan(Layout(cp=2, ulysses=2), batch, precision=bf16, cp_kind="ulysses", lora=Lora(8, nf4=True, dora=True)),
        ),
        "pairs": (qwen, Plan(Layout(dp_shard=2), batch, Shard("zero1"), bf16, loss="dpo")),
    }
    made = {}
    for name, (spec, plan) in plans.items():
        recipe = Recipe(data=Data(path="none.jsonl"), method=dpo if name == "pairs" else Method())
        made[name] = certify.subject_of(recipe, spec, plan, 4)
        assert made[name].small is not None, made[name].why
    return made


def proofs(subject: Any) -> list[str]:
    return [proof for proof in ORDER if proof in {each for each, _ in subject.cases("normal")}]


def drifts(subject: Any) -> list[str]:
    """Drift of the small plan in its own dtypes."""
    from shardwise.prove import certify

    small = subject.small
    ranks = certify.places(small.own.layout, "quick")
    return [line for rank in ranks for line in certify._drift(small.spec, small.own, rank, {})]


def judge() -> str:
    """Return which proof of which certificate fails, or nothing."""
    from shardwise.prove import certify
    from shardwise.prove.pool import RankPool

    each = subjects()
    with RankPool(4) as pool:
        for proof, (name, subject) in product(ORDER, each.items()):
            if proof in proofs(subject):
                small = drifts(subject) if proof == "drift" else []
                if found := small or certify.run(subject, proof, 0, pool).problems:
                    return f"{proof} of {name}: {found[0][:160]}"
    return ""


def traced(rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...], out: str) -> Any:
    """``fn`` on a rank, with the lines that it runs written to ``out``."""
    ran: dict[str, set[int]] = defaultdict(set)
    calls: Counter[Any] = Counter()
    root = str(PACKAGE)
    folders = tuple(f"{root}/{name}" for name in WHERE)

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            ran[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        calls[frame.f_code] += 1
        followed = calls[frame.f_code] <= CALLS and frame.f_code.co_filename.startswith(folders)
        return line if followed else None

    sys.settrace(call)
    threading.settrace(call)
    try:
        return fn(rank, world, *args)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        told = {name.removeprefix(root + "/"): sorted(lines) for name, lines in ran.items()}
        Path(out, f"{rank}-{random.random()}.json").write_text(json.dumps(told))


@dataclass
class TracingRanks:
    pool: Any
    out: str

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = 900.0) -> list[Any]:
        from mutations import traced as by_name

        found: list[Any] = self.pool.run(by_name, fn, args, self.out, world=world, timeout_s=timeout_s)
        return found


def lines_run() -> dict[str, set[int]]:
    """Return the lines of each file that ranks run in parity and dtypes of the certificates."""
    from shardwise.prove import certify
    from shardwise.prove.pool import RankPool

    found: dict[str, set[int]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as out, RankPool(4) as pool:
        for subject in subjects().values():
            for proof in ("parity", "dtypes"):
                check = certify.run(subject, proof, 0, TracingRanks(pool, out))
                assert not check.problems, check.problems
        for file in Path(out).iterdir():
            for name, lines in json.loads(file.read_text()).items():
                found[name] |= set(lines)
    return found


def tried(mutant: Mutant) -> str:
    """Return what the certificates say of a package with the change."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(ROOT / "src", Path(root, "src"), ignore=shutil.ignore_patterns("__pycache__"))
        Path(root, "src", "shardwise", mutant.file).write_text(mutant.text, encoding="utf-8")
        paths = {"PYTHONPATH": f"{root}/src", "OMP_NUM_THREADS": "1", "HOME": root, "XDG_CACHE_HOME": root}
        command = [sys.executable, "-W", "ignore", str(ROOT / "bench" / "mutations.py"), "--judge"]
        try:
            done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "no end"
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return done.stdout.strip() if done.returncode == 0 else f"raised: {last[:160]}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--count", type=int, default=40)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--jobs", type=int, default=2)
    ask.add_argument("--only", default="")
    ask.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.judge:
        print(judge())
        return
    ran = lines_run()
    every = [make for file in sorted(ran) if file.startswith(given.only or WHERE) for make in mutants(file, ran[file])]
    print(f"{len(every)} changes can be made on the lines that are run", flush=True)
    chosen = [make() for make in random.Random(given.seed).sample(every, min(given.count, len(every)))]
    survived = 0
    with ThreadPoolExecutor(given.jobs) as workers:
        for mutant, found in zip(chosen, workers.map(tried, chosen), strict=True):
            survived += not found
            word = "seen    " if found else "SURVIVED"
            print(f"{word}  {mutant.file}:{mutant.line}  {mutant.words[:120]}  |  {found}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} seen")


if __name__ == "__main__":
    main()
