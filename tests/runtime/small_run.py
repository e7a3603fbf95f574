"""A run small enough to be made many times: a tiny Llama on a few kilobytes of text."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.recipe import Recipe

SEQ_LEN, ROWS = 16, 4
MODEL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def write_text(directory: Path) -> Path:
    """Some lines of text that differ, in a few files."""
    directory.mkdir(parents=True)
    for number in range(12):
        words = [f"line {number} {n} says {n * n % 97} and {n * number % 13}" for n in range(120)]
        (directory / f"{number}.txt").write_text("\n".join(words))
    return directory


def recipe(root: Path, name: str = "run", **changes: Any) -> Recipe:
    """A recipe under ``root``, which holds the text (made once) and the runs; ``changes`` by section."""
    text = root / "text"
    if not text.exists():
        write_text(text)
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "out": str(root / "runs"), "device": "cpu", "timeout_s": 20.0},
        "data": {"path": str(text), "cache": str(root / "cache"), "num_proc": 1, "tokenizer": {"vocab_size": 320}},
        "model": {"config": MODEL},
        "train": {"seq_len": SEQ_LEN, "max_steps": 8},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
        "checkpoint": {"save_steps": 3},
        "evaluate": {"max_batches": 2},
    }
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    return Recipe.model_validate(sections)


def plan(strategy: str = "ddp", world: int = 1) -> Plan:
    """``strategy`` over ``world`` ranks; the global batch is the same for all."""
    layout = Layout(dp_replicate=world) if strategy == "ddp" else Layout(dp_shard=world)
    return Plan(layout=layout, batch=Batch(ROWS // world, 1, SEQ_LEN, 16), shard=Shard(strategy=strategy))  # type: ignore[arg-type]


def directory(made: Recipe) -> Path:
    return Path(made.run.out) / made.run.name


def numbers(run: Path) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions: of each line of metrics.jsonl."""
    keys = ("step", "tokens", "loss", "grad_norm", "learning_rate", "supervised_tokens", "skipped")
    return [tuple(json.loads(line)[key] for key in keys) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_hash(run: Path) -> str:
    """Of the exported weights."""
    return hashlib.sha256((run / "hf" / "model.safetensors").read_bytes()).hexdigest()


def train_here(made: Recipe, after_step: tuple[Callable[..., None], ...] = ()) -> Any:
    """Train in this process."""
    from shardwise.runtime.loop import train

    return train(made, plan(), after_step)


def train_ranks(made: Recipe, strategy: str, world: int = 2, fault: str = "") -> list[int]:
    """Train as ``world`` ranks, forked from a process that has imported everything; their exit codes (minus the signal
    for one that was killed)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forking = get_context("forkserver")
    forking.set_forkserver_preload(["torch", "torch.distributed.fsdp", "tests.runtime.small_run"])
    job = (made.model_dump_json(), strategy, world, port, fault)
    processes = [forking.Process(target=be_rank, args=(rank, *job), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
            process.join()
    return [int(process.exitcode or 0) for process in processes]


def be_rank(rank: int, made: str, strategy: str, world: int, port: int, fault: str) -> None:
    """One rank, as a launcher starts it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDWISE_FAULT": fault,
    }
    from shardwise.runtime.loop import train

    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
    try:
        train(Recipe.model_validate_json(made), plan(strategy, world))
    except ShardwiseError as error:
        os._exit(error.exit_code)
    except BaseException:
        os._exit(70)
    os._exit(0)
