"""The process group and the mesh. The only reader of environment variables in the runtime."""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.torch_private import abort_groups, set_timeout, settle_senders
from shardwise.errors import ConfigError, Problem, UnavailableError, first_line
from shardwise.runtime import objects
from shardwise.spec.host import cores
from shardwise.spec.layout import Layout

DeviceKind = Literal["cpu", "cuda"]
T = TypeVar("T")
FIRST_RANK_SPEAKS_S = 5.0
TOLD_S = 600.0
HEARD_S = 60
"""How long rank 0 waits at most until all others have heard what it said."""
CONNECTED_RANKS = 64
"""Up to so many, gloo connects all ranks with one another when a group is made: each then has a socket for every other,
and reads from the store what every other wrote there, which grows with the cube of their number (14 GB of 1,024 ranks).
Of more ranks two are connected when they first talk."""
OPEN_FILES = 2**20


class Watch(Protocol):
    """The watch over the ranks (runtime/faults/guard.py)."""

    @property
    def nccl_timeout_s(self) -> float: ...
    def tell(self, error: BaseException) -> BaseException: ...


@dataclass(frozen=True)
class Process:
    """This process among those of the run, as its launcher described it. ``fault``: a test asks this rank to fail;
    ``store``: the file through which ranks of ``shardwise train`` find one another; ``told_for``: the launcher is ours,
    and reports why a rank ended."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    threads: int
    host: str
    fault: str
    store: str = ""
    told_for: bool = False

    @property
    def neighbours(self) -> range:
        """The ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def process() -> Process:
    """Read the launcher's variables; without them, a run of one process."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Process(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=local_world_size,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores() // local_world_size),
        host=socket.gethostname(),
        fault=os.environ.get("SHARDWISE_FAULT", ""),
        store=os.environ.get("SHARDWISE_STORE", ""),
        told_for="SHARDWISE_LAUNCHER_PID" in os.environ,
    )


def is_worker() -> bool:
    """Return whether a launcher (torchrun, the elastic agent) started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device_of(kind: DeviceKind) -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", process().local_rank) if kind == "cuda" else torch.device("cpu")


def take_device() -> None:
    """Call in every new thread. A thread starts on the first GPU, where its first CUDA call would create a context:
    some hundred MiB for every rank of the node."""
    if torch.cuda.is_initialized():
        torch.cuda.set_device(process().local_rank)


