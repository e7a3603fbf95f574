"""The job that is made to fail: two ranks, a tiny Llama sharded whole (zero3), 12 steps, a checkpoint every 5."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.runtime.checkpoint import manifest
from shardwise.runtime.faults.outcome import Exit, read_exit
from shardwise.spec.layout import Layout
from shardwise.spec.load import dump_plan, dump_recipe
from shardwise.spec.plan import Batch, Offload, Optim, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import Recipe
from tests.faults.ranks import Order, Ranks

STEPS, SAVE, KILL = 12, 5, 7
SEQ_LEN, ROWS = 32, 8
WEIGHTS = ("step", "tokens", "loss", "grad_norm", "learning_rate", "supervised_tokens", "skipped")
MODEL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""In its place where ranks have different experts."""


def write_text(directory: Path) -> None:
    """Some lines of text that differ, in a few files."""
    directory.mkdir()
    for number in range(12):
        words = [f"line {number} {n} says {n * n % 97} and {n * number % 13}" for n in range(120)]
        (directory / f"{number}.txt").write_text("\n".join(words))


def plan(strategy: str = "zero3", world: int = 2) -> Plan:
    """The same global batch of 8 rows for any number of ranks up to 4, in micro-batches of 2. ``tp-zero3``: pairs of
    ranks share each layer; ``pp-zero1``: a pipeline of two stages, each on half of the ranks; ``cp-zero3``: pairs of
    ranks share each row in a ring; ``ep-zero3``: pairs of ranks share the experts; ``nvme-zero3``: the optimizer is in
    a file; ``filed-zero3``: inputs of blocks are."""
    if strategy == "tp-zero3":
        layout = Layout(dp_shard=world // 2, tp=2)
        return Plan(layout, Batch(2, ROWS // world, SEQ_LEN, 64), Shard("zero3"), sequence_parallel=True)
    if strategy == "cp-zero3":
        layout = Layout(dp_shard=world // 2, cp=2)
        return Plan(layout, Batch(2, ROWS // world, SEQ_LEN, 64), Shard("zero3"), cp_kind="ring")
    if strategy == "pp-zero1":
        layout, stages = Layout(dp_shard=world // 2, pp=2), Pipeline("1f1b", 1, (1, 1))
        return Plan(layout, Batch(2, ROWS // world, SEQ_LEN, 64), Shard("zero1"), pipeline=stages)
    batch = Batch(2, ROWS // (2 * world), SEQ_LEN, 64)
    if strategy in ("nvme-zero3", "weights-zero3"):
        offload = Offload("nvme", weights="nvme" if strategy == "weights-zero3" else "none")
        return Plan(Layout(dp_shard=world), batch, Shard("zero3"), offload=offload)
    if strategy == "filed-zero3":
        filed = Offload("none", "nvme")
        return Plan(Layout(dp_shard=world), batch, Shard("zero3"), remat=Remat("full"), offload=filed)
    if strategy == "ep-zero3":
        return Plan(Layout(dp_shard=world, ep=2), batch, Shard("zero3"))
    if strategy == "hsdp":
        return Plan(layout=Layout(dp_replicate=2, dp_shard=world // 2), batch=batch, shard=Shard("zero3"))
    if strategy == "ddp":
        return Plan(layout=Layout(dp_replicate=world), batch=batch, shard=Shard("ddp"))
    return Plan(layout=Layout(dp_shard=world), batch=batch, shard=Shard(strategy))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """One run under ``root`` (which holds the text, the prepared data and all runs), started as often as need be."""

    root: Path
    name: str
    ranks: Ranks
    strategy: str = "zero3"
    world: int = 2

    @property
    def directory(self) -> Path:
        return self.root / "runs" / self.name

    @property
    def log(self) -> Path:
        """What its ranks print."""
        return self.root / f"{self.name}.log"

    def write(self, **changes: Any) -> list[str]:
        """Write its recipe (``changes`` by section) and plan; the words after ``shardwise``."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"name": self.name, "out": str(self.root / "runs"), "device": "cpu", "timeout_s": 60.0},
            "data": {"path": str(self.root / "text"), "cache": str(self.root / "cache"), "num_proc": 1},
            "model": {"config": EXPERTS if self.strategy.startswith("ep") else MODEL},
            "train": {"seq_len": SEQ_LEN, "global_batch_size": ROWS, "max_steps": STEPS},
            "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
            "checkpoint": {"save_steps": SAVE, "asynchronous": False},
            "evaluate": {"max_batches": 2, "sample_prompt": "line 1"},
        }
        sections["data"]["tokenizer"] = {"vocab_size": 320}
        for section, keys in changes.items():
            sections.setdefault(section, {}).update(keys)
        recipe = self.root / f"{self.name}.yaml"
        recipe.write_text(dump_recipe(Recipe.model_validate(sections)))
        planned = self.root / f"{self.strategy}-{self.world}.plan.yaml"
        deterministic = sections["run"].get("deterministic", False)
        precision = Precision(**sections.get("precision", {}))
        split = replace(plan(self.strategy, self.world), deterministic=deterministic, precision=precision)
        split = replace(split, optim=Optim(sections["optim"].get("name", "adamw")))
        planned.write_text(dump_plan(split))
        return ["train", str(recipe), "--plan", str(planned)]

    def start(
        self, words: list[str], faults: dict[int, str] | None = None, sabotage: tuple[Any, ...] = ()
    ) -> list[int]:
        """Start the ranks; their pids."""
        return self.ranks.start(words, Order(self.world, faults or {}, sabotage), self.directory, self.log)

    def train(
        self, words: list[str], faults: dict[int, str] | None = None, sabotage: tuple[Any, ...] = ()
    ) -> list[int]:
        """Start the ranks and wait; their exit codes."""
        self.start(words, faults, sabotage)
        return self.ranks.finish()

    def fired(self, name: str) -> bool:
        """Whether the fault of this name has left its mark."""
        return (self.directory / f"fault-{name}").exists()

    def numbers(self) -> list[tuple[Any, ...]]:
        """Of each line of metrics.jsonl, what must not depend on interruptions."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [tuple(json.loads(line)[key] for key in WEIGHTS) for line in lines]

    def steps(self) -> list[int]:
        """The steps in metrics.jsonl."""
        return [line[0] for line in self.numbers()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def begun_at(self) -> list[int]:
        """The step that each start went on from."""
        return [event["step"] for event in self.events("start")]

    def weights(self) -> str:
        """A hash of the exported weights."""
        return hashlib.sha256((self.directory / "hf" / "model.safetensors").read_bytes()).hexdigest()

    def saved(self) -> list[int]:
        """The steps of the checkpoints that are to be seen, each of which must verify."""
        paths = sorted((self.directory / "checkpoints").glob("step-*"))
        return [manifest.check(path).step for path in paths]

    def last_checkpoint(self) -> dict[str, str]:
        """Hashes of every file of the newest checkpoint but its manifest, which tells the run's own identity."""
        newest = max((self.directory / "checkpoints").glob("step-*"))
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(newest.iterdir())
            if path.suffix == ".safetensors"
        }

    def ended(self) -> Exit:
        found = read_exit(self.directory)
        assert found is not None, f"no exit.json; {self.log.read_text()[-2000:]}"
        return found

    def same_as(self, whole: Job) -> None:
        """The whole run: every step once, with the same numbers, and the same weights, moments and exported model."""
        assert self.steps() == list(range(1, STEPS + 1))
        assert self.numbers() == whole.numbers()
        assert self.last_checkpoint() == whole.last_checkpoint() != {}
        assert self.weights() == whole.weights()
