"""The start and the first checkpoint of many ranks, without them: what a process, the store and a disk have to do.

    python -m bench.ranks [--ranks 256 1024 4096 16384] [--json FILE]

groups      process groups that each rank makes or passes over, and how long that takes (fake world)
store       what ranks read from the store, and sockets of a rank, when gloo connects all at once or late (counted with
            8, 16 and 32 ranks, as threads of one process; of more, on the cubic of these, or in proportion)
comparison  one object of every rank, read by the first and then by all; nodes' facts, by the first
checkpoint  the first rank's plan of who writes which slice, and the manifest (of up to 256 ranks, then in proportion to
            slices)
files       calls in the run's directory from its start to its first checkpoint, of real runs of 2 and 4 ranks, without
            those of the watch, which reads the pages of a node's own ranks while it waits
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardwise.distributed.fake_world import fake_world
from shardwise.launch.local import run_ranks
from shardwise.runtime.checkpoint.manifest import FileRecord, Manifest, Slice, TensorRecord, dump
from shardwise.runtime.checkpoint.packed import pack_plan, unpack_plan
from shardwise.runtime.checkpoint.storage import ShardPlanner
from shardwise.runtime.node_facts import differences
from shardwise.runtime.objects import decode, encode
from shardwise.spec.layout import Layout

RANKS_PER_NODE = 8
LAYOUTS = {
    256: Layout(dp_shard=32, tp=8),
    1024: Layout(dp_shard=32, tp=8, pp=4),
    4096: Layout(dp_replicate=2, dp_shard=32, tp=8, pp=4, cp=2),
    16384: Layout(dp_replicate=4, dp_shard=16, tp=8, pp=16, cp=2),
}
BLOCKS, TENSORS = 126, 9
"""Of a model of 405 B."""
TIMED_RANKS = 256
COUNTED = (8, 16, 32)
RECIPE = """
run: {{device: cpu, nproc: {nproc}, out: {out}, name: counted}}
model: {{config: {{model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 128}}}}
data: {{path: stdlib, tokenizer: {{vocab_size: 512}}}}
train: {{seq_len: 64, micro_batch_size: 1, gradient_accumulation_steps: 1, max_steps: 1}}
parallel: {{strategy: zero3}}
"""


def groups(layout: Layout) -> dict[str, float]:
    """Return how many groups a rank of ``layout`` makes or passes over, and the seconds."""
    true, calls = distributed_c10d._new_group_with_tag, Counter[str]()

    def counted(*given: Any, **named: Any) -> Any:
        calls["groups"] += 1
        return true(*given, **named)

    distributed_c10d._new_group_with_tag = counted
    try:
        begun_s = time.perf_counter()
        with fake_world(layout):
            return {"groups": calls["groups"], "seconds": time.perf_counter() - begun_s}
    finally:
        distributed_c10d._new_group_with_tag = true


class CountedStore(dist.Store):
    """A store in this process that counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.read_bytes = 0
        self._inner, self._lock = dist.HashStore(), threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        with self._lock:
            self.reads += 1
            self.read_bytes += len(value)
        return bytes(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timeout or timedelta(seconds=60))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))


def rendezvous(ranks: int) -> dict[str, float]:
    """Connect as many ranks, threads of this process, and do what a start does: a sum, a gather, a broadcast. Returns
    reads and bytes of the store, and open sockets of all."""
    store, made = CountedStore(), list[Any]([None] * ranks)

    def on_each(work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=60)
        made[rank] = dist.ProcessGroupGloo(dist.PrefixStore("0/", store), rank, ranks, options)

    def talk(rank: int) -> None:
        group, own = made[rank], torch.ones(ranks)
        group.allreduce([own]).wait()
        group.gather(
            [[torch.ones(ranks) for _ in range(ranks)]] if rank == 0 else [], [own], _root(dist.GatherOptions)
        ).wait()
        group.broadcast([own], _root(dist.BroadcastOptions)).wait()

    open_before = len(os.listdir("/proc/self/fd"))
    on_each(connect)
    on_each(talk)
    sockets = len(os.listdir("/proc/self/fd")) - open_before
    return {"reads": store.reads, "bytes": store.read_bytes, "sockets": sockets}


def _root(kind: Any) -> Any:
    options = kind()
    options.rootRank = 0
    return options