@contextmanager
def world(layout: Layout, kind: DeviceKind, timeout_s: float, watch: Watch | None = None) -> Iterator[Meshes]:
    """Join the process group and yield the groups of ``layout``.

    Collectives fail after ``timeout_s``; under ``watch`` those of NCCL only after its ``nccl_timeout_s``, for NCCL ends
    the process from a thread of its own, before anybody can say why. An error is told to ``watch`` before the groups
    are taken down, which may take long. Leaves through a barrier, for without ``destroy_process_group`` a rank may end
    in SIGABRT. Raises RUN001 when the layout is for another number of processes.
    """
    me = process()
    if layout.world != me.world_size:
        raise ConfigError(_wrong_world(layout, me.world_size))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes lines between ours
    torch.set_num_threads(me.threads)
    _keep_to_ourselves(me)
    if me.world_size > CONNECTED_RANKS:
        _connect_late()
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(me.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if me.store:
        place: dict[str, Any] = {"store": _store(), "rank": me.rank, "world_size": me.world_size}
        dist.init_process_group(backend, timeout=timeout, **place)
    elif is_worker():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        made = meshes(layout, kind, timeout)
        for group in {dist.group.WORLD, *made.groups.values(), *made.channels.values()}:
            set_timeout(group, timeout_s, watch.nccl_timeout_s if watch and kind == "cuda" else None)
        yield made
        dist.barrier()
    except BaseException as error:
        if watch:
            watch.tell(error)
        if kind == "cuda":
            with suppress(RuntimeError):
                abort_groups()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            settle_senders()


def told_by_first(make: Callable[[], str]) -> str:
    """The text that ``make`` returns on rank 0, on every rank, before there is a process group: through the store in
    which ranks find one another."""
    store = _store()
    if process().rank == 0:
        store.set("shardwise/told", make())
    return str(store.get("shardwise/told").decode())


def told_by_nodes(make: Callable[[], str], judge: Callable[[list[str]], str]) -> str:
    """What ``judge`` says, on rank 0, of the texts that ``make`` returns on the first rank of each node, on every rank,
    before there is a process group. Of a node that has not spoken in ``TOLD_S`` seconds the text is empty."""
    me, store = process(), _store()
    if me.local_rank == 0:
        store.set(f"shardwise/node/{me.rank // me.local_world_size}", make())
    if me.rank == 0:
        end_s, told = time.monotonic() + TOLD_S, []
        for node in range(me.world_size // me.local_world_size):
            left = timedelta(seconds=max(1.0, end_s - time.monotonic()))
            try:
                store.wait([f"shardwise/node/{node}"], left)
                told.append(store.get(f"shardwise/node/{node}").decode())
            except RuntimeError:  # in that time
                told.append("")
        store.set("shardwise/judged", judge(told))
    said = str(store.get("shardwise/judged").decode())
    heard = store.add("shardwise/heard", 1)
    for _ in range(HEARD_S * 10 if me.rank == 0 else 0):  # the store goes with rank 0
        if heard == me.world_size:
            break
        time.sleep(0.1)
        heard = store.add("shardwise/heard", 0)
    return said


@cache
def _store() -> Any:
    """The store, cached: where rank 0 serves it, it would end with its last reference. Raises UnavailableError (NET004)
    where ranks of several nodes cannot meet: the port is taken, or some do not come."""
    me = process()
    if me.store:
        return FileStore(me.store, me.world_size)
    try:
        return next(rendezvous("env://"))[0]
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        fix = "read the logs of the other nodes; if the port is in use (`ss -ltnp` there), another one with `--port`"
        problem = Problem("NET004", f"ranks do not meet on {place}: {first_line(error)}", f"rank {me.rank}", fix)
        raise UnavailableError(problem) from error


def _keep_to_ourselves(me: Process) -> None:
    """Have ranks of one machine talk over the loopback interface: nothing can reach them from a network, whatever
    interface torch or the user's environment would choose. And what torch compiles goes where no other user of the
    machine can put code for us to load: torch's own choice is a directory of known name in /tmp."""
    if me.world_size == me.local_world_size:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_SOCKET_IFNAME"] = "=lo"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_for_compiled_code(me))


def _connect_late() -> None:
    """Have gloo connect ranks when they first talk, and let the first rank, with which all do, have that many sockets:
    1,024 open files are what a login often allows."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _for_compiled_code(me: Process) -> Path:
    """A directory that stays, in the user's home; where that cannot be written, one that goes with the run."""
    with suppress(OSError, RuntimeError):  # the latter: nobody knows where it is
        kept = Path.home() / ".cache" / "shardwise" / "inductor"
        kept.mkdir(parents=True, exist_ok=True)
        if os.access(kept, os.W_OK):
            return kept
    if me.store:  # in the directory that our launcher has made for its ranks alone, and will remove
        shared = Path(me.store).parent / "inductor"
        shared.mkdir(mode=0o700, exist_ok=True)
        return shared
    private = tempfile.mkdtemp(prefix="shardwise-inductor-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def from_first(make: Callable[[], T]) -> T:
    """Return on every rank what ``make`` returns on rank 0."""
    return objects.broadcast(make() if dist.get_rank() == 0 else None)


@cache
def show_mistakes_once() -> None:
    """Have a ConfigError that ends the process, from now on, shown by the first rank of each node, without a traceback
    but with the user's line. Every rank makes the same mistake; the others wait, for torchrun ends all with the first
    that is gone, and speak if that rank does not."""
    plain = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ConfigError):
            return plain(kind, error, trace)
        if process().local_rank:
            time.sleep(FIRST_RANK_SPEAKS_S)
        others = (str(Path(__file__).parents[1]), sys.base_prefix)
        called = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(others)]
        line = f"\ncalled: {called[-1].filename}:{called[-1].lineno}: {called[-1].line}" if called else ""
        print(f"{error}{line}", file=sys.stderr, flush=True)

    sys.excepthook = show


def _wrong_world(layout: Layout, world_size: int) -> Problem:
    degrees = " x ".join(f"{axis} {size}" for axis, size in layout.axes()) or "1 process"
    what = f"the plan is for {layout.world} processes ({degrees}), but {world_size} were started"
    fix = f"start {layout.world} processes, or plan again for {world_size}: leave out --plan, or run.nproc={world_size}"
    return Problem("RUN001", what, "WORLD_SIZE", fix)
