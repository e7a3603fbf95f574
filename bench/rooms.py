"""How far it is from ``train`` to the optimizer's step, for somebody who follows the calls.

    python bench/rooms.py [--plan] [--list] [--source CHECKOUT/src]      # another version's walk

Trains a tiny model on data that are prepared, in this process, as torchrun would start it. Looks at every call between
functions of Shardwise from the entry into ``runtime/loop.py``'s ``train`` to the optimizer of the first step. What is
between them (torch, autograd) is passed over: a hook that torch calls is called by the function of ours that called
torch. Code that runs because a module is imported does not count. With ``--plan``: from a plan of Llama 3.1 8B on 16
GPUs to its memory and seconds. Counted are

* rooms: modules that are entered from another one, each once;
* doors: pairs of functions in two modules of which one calls the other, each once however often it does;
* climbs: doors that lead up. The called function's module stands in a higher layer than the caller's (the contract of
  import-linter in pyproject.toml), as a callback's does.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

Function = tuple[str, str]
"""Its module, below the package, and its name."""
ROOT = Path(__file__).parents[1]
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class Walk:
    """Collects ``doors`` while it is the profile function of this thread."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.doors: set[tuple[Function, Function]] = set()
        self.stack: list[Function | None] = []
        self.begun = self.ended = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "step" and "torch/optim/adam" in code.co_filename:
            # The fit check calls an optimizer, too, but not through the technique.
            self.ended |= any(here is not None and here[0].startswith("techniques/optim") for here in self.stack[-1:])
        if self.ended or event not in ("call", "return") or not code.co_filename.startswith(self.package):
            return
        module = code.co_filename.removeprefix(self.package).removesuffix(".py").removesuffix("/__init__")
        if event == "return":
            if self.stack:
                self.stack.pop()
            return
        if (module, code.co_name) == ("runtime/loop", "train"):
            self.begun, self.stack = True, []
        if self.begun:
            caller = self.stack[-1] if self.stack else (module, code.co_name)
            importing = caller is None or not code.co_flags & inspect.CO_OPTIMIZED
            here = None if importing else (module, code.co_qualname)
            if caller and here and caller[0] != module:
                self.doors.add((caller, here))
            self.stack.append(here)


def layers() -> dict[str, int]:
    """How high each package of ours stands: 0 is the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    words = ((word, height) for height, row in enumerate(reversed(rows)) for word in row.split() if "." in word)
    return {word.strip("()").removeprefix("shardwise."): height for word, height in words}


def walk(package: Path) -> Walk:
    """That of one training of one step."""
    from shardwise.cli.app import main

    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29_477}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in place.items()}
    config = [f"model.config.{key}={str(value).lower()}" for key, value in MODEL.items()]
    with tempfile.TemporaryDirectory() as directory:
        (text := Path(directory) / "a.txt").write_text("some words of a text\n" * 2000)
        data = [f"data.path={text}", f"data.cache={directory}/cache", "data.tokenizer.vocab_size=300"]
        run = [f"run.out={directory}", "run.device=cpu", "train.seq_len=32", "train.global_batch_size=2"]
        main(["data", "prepare", *config, *data, *run])
        run += ["train.max_steps=1", "precision.compute=fp32"]  # which was not always what a CPU computes in
        sys.setprofile(seen := Walk(package))
        try:
            code = main(["train", *config, *data, *run])
        finally:
            sys.setprofile(None)
    if code or not seen.ended:
        raise SystemExit(f"the training ended with {code}, and {len(seen.doors)} doors were seen")
    return seen


def priced(package: Path) -> Walk:
    """That of one plan, which was not searched for."""
    from shardwise.models.lookup import load_spec
    from shardwise.planner.price import price
    from shardwise.planner.seconds.step_seconds import timed
    from shardwise.spec.cluster import parse_cluster
    from shardwise.spec.layout import Layout
    from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard

    spec, cluster, batch = load_spec("Llama-3.1-8B"), parse_cluster("2x8xH100"), Batch(1, 4, 8192, 2048)
    layout = Layout(dp_replicate=2, dp_shard=8, ranks_per_node=8)
    plan = Plan(layout, batch, Shard("zero3"), Precision("bf16"), Remat("selective"))
    seen = Walk(package)
    seen.begun = True
    sys.setprofile(seen)
    try:
        timed(spec, price(spec, plan, cluster), cluster)
    finally:
        sys.setprofile(None)
    return seen


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every door")
    parser.add_argument("--plan", action="store_true", help="from a plan to its seconds")
    parser.add_argument("--source", type=Path, help="the folder that has another version of the package")
    options = parser.parse_args(words)
    if options.source:
        sys.path.insert(0, str(options.source.resolve()))
    found = importlib.util.find_spec("shardwise")
    assert found is not None and found.origin is not None
    doors, height = (priced if options.plan else walk)(Path(found.origin).parent).doors, layers()
    level = {module: height.get(module.partition("/")[0], -1) for door in doors for module, _ in door}
    climbs = {(one, other) for one, other in doors if level[other[0]] > level[one[0]]}
    for one, other in sorted(doors) if options.list else ():
        print("up  " if (one, other) in climbs else "    ", " ".join(one), "->", " ".join(other))
    rooms = {other for _, (other, _) in doors}
    print(f"{found.origin}: {len(rooms)} rooms, {len(doors)} doors, {len(climbs)} climbs")


if __name__ == "__main__":
    main()
