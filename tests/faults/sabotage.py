"""What is broken in a rank before it begins, where ``SHARDWISE_FAULT`` cannot reach. Every function takes the rank and
the run's directory, and leaves a mark there when the fault comes about."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any


def mark(directory: Path, name: str) -> bool:
    """Prove that the fault fired; False if it had fired before in the life of this run."""
    try:
        descriptor = os.open(directory / f"fault-{name}", os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.close(descriptor)
    return True


def die(directory: Path, name: str) -> None:
    if mark(directory, name):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(rank: int, directory: Path, who: int, step: int, when: str) -> None:
    """Rank ``who`` dies while it writes the checkpoint of ``step``: half-way through its first file (``torn``), before
    the directory gets its name (``unnamed``), or right after (``named``)."""
    from shardwise.runtime import begin
    from shardwise.runtime.checkpoint import commit
    from shardwise.runtime.checkpoint.save import RunCheckpoints

    if rank != who:
        return
    name = f"save-{when}"
    ours: set[int] = set()

    def open_file(path: Any, *args: Any) -> int:
        descriptor = os.open(path, *args)
        if f"tmp-step-{step:08d}" in str(path):
            ours.add(descriptor)
        return descriptor

    def write(descriptor: int, data: memoryview) -> int:
        if when == "torn" and descriptor in ours:
            os.write(descriptor, data[: len(data) // 2])
            die(directory, name)
        return os.write(descriptor, data)

    def rename(source: Path, target: Path) -> None:
        ending = target.name == f"step-{step:08d}"
        if ending and when == "unnamed":
            die(directory, name)
        os.rename(source, target)
        if ending and when == "named":
            die(directory, name)

    disk = replace(commit.DISK, open=open_file, write=write, rename=rename)
    begin.RunCheckpoints = partial(RunCheckpoints, disk=disk)  # type: ignore[misc, assignment]


def kill_in_pass(rank: int, directory: Path, who: int, writes: int) -> None:
    """Rank ``who`` dies within a step, when so many pieces of its optimizer have been written to its file."""
    from shardwise.techniques.offload.scratch import Scratch

    if rank != who:
        return
    write, done = Scratch.write, [0]

    def counted(self: Any, place: int, begin: int, values: memoryview) -> None:
        write(self, place, begin, values)
        done[0] += 1
        if done[0] == writes:
            die(directory, "pass")

    Scratch.write = counted  # type: ignore[method-assign]


def no_room(rank: int, directory: Path, who: int, needed: str) -> None:
    """On rank ``who`` no file of a certain kind gets room: that of the optimizer (``offload``), or the copy of what is
    saved (``save``)."""
    if rank != who:
        return
    allocate, opened = os.posix_fallocate, [0]

    def refused(descriptor: int, begin: int, size: int) -> None:
        opened[0] += 1
        if (opened[0] == 1) == (needed == "offload"):
            mark(directory, f"full-{needed}")
            raise OSError(28, "No space left on device")
        allocate(descriptor, begin, size)

    os.posix_fallocate = refused


def spoil_loss(rank: int, directory: Path, who: int, steps: list[int], factor: str) -> None:
    """The loss of rank ``who`` is multiplied by ``factor`` (nan, inf) in these steps. Every rank notes the hashes of
    its weights and moments, and the count of updates, before and after each step in ``hashes-<rank>.jsonl``."""
    from shardwise.methods import pretrain
    from shardwise.runtime import loop

    at = [0]
    true_launch, true_finish = loop.launch, pretrain.finish

    def launch(state: Any, *args: Any) -> Any:
        at[0] = state.step + 1
        before = [*hashes(state), updates(state)]
        launched = true_launch(state, *args)
        with (directory / f"hashes-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([at[0], before, [*hashes(state), updates(state)]]) + "\n")
        return launched

    def finish(*args: Any, **given: Any) -> Any:
        loss = true_finish(*args, **given)
        if rank != who or at[0] not in steps:
            return loss
        mark(directory, f"{factor}-{at[0]}")
        return loss._replace(value=loss.value * float(factor))

    loop.launch, pretrain.finish = launch, finish


def diverge(rank: int, directory: Path, cause: str, step: int) -> None:
    """From ``step`` on the run diverges: by a ``rate`` that is too high or a ``jump`` beyond all numbers, by ``rows``
    whose loss is infinite, or by what the update of this step does to the last block (``stage``) or to one number of
    rank 1 (``rank``)."""
    from shardwise.distributed.slices import local
    from shardwise.methods import pretrain
    from shardwise.runtime import loop
    from shardwise.techniques import optim

    launch, finish, rated, at = loop.launch, pretrain.finish, optim.learning_rate, [0]

    def launching(state: Any, *args: Any) -> Any:
        at[0] = state.step + 1
        launched = launch(state, *args)
        if at[0] == step:
            mark(directory, f"{cause}-{rank}")
            held = {name: local(each.detach()) for name, each in state.parameters().items()}
            for name, own in held.items():
                if cause == "stage" and name.startswith("layers.1."):
                    own.mul_(1e30)
            if cause == "rank" and rank == 1:
                next(own for own in held.values() if own.numel()).view(-1)[0] = float("nan")
        return launched

    def finishing(*args: Any, **given: Any) -> Any:
        loss = finish(*args, **given)
        bad = cause == "rows" and at[0] >= step
        return loss._replace(value=loss.value * float("inf")) if bad else loss

    def rating(*args: Any) -> float:
        # At 30 the norm of huge numbers may come to 0, and nothing is ever infinite; at 1e4 the decay alone multiplies
        # weights by a thousand in every step.
        rates = {"rate": 1e4, "jump": 1e30}
        return rates[cause] if cause in rates and at[0] >= step else rated(*args)

    loop.launch, pretrain.finish, optim.learning_rate = launching, finishing, rating


def spoil_sample(rank: int, directory: Path, who: int, where: str) -> None:
    """What rank ``who`` (of -1 every rank) does to write a sample fails: ``logits`` that are not finite, an error in
    the ``forward`` pass, or one of the ``tokenizer`` afterwards."""
    import torch

    from shardwise.data.tokens import Tokenizer
    from shardwise.models.decoder import Block
    from shardwise.runtime import begin, generate
    from shardwise.runtime.report import sample

    begin.begins_trained = lambda recipe: True  # or random weights have no sample before training
    if who not in (rank, -1):
        return
    if where == "logits":
        true = generate.last_logits
        generate.last_logits = lambda *args: true(*args) * float("nan")  # type: ignore[assignment]
    elif where == "tokenizer":
        Tokenizer.decode = lambda self, ids: bytes([255]).decode()  # type: ignore[method-assign]
    else:
        forward, sampling = Block.forward, generate.generate

        def fail(self: Any, *args: Any) -> Any:
            raise torch.OutOfMemoryError("no memory left for a sample")

        def generating(*args: Any, **named: Any) -> Any:
            Block.forward = fail  # type: ignore[method-assign]
            try:
                return sampling(*args, **named)
            finally:
                Block.forward = forward  # type: ignore[method-assign]

        sample.generate = generating


def hashes(state: Any) -> list[str]:
    """Of this rank's slices of the weights, and of the moments."""
    from shardwise.distributed.slices import local

    weights, moments = hashlib.sha256(), hashlib.sha256()
    for name, tensor in state.tensors().items():
        (weights if name.startswith("model.") else moments).update(bytes(local(tensor).contiguous().numpy().data))
    return [weights.hexdigest(), moments.hexdigest()]