def cubic(counts: Sequence[float], ranks: int) -> int:
    """Return the value at ``ranks`` of the cubic through zero and the three ``counts`` of ``COUNTED`` ranks."""
    powers = torch.tensor([[float(n), n**2, n**3] for n in COUNTED], dtype=torch.float64)
    found = torch.linalg.solve(powers, torch.tensor(counts, dtype=torch.float64))
    return round(float(found @ torch.tensor([float(ranks), ranks**2, ranks**3], dtype=torch.float64)))


def proportional(counts: Sequence[float], ranks: int) -> int:
    """Return ``ranks`` times the most that one of ``COUNTED`` ranks had."""
    return round(ranks * max(count / n for count, n in zip(counts, COUNTED, strict=True)))


def store_traffic(late: bool) -> dict[int, dict[str, float]]:
    """Return what :func:`rendezvous` counts of each of ``COUNTED`` ranks, each in a process of its own."""
    found = {}
    for ranks in COUNTED:
        command = [sys.executable, "-m", "bench.ranks", "--connect", str(ranks)]
        environment = {**os.environ, **({"TORCH_GLOO_LAZY_INIT": "1"} if late else {})}
        found[ranks] = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    return found


def comparison(ranks: int) -> dict[str, float]:
    """Return the seconds in which one rank reads an object of every rank, and all of them as one, and those of the
    first for the facts of all nodes."""
    parts = [encode(f"{rank:064x}") for rank in range(ranks)]
    begun_s = time.perf_counter()
    objects = [decode(part) for part in parts]
    read_s, begun_s = time.perf_counter() - begun_s, time.perf_counter()
    whole = encode(objects)
    decode(whole)
    all_s = time.perf_counter() - begun_s
    versions = {"torch": "2.13.0", "python": "3.11.7", "shardwise's code": "0" * 12}
    nodes = [
        {"host": f"node-{n}", "versions": versions, "data": "0" * 12, "unwritable": "", "free": 2**40, "mark": f"{n}"}
        for n in range(ranks // RANKS_PER_NODE)
    ]
    begun_s = time.perf_counter()
    assert not differences(nodes, [True] * len(nodes), Path("/"))
    nodes_s = time.perf_counter() - begun_s
    return {"first_s": read_s, "every_s": all_s, "bytes": sum(map(len, parts)), "nodes_s": nodes_s}


def checkpoint(layout: Layout) -> dict[str, float]:
    """Return seconds and bytes of the first rank's plan of a checkpoint, whose tensors are cut along the shorter of two
    dims, and of its manifest."""
    blocks = -(-BLOCKS // layout.pp)
    shards = layout.fsdp * layout.tp
    plans = []
    for rank in range(layout.world):
        stage, replica = layout.coordinate(rank, "pp"), layout.coordinate(rank, "dp_replicate")
        piece = layout.index(rank, "fsdp") * layout.tp + layout.coordinate(rank, "tp")
        names = [
            f"{kind}.layers.{stage * blocks + block}.weight_{tensor}"
            for kind in ("model", "optim.first", "optim.second")
            for block in range(blocks)
            for tensor in range(TENSORS)
        ]
        plans.append(cut_along_the_shorter_dim(names, piece, shards) if replica == 0 else SavePlan([]))
    packed = [pack_plan(plan) for plan in plans]
    planner = ShardPlanner()
    planner.set_up_planner({}, is_coordinator=True)
    begun_s = time.perf_counter()
    final, _ = planner.create_global_plan([unpack_plan(each) for each in packed])
    for plan in final:
        pack_plan(plan)
    plan_s = time.perf_counter() - begun_s
    slices = {f"{rank}": plan.items for rank, plan in enumerate(final) if plan.items}
    tensors: dict[str, list[Slice]] = {}
    for file, items in slices.items():
        for item in items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            tensors.setdefault(item.index.fqn, []).append(Slice(tuple(chunk.offsets), tuple(chunk.sizes), file, 8))
    files = {file: FileRecord(2**30, ("0" * 32,) * 16) for file in slices}
    records = {name: TensorRecord((shards, 2**20), "F32", tuple(cut)) for name, cut in tensors.items()}
    begun_s = time.perf_counter()
    size = len(dump(Manifest("bench", 1, 1, layout.world, files, records)))
    dump_s = time.perf_counter() - begun_s
    return {
        "plan_s": plan_s,
        "a_rank_sends": len(packed[0]),
        "slices": sum(map(len, slices.values())),
        "manifest": size,
        "manifest_s": dump_s,
    }


def cut_along_the_shorter_dim(names: Sequence[str], piece: int, pieces: int) -> SavePlan:
    """Return the plan of a rank that has one piece of each of the tensors named."""
    chunk = ChunkStorageMetadata(torch.Size((piece, 0)), torch.Size((1, 2**20)))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size((pieces, 2**20)))
    return SavePlan(
        [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data) for name in names]
    )


