"""The worker's side of the launch: knowing that it is one, and not outliving its launcher. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

from shardwise.launch.ranks import is_worker as is_worker

LAUNCHER = "SHARDWISE_LAUNCHER_PID"
STORE = "SHARDWISE_STORE"
"""The file through which the ranks of our launcher find one another; read by shardwise.runtime.world."""
WITH_MEETING = "SHARDWISE_MEETING"
"""The pid of a launcher that stays when its ranks end, and meets those of other nodes (shardwise.launch.elastic)."""
TURN_S = 2.0
"""Longer than torchrun takes to see that a rank has ended."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where a user may have set torch's allocator."""
_PR_SET_PDEATHSIG = 1


def rank() -> int:
    """This process among those of the run; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def started() -> tuple[int, int]:
    """(processes in all, processes on this node), as torchrun or our launcher says it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))


def start_name() -> str:
    """A name that is the same on all ranks that torchrun started together, and differs for another start."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    known = [os.environ.get(name, "") for name in names]
    alone = known[2].startswith(("localhost", "127.", "::1")) or not known[2]  # an address that every machine has
    return "/".join([*known, socket.gethostname()] if alone else known)


def by_our_launcher() -> bool:
    """Say whether our launcher, which shows the first failure itself, started this worker."""
    return LAUNCHER in os.environ


def meets_again() -> bool:
    """Say whether this rank's node does what ``run.on_loss`` says when another is lost."""
    return WITH_MEETING in os.environ


def launcher_directory() -> Path | None:
    """A directory that our launcher and its ranks alone can read, mostly on another disk than the run; None without
    our launcher."""
    return Path(os.environ[STORE]).parent if STORE in os.environ else None


def state_directory() -> Path:
    """Return the directory where this machine keeps what runs leave for later ones, as the XDG specification says."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "shardwise"


def set_up_torch(*, deterministic: bool) -> None:
    """Set the variables that torch reads once, as it is loaded; a rank calls this before that. Unless the user has set
    the allocator, segments of GPU memory grow in place: tensors of many sizes then leave fewer gaps that nothing fits.
    ``deterministic``: cuBLAS gets workspaces of its own for every stream, without which torch would refuse it."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def speak_in_turn() -> None:
    """Call before a rank of torchrun prints an error that all ranks may have met. Rank 0 prints it at once; the others
    wait, and torchrun, which ends every rank once one has ended, stops them before they print it again."""
    if is_worker() and not by_our_launcher() and rank():
        time.sleep(TURN_S)


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, however it dies: a rank left alone holds its memory
    and its port for ever. To be called before anything slow; a launcher that died earlier is noticed by the changed
    parent."""
    launcher = os.environ.get(LAUNCHER, os.environ.get(WITH_MEETING))
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)