def updates(state: Any) -> float:
    """How many AdamW has done."""
    return max(float(kept["step"]) for kept in state.optimizer.state.values())


def tell_tensors(rank: int, directory: Path) -> None:
    """Rank 0 notes the hash of every whole tensor: as it is saved (``saved-<step>.json``) and as it is after resuming
    (``loaded-<step>.json``)."""
    from shardwise.runtime import loop
    from shardwise.runtime.checkpoint.save import RunCheckpoints

    true_begin, true_save = loop.begin, RunCheckpoints.save

    def note(kind: str, step: int, tensors: Any) -> None:
        found = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = hashlib.sha256(bytes(whole.contiguous().numpy().data)).hexdigest()
        if rank == 0:
            (directory / f"{kind}-{step}.json").write_text(json.dumps(found))

    def begin(*args: Any) -> Any:
        job, state, rules, checkpoints = true_begin(*args)
        note("loaded", state.step, state.tensors())
        return job, state, rules, checkpoints

    def save(self: Any, tensors: Any, facts: Any, step: int, *judged: bool, **named: bool) -> bool:
        note("saved", step, tensors)
        return true_save(self, tensors, facts, step, *judged, **named)

    loop.begin, RunCheckpoints.save = begin, save  # type: ignore[method-assign]


def no_memory(rank: int, directory: Path, who: int, step: int = 0) -> None:
    """Rank ``who`` may take 64 MiB more from the kernel, and its fit check, or ``step``, needs 256."""
    import torch

    from shardwise.runtime import fit
    from shardwise.runtime import step as steps

    place: Any = steps if step else fit
    true: Callable[..., Any] = place.accumulate

    def accumulate(state: Any, *args: Any) -> Any:
        if rank == who and (not step or state.step + 1 == step):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            mark(directory, "memory")
            torch.empty(256 << 20, dtype=torch.uint8)
        return true(state, *args)

    place.accumulate = accumulate