CALLS = ("open", "os.mkdir", "os.rename", "os.listdir", "os.scandir", "os.remove", "os.rmdir", "os.truncate")


def counted_rank(words: Sequence[str]) -> int:
    """Train as one rank, and write the calls that it made in its run's directory."""
    from shardwise.cli.app import main

    place, calls = os.environ["COUNTED"], Counter[str]()

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event in CALLS and given and (path := str(given[0])).startswith(place):
            inside = path.removeprefix(place).strip("/")
            calls["watch" if inside.startswith("ranks/") else "others"] += 1

    sys.addaudithook(hear)
    code = main(list(words))
    Path(os.environ["COUNTED"]).parent.joinpath(f"calls-{os.environ['RANK']}.json").write_text(json.dumps(calls))
    return code


def files(nproc: int) -> list[int]:
    """Return the calls of each of so many ranks in a run's directory, from its start to its first checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        recipe = Path(temporary) / "recipe.yaml"
        recipe.write_text(RECIPE.format(nproc=nproc, out=out))
        subprocess.run(
            [sys.executable, "-m", "shardwise", "train", recipe, "train.max_steps=1", "run.name=first"],
            check=True,
            capture_output=True,
        )
        plan = out / "first" / "plan.yaml"
        os.environ["COUNTED"] = str(out / "counted")
        os.environ["PYTHONPATH"] = os.getcwd()
        (out / "counted").mkdir()
        ended = run_ranks(["train", str(recipe), "--plan", str(plan)], nproc, out / "counted", "bench.ranks")
        assert ended.exit_code == 0, ended
        return [json.loads((out / f"calls-{rank}.json").read_text())["others"] for rank in range(nproc)]


def measured(ranks: Sequence[int]) -> dict[str, Any]:
    """Return the figures of each of so many ranks."""
    eager, late = store_traffic(False), store_traffic(True)
    small = {nproc: files(nproc) for nproc in (2, 4)}
    a_rank = small[4][-1]
    more = (small[4][0] - small[2][0]) / 2
    plans = {size: checkpoint(LAYOUTS[size]) for size in ranks if size <= TIMED_RANKS}
    largest = max(plans)
    found: dict[str, Any] = {}
    for size in ranks:
        stored = {
            f"{name}_{what}": at([counts[n][what] for n in COUNTED], size)
            for name, counts, at in (("eager", eager, cubic), ("late", late, proportional))
            for what in ("reads", "bytes", "sockets")
        }
        plan = plans.get(size) or {
            name: value if name == "a_rank_sends" else value * LAYOUTS[size].fsdp * LAYOUTS[size].tp / shards
            for name, value in plans[largest].items()
            if (shards := LAYOUTS[largest].fsdp * LAYOUTS[largest].tp)
        }
        calls = {"first_calls": small[4][0] + more * (size - 4), "rank_calls": a_rank}
        found[str(size)] = {"groups": groups(LAYOUTS[size]), "store": stored, "comparison": comparison(size)}
        found[str(size)] |= {"checkpoint": plan, "files": calls}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--connect", type=int)
    asked = parser.parse_args()
    if asked.connect:
        print(json.dumps(rendezvous(asked.connect)), flush=True)
        os._exit(0)  # the groups' threads would be waited for
    found = measured(asked.ranks)
    for ranks, parts in found.items():
        print(f"{int(ranks):,} ranks")
        for name, figures in parts.items():
            print(f"  {name:11s}" + ", ".join(f"{key} {value:,.3g}" for key, value in figures.items()))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        sys.exit(counted_rank(sys.argv[1:]))
    main()