def nccl_stands_in(rank: int, directory: Path) -> None:
    """gloo behaves as NCCL does: its collectives stand in NCCL's recorder, time out late, and never raise in the thread
    that asked for them. A rank is missed after a second, not ten."""
    import threading
    import time

    from torch._C import _distributed_c10d

    from shardwise.runtime import world
    from shardwise.runtime.faults import guard

    recorded, set_timeout = vars(_distributed_c10d)["_dump_fr_trace_json"], world.set_timeout
    tell = guard.Guard.tell

    def dump(**named: Any) -> bytes:
        written: bytes = recorded(**named)
        return written.replace(b"gloo:", b"nccl:")

    def told(self: Any, error: BaseException) -> BaseException:
        if threading.current_thread() is threading.main_thread() and "fault ordered" not in str(error):
            time.sleep(3600)
        return tell(self, error)

    vars(_distributed_c10d)["_dump_nccl_trace_json"] = dump
    world.set_timeout = lambda group, *timeouts: set_timeout(group, 3600.0)
    guard.Guard.tell = told  # type: ignore[method-assign]
    guard.ABANDONED_S = 1.0


def hold_the_lock(rank: int, directory: Path, who: int, step: int) -> None:
    """In ``step`` rank ``who`` keeps Python's lock for ever, in a regular expression: no thread of it runs any more."""
    import re

    from shardwise.runtime import loop

    true = loop.launch

    def launch(state: Any, *args: Any) -> Any:
        if rank == who and state.step + 1 == step and mark(directory, "lock"):
            re.match(r"(a+)+$", "a" * 60 + "b")
        return true(state, *args)

    loop.launch = launch


def kill_at_begin(rank: int, directory: Path, who: int) -> None:
    """Rank ``who`` dies once the run has its identity, before it has built anything."""
    from shardwise.runtime import begin

    if rank == who:
        begin.build = lambda *args: die(directory, "begin")  # type: ignore[assignment]


def kill_at_load(rank: int, directory: Path, who: int) -> None:
    """Rank ``who`` dies between verifying a checkpoint and reading it."""
    from shardwise.runtime.checkpoint import save as checkpoint

    if rank == who:
        checkpoint.fill = lambda *args: die(directory, "load")  # type: ignore[assignment]


def busy(rank: int, directory: Path, who: int, step: int) -> None:
    """From ``step`` on rank ``who`` needs six times as long for each block, which is more than what else runs on the
    same cores may add to others: a loop keeps it busy."""
    import time

    from shardwise.models.decoder import Block
    from shardwise.runtime import loop

    true, true_launch, at = Block.forward, loop.launch, [0]

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        begun_s = time.perf_counter()
        out = true(self, *args, **named)
        end_s = begun_s + 6 * (time.perf_counter() - begun_s)
        while rank == who and at[0] >= step and time.perf_counter() < end_s:
            mark(directory, "busy")
        return out

    def launch(state: Any, *args: Any) -> Any:
        at[0] = state.step + 1
        return true_launch(state, *args)

    Block.forward, loop.launch = forward, launch  # type: ignore[method-assign]


def connected_late(rank: int, directory: Path) -> None:
    """Two ranks are connected as more than 64 are: when they first talk."""
    from shardwise.runtime import world

    true = world._connect_late

    def connect_late() -> None:
        mark(directory, "late")
        true()

    world.CONNECTED_RANKS, world._connect_late = 1, connect_late


def flip_bit(rank: int, directory: Path, who: int, step: int, where: str) -> None:
    """From ``step`` on one bit is wrong on rank ``who``: of the gradient of a block's input, in every backward
    (``gradient``) or in one alone, of a comparison (``once``); or, after that step's update, of the first ``weight`` or
    ``moment`` that other ranks have too. It is one that rounding does not take away again."""
    import torch

    from shardwise.distributed.slices import local, replication
    from shardwise.models.decoder import Block
    from shardwise.runtime import check_bits, loop

    if rank != who:
        return
    launch, forward, accumulate, at = loop.launch, Block.forward, check_bits.accumulate, [0]
    compares = [where == "gradient"]

    def flip(tensor: Any) -> Any:
        mark(directory, where)
        local(tensor).detach().view(-1).view(torch.int32)[3] ^= 1 << 22
        return tensor

    def launching(state: Any, *args: Any) -> Any:
        at[0] = state.step + 1
        launched = launch(state, *args)
        if at[0] == step and where in ("weight", "moment"):
            kind, ranks = "model." if where == "weight" else "optim.exp_avg.", args[2].meshes.size("stage")
            held = [one for name, one in state.tensors().items() if name.startswith(kind)]
            flip(next(one for one in held if replication(one, ranks) > 1))
        return launched

    def comparing(*args: Any) -> Any:
        compares[0] = where == "gradient" or (at[0] >= step and mark(directory, "comparing"))
        try:
            return accumulate(*args)
        finally:
            compares[0] = where == "gradient"

    def wrong(gradient: Any) -> Any:
        if at[0] < step or not compares[0] or where not in ("gradient", "once"):
            return gradient
        compares[0] = where == "gradient"
        return flip(gradient.clone())

    def through(self: Any, hidden: Any, *args: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(wrong)
        return forward(self, hidden, *args, **named)

    loop.launch, Block.forward, check_bits.accumulate = launching, through, comparing  # type: ignore[method-assign]
